#include "size_table.h"

#include <algorithm>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "checked.h"

namespace torch_hybrid_backend {
namespace {

int64_t Quotient(int64_t x, int64_t y) {
  if (y == 0) return 0;
  if (y == -1) return CheckedProduct(x, -1);
  return x / y - (x % y != 0 && (x < 0) != (y < 0) ? 1 : 0);
}

int64_t Rest(int64_t x, int64_t y) {
  if (y == 0 || y == -1) return 0;
  const int64_t rest = x % y;
  return rest != 0 && (rest < 0) != (y < 0) ? rest + y : rest;
}

}  // namespace

SizeTable::SizeTable(std::vector<std::string> symbols, const Json& sizes)
    : symbols_(std::move(symbols)) {
  for (const Json& expression : sizes.AsList()) {
    Add(expression);
    ends_.push_back(instructions_.size());
  }
}

void SizeTable::Add(const Json& expression) {
  if (expression.IsList()) return AddOperation(expression.AsList());
  if (!expression.IsString()) {
    instructions_.push_back({Kind::kConstant, expression.AsInt()});
    return;
  }
  const auto found = std::find(symbols_.begin(), symbols_.end(), expression.AsString());
  if (found == symbols_.end()) {
    throw std::runtime_error("a size depends on \"" + expression.AsString() +
                             "\", which is no symbol of the plan");
  }
  instructions_.push_back({Kind::kSymbol, found - symbols_.begin()});
}

void SizeTable::AddOperation(const std::vector<Json>& words) {
  constexpr std::pair<std::string_view, Kind> kOperations[] = {
      {"+", Kind::kSum},  {"*", Kind::kProduct}, {"//", Kind::kQuotient},
      {"%", Kind::kRest}, {"max", Kind::kMost},  {"min", Kind::kLeast}};
  if (words.empty()) throw std::runtime_error("a size is an empty list");
  const std::string& name = words[0].AsString();
  if (name == "span" && words.size() == 3) {
    const std::vector<Json>& sizes = words[1].AsList();
    const std::vector<Json>& strides = words[2].AsList();
    if (sizes.size() != strides.size())
      throw std::runtime_error("a span has one stride for each size");
    for (const Json& size : sizes) Add(size);
    for (const Json& stride : strides) Add(stride);
    instructions_.push_back({Kind::kSpan, static_cast<int64_t>(sizes.size())});
    return;
  }
  const auto* const found =
      std::find_if(std::begin(kOperations), std::end(kOperations),
                   [&](const auto& operation) { return operation.first == name; });
  const bool is_binary = name == "//" || name == "%";
  if (found == std::end(kOperations) || words.size() < 2 || (is_binary && words.size() != 3))
    throw std::runtime_error("sizes know no operation \"" + name + "\" of " +
                             std::to_string(words.size() - 1) + " operands");
  Add(words[1]);
  for (size_t i = 2; i < words.size(); ++i) {
    Add(words[i]);
    instructions_.push_back({found->second});
  }
}

std::vector<int64_t> SizeTable::At(const std::vector<int64_t>& values) const {
  if (values.size() != symbols_.size()) {
    throw std::runtime_error("the sizes depend on " + std::to_string(symbols_.size()) +
                             " symbols, but " + std::to_string(values.size()) +
                             " values are given");
  }
  std::vector<int64_t> sizes;
  std::vector<int64_t> results;
  size_t next = 0;
  sizes.reserve(ends_.size());
  for (const size_t end : ends_) {
    for (; next < end; ++next) {
      const Instruction& instruction = instructions_[next];
      if (instruction.kind == Kind::kConstant) {
        results.push_back(instruction.operand);
      } else if (instruction.kind == Kind::kSymbol) {
        results.push_back(values[instruction.operand]);
      } else {
        Apply(instruction, results);
      }
    }
    sizes.push_back(results.back());
    results.clear();
  }
  return sizes;
}

SizedText::SizedText(Json text, size_t sizes) : json_(std::move(text)) {
  json_.Visit([&](Json& each) {
    const Json* const number = each.IsObject() ? each.Find("size") : nullptr;
    if (number == nullptr) return;
    const int64_t size = number->AsInt();
    if (size < 0 || size >= static_cast<int64_t>(sizes))
      throw std::runtime_error("there is no size " + std::to_string(size) + ": there are " +
                               std::to_string(sizes));
    each.Set(0);
    holes_.push_back({&each, static_cast<size_t>(size)});
  });
}

void SizedText::Fill(const std::vector<int64_t>& sizes) {
  for (const Hole& hole : holes_) hole.place->Set(sizes[hole.size]);
}

std::vector<std::string> NamesIn(const Json& list) {
  std::vector<std::string> names;
  for (const Json& name : list.AsList()) names.push_back(name.AsString());
  return names;
}

void SizeTable::Apply(const Instruction& instruction, std::vector<int64_t>& results) {
  if (instruction.kind == Kind::kSpan) {
    const int64_t dimensions = instruction.operand;
    const auto n = static_cast<size_t>(dimensions);
    const int64_t* const sizes = results.data() + results.size() - 2 * dimensions;
    const int64_t span = SpanOf({sizes, n}, {sizes + dimensions, n});
    results.resize(results.size() - 2 * dimensions);
    results.push_back(span);
    return;
  }
  const int64_t y = results.back();
  results.pop_back();
  int64_t& x = results.back();
  switch (instruction.kind) {
    case Kind::kSum:
      x = CheckedSum(x, y);
      break;
    case Kind::kProduct:
      x = CheckedProduct(x, y);
      break;
    case Kind::kQuotient:
      x = Quotient(x, y);
      break;
    case Kind::kRest:
      x = Rest(x, y);
      break;
    case Kind::kMost:
      x = std::max(x, y);
      break;
    default:
      x = std::min(x, y);
  }
}

}  // namespace torch_hybrid_backend
