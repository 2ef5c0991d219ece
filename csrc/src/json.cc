#include "json.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <type_traits>

namespace torch_hybrid_backend {
namespace {

// True if the text is UTF-8: no overlong forms, no surrogates, nothing above U+10FFFF.
bool IsUtf8(std::string_view text) {
  for (size_t at = 0; at < text.size();) {
    const auto first = static_cast<unsigned char>(text[at++]);
    if (first < 0x80) continue;
    const int more = first >= 0xf0 ? 3 : first >= 0xe0 ? 2 : 1;
    if (first < 0xc0 || first > 0xf7) return false;
    uint32_t code = first & (0x3f >> more);
    for (int i = 0; i < more; ++i) {
      if (at == text.size() || (text[at] & 0xc0) != 0x80) return false;
      code = code << 6 | (text[at++] & 0x3f);
    }
    constexpr uint32_t kLeast[] = {0x80, 0x800, 0x10000};
    if (code < kLeast[more - 1] || code > 0x10ffff || (code >= 0xd800 && code < 0xe000)) {
      return false;
    }
  }
  return true;
}

void AppendUtf8(std::string& text, uint32_t code) {
  const auto append = [&](uint32_t byte) { text.push_back(static_cast<char>(byte)); };
  if (code < 0x80) return append(code);
  const int more = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
  append((0xff00 >> (more + 1) & 0xff) | code >> (6 * more));
  for (int i = more - 1; i >= 0; --i) append(0x80 | (code >> (6 * i) & 0x3f));
}

// True if JSON writes a number like this: no leading zeros, digits on both sides of a point.
bool IsJsonNumber(std::string_view text) {
  size_t at = text.starts_with('-') ? 1 : 0;
  const auto has = [&](std::string_view any) {
    return at < text.size() && any.find(text[at]) != any.npos;
  };
  const auto digits = [&] {
    const size_t begin = at;
    while (has("0123456789")) ++at;
    return at - begin;
  };
  const bool zero = has("0");
  const size_t whole = digits();
  if (whole == 0 || (zero && whole > 1)) return false;
  if (has(".")) {
    ++at;
    if (digits() == 0) return false;
  }
  if (has("eE")) {
    ++at;
    if (has("+-")) ++at;
    if (digits() == 0) return false;
  }
  return at == text.size();
}

std::string TextOf(double number) {
  if (std::isnan(number)) return "NaN";
  if (std::isinf(number)) return number < 0 ? "-Infinity" : "Infinity";
  std::array<char, 32> digits{};
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), number).ptr;
  std::string text(digits.data(), end);
  // A whole number would be an integer, which has no -0.
  return text.find_first_of(".e") == text.npos ? text + ".0" : text;
}

std::string TextOf(std::string_view words) {
  std::string text = "\"";
  for (const char c : words) {
    if (static_cast<unsigned char>(c) < 0x20) {
      constexpr char kDigits[] = "0123456789abcdef";
      text += {'\\', 'u', '0', '0', kDigits[c >> 4], kDigits[c & 15]};
    } else {
      if (c == '"' || c == '\\') text += '\\';
      text += c;
    }
  }
  return text + '"';
}

}  // namespace

class Json::Parser {
 public:
  Parser(std::string_view text, bool trusted)
      : text_(text), trusted_(trusted), deepest_(trusted ? kDeepest : kDeepestUntrusted) {}

  Json Whole() {
    if (!trusted_ && text_.size() > kMostUntrustedBytes) Fail("an end within 16 MiB");
    if (!trusted_ && !IsUtf8(text_)) throw std::runtime_error("no JSON: it is not UTF-8");
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
    if (!trusted_ && ++values_ > kMostUntrustedValues) Fail("an end within 2^20 values");
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
    if (!trusted_) {
      if (!IsJsonNumber({begin, number_end})) Fail("a value");
      if (whole_error == std::errc::result_out_of_range && whole_end == number_end) {
        Fail("a whole number of 64 bits");
      }
    }
    at_ += number_end - begin;
    if (whole_error == std::errc() && whole_end == number_end) {
      json.value_ = whole;
    } else {
      json.value_ = number;
    }
  }

