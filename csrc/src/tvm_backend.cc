#include "tvm_backend.h"

#include <atomic>
#include <exception>
#include <vector>

#include "aligned_block.h"
#include "parallel.h"
#include "team.h"

namespace torch_hybrid_backend {
namespace {

// The scratch memory of one thread: blocks stay allocated between kernels, so that the steady state
// allocates nothing.
class Workspace {
 public:
  void* Take(size_t size_bytes) {
    Slot* best = nullptr;
    for (Slot& slot : slots_) {
      if (slot.taken || slot.block.size_bytes() < size_bytes) continue;
      if (best == nullptr || slot.block.size_bytes() < best->block.size_bytes()) best = &slot;
    }
    if (best == nullptr) {
      // A kernel with nothing to store still wants an address.
      slots_.push_back({AlignedBlock(size_bytes == 0 ? kAlignment : size_bytes), false});
      best = &slots_.back();
    }
    best->taken = true;
    return best->block.data();
  }

  bool GiveBack(const void* memory) {
    for (Slot& slot : slots_) {
      if (slot.block.data() != memory) continue;
      slot.taken = false;
      return true;
    }
    return false;
  }

 private:
  struct Slot {
    AlignedBlock block;
    bool taken;
  };
  std::vector<Slot> slots_;
};

Workspace& ThisThreadsWorkspace() {
  thread_local Workspace workspace;
  return workspace;
}

}  // namespace

int ParallelLaunch(ParallelLambda lambda, void* closure, int num_task) {
  if (Team* team = Team::Led()) {
    return team->Launch(lambda, closure, num_task > 0 ? num_task : team->threads());
  }
  try {
    const int tasks = num_task > 0 ? num_task : ThreadCount();
    std::atomic<int> status{0};
    // Relaxed: the end of parallel_for orders every task before the final read.
    ParallelFor(0, tasks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) {
        ParallelGroupEnv env{nullptr, tasks};
        const int failed = lambda(static_cast<int>(task), &env, closure);
        if (failed != 0) status.store(failed, std::memory_order_relaxed);
      }
    });
    return status.load(std::memory_order_relaxed);
  } catch (const std::exception&) {
    return -1;
  }
}

void* AllocWorkspace(int /*device_type*/, int /*device_id*/, uint64_t size_bytes,
                     int /*dtype_code*/, int /*dtype_bits*/) {
  try {
    return ThisThreadsWorkspace().Take(size_bytes);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

int FreeWorkspace(int /*device_type*/, int /*device_id*/, void* memory) {
  return ThisThreadsWorkspace().GiveBack(memory) ? 0 : -1;
}

}  // namespace torch_hybrid_backend
