#include "tile_permission.h"

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace torch_hybrid_backend {
namespace {

constexpr int kRequest = 0x1023;         // ARCH_REQ_XCOMP_PERM
constexpr unsigned long kTileData = 18;  // XFEATURE_XTILEDATA

}  // namespace

bool MayUseTiles(ArchPrctl arch_prctl) { return arch_prctl(kRequest, kTileData) == 0; }

bool MayUseTiles() {
#if defined(__x86_64__) && defined(__linux__)
  return MayUseTiles([](int code, unsigned long feature) -> long {
    return syscall(SYS_arch_prctl, code, feature);
  });
#else
  return false;
#endif
}

}  // namespace torch_hybrid_backend