  std::string Text() {
    std::string text;
    while (at_ < text_.size()) {
      const char c = text_[at_++];
      if (c == '"') return text;
      if (c == '\\') {
        Escaped(text);
      } else {
        if (!trusted_ && static_cast<unsigned char>(c) < 0x20) Fail("an escape");
        text.push_back(c);
      }
    }
    Fail("the end of a text");
  }

  void Escaped(std::string& text) {
    const char c = at_ < text_.size() ? text_[at_] : '\0';
    constexpr std::string_view kLetters = "\"\\/bfnrt";
    constexpr std::string_view kMeanings = "\"\\/\b\f\n\r\t";
    if (const size_t which = kLetters.find(c); c != '\0' && which != kLetters.npos) {
      text.push_back(kMeanings[which]);
      ++at_;
      return;
    }
    uint32_t code = Unit();
    if (code >= 0xd800 && code < 0xdc00) {  // the first half of a pair
      if (!Take("\\")) Fail("the second half of an escape");
      const uint32_t low = Unit();
      if (low < 0xdc00 || low >= 0xe000) Fail("the second half of an escape");
      code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
    } else if (code >= 0xdc00 && code < 0xe000) {
      Fail("the first half of an escape");
    }
    AppendUtf8(text, code);
  }

  // The number that "u" and four hexadecimal digits stand for.
  uint32_t Unit() {
    const char* const digits = text_.data() + at_ + 1;
    uint32_t unit = 0;
    if (at_ + 5 > text_.size() || text_[at_] != 'u' ||
        std::from_chars(digits, digits + 4, unit, 16).ptr != digits + 4) {
      Fail("an escape that is known");
    }
    at_ += 5;
    return unit;
  }

  std::vector<Json> List(int depth) {
    if (depth >= deepest_) Fail("an end of nested values");
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
    if (depth >= deepest_) Fail("an end of nested values");
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
    if (!trusted_) RefuseTwins(members);
    return members;
  }

  // By sorting: members may be many.
  static void RefuseTwins(const Members& members) {
    std::vector<std::string_view> names;
    names.reserve(members.size());
    for (const auto& [name, member] : members) names.push_back(name);
    std::sort(names.begin(), names.end());
    const auto twin = std::adjacent_find(names.begin(), names.end());
    if (twin != names.end()) {
      throw std::runtime_error("no JSON: an object has two members \"" + std::string(*twin) + "\"");
    }
  }

  const std::string_view text_;
  const bool trusted_;
  const int deepest_;
  size_t at_ = 0;
  size_t values_ = 0;
};

Json Json::Parse(std::string_view text) { return Parser(text, /*trusted=*/true).Whole(); }

Json Json::ParseUntrusted(std::string_view text) { return Parser(text, /*trusted=*/false).Whole(); }

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

void Json::Visit(const std::function<void(Json&)>& visit) {
  visit(*this);
  if (auto* list = std::get_if<std::vector<Json>>(&value_)) {
    for (Json& item : *list) item.Visit(visit);
  } else if (auto* members = std::get_if<Members>(&value_)) {
    for (auto& [name, member] : *members) member.Visit(visit);
  }
}

std::string Json::ToText() const {
  return std::visit(
      [](const auto& value) -> std::string {
        using T = std::decay_t<decltype(value)>;
        if constexpr (std::is_same_v<T, std::nullptr_t>) {
          return "null";
        } else if constexpr (std::is_same_v<T, bool>) {
          return value ? "true" : "false";
        } else if constexpr (std::is_same_v<T, int64_t>) {
          return std::to_string(value);
        } else if constexpr (std::is_same_v<T, double>) {
          return TextOf(value);
        } else if constexpr (std::is_same_v<T, std::string>) {
          return TextOf(value);
        } else if constexpr (std::is_same_v<T, Members>) {
          std::string text = "{";
          for (const auto& [name, member] : value)
            text += (text.size() > 1 ? "," : "") + TextOf(name) + ":" + member.ToText();
          return text + "}";
        } else {
          std::string text = "[";
          for (const Json& item : value) text += (text.size() > 1 ? "," : "") + item.ToText();
          return text + "]";
        }
      },
      value_);
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
