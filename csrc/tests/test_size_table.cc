#include <cstdint>
#include <string>

#include "check.h"
#include "size_table.h"

using namespace torch_hybrid_backend;

namespace {

int64_t Value(const std::string& expression, int64_t a, int64_t b) {
  return SizeTable({"a", "b"}, Json::Parse("[" + expression + "]")).At({a, b}).at(0);
}

void Computes() {
  Check(Value(R"(["+", ["*", 4, "a", "b"], -1, "b"])", 2, 3) == 26, "sums of products");
  Check(Value(R"(["max", "a", ["min", 7, "b"]])", 2, 9) == 7, "extremes");
  for (const int64_t a : {-7, -6, 0, 6, 7}) {
    for (const int64_t b : {-3, -1, 1, 3}) {
      const int64_t quotient = Value(R"(["//", "a", "b"])", a, b);
      const int64_t rest = Value(R"(["%", "a", "b"])", a, b);
      Check(quotient * b + rest == a && (b > 0 ? 0 <= rest && rest < b : b < rest && rest <= 0),
            "quotients are rounded down");
    }
    Check(Value(R"(["//", "a", 0])", a, 0) == 0 && Value(R"(["%", "a", 0])", a, 0) == 0,
          "divisions by 0 give 0");
  }
  Check(Value(R"(["%", "a", -1])", INT64_MIN, 0) == 0, "the least number has no rest");
  Check(Value(R"(["span", ["a", 3], ["b", 1]])", 4, 5) == 18, "spans");
  Check(Value(R"(["span", ["a", 3], ["b", 1]])", 0, INT64_MAX) == 0, "empty spans");
  Check(Value(R"(["span", [], []])", 0, 0) == 1, "numbers");
}

void RefusesOverflow() {
  for (const std::string expression :
       {R"(["+", "a", 1])", R"(["*", "a", 2])", R"(["//", ["+", ["*", "a", -1], -1], -1])",
        R"(["span", [3], ["a"]])"})
    CheckThrows([&] { Value(expression, INT64_MAX, 0); }, "does not fit in 64 bits");
}

void RefusesOthers() {
  for (const std::string expression :
       {R"("c")", R"(["-", "a", "b"])", R"(["+"])", R"(["%", "a"])", R"(["span", ["a"], []])",
        R"(["span", ["a"]])", "[]", R"({"a": 1})", "1.5", "null"})
    CheckThrows([&] { Value(expression, 1, 1); }, "");
  CheckThrows([] { SizeTable({"a"}, Json::Parse(R"(["a"])")).At({1, 2}); },
              "1 symbols, but 2 values");
}

void FillsTexts() {
  SizedText text(Json::Parse(R"({"a": [{"size": 1}, 5], "b": {"size": 0}})"), 2);
  for (const int64_t n : {3, 4}) {
    text.Fill({n, 10 * n});
    Check(text.json()["a"].AsInts() == std::vector<int64_t>{10 * n, 5} &&
              text.json()["b"].AsInt() == n,
          "sizes stand in their places");
  }
  for (const std::string wrong : {R"({"size": 2})", R"([{"size": -1}])", R"({"size": "a"})"})
    CheckThrows([&] { SizedText(Json::Parse(wrong), 2); }, "");
}

}  // namespace

int main() {
  Computes();
  RefusesOverflow();
  RefusesOthers();
  FillsTexts();
}
