#include "cuda_graph.h"

#include <algorithm>

namespace torch_hybrid_backend {
namespace {

bool Conflict(const std::vector<Access>& earlier, const std::vector<Access>& later) {
  return std::any_of(earlier.begin(), earlier.end(), [&](const Access& a) {
    return std::any_of(later.begin(), later.end(), [&](const Access& b) {
      return (a.writes || b.writes) && std::max(a.begin, b.begin) < std::min(a.end, b.end);
    });
  });
}

}  // namespace

std::vector<std::vector<size_t>> Dependencies(const std::vector<std::vector<Access>>& launches) {
  std::vector<std::vector<size_t>> after(launches.size());
  std::vector<std::vector<bool>> reached;  // by launch: all that it waits for, directly or not
  for (size_t later = 0; later < launches.size(); ++later) {
    std::vector<bool>& waits = reached.emplace_back(later, false);
    // From the nearest on: what it waits for in turn is then known.
    for (size_t earlier = later; earlier-- > 0;) {
      if (waits[earlier] || !Conflict(launches[earlier], launches[later])) continue;
      after[later].push_back(earlier);
      waits[earlier] = true;
      for (size_t i = 0; i < earlier; ++i) waits[i] = waits[i] || reached[earlier][i];
    }
  }
  return after;
}

}  // namespace torch_hybrid_backend
