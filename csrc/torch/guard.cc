#include "guard.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "any_in_parallel.h"
#include "parallel.h"

namespace torch_hybrid_backend {
namespace {

using torch::headeronly::IntHeaderOnlyArrayRef;

constexpr int64_t kSamplesPerTensor = 8;
// A sample is 10 to 25 ns of waiting for memory, waking the other threads about a microsecond.
constexpr int64_t kSamplesPerTask = 512;
// A page takes 0.2 us from the caches, 0.5 from memory.
constexpr int64_t kSegmentsPerTask = 32;
// Small models are compared whole in each call: 64 KiB of 4 KiB pages take about 5 us.
constexpr size_t kMinSegmentsPerCall = 16;

// A page that was written to so often while none of its weights changed belongs to others as well:
// comparing it in each call (0.3 us) is cheaper than the two scans and the page fault that each of
// its writes costs. Not more than so many: all pages may be written to with what they hold.
constexpr int kFalseAlarms = 3;
constexpr size_t kMaxNoisySegments = 128;
constexpr uintptr_t kMaxNoisyRun = 8;  // pages

// Equal where all bytes are equal; where one word of eight bytes differs, always different: each
// step maps different values to different ones. The rotation brings high bits (signs) to bear on
// all others.
uint64_t Hash(const std::byte* data, size_t bytes) {
  constexpr uint64_t kOdd = 0x9E3779B97F4A7C15;
  constexpr size_t kLanes = 8;  // chains that do not wait for each other
  std::array<uint64_t, kLanes> lanes{};
  const auto mix = [](uint64_t hash, uint64_t word) { return std::rotl(hash ^ word, 32) * kOdd; };
  const auto load = [data](size_t at, size_t size) {
    uint64_t word = 0;
    std::memcpy(&word, data + at, size);
    return word;
  };
  size_t at = 0;
  for (; at + sizeof(lanes) <= bytes; at += sizeof(lanes)) {
    for (size_t k = 0; k < kLanes; ++k) {
      lanes[k] = mix(lanes[k], load(at + k * sizeof(uint64_t), sizeof(uint64_t)));
    }
  }
  for (size_t k = 0; at < bytes; ++k, at += sizeof(uint64_t)) {
    lanes[k] = mix(lanes[k], load(at, std::min(sizeof(uint64_t), bytes - at)));
  }
  uint64_t hash = 0;
  for (const uint64_t lane : lanes) hash = mix(hash, lane);
  return hash;
}

// Offset in elements of the `index`-th element in row-major order.
int64_t Offset(int64_t index, IntHeaderOnlyArrayRef sizes, IntHeaderOnlyArrayRef strides) {
  int64_t offset = 0;
  for (size_t d = sizes.size(); d-- > 0;) {
    offset += index % sizes[d] * strides[d];
    index /= sizes[d];
  }
  return offset;
}

// Adds the memory that the tensor's elements take, and nothing between them.
void AddRanges(const Tensor& tensor, std::vector<AddressRange>& ranges) {
  const auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  const auto element = static_cast<uintptr_t>(tensor.element_size());
  struct Dim {
    int64_t size, stride;
  };
  std::vector<Dim> dims;
  for (size_t d = 0; d < tensor.sizes().size(); ++d) {
    const Dim dim{tensor.sizes()[d], tensor.strides()[d]};
    if (dim.size == 0) return;
    if (dim.size > 1 && dim.stride != 0) dims.push_back(dim);  // the others repeat the same memory
  }
  std::sort(dims.begin(), dims.end(),
            [](const Dim& a, const Dim& b) { return a.stride < b.stride; });
  int64_t run = 1;  // neighbouring elements
  size_t inner = 0;
  for (; inner < dims.size() && dims[inner].stride <= run; ++inner) {
    run += (dims[inner].size - 1) * dims[inner].stride;
  }
  std::vector<int64_t> starts{0};
  for (size_t d = inner; d < dims.size(); ++d) {
    const size_t count = starts.size();
    for (int64_t i = 1; i < dims[d].size; ++i) {
      for (size_t k = 0; k < count; ++k) starts.push_back(starts[k] + i * dims[d].stride);
    }
  }
  for (const int64_t start : starts) {
    const uintptr_t first = begin + static_cast<uintptr_t>(start) * element;
    ranges.push_back({first, first + static_cast<uintptr_t>(run) * element});
  }
}

}  // namespace

Guard::Guard(const std::vector<Tensor>& tensors, GuardKind kind) {
  std::vector<AddressRange> ranges;
  for (const Tensor& tensor : tensors) {
    if (tensor.is_cpu()) AddRanges(tensor, ranges);
  }
  // Watched before it is read: what is written meanwhile counts as a change.
  if (kind == GuardKind::kLive) watch_ = std::make_unique<WriteWatch>(ranges);
  Segments segments = Split(std::move(ranges));
  const auto is_watched = [this](const Segment& segment) {
    if (!watch_) return false;
    const auto address = reinterpret_cast<uintptr_t>(segment.address);
    const auto& pages = watch_->pages();
    const auto after =
        std::upper_bound(pages.begin(), pages.end(), address,
                         [](uintptr_t a, const AddressRange& range) { return a < range.begin; });
    return after != pages.begin() && address < std::prev(after)->end;
  };
  const auto unwatched = std::stable_partition(segments.begin(), segments.end(), is_watched);
  watched_.assign(segments.begin(), unwatched);
  unwatched_.assign(unwatched, segments.end());
  if (kind == GuardKind::kEveryByte) {
    per_call_ = unwatched_.size();
    return;
  }
  per_call_ = std::max((unwatched_.size() + kCallsPerRound - 1) / kCallsPerRound,
                       std::min(kMinSegmentsPerCall, unwatched_.size()));
  if (per_call_ == unwatched_.size()) return;  // nothing is left for samples to find
  for (const Tensor& tensor : tensors) {
    if (tensor.is_cpu()) TakeSamples(tensor);
  }
}

Guard::Segments Guard::Split(std::vector<AddressRange> ranges) {
  std::sort(ranges.begin(), ranges.end(),
            [](const auto& a, const auto& b) { return a.begin < b.begin; });
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  Segments segments;
  uintptr_t done = 0;  // tensors may share memory
  for (const AddressRange& range : ranges) {
    for (uintptr_t begin = std::max(range.begin, done); begin < range.end;) {
      const uintptr_t end = std::min(range.end, (begin / page + 1) * page);
      segments.push_back({reinterpret_cast<const std::byte*>(begin), end - begin, 0});
      begin = end;
    }
    done = std::max(done, range.end);
  }
  ParallelFor(0, static_cast<int64_t>(segments.size()), kSegmentsPerTask,
              [&](int64_t begin, int64_t end) {
                for (int64_t i = begin; i < end; ++i) {
                  segments[i].hash = Hash(segments[i].address, segments[i].size_bytes);
                }
              });
  return segments;
}

void Guard::TakeSamples(const Tensor& tensor) {
  const int64_t numel = tensor.numel();
  const size_t bytes = tensor.element_size();
  const auto* data = static_cast<const std::byte*>(tensor.const_data_ptr());
  const int64_t count = std::min(numel, kSamplesPerTensor);
  for (int64_t i = 0; i < count; ++i) {
    // First and last element included. 1 below: a single sample has no spread.
    const int64_t index = i * (numel - 1) / std::max<int64_t>(count - 1, 1);
    const int64_t offset = Offset(index, tensor.sizes(), tensor.strides());
    Sample sample{data + offset * static_cast<int64_t>(bytes), bytes, {}};
    std::memcpy(sample.value.data(), sample.address, bytes);
    samples_.push_back(sample);
  }
}

bool Guard::IsChanged(const Segment& segment) {
  return Hash(segment.address, segment.size_bytes) != segment.hash;
}

std::pair<Guard::Segments::const_iterator, Guard::Segments::const_iterator> Guard::In(
    const Segments& segments, const AddressRange& range) {
  const auto before = [](const Segment& segment, uintptr_t address) {
    return reinterpret_cast<uintptr_t>(segment.address) < address;
  };
  const auto first = std::lower_bound(segments.begin(), segments.end(), range.begin, before);
  return {first, std::lower_bound(first, segments.end(), range.end, before)};
}

bool Guard::IsStale() const {
  if (stale_) return true;
  if (IsWatchedMemoryStale() || IsUnwatchedMemoryStale()) stale_ = true;
  return stale_;
}

bool Guard::IsWatchedMemoryStale() const {
  if (watched_.empty()) return false;
  // In this order: another thread that has taken the written pages, so that they look clean, is
  // either still comparing or has said what it found; what it has left to comparing is noisy.
  if (watch_->MayBeWritten() || is_comparing_) {
    const std::lock_guard<std::mutex> lock(comparing_);
    is_comparing_ = true;
    const auto written = watch_->TakeWritten();
    const auto changed = [this](const AddressRange& range) {
      const auto [first, last] = In(watched_, range);
      const auto differs = [first = first](size_t i) { return IsChanged(first[i]); };
      return AnyInParallel(last - first, kSegmentsPerTask, differs);
    };
    if (!written || std::any_of(written->begin(), written->end(), changed)) stale_ = true;
    if (!stale_) {
      for (const AddressRange& range : *written) LeaveIfNoisy(range);
    }
    is_comparing_ = false;
  }
  const std::shared_ptr<const Segments> noisy = noisy_.Get();
  return stale_ || (noisy && std::any_of(noisy->begin(), noisy->end(), IsChanged));
}

void Guard::LeaveIfNoisy(const AddressRange& written) const {
  const auto page_bytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  if (written.end - written.begin > kMaxNoisyRun * page_bytes) return;
  for (uintptr_t begin = written.begin; begin < written.end; begin += page_bytes) {
    if (++false_alarms_[begin] < kFalseAlarms) continue;
    const AddressRange page{begin, begin + page_bytes};
    const auto [first, last] = In(watched_, page);
    const std::shared_ptr<const Segments> before = noisy_.Get();
    auto noisy = before ? std::make_shared<Segments>(*before) : std::make_shared<Segments>();
    noisy->insert(noisy->end(), first, last);
    if (noisy->size() > kMaxNoisySegments) return;
    noisy_.Set(std::move(noisy));  // before the page is left: somebody always looks at it
    watch_->Leave(page);
  }
}

bool Guard::IsUnwatchedMemoryStale() const {
  const auto is_sample_changed = [this](size_t i) {
    const Sample& sample = samples_[i];
    return std::memcmp(sample.address, sample.value.data(), sample.size_bytes) != 0;
  };
  if (AnyInParallel(samples_.size(), kSamplesPerTask, is_sample_changed)) {
    return true;
  }
  if (unwatched_.empty()) return false;
  const size_t count = unwatched_.size();
  const size_t first = next_.fetch_add(per_call_) % count;
  const auto is_segment_changed = [&](size_t i) {
    return IsChanged(unwatched_[(first + i) % count]);
  };
  if (!AnyInParallel(per_call_, kSegmentsPerTask, is_segment_changed)) {
    return false;
  }
  if (per_call_ < count) late_ = true;
  return true;
}

}  // namespace torch_hybrid_backend
