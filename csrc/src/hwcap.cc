#include "hwcap.h"

#include <array>
#include <cstddef>

namespace torch_hybrid_backend {
namespace {

// From bit 0 on: Linux's arch/arm64/include/uapi/asm/hwcap.h, whose words in /proc/cpuinfo are
// these.
constexpr std::array kHwcap = {
    "fp",      "asimd", "evtstrm", "aes",   "pmull",    "sha1",   "sha2", "crc32",
    "atomics", "fphp",  "asimdhp", "cpuid", "asimdrdm", "jscvt",  "fcma", "lrcpc",
    "dcpop",   "sha3",  "sm3",     "sm4",   "asimddp",  "sha512", "sve",  "asimdfhm",
    "dit",     "uscat", "ilrcpc",  "flagm", "ssbs",     "sb",     "paca", "pacg"};
constexpr std::array kHwcap2 = {"dcpodp",  "sve2",   "sveaes", "svepmull", "svebitperm", "svesha3",
                                "svesm4",  "flagm2", "frint",  "svei8mm",  "svef32mm",   "svef64mm",
                                "svebf16", "i8mm",   "bf16",   "dgh",      "rng",        "bti"};

template <size_t N>
void Insert(const std::array<const char*, N>& names, unsigned long bits,
            std::set<std::string>& features) {
  for (size_t bit = 0; bit < N; ++bit) {
    if ((bits >> bit & 1) != 0) features.insert(names[bit]);
  }
}

}  // namespace

std::set<std::string> FeaturesOfHwcap(unsigned long hwcap, unsigned long hwcap2) {
  std::set<std::string> features;
  Insert(kHwcap, hwcap, features);
  Insert(kHwcap2, hwcap2, features);
  return features;
}

// From "a" on: Linux's arch/riscv/include/uapi/asm/hwcap.h.
std::set<std::string> LettersOfHwcap(unsigned long hwcap) {
  std::set<std::string> features;
  for (char letter = 'a'; letter <= 'z'; ++letter) {
    if ((hwcap >> (letter - 'a') & 1) != 0) features.insert(std::string(1, letter));
  }
  return features;
}

}  // namespace torch_hybrid_backend
