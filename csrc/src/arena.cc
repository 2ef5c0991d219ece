#include "arena.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <utility>

namespace torch_hybrid_backend {
namespace {

constexpr size_t kMostOrders = 64;

// Buffers, and for each of them the others that are alive at a step at which it is.
class Buffers {
 public:
  Buffers(const std::vector<LiveRange>& ranges, int64_t alignment)
      : ranges_(ranges), together_(ranges.size()) {
    for (const LiveRange& range : ranges) {
      int64_t size = 0;
      if (range.size_bytes < 0 || __builtin_add_overflow(range.size_bytes, alignment - 1, &size) ||
          __builtin_add_overflow(total_, size, &total_))
        throw std::runtime_error("the memory of a plan does not fit in 64 bits");
      sizes_.push_back(size / alignment * alignment);
    }
    for (size_t i = 0; i < ranges.size(); ++i) {
      if (sizes_[i] != 0) earliest_.push_back(i);
    }
    std::sort(earliest_.begin(), earliest_.end(), [&](size_t i, size_t j) {
      return std::tuple(ranges[i].first, sizes_[j], i) < std::tuple(ranges[j].first, sizes_[i], j);
    });
    std::vector<size_t> alive;
    for (const size_t i : earliest_) {
      std::erase_if(alive, [&](size_t j) { return ranges[j].last < ranges[i].first; });
      for (const size_t j : alive) {
        together_[i].push_back(j);
        together_[j].push_back(i);
      }
      pairs_ += 2 * alive.size();
      alive.push_back(i);
    }
  }

  size_t pairs() const { return pairs_; }
  const std::vector<size_t>& EarliestFirst() const { return earliest_; }

  std::vector<size_t> LargestFirst() const {
    std::vector<size_t> order = earliest_;
    std::sort(order.begin(), order.end(), [&](size_t i, size_t j) {
      return std::tuple(-sizes_[i], ranges_[i].first, i) <
             std::tuple(-sizes_[j], ranges_[j].first, j);
    });
    return order;
  }

  // The bytes alive at the step with the most: no placement takes less.
  int64_t MostAlive() const {
    std::map<int64_t, int64_t> changes;
    for (const size_t i : earliest_) {
      changes[ranges_[i].first] += sizes_[i];
      changes[ranges_[i].last + 1] -= sizes_[i];
    }
    int64_t alive = 0;
    int64_t most = 0;
    for (const auto& [step, change] : changes) most = std::max(most, alive += change);
    return most;
  }

  ArenaLayout Place(const std::vector<size_t>& order) const {
    ArenaLayout layout{std::vector<int64_t>(sizes_.size()), 0};
    std::vector<bool> placed(sizes_.size());
    std::vector<std::pair<int64_t, int64_t>> neighbours;
    for (const size_t i : order) {
      neighbours.clear();
      for (const size_t j : together_[i]) {
        if (placed[j]) neighbours.emplace_back(layout.offsets[j], End(layout, j));
      }
      std::sort(neighbours.begin(), neighbours.end());
      layout.offsets[i] = SmallestGap(neighbours, sizes_[i]);
      placed[i] = true;
      layout.size_bytes = std::max(layout.size_bytes, End(layout, i));
    }
    return layout;
  }

  int64_t End(const ArenaLayout& layout, size_t i) const { return layout.offsets[i] + sizes_[i]; }

 private:
  // The start of the smallest gap of at least `size` between `neighbours` (sorted), or the end of
  // them all.
  static int64_t SmallestGap(const std::vector<std::pair<int64_t, int64_t>>& neighbours,
                             int64_t size) {
    std::optional<std::pair<int64_t, int64_t>> best;  // width and start
    int64_t free_from = 0;
    for (const auto& [start, end] : neighbours) {
      const int64_t width = start - free_from;
      if (width >= size && (!best || width < best->first)) best = {width, free_from};
      free_from = std::max(free_from, end);
    }
    return best ? best->second : free_from;
  }

  const std::vector<LiveRange>& ranges_;
  std::vector<int64_t> sizes_;
  std::vector<size_t> earliest_;  // those that are not empty
  std::vector<std::vector<size_t>> together_;
  size_t pairs_ = 0;
  int64_t total_ = 0;
};

}  // namespace

ArenaLayout PlanArena(const std::vector<LiveRange>& ranges, int64_t alignment, size_t most_pairs) {
  const Buffers buffers(ranges, alignment);
  const int64_t least = buffers.MostAlive();
  const size_t orders =
      std::max<size_t>(1, std::min(kMostOrders, most_pairs / (1 + buffers.pairs())) / 2);
  ArenaLayout best = buffers.Place(buffers.LargestFirst());
  for (std::vector<size_t> order : {buffers.LargestFirst(), buffers.EarliestFirst()}) {
    for (size_t n = 0; n < orders; ++n) {
      if (best.size_bytes == least) return best;
      ArenaLayout layout = buffers.Place(order);
      const auto highest = std::max_element(order.begin(), order.end(), [&](size_t i, size_t j) {
        return buffers.End(layout, i) < buffers.End(layout, j);
      });
      if (layout.size_bytes < best.size_bytes) best = std::move(layout);
      std::rotate(order.begin(), highest, highest + 1);
    }
  }
  return best;
}

}  // namespace torch_hybrid_backend
