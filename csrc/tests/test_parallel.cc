#include <atomic>
#include <stdexcept>
#include <string>

#include "check.h"
#include "parallel.h"
#include "pytorch_threads.h"

using torch_hybrid_backend::ParallelFor;

int main() {
  for (const int threads : {1, 4}) {
    pytorch_threads = threads;
    std::atomic<int64_t> sum{0};
    ParallelFor(0, 100, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) sum += i;
    });
    Check(sum == 4950, "every number is in one part");

    std::string caught;
    try {
      ParallelFor(0, 100, 1, [](int64_t, int64_t) { throw std::domain_error("a part"); });
    } catch (const std::domain_error& error) {
      caught = error.what();
    }
    Check(caught == "a part", "what a part throws arrives as it was, once");
  }
}
