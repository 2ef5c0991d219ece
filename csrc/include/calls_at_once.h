// CallsAtOnce: how many calls have run at once of late: in the last two windows of kCallsPerWindow
// calls or one second, whichever is over first.
//
// Use: Begin and End around each call, both under the owner's lock.
//
// Ownership: plain data. Failure: nothing throws.
#ifndef TORCH_HYBRID_BACKEND_CALLS_AT_ONCE_H_
#define TORCH_HYBRID_BACKEND_CALLS_AT_ONCE_H_

#include <algorithm>
#include <chrono>
#include <cstddef>

namespace torch_hybrid_backend {

class CallsAtOnce {
 public:
  static constexpr size_t kCallsPerWindow = 64;

  void Begin() { ++running_; }

  void End() {
    most_ = std::max(most_, running_);
    --running_;
    const Clock::time_point now = Clock::now();
    if (++calls_ < kCallsPerWindow && now < window_end_) return;
    most_before_ = most_;
    most_ = running_;
    calls_ = 0;
    window_end_ = now + std::chrono::seconds(1);
  }

  size_t running() const { return running_; }
  size_t most() const { return std::max(most_, most_before_); }

 private:
  using Clock = std::chrono::steady_clock;

  size_t running_ = 0;
  // The most in this window, and in the one before.
  size_t most_ = 0;
  size_t most_before_ = 0;
  size_t calls_ = 0;  // that ended in this window
  Clock::time_point window_end_ = Clock::now() + std::chrono::seconds(1);
};

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_CALLS_AT_ONCE_H_
