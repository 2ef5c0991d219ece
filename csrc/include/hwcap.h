// The features of an Arm processor, as Linux tells programs: bits in their auxiliary vector.
// /proc/cpuinfo has the same words, but under emulation it is that of another machine.
//
// Failure: none.
#ifndef TORCH_HYBRID_BACKEND_HWCAP_H_
#define TORCH_HYBRID_BACKEND_HWCAP_H_

#include <set>
#include <string>

namespace torch_hybrid_backend {

// The features of AArch64, by Linux's names, in the numbers for AT_HWCAP and AT_HWCAP2.
std::set<std::string> FeaturesOfHwcap(unsigned long hwcap, unsigned long hwcap2);

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_HWCAP_H_
