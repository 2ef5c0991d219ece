#include <cstdint>
#include <random>
#include <string>

#include "arena.h"
#include "check.h"

using namespace torch_hybrid_backend;

namespace {

void CheckLayout(const std::vector<LiveRange>& ranges, const ArenaLayout& layout) {
  for (size_t i = 0; i < ranges.size(); ++i) {
    Check(layout.offsets[i] % 64 == 0 && layout.offsets[i] >= 0, "offsets are aligned");
    Check(layout.offsets[i] + ranges[i].size_bytes <= layout.size_bytes, "buffers are inside");
    for (size_t j = 0; j < i; ++j) {
      const bool together = ranges[i].first <= ranges[j].last && ranges[j].first <= ranges[i].last;
      const bool apart = layout.offsets[i] + ranges[i].size_bytes <= layout.offsets[j] ||
                         layout.offsets[j] + ranges[j].size_bytes <= layout.offsets[i];
      Check(!together || apart || ranges[i].size_bytes == 0 || ranges[j].size_bytes == 0,
            "buffers alive together are apart");
    }
  }
}

void PlacesRandomBuffers() {
  std::mt19937 random(1);
  const auto number = [&](int64_t most) {
    return std::uniform_int_distribution<int64_t>(0, most)(random);
  };
  for (int trial = 0; trial < 50; ++trial) {
    std::vector<LiveRange> ranges;
    for (int i = 0; i < 40; ++i) {
      const int64_t first = number(30);
      ranges.push_back({number(5000), first, first + number(10)});
    }
    for (const size_t pairs : {size_t{0}, kPairsInCall, kPairsAhead})
      CheckLayout(ranges, PlanArena(ranges, 64, pairs));
  }
}

void RefusesTooMuch() {
  CheckThrows([] { PlanArena({{INT64_MAX, 0, 1}}, 64, 0); }, "64 bits");
  CheckThrows([] { PlanArena({{INT64_MAX / 2, 0, 1}, {INT64_MAX / 2, 0, 1}, {64, 0, 1}}, 64, 0); },
              "64 bits");
  CheckThrows([] { PlanArena({{-1, 0, 1}}, 64, 0); }, "64 bits");
}

}  // namespace

int main() {
  PlacesRandomBuffers();
  RefusesTooMuch();
  Check(PlanArena({}, 64, 0).size_bytes == 0, "nothing needs nothing");
}
