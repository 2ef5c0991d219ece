#include "json.h"

#include <cctype>
#include <charconv>
#include <cmath>
#include <limits>
#include <stdexcept>

namespace torch_hybrid_backend {

class Json::Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  Json Whole() {
    Json whole = Next(0);
    SkipSpace();
    if (at_ != text_.size()) Fail("the end");
    return whole;
  }

 private:
  // Deeper than any description; without a limit a hostile text could use up the stack.
  static constexpr int kDeepest = 64;

  [[noreturn]] void Fail(const char* wanted) const {
    throw std::runtime_error(std::string("no JSON: ") + wanted + " is missing at character " +
                             std::to_string(at_));
  }

  void SkipSpace() {
    while (at_ < text_.size() && std::string_view(" \t\r\n").find(text_[at_]) != text_.npos) ++at_;
  }

  bool Take(std::string_view word) {
    if (text_.substr(at_, word.size()) != word) return false;
    at_ += word.size();
    return true;
  }

  void Expect(std::string_view word, const char* wanted) {
    SkipSpace();
    if (!Take(word)) Fail(wanted);
  }

  Json Next(int depth) {
    if (depth > kDeepest) Fail("an end of nested values");
    SkipSpace();
    Json json;
    if (Take("null")) return json;
    if (Take("true")) {
      json.value_ = true;
    } else if (Take("false")) {
      json.value_ = false;
    } else if (Take("NaN")) {
      json.value_ = std::numeric_limits<double>::quiet_NaN();
    } else if (Take("Infinity")) {
      json.value_ = std::numeric_limits<double>::infinity();
    } else if (Take("-Infinity")) {
      json.value_ = -std::numeric_limits<double>::infinity();
    } else if (Take("\"")) {
      json.value_ = Text();
    } else if (Take("[")) {
      json.value_ = List(depth);
    } else if (Take("{")) {
      json.value_ = Object(depth);
    } else {
      Number(json);
    }
    return json;
  }

  void Number(Json& json) {
    const char* const begin = text_.data() + at_;
    const char* const end = text_.data() + text_.size();
    int64_t whole = 0;
    const auto [whole_end, whole_error] = std::from_chars(begin, end, whole);
    double number = 0;
    const auto [number_end, number_error] = std::from_chars(begin, end, number);
    if (number_error != std::errc()) Fail("a value");
    at_ += number_end - begin;
    if (whole_error == std::errc() && whole_end == number_end) {
      json.value_ = whole;
    } else {
      json.value_ = number;
    }
  }

  std::string Text() {
    std::string text;
    for (; at_ < text_.size(); ++at_) {
      const char c = text_[at_];
      if (c == '"') {
        ++at_;
        return text;
      }
      if (c == '\\') {
        ++at_;
        Escaped(text);
      } else {
        text.push_back(c);
      }
    }
    Fail("the end of a text");
  }

  // The writer keeps what is not ASCII as UTF-8, so \u stands for control characters only.
  void Escaped(std::string& text) {
    const char c = at_ < text_.size() ? text_[at_] : '\0';
    constexpr std::string_view kLetters = "\"\\/bfnrt";
    constexpr std::string_view kMeanings = "\"\\/\b\f\n\r\t";
    if (const size_t which = kLetters.find(c); c != '\0' && which != kLetters.npos) {
      text.push_back(kMeanings[which]);
      return;
    }
    const char* const digits = text_.data() + at_ + 1;
    unsigned code = 0;
    if (c != 'u' || at_ + 5 > text_.size() ||
        std::from_chars(digits, digits + 4, code, 16).ptr != digits + 4 || code >= 0x80) {
      Fail("an escape that is known");
    }
    text.push_back(static_cast<char>(code));
    at_ += 4;
  }

  std::vector<Json> List(int depth) {
    std::vector<Json> list;
    SkipSpace();
    if (Take("]")) return list;
    do {
      list.push_back(Next(depth + 1));
      SkipSpace();
    } while (Take(","));
    Expect("]", "the end of a list");
    return list;
  }

  Members Object(int depth) {
    Members members;
    SkipSpace();
    if (Take("}")) return members;
    do {
      Expect("\"", "the name of a member");
      std::string name = Text();
      Expect(":", "a colon");
      members.emplace_back(std::move(name), Next(depth + 1));
      SkipSpace();
    } while (Take(","));
    Expect("}", "the end of an object");
    return members;
  }

  std::string_view text_;
  size_t at_ = 0;
};

Json Json::Parse(std::string_view text) { return Parser(text).Whole(); }

void Json::Refuse(const char* wanted) {
  throw std::runtime_error(std::string("a description has a value of another type than ") + wanted);
}

double Json::AsDouble() const {
  if (const auto* whole = std::get_if<int64_t>(&value_)) return static_cast<double>(*whole);
  return Get<double>("a number");
}

std::vector<int64_t> Json::AsInts() const {
  std::vector<int64_t> numbers;
  numbers.reserve(AsList().size());
  for (const Json& number : AsList()) numbers.push_back(number.AsInt());
  return numbers;
}

const Json* Json::Find(std::string_view name) const {
  for (const auto& [key, member] : Get<Members>("an object")) {
    if (key == name) return &member;
  }
  return nullptr;
}

const Json& Json::operator[](std::string_view name) const {
  const Json* member = Find(name);
  if (member == nullptr) {
    throw std::runtime_error("a description has no member \"" + std::string(name) + "\"");
  }
  return *member;
}

}  // namespace torch_hybrid_backend
