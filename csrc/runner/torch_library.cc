#include "torch_library.h"

#include <dlfcn.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <mutex>
#include <stdexcept>
#include <system_error>

namespace torch_hybrid_backend {
namespace {

constexpr char kName[] = "libhybrid_runner_torch.so";

std::mutex mutex;
const TorchFunctions* opened = nullptr;  // set once, under the mutex

// The first three numbers of a version: of "2.13.0+cpu", or of LibTorch's 0x020d00....
using Version = std::array<unsigned, 3>;

Version VersionNamed(const std::string& text) {
  Version version{};
  std::sscanf(text.c_str(), "%u.%u.%u", &version[0], &version[1], &version[2]);
  return version;
}

Version VersionOf(uint64_t number) {
  return {static_cast<unsigned>(number >> 56), static_cast<unsigned>(number >> 48 & 0xff),
          static_cast<unsigned>(number >> 40 & 0xff)};
}

std::string Shown(const Version& version) {
  return std::to_string(version[0]) + "." + std::to_string(version[1]) + "." +
         std::to_string(version[2]);
}

// What HYBRID_RUNNER_TORCH says, else the file beside the library or the program that this code is
// in.
std::filesystem::path PathOfLibrary() {
  const char* const named = secure_getenv("HYBRID_RUNNER_TORCH");
  if (named != nullptr && *named != '\0') return named;
  std::error_code none;
  Dl_info own;
  std::filesystem::path beside;
  if (dladdr(reinterpret_cast<void*>(&OpenTorch), &own) != 0) beside = own.dli_fname;
  // A program has the name that it was called by, which need not be a path.
  if (!beside.has_parent_path()) beside = std::filesystem::read_symlink("/proc/self/exe", none);
  return std::filesystem::weakly_canonical(beside.parent_path() / kName, none);
}

const TorchFunctions* Open(const std::string& torch, const std::string& folder,
                           const std::function<std::string()>& operators) {
  const auto refuse = [&](const std::string& why, const std::string& cure) {
    throw std::runtime_error("it calls operators of PyTorch (" + operators() + "), and " + why +
                             ": " + cure + ", or open the file by torch_hybrid_backend.load");
  };
  const std::string where =
      "install torch " + Shown(VersionNamed(torch)) +
      " and name the folder of its libtorch_cpu.so, by torch_folder of HybridOptions, --torch of "
      "hybrid-run or LD_LIBRARY_PATH";
  // Not closed: the library is linked to it.
  if (!folder.empty() &&
      dlopen((folder + "/libtorch_cpu.so").c_str(), RTLD_NOW | RTLD_LOCAL) == nullptr) {
    refuse(std::string("LibTorch cannot be opened, ") + dlerror(), where);
  }
  const std::filesystem::path path = PathOfLibrary();
  std::error_code none;
  if (!std::filesystem::exists(path, none)) {
    refuse("there is no " + path.string(),
           "install it, or name it by the environment variable HYBRID_RUNNER_TORCH");
  }
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (library == nullptr) refuse(std::string("LibTorch cannot be opened, ") + dlerror(), where);
  const auto functions =
      reinterpret_cast<decltype(&hybrid_torch_functions)>(dlsym(library, "hybrid_torch_functions"));
  if (functions == nullptr || functions()->version != TorchFunctions::kVersion)
    refuse(path.string() + " is of another version than the runner", "install both of one version");
  return functions();
}

}  // namespace

void OpenTorch(const std::string& torch, const std::string& folder,
               const std::function<std::string()>& operators) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (opened == nullptr) opened = Open(torch, folder, operators);
  const Version there = VersionOf(opened->torch_version);
  if (there != VersionNamed(torch)) {
    throw std::runtime_error("it holds operators of torch " + Shown(VersionNamed(torch)) + " (" +
                             operators() + "), and this is LibTorch " + Shown(there) +
                             ": give that version's, or export the model again with this one");
  }
}

const TorchFunctions& Torch() {
  const std::lock_guard<std::mutex> lock(mutex);
  if (opened == nullptr)
    throw std::runtime_error(
        "the plan has operators of PyTorch, and the file says that it has none");
  return *opened;
}

}  // namespace torch_hybrid_backend
