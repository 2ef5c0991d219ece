#include <cmath>
#include <string>

#include "check.h"
#include "json.h"

using torch_hybrid_backend::Json;

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
}
