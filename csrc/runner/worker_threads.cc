#include "worker_threads.h"

#include <dlfcn.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>

namespace torch_hybrid_backend {
namespace {

// The functions of GCC's OpenMP library that are called here. Its GOMP_parallel is what a parallel
// pragma becomes, so compilers need not know OpenMP.
struct OpenMp {
  void (*parallel)(void (*function)(void*), void* data, unsigned threads, unsigned flags);
  int (*get_max_threads)();
  int (*in_parallel)();
  int (*get_num_threads)();
  int (*get_thread_num)();
};

template <typename Function>
bool Find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

// Nothing where the system has no libgomp.
const std::optional<OpenMp>& OfSystem() {
  static const std::optional<OpenMp> openmp = []() -> std::optional<OpenMp> {
    // Its threads live as long as the process.
    void* const library = dlopen("libgomp.so.1", RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    OpenMp found{};
    if (library == nullptr || !Find(library, "GOMP_parallel", found.parallel) ||
        !Find(library, "omp_get_max_threads", found.get_max_threads) ||
        !Find(library, "omp_in_parallel", found.in_parallel) ||
        !Find(library, "omp_get_num_threads", found.get_num_threads) ||
        !Find(library, "omp_get_thread_num", found.get_thread_num)) {
      return std::nullopt;
    }
    return found;
  }();
  return openmp;
}

// OpenMP's library keeps some 100 bytes for each thread on the caller's stack, and ends the process
// where the system has no more threads: it gets no number for which either is likely.
int MostThreads() {
  return std::max(256, 4 * static_cast<int>(std::thread::hardware_concurrency()));
}

// As OMP_NUM_THREADS says, or an application has set it.
int ThreadsByDefault() { return std::min(OfSystem()->get_max_threads(), MostThreads()); }

thread_local int threads_of_call = 0;  // 0: no call runs

struct Loop {
  int64_t begin;
  int64_t end;
  PartFunction part;
  const void* function;
};

void RunPart(void* data) {
  const Loop& loop = *static_cast<const Loop*>(data);
  const OpenMp& openmp = *OfSystem();
  const int64_t provided = openmp.get_num_threads();
  const int64_t size = (loop.end - loop.begin + provided - 1) / provided;
  const int64_t first = loop.begin + openmp.get_thread_num() * size;
  if (first < loop.end) loop.part(loop.function, first, std::min(loop.end, first + size));
}

}  // namespace

int ThreadsFor(int wanted) {
  if (wanted < 0 || wanted > MostThreads()) {
    throw std::runtime_error("threads is " + std::to_string(wanted) +
                             ": it must be 0, for all, or their number, at most " +
                             std::to_string(MostThreads()));
  }
  if (wanted == 1) return 1;
  if (!OfSystem()) {
    throw std::runtime_error(
        "GCC's OpenMP library, libgomp.so.1, is not there: install it (Debian and Ubuntu: "
        "libgomp1, "
        "Fedora: libgomp), or open the model with one thread");
  }
  return wanted > 0 ? wanted : ThreadsByDefault();
}

int ThreadCount() {
  if (threads_of_call == 1 || !OfSystem() || OfSystem()->in_parallel() != 0) return 1;
  return threads_of_call > 0 ? threads_of_call : ThreadsByDefault();
}

ThreadsOfCall::ThreadsOfCall(int threads) : before_(threads_of_call) { threads_of_call = threads; }

ThreadsOfCall::~ThreadsOfCall() { threads_of_call = before_; }

void RunPartsOf(int64_t begin, int64_t end, int64_t grain, PartFunction part,
                const void* function) {
  if (begin >= end) return;
  const int64_t most = (end - begin + grain - 1) / grain;
  const auto threads = static_cast<unsigned>(std::min<int64_t>(ThreadCount(), most));
  if (threads == 1) return part(function, begin, end);
  Loop loop{begin, end, part, function};
  OfSystem()->parallel(&RunPart, &loop, threads, /*flags=*/0);
}

}  // namespace torch_hybrid_backend
