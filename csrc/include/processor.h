// The machine as .hybrid files name it: its operating system, its processor, and what that can do.
//
// Failure: none; a machine that does not say what it can do has no features.
#ifndef TORCH_HYBRID_BACKEND_PROCESSOR_H_
#define TORCH_HYBRID_BACKEND_PROCESSOR_H_

#include <array>
#include <functional>
#include <istream>
#include <set>
#include <string>

namespace torch_hybrid_backend {

struct Processor {
  std::string system;              // "linux"
  std::string name;                // "x86_64", as `uname -m`
  std::set<std::string> features;  // by Linux's names
};

// This machine. Read once, by the first call.
const Processor& ThisProcessor();

// The features of the first processor in a text of the form of /proc/cpuinfo: the words behind
// "flags" (x86) or "Features" (Arm). Reads no further: the text is long where processors are many.
std::set<std::string> FeaturesIn(std::istream& cpuinfo);

// EAX, EBX, ECX and EDX as the instruction CPUID gives them for a leaf and a subleaf; zeros for a
// leaf that the processor lacks.
using CpuidRegisters = std::array<unsigned, 4>;
using Cpuid = std::function<CpuidRegisters(unsigned leaf, unsigned subleaf)>;

// Removes the features that CPUID does not show: an emulator runs programs beside the /proc/cpuinfo
// of its host. Features that CPUID shows and Linux does not stay out, as Linux may have switched
// them off.
void ConfirmX86(std::set<std::string>& features, const Cpuid& cpuid);

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_PROCESSOR_H_
