// Team: the threads of worker_threads.h, kept together for a run of kernels.
//
// Starting and ending a parallel region costs as much as a small kernel's loop. A team is one
// region for many kernels: the calling thread, its leader, runs them one after the other; the
// others wait, spinning, for the tasks of the parallel loops that it launches. Whatever number of
// them there are, also none, the leader itself runs what nobody else has taken.
//
// Ownership: a team lives on the stack of its leader, for the time of RunInTeam.
//
// Failure: RunInTeam rethrows what `leader` threw, once all threads have left.
#ifndef TORCH_HYBRID_BACKEND_TEAM_H_
#define TORCH_HYBRID_BACKEND_TEAM_H_

#include <atomic>
#include <cstdint>
#include <functional>

#include "tvm_backend.h"

namespace torch_hybrid_backend {

class Team {
 public:
  explicit Team(int threads) : threads_(threads) {}
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // The team that the calling thread leads; null where it leads none.
  static Team* Led();

  int threads() const { return threads_; }

  // Runs tasks 0 .. tasks-1 and returns when all have ended: the status of one that failed, or 0.
  int Launch(ParallelLambda lambda, void* closure, int tasks);

 private:
  friend void RunInTeam(const std::function<void()>& leader);

  void Lead(const std::function<void()>& leader);
  void Serve(int64_t thread);
  bool Take(uint64_t task);
  void RunTask(int task);

  const int threads_;
  // Of the loop that runs now; written while none of its tasks can be taken.
  ParallelLambda lambda_ = nullptr;
  void* closure_ = nullptr;
  int tasks_ = 0;
  int first_ = 0;  // the task that bit 0 of `open_` stands for
  std::atomic<int> status_{0};
  // Apart from each other: one is read by all who wait, the other written by all who work.
  alignas(64) std::atomic<uint64_t> open_{0};  // tasks that nobody has taken, a bit each
  std::atomic<bool> over_{false};
  alignas(64) std::atomic<int> ended_{0};
};

// Runs `leader` on the calling thread, the other threads serving the loops that it launches.
void RunInTeam(const std::function<void()>& leader);

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_TEAM_H_
