// The features of a processor other than x86, as Linux tells programs: bits in their auxiliary
// vector. /proc/cpuinfo has the same words, but under emulation it is that of another machine.
//
// Failure: none.
#ifndef TORCH_HYBRID_BACKEND_HWCAP_H_
#define TORCH_HYBRID_BACKEND_HWCAP_H_

#include <set>
#include <string>

namespace torch_hybrid_backend {

// The features of AArch64, by Linux's names, in the numbers for AT_HWCAP and AT_HWCAP2.
std::set<std::string> FeaturesOfHwcap(unsigned long hwcap, unsigned long hwcap2);

// The features of RISC-V that have one letter, in the number for AT_HWCAP.
std::set<std::string> LettersOfHwcap(unsigned long hwcap);

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_HWCAP_H_
