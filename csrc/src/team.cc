#include "team.h"

#include <algorithm>
#include <bit>
#include <thread>

#include "parallel.h"

namespace torch_hybrid_backend {
namespace {

constexpr int kMostTasksAtOnce = 64;  // the bits of Team::open_

thread_local Team* led = nullptr;

// Spins for some 20 us, then lets other threads have the core: they may be more than cores.
class Spin {
 public:
  void operator()() {
    if (++turns_ < kTurns) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#elif defined(__aarch64__)
      asm volatile("isb");  // `yield` returns at once
#endif
    } else {
      std::this_thread::yield();
    }
  }

 private:
  static constexpr int kTurns = 2000;
  int turns_ = 0;
};

}  // namespace

Team* Team::Led() { return led; }

int Team::Launch(ParallelLambda lambda, void* closure, int tasks) {
  lambda_ = lambda;
  closure_ = closure;
  tasks_ = tasks;
  status_.store(0, std::memory_order_relaxed);
  led = nullptr;  // a loop inside a task runs on the task's thread
  for (first_ = 0; first_ < tasks; first_ += kMostTasksAtOnce) {
    const int count = std::min(tasks - first_, kMostTasksAtOnce);
    ended_.store(0, std::memory_order_relaxed);
    const uint64_t all = count == kMostTasksAtOnce ? ~uint64_t{0} : (uint64_t{1} << count) - 1;
    open_.store(all & ~uint64_t{1}, std::memory_order_release);  // the leader has taken task 0
    RunTask(0);
    while (const uint64_t open = open_.load(std::memory_order_relaxed)) {
      if (Take(std::bit_width(open) - 1)) continue;  // from the end: others begin at their own
    }
    for (Spin spin; ended_.load(std::memory_order_acquire) != count;) spin();
  }
  led = this;
  return status_.load(std::memory_order_relaxed);
}

// Runs the task unless another thread has taken it. A thread that comes late, its bit from an
// earlier loop, takes a task of the present one: that is as good.
bool Team::Take(uint64_t task) {
  const uint64_t bit = uint64_t{1} << task;
  if ((open_.fetch_and(~bit, std::memory_order_acq_rel) & bit) == 0) return false;
  RunTask(static_cast<int>(task));
  return true;
}

void Team::RunTask(int task) {
  ParallelGroupEnv env{nullptr, tasks_};
  const int failed = lambda_(first_ + task, &env, closure_);
  if (failed != 0) status_.store(failed, std::memory_order_relaxed);
  ended_.fetch_add(1, std::memory_order_release);
}

void Team::Lead(const std::function<void()>& leader) {
  led = this;
  try {
    leader();
  } catch (...) {
    led = nullptr;
    over_.store(true, std::memory_order_release);
    throw;
  }
  led = nullptr;
  over_.store(true, std::memory_order_release);
}

// A thread tries the task of its own number first, so that it meets the same part of the work in
// each call, as far as that is in its caches.
void Team::Serve(int64_t thread) {
  const uint64_t own = thread % kMostTasksAtOnce;
  for (Spin spin; !over_.load(std::memory_order_acquire);) {
    const uint64_t open = open_.load(std::memory_order_relaxed);
    if (open == 0) {
      spin();
      continue;
    }
    Take((open >> own & 1) != 0 ? own : std::countr_zero(open));
    spin = Spin();
  }
}

void RunInTeam(const std::function<void()>& leader) {
  const int threads = ThreadCount();
  if (threads == 1) return leader();
  Team team(threads);
  ParallelFor(0, threads, 1, [&](int64_t begin, int64_t /*end*/) {
    if (begin == 0) {
      team.Lead(leader);
    } else {
      team.Serve(begin);
    }
  });
}

}  // namespace torch_hybrid_backend
