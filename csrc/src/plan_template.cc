#include "plan_template.h"

#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "checked.h"

namespace torch_hybrid_backend {

PlanTemplate::PlanTemplate(Json description, LibraryPaths library_path)
    : library_path_(std::move(library_path)),
      symbols_(NamesIn(description["symbols"])),
      sizes_(symbols_, description["sizes"]),
      description_(std::move(description), sizes_.size()) {
  Json& whole = description_.json();
  FindArenas(whole);
  if (whole.Find("plans") == nullptr) return;
  for (Json& plan : whole["plans"].AsList()) FindArenas(plan);
}

void PlanTemplate::FindArenas(Json& description) {
  std::vector<Json>& arenas = description["arenas"].AsList();
  const std::vector<Json>& lives = description["lives"].AsList();
  if (arenas.size() != lives.size())
    throw std::runtime_error("a plan tells of each arena what is alive in it");
  std::vector<Json>& values = description["values"].AsList();
  for (size_t i = 0; i < arenas.size(); ++i) {
    const Device device = Device::Named(arenas[i].AsList().at(0).AsString());
    const size_t alignment = device.is_host ? kAlignment : kDeviceAlignment;
    Arena arena{&arenas[i].AsList().at(1), static_cast<int64_t>(alignment), {}};
    for (const Json& life : lives[i].AsList()) {
      const std::vector<int64_t> numbers = life.AsInts();
      if (numbers.size() != 3 || numbers[0] < 0 ||
          numbers[0] >= static_cast<int64_t>(values.size()) || numbers[1] < 0 ||
          numbers[2] < numbers[1] || numbers[2] == std::numeric_limits<int64_t>::max())
        throw std::runtime_error("a value's life is its number, its first and its last step");
      std::vector<Json>& value = values[numbers[0]].AsList();
      arena.lives.push_back(
          {&value, ElementBytes(DtypeNamed(value.at(2).AsString())), numbers.at(1), numbers.at(2)});
    }
    arenas_.push_back(std::move(arena));
  }
}

std::unique_ptr<Plan> PlanTemplate::At(const std::vector<int64_t>& values,
                                       const std::function<void(const Json&)>& check) {
  const std::vector<int64_t> sizes = sizes_.At(values);
  const std::lock_guard<std::mutex> lock(mutex_);
  description_.Fill(sizes);
  for (const Arena& arena : arenas_) Place(arena);
  check(description_.json());
  return std::make_unique<Plan>(description_.json(), library_path_);
}

void PlanTemplate::Place(const Arena& arena) {
  std::vector<LiveRange> ranges;
  ranges.reserve(arena.lives.size());
  for (const Life& life : arena.lives) {
    const int64_t span = SpanOf(life.value->at(3).AsInts(), life.value->at(4).AsInts());
    ranges.push_back({CheckedProduct(span, life.element_bytes), life.first, life.last});
  }
  const ArenaLayout placed = PlanArena(ranges, arena.alignment, kPairsInCall);
  arena.size_bytes->Set(placed.size_bytes);
  for (size_t i = 0; i < ranges.size(); ++i) arena.lives[i].value->at(1).Set(placed.offsets[i]);
}

}  // namespace torch_hybrid_backend
