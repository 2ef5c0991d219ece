#include "processor.h"

#include <sys/auxv.h>
#include <sys/utsname.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <cctype>
#include <fstream>
#include <sstream>

#include "hwcap.h"

namespace torch_hybrid_backend {
namespace {

// An extension of x86 that kernels may use (engines/cpu/isa.py), and its bit in CPUID (Intel SDM,
// volume 2A, CPUID; "abm": AMD APM, volume 3, appendix E).
struct Extension {
  const char* name;
  unsigned leaf, subleaf, output, bit;
};
enum Output : unsigned { kEax, kEbx, kEcx, kEdx };
constexpr Extension kExtensions[] = {
    {"fma", 1, 0, kEcx, 12},
    {"sse4_1", 1, 0, kEcx, 19},
    {"sse4_2", 1, 0, kEcx, 20},
    {"movbe", 1, 0, kEcx, 22},
    {"popcnt", 1, 0, kEcx, 23},
    {"avx", 1, 0, kEcx, 28},
    {"f16c", 1, 0, kEcx, 29},
    {"abm", 0x80000001, 0, kEcx, 5},
    {"bmi1", 7, 0, kEbx, 3},
    {"avx2", 7, 0, kEbx, 5},
    {"bmi2", 7, 0, kEbx, 8},
    {"avx512f", 7, 0, kEbx, 16},
    {"avx512dq", 7, 0, kEbx, 17},
    {"adx", 7, 0, kEbx, 19},
    {"avx512ifma", 7, 0, kEbx, 21},
    {"avx512cd", 7, 0, kEbx, 28},
    {"avx512bw", 7, 0, kEbx, 30},
    {"avx512vl", 7, 0, kEbx, 31},
    {"avx512vbmi", 7, 0, kEcx, 1},
    {"avx512_vbmi2", 7, 0, kEcx, 6},
    {"gfni", 7, 0, kEcx, 8},
    {"vaes", 7, 0, kEcx, 9},
    {"vpclmulqdq", 7, 0, kEcx, 10},
    {"avx512_vnni", 7, 0, kEcx, 11},
    {"avx512_bitalg", 7, 0, kEcx, 12},
    {"avx512_vpopcntdq", 7, 0, kEcx, 14},
    {"avx512_vp2intersect", 7, 0, kEdx, 8},
    {"amx_bf16", 7, 0, kEdx, 22},
    {"avx512_fp16", 7, 0, kEdx, 23},
    {"amx_tile", 7, 0, kEdx, 24},
    {"amx_int8", 7, 0, kEdx, 25},
    {"avx_vnni", 7, 1, kEax, 4},
    {"avx512_bf16", 7, 1, kEax, 5},
    {"amx_fp16", 7, 1, kEax, 21},
};

#if defined(__x86_64__)
CpuidRegisters ThisCpuid(unsigned leaf, unsigned subleaf) {
  CpuidRegisters read{};
  __get_cpuid_count(leaf, subleaf, &read[kEax], &read[kEbx], &read[kEcx], &read[kEdx]);
  return read;
}
#endif

}  // namespace

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

void ConfirmX86(std::set<std::string>& features, const Cpuid& cpuid) {
  for (const Extension& each : kExtensions) {
    const std::string name = each.name;
    if ((cpuid(each.leaf, each.subleaf)[each.output] >> each.bit & 1U) == 0) {
      features.erase(name);
    } else if (name == "amx_fp16" && features.contains("amx_tile")) {
      features.insert(name);  // Linux has no name for it, and lets processes use all of AMX or none
    }
  }
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
#elif defined(__riscv)
    made->features = LettersOfHwcap(getauxval(AT_HWCAP));
#else
    std::ifstream file("/proc/cpuinfo");
    made->features = FeaturesIn(file);
#endif
#if defined(__x86_64__)
    ConfirmX86(made->features, ThisCpuid);
#endif
    return made;
  }();
  return *processor;
}

}  // namespace torch_hybrid_backend
