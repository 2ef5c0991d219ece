// Json: a parsed JSON text. The plan's description arrives as one
// (docs/adr/0020-plan-steps.md).
//
// Beyond JSON it reads NaN, Infinity and -Infinity, as Python writes them. Whole numbers are 64-bit
// integers, others are doubles. Texts of this process are read by Parse, those of files that may
// come from anybody by ParseUntrusted: its memory is bounded, and no text has two readings.
//
// Ownership: a value owns what is inside it.
//
// Failure: Parse throws std::runtime_error with the position of what is no JSON; the accessors
// throw it for a value of another type and for a member that is missing, by its name.
#ifndef TORCH_HYBRID_BACKEND_JSON_H_
#define TORCH_HYBRID_BACKEND_JSON_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace torch_hybrid_backend {

class Json {
 public:
  static constexpr size_t kMostUntrustedBytes = size_t{16} << 20;
  static constexpr size_t kMostUntrustedValues = size_t{1} << 20;
  static constexpr int kDeepestUntrusted = 32;

  static Json Parse(std::string_view text);
  // Refuses more bytes, values or nested values than the constants above allow, what is not UTF-8,
  // control characters in texts, two members of one name, numbers that are not written as JSON's,
  // and whole numbers of more than 64 bits.
  static Json ParseUntrusted(std::string_view text);

  bool IsNull() const { return std::holds_alternative<std::nullptr_t>(value_); }
  bool IsString() const { return std::holds_alternative<std::string>(value_); }
  bool IsList() const { return std::holds_alternative<std::vector<Json>>(value_); }
  bool IsObject() const { return std::holds_alternative<Members>(value_); }
  bool AsBool() const { return Get<bool>("true or false"); }
  int64_t AsInt() const { return Get<int64_t>("a whole number"); }
  double AsDouble() const;  // whole numbers too
  const std::string& AsString() const { return Get<std::string>("a text"); }
  const std::vector<Json>& AsList() const { return Get<std::vector<Json>>("a list"); }
  std::vector<int64_t> AsInts() const;

  // A member of an object.
  const Json& operator[](std::string_view name) const;
  const Json* Find(std::string_view name) const;  // null where there is none

  // A text that Parse reads as an equal value.
  std::string ToText() const;

  // To change numbers in a text that is read again and again.
  void Set(int64_t number) { value_ = number; }
  std::vector<Json>& AsList() {
    return const_cast<std::vector<Json>&>(std::as_const(*this).AsList());
  }
  Json& operator[](std::string_view name) { return const_cast<Json&>(std::as_const(*this)[name]); }
  // Calls `visit` with every value inside, the outer ones first; with nothing inside what it sets.
  void Visit(const std::function<void(Json&)>& visit);

 private:
  using Members = std::vector<std::pair<std::string, Json>>;
  using Value =
      std::variant<std::nullptr_t, bool, int64_t, double, std::string, std::vector<Json>, Members>;
  class Parser;

  template <typename T>
  const T& Get(const char* wanted) const {
    const T* value = std::get_if<T>(&value_);
    if (value == nullptr) Refuse(wanted);
    return *value;
  }
  [[noreturn]] static void Refuse(const char* wanted);

  Value value_ = nullptr;
};

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_JSON_H_
