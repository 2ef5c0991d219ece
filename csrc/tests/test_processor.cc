#include <sstream>

#include "check.h"
#include "processor.h"

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
  const Processor& machine = ThisProcessor();
  Check(machine.system == "linux" && !machine.name.empty(), "this machine");
#if defined(__x86_64__)
  Check(machine.name == "x86_64" && machine.features.contains("sse2"),
        "has what all of its kind have");
#elif defined(__aarch64__)
  Check(machine.name == "aarch64" && machine.features.contains("asimd"),
        "has what all of its kind have");
#endif
}
