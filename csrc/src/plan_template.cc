#include "plan_template.h"

#include <stdexcept>
#include <string>
#include <utility>

#include "checked.h"

namespace torch_hybrid_backend {

PlanTemplate::PlanTemplate(std::string_view description, LibraryPaths library_path)
    : library_path_(std::move(library_path)),
      description_(Json::Parse(description)),
      sizes_(description_) {
  FindHoles();
  FindArenas();
}

void PlanTemplate::FindHoles() {
  description_.Visit([this](Json& each) {
    const Json* const number = each.IsObject() ? each.Find("size") : nullptr;
    if (number == nullptr) return;
    const int64_t size = number->AsInt();
    if (size < 0 || size >= static_cast<int64_t>(sizes_.size()))
      throw std::runtime_error("the plan has no size " + std::to_string(size));
    each.Set(0);
    holes_.push_back({&each, static_cast<size_t>(size)});
  });
}

void PlanTemplate::FindArenas() {
  std::vector<Json>& arenas = description_["arenas"].AsList();
  const std::vector<Json>& lives = description_["lives"].AsList();
  if (arenas.size() != lives.size())
    throw std::runtime_error("a plan tells of each arena what is alive in it");
  std::vector<Json>& values = description_["values"].AsList();
  for (size_t i = 0; i < arenas.size(); ++i) {
    const Device device = Device::Named(arenas[i].AsList().at(0).AsString());
    const size_t alignment = device.is_host ? kAlignment : kDeviceAlignment;
    Arena arena{&arenas[i].AsList().at(1), static_cast<int64_t>(alignment), {}};
    for (const Json& life : lives[i].AsList()) {
      const std::vector<int64_t> numbers = life.AsInts();
      std::vector<Json>& value = values.at(numbers.at(0)).AsList();
      arena.lives.push_back(
          {&value, ElementBytes(DtypeNamed(value.at(2).AsString())), numbers.at(1), numbers.at(2)});
    }
    arenas_.push_back(std::move(arena));
  }
}

std::unique_ptr<Plan> PlanTemplate::At(const std::vector<int64_t>& values) {
  const std::vector<int64_t> sizes = sizes_.At(values);
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const Hole& hole : holes_) hole.place->Set(sizes[hole.size]);
  for (const Arena& arena : arenas_) Place(arena);
  return std::make_unique<Plan>(description_, library_path_);
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
