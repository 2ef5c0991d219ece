// SizeTable: sizes known only at run time, as expressions over symbols.
//
// Use: construct it from names and expressions, then At for each set of values. An expression is in
// JSON a number, the name of a symbol, or one of
//
//   ["+", x, ...]  ["*", x, ...]  ["max", x, ...]  ["min", x, ...]
//   ["//", x, y]  ["%", x, y]                 rounded down; 0 where y is 0
//   ["span", [size, ...], [stride, ...]]      elements from the first one to the last, 0 when empty
//
// Ownership: plain data, which does not change: threads may share it.
//
// Failure: throws std::runtime_error for what is no expression, for an unknown symbol, and for
// values at which a size, or an intermediate result, does not fit in 64 bits.
#ifndef TORCH_HYBRID_BACKEND_SIZE_TABLE_H_
#define TORCH_HYBRID_BACKEND_SIZE_TABLE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "json.h"

namespace torch_hybrid_backend {

class SizeTable {
 public:
  // `sizes`: a list of expressions.
  SizeTable(std::vector<std::string> symbols, const Json& sizes);

  size_t size() const { return ends_.size(); }
  // The sizes, in order. `values`: of the symbols, in order.
  std::vector<int64_t> At(const std::vector<int64_t>& values) const;

 private:
  enum class Kind : uint8_t {
    kConstant,  // operand: the number
    kSymbol,    // operand: its position
    kSum,       // from here on, of the two results before it
    kProduct,
    kQuotient,
    kRest,
    kMost,
    kLeast,
    kSpan,  // operand: dimensions; of their sizes, then their strides
  };
  struct Instruction {
    Kind kind;
    int64_t operand = 0;
  };

  void Add(const Json& expression);
  void AddOperation(const std::vector<Json>& words);
  static void Apply(const Instruction& instruction, std::vector<int64_t>& results);

  std::vector<std::string> symbols_;
  std::vector<Instruction> instructions_;  // in postfix order
  std::vector<size_t> ends_;               // of each size's instructions
};

// A text of JSON in which {"size": n} stands for the n-th size of a table, again and again with
// other sizes in their places.
class SizedText {
 public:
  // Throws for a number that is no size of the table.
  SizedText(Json text, size_t sizes);
  SizedText(const SizedText&) = delete;
  SizedText& operator=(const SizedText&) = delete;

  Json& json() { return json_; }
  // Writes the sizes into it.
  void Fill(const std::vector<int64_t>& sizes);

 private:
  struct Hole {
    Json* place;
    size_t size;
  };
  Json json_;
  std::vector<Hole> holes_;
};

// The texts in a list.
std::vector<std::string> NamesIn(const Json& list);

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_SIZE_TABLE_H_
