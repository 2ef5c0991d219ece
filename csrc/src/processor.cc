#include "processor.h"

#include <sys/auxv.h>
#include <sys/utsname.h>

#include <cctype>
#include <fstream>
#include <sstream>

#include "hwcap.h"

namespace torch_hybrid_backend {

std::set<std::string> FeaturesIn(std::istream& cpuinfo) {
  for (std::string line; std::getline(cpuinfo, line);) {
    const size_t colon = line.find(':');
    if (colon == line.npos) continue;
    const std::string name = line.substr(0, line.find_first_of(" \t:"));
    if (name != "flags") continue;
    std::istringstream words(line.substr(colon + 1));
    std::set<std::string> features;
    for (std::string word; words >> word;) features.insert(word);
    return features;
  }
  return {};
}

const Processor& ThisProcessor() {
  static const auto* const processor = [] {
    auto* const made = new Processor;
    utsname names{};
    if (uname(&names) == 0) {
      for (const char* c = names.sysname; *c != '\0'; ++c) {
        made->system.push_back(static_cast<char>(std::tolower(static_cast<unsigned char>(*c))));
      }
      made->name = names.machine;
    }
#if defined(__aarch64__)
    made->features = FeaturesOfHwcap(getauxval(AT_HWCAP), getauxval(AT_HWCAP2));
#else
    std::ifstream file("/proc/cpuinfo");
    made->features = FeaturesIn(file);
#endif
    return made;
  }();
  return *processor;
}

}  // namespace torch_hybrid_backend
