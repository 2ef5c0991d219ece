#include "pytorch_threads.h"

#include <torch/csrc/stable/c/shim.h>

#include <algorithm>
#include <thread>
#include <vector>

namespace {

thread_local bool in_region = false;

}  // namespace

// What PyTorch's headers ask for, from 2.14 on, to word an error. Weak: pytorch_tensors.cc has one
// too, which some tests link as well.
extern "C" __attribute__((weak)) uint64_t aoti_torch_abi_version() { return TORCH_TARGET_VERSION; }

extern "C" AOTITorchError torch_get_num_threads(uint32_t* out) {
  *out = static_cast<uint32_t>(pytorch_threads.load());
  return AOTI_TORCH_SUCCESS;
}

extern "C" AOTITorchError torch_parallel_for(int64_t begin, int64_t end, int64_t /*grain*/,
                                             ParallelFunc function, void* context) {
  if (begin >= end) return AOTI_TORCH_SUCCESS;
  const int64_t most = in_region ? 1 : std::min(pytorch_threads.load(), most_provided.load());
  const int64_t parts = std::min(most, end - begin);
  const int64_t size = (end - begin + parts - 1) / parts;
  std::atomic<bool> failed{false};
  const auto run = [&](int64_t part) {
    const int64_t from = begin + part * size;
    const bool outside = !in_region;
    in_region = true;
    try {
      if (from < end) function(from, std::min(end, from + size), context);
    } catch (...) {
      failed = true;
    }
    if (outside) in_region = false;
  };
  std::vector<std::thread> threads;
  for (int64_t part = 1; part < parts; ++part) threads.emplace_back(run, part);
  run(0);
  for (std::thread& thread : threads) thread.join();
  return failed ? AOTI_TORCH_FAILURE : AOTI_TORCH_SUCCESS;
}
