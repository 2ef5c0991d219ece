#include <cmath>
#include <string>

#include "check.h"
#include "json.h"

using torch_hybrid_backend::Json;

namespace {

void ReadsUntrusted() {
  const Json json = Json::ParseUntrusted(
      "{\"a\": [-0.5, 10, 1e2, -9223372036854775808, 9223372036854775807, Infinity], "
      "\"b\": \"\\u0001\xc3\xa4\xe2\x82\xac\xf0\x9f\x98\x80\"}");
  Check(json["a"].AsList()[3].AsInt() == INT64_MIN && json["a"].AsList()[2].AsDouble() == 100,
        "numbers of every form");
  Check(json["b"].AsString() == "\1\xc3\xa4\xe2\x82\xac\xf0\x9f\x98\x80", "texts");
  CheckThrows([] { Json::ParseUntrusted(R"({"a": 1, "b": 2, "a": 1})"); }, "two members \"a\"");
  for (const std::string text :
       {"01", "-01", ".5", "1.", "1.e5", "+1", "inf", "nan", "-nan", "0x1", "1e", "\"\1\"",
        "9223372036854775808", "-9223372036854775809", "1e999"})
    CheckThrows([&] { Json::ParseUntrusted(text); }, "no JSON");
  for (const std::string text : {"\x80", "\xc0\x80", "\xc3", "\xe0\x80\x80", "\xed\xa0\x80",
                                 "\xf4\x90\x80\x80", "\xf8\x88\x80\x80", "\xf0\x9f\x98"})
    CheckThrows([&] { Json::ParseUntrusted("\"" + text + "\""); }, "not UTF-8");
  const auto nested = [](int depth) { return std::string(depth, '[') + std::string(depth, ']'); };
  Json::ParseUntrusted(nested(Json::kDeepestUntrusted));
  CheckThrows([&] { Json::ParseUntrusted(nested(Json::kDeepestUntrusted + 1)); }, "nested");
  const auto many = [](size_t values) {  // with the list itself
    std::string text = "[0";
    for (size_t i = 2; i < values; ++i) text += ",0";
    return text + "]";
  };
  CheckThrows([&] { Json::ParseUntrusted(many(Json::kMostUntrustedValues + 1)); }, "2^20 values");
  CheckThrows([&] { Json::ParseUntrusted(std::string(Json::kMostUntrustedBytes + 1, ' ')); },
              "16 MiB");
}

void WritesWhatItReads() {
  const std::string text =
      R"({"a":[-0.0,2.0,0.1,1e+300,-9223372036854775808,NaN,Infinity,-Infinity,true,null],)"
      "\"b\\\"\\\\\\u0001\\u001f\":{\"c\":\"\xc3\xa4\",\"d\":[[],{}]}}";
  Check(Json::Parse(text).ToText() == text, "a text is written as it was read");
}

}  // namespace

int main() {
  const Json json = Json::Parse(
      "{\"whole\": -9223372036854775808, \"number\": 0.1, \"large\": 1e+16, \"text\": "
      "\"a\\\"\\\\\\n\\u0009\xc3\xa4\","
      "\"list\": [1, [], {}, null, true], \"nan\": [NaN, Infinity, -Infinity] }");
  Check(json["whole"].AsInt() == INT64_MIN, "whole numbers have 64 bits");
  Check(json["number"].AsDouble() == 0.1, "numbers are read exactly");
  Check(json["large"].AsDouble() == 1e16, "with exponents");
  Check(json["text"].AsString() == "a\"\\\n\t\xc3\xa4", "texts have escapes and UTF-8");
  Check(json["list"].AsList().size() == 5 && json["list"].AsList()[3].IsNull() &&
            json["list"].AsList()[4].AsBool() && json["list"].AsList()[1].AsList().empty(),
        "lists hold values of any type");
  Check(std::isnan(json["nan"].AsList()[0].AsDouble()), "numbers that are none");
  Check(json["nan"].AsList()[2].AsDouble() == -INFINITY, "and infinite ones");
  Check(json.Find("gone") == nullptr, "a member that is not there");
  CheckThrows([&] { json["gone"]; }, "no member \"gone\"");
  CheckThrows([&] { json["text"].AsInt(); }, "another type than a whole number");
  CheckThrows([&] { json["number"].AsInt(); }, "another type than a whole number");
  for (const std::string text : {"", "[1,", "[1 2]", "{\"a\" 1}", "\"open", "\"\\x\"", "nul", "1 2",
                                 "{1: 2}", "\"\\u12\"", "-"})
    CheckThrows([&] { Json::Parse(text); }, "no JSON");
  CheckThrows([&] { Json::Parse(std::string(1000, '[')); }, "nested");
  Check(Json::Parse(R"("\u00e4\u20ac\ud83d\ude00")").AsString() ==
            "\xc3\xa4\xe2\x82\xac\xf0\x9f\x98\x80",
        "escapes stand for any character");
  for (const std::string text :
       {R"("\ud83d")", R"("\ud83d\u0041")", R"("\ude00")", R"("\ud83d\n")"})
    CheckThrows([&] { Json::Parse(text); }, "no JSON");
  ReadsUntrusted();
  WritesWhatItReads();
}
