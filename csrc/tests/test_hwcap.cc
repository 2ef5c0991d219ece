#include <set>
#include <string>

#include "hwcap.h"

#if defined(__aarch64__)
#include <asm/hwcap.h>
#endif

#include "check.h"

using torch_hybrid_backend::FeaturesOfHwcap;
using torch_hybrid_backend::LettersOfHwcap;
using Features = std::set<std::string>;

int main() {
  Check(FeaturesOfHwcap(0, 0).empty(), "none");
  // What Linux 5.10 gives programs on a Cortex-A72, and for AT_HWCAP on a Neoverse N1.
  Check(FeaturesOfHwcap(0x8ff, 0) ==
            Features{"aes", "asimd", "cpuid", "crc32", "evtstrm", "fp", "pmull", "sha1", "sha2"},
        "Cortex-A72");
  const Features n1 = FeaturesOfHwcap(0x119fff, 0);
  Check(LettersOfHwcap(0x20112d) == Features{"a", "c", "d", "f", "i", "m", "v"}, "RV64GCV");
  Check(n1.contains("asimddp") && n1.contains("asimdhp") && !n1.contains("sve"), "Neoverse N1");
#if defined(__aarch64__)
  Check(FeaturesOfHwcap(HWCAP_ASIMDDP | HWCAP_ASIMDHP | HWCAP_SVE | HWCAP_SHA2 | HWCAP_PACG,
                        HWCAP2_SVE2 | HWCAP2_I8MM | HWCAP2_BF16 | HWCAP2_BTI) ==
            Features{"asimddp", "asimdhp", "bf16", "bti", "i8mm", "pacg", "sha2", "sve", "sve2"},
        "the system's own numbers");
#endif
}
