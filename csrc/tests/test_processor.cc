#include <set>
#include <sstream>
#include <string>

#include "check.h"
#include "processor.h"

using torch_hybrid_backend::ConfirmX86;
using torch_hybrid_backend::CpuidRegisters;
using torch_hybrid_backend::FeaturesIn;
using torch_hybrid_backend::Processor;
using torch_hybrid_backend::ThisProcessor;

int main() {
  const auto features = [](const std::string& text) {
    std::istringstream stream(text);
    return FeaturesIn(stream);
  };
  Check(
      features("processor\t: 0\nvmx flags\t: ept\nflags\t\t: fpu avx2 sha_ni\n\nflags\t\t: x\n") ==
          std::set<std::string>{"avx2", "fpu", "sha_ni"},
      "those of the first x86 processor");
  Check(features("").empty() && features("model name : flags\nflags\n").empty(), "or none");

  // EBX of leaf 7 has AVX2 and AVX-512F, EAX of its subleaf 1 has AMX-FP16; nothing else.
  const auto cpuid = [](unsigned leaf, unsigned subleaf) -> CpuidRegisters {
    if (leaf != 7) return {};
    if (subleaf == 1) return {1U << 21, 0, 0, 0};
    return {0, 1U << 5 | 1U << 16, 0, 1U << 24};
  };
  const auto confirmed = [&](std::set<std::string> features) {
    ConfirmX86(features, cpuid);
    return features;
  };
  Check(confirmed({"fpu", "avx2", "avx512_vnni", "avx_vnni", "fma", "abm"}) ==
            std::set<std::string>{"avx2", "fpu"},
        "what CPUID does not show is no feature; what kernels never use is not asked for");
  Check(confirmed({"amx_tile"}) == std::set<std::string>{"amx_fp16", "amx_tile"},
        "AMX-FP16 is CPUID's to tell, where Linux permits tiles");

  const Processor& machine = ThisProcessor();
  Check(machine.system == "linux" && !machine.name.empty(), "this machine");
#if defined(__x86_64__)
  Check(machine.name == "x86_64" && machine.features.contains("sse2"),
        "has what all of its kind have");
#elif defined(__aarch64__)
  Check(machine.name == "aarch64" && machine.features.contains("asimd"),
        "has what all of its kind have");
#elif defined(__riscv)
  Check(machine.name == "riscv64" && machine.features.contains("d"),
        "has what all of its kind have");
#endif
}
