// Eight threads that open, call and close models of one .hybrid file, and call one that all share:
// for ThreadSanitizer. Its inputs are zeros.
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "hybrid_runner.hpp"

namespace {

constexpr int kThreads = 8;
constexpr int kRounds = 20;

void Call(hybrid::Model& model) {
  const HybridEntry entry = model.Describe();
  std::vector<std::vector<char>> memory;
  std::vector<hybrid::Input> inputs;
  for (size_t i = 0; i < entry.input_count; ++i) {
    const HybridTensor& input = entry.inputs[i];
    size_t bytes = input.dlpack_dtype.bits / 8;
    for (int d = 0; d < input.ndim; ++d) bytes *= static_cast<size_t>(input.sizes[d]);
    memory.emplace_back(bytes);
    inputs.emplace_back(static_cast<void*>(memory.back().data()), input.dlpack_dtype,
                        std::vector<int64_t>(input.sizes, input.sizes + input.ndim));
  }
  model.Run(inputs);
}

}  // namespace

int main(int /*count*/, char** values) {
  try {
    hybrid::Model shared(values[1]);
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&] {
        for (int round = 0; round < kRounds; ++round) {
          Call(shared);
          hybrid::Model own(values[1]);
          Call(own);
          Call(own);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
