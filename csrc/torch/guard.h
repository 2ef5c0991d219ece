// Guard: notices that tensors changed behind the version counter (`p.data.mul_(2)`, a write
// through numpy or from C).
//
// It remembers a hash of each page that they lie in. Which pages to compare is the kind's matter:
//
//   kEveryByte  all of them, each time it is asked
//   kLive       the pages that the kernel says were written to (see write_watch.h). Where the
//   kernel
//               cannot say, a few elements of each tensor and a part of the pages, another one each
//               time, so that all were compared after kCallsPerRound calls at most.
//
// Ownership: it holds addresses, not tensors, so that it keeps no parameter alive. Whoever asks
// must have made sure that each tensor is alive and still has the data pointer it had when the
// guard was made. Threads may ask at once.
//
// Tensors that are not in the host's memory are not looked at: reading them would wait for their
// device. Their address and version counter are all there is to tell.
#ifndef TORCH_HYBRID_BACKEND_GUARD_H_
#define TORCH_HYBRID_BACKEND_GUARD_H_

#include <torch/csrc/stable/tensor.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "binding.h"
#include "shared_value.h"
#include "write_watch.h"

namespace torch_hybrid_backend {

// The numbers are those of GuardKind in torch_hybrid_backend/runtime/native/ops.py.
enum class GuardKind : int64_t {
  kEveryByte = 0,
  kLive = 1,
  kLiveUnwatched = 2,  // as kLive where the kernel cannot tell
};

class Guard final : public StaleCheck {
 public:
  static constexpr size_t kCallsPerRound = 256;

  Guard(const std::vector<Tensor>& tensors, GuardKind kind);

  // Whether the tensors changed since the guard was made; once true, always true.
  bool IsStale() const override;

  // Whether an earlier call may have missed the change that IsStale found.
  bool IsLate() const { return late_; }

 private:
  // A part of a tensor's memory that lies in one page.
  struct Segment {
    const std::byte* address;
    size_t size_bytes;
    uint64_t hash;
  };
  // complex128 is the widest element.
  static constexpr size_t kMaxElementBytes = 16;
  struct Sample {
    const void* address;
    size_t size_bytes;
    std::array<std::byte, kMaxElementBytes> value;
  };
  using Segments = std::vector<Segment>;

  static Segments Split(std::vector<AddressRange> ranges);
  static bool IsChanged(const Segment& segment);
  // Those that begin in the range.
  static std::pair<Segments::const_iterator, Segments::const_iterator> In(
      const Segments& segments, const AddressRange& range);
  void TakeSamples(const Tensor& tensor);

  bool IsWatchedMemoryStale() const;
  bool IsUnwatchedMemoryStale() const;

  void LeaveIfNoisy(const AddressRange& written) const;

  Segments watched_;    // sorted by address
  Segments unwatched_;  // likewise
  std::vector<Sample> samples_;
  std::unique_ptr<WriteWatch> watch_;
  size_t per_call_ = 0;  // of `unwatched_`
  mutable std::atomic<size_t> next_{0};
  // Of `watched_`, segments in pages that are written to all the time, by others than us: they are
  // compared in each call. Replaced as a whole.
  mutable SharedValue<Segments> noisy_;
  mutable std::unordered_map<uintptr_t, int> false_alarms_;  // by page; guarded by comparing_
  mutable std::mutex comparing_;
  mutable std::atomic<bool> is_comparing_{false};
  mutable std::atomic<bool> stale_{false};
  mutable std::atomic<bool> late_{false};
};

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_GUARD_H_
