#include <torch/csrc/stable/stableivalue_conversions.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "check.h"
#include "plans.h"
#include "pytorch_tensors.h"

using namespace torch_hybrid_backend;
using torch::stable::Tensor;
using Floats32 = std::vector<float>;

namespace {

using torch::stable::detail::from;
using torch::stable::detail::to;

std::string Operator(const std::string& name, const std::string& overload,
                     const std::string& arguments, const std::string& results) {
  return R"({"kind":"operator","name":")" + name + R"(","overload":")" + overload +
         R"(","arguments":[)" + arguments + R"(],"results":[)" + results + "]}";
}

// The dispatcher takes what is on the heap for an optional value.
template <typename T>
std::optional<T> TakeOptional(StableIValue value) {
  if (value == from(std::nullopt)) return std::nullopt;
  const std::unique_ptr<StableIValue> inner(to<StableIValue*>(value));
  return to<T>(*inner);
}

void TestEveryKindOfArgument() {
  operators["test::every.kind"] = [](StableIValue* stack) {
    Check(to<int64_t>(stack[0]) == -3, "int");
    Check(to<double>(stack[1]) == 0.5, "float");
    Check(to<double>(stack[2]) == 2.0, "float written as a whole number");
    Check(to<bool>(stack[3]), "bool");
    Check(std::unique_ptr<std::string>(reinterpret_cast<std::string*>(stack[4]))
                  ->compare("two words") == 0,
          "str");
    Check(to<int32_t>(stack[5]) == aoti_torch_dtype_float16(), "dtype");
    Check(to<int32_t>(stack[6]) == aoti_torch_layout_sparse_csr(), "layout");
    Check(to<int32_t>(stack[7]) == aoti_torch_memory_format_channels_last(), "memory format");
    Check(stack[8] == (uint64_t{kCuda} << 32 | 3), "device");
    Check(!TakeOptional<int64_t>(stack[9]), "none");
    Check(TakeOptional<int64_t>(stack[10]) == 8, "an optional value that is there");
    Check(to<std::vector<int64_t>>(stack[11]) == std::vector<int64_t>{4, 5}, "ints");
    Check(to<std::vector<double>>(stack[12]) == std::vector<double>{0.25}, "floats");
    Check(to<std::vector<bool>>(stack[13]) == std::vector<bool>{true, false}, "bools");
    Check(to<std::vector<int64_t>>(stack[14]).empty(), "an empty list");
    const auto tensors = to<std::vector<Tensor>>(stack[15]);
    Check(tensors.size() == 2 && Read(tensors[1])[0] == 2, "tensors");
    Check(Read(*TakeOptional<Tensor>(stack[16]))[0] == 1, "an optional tensor");
    stack[0] = from(Floats({1}, {42}));
  };
  Plan plan(Described(
      Row("input", 0, 1) + "," + Row("input", 1, 1) + "," + Row("returned", 0, 1),
      Operator("test::every", "kind",
               R"(["int",-3],["float",0.5],["float",2],["bool",true],["str","two words"],)"
               R"(["dtype","float16"],["layout","sparse_csr"],["memory_format","channels_last"],)"
               R"(["device","cuda:3"],["none"],["some",["int",8]],["list",[["int",4],["int",5]]],)"
               R"(["list",[["float",0.25]]],["list",[["bool",true],["bool",false]]],["list",[]],)"
               R"(["list",[["tensor",0],["tensor",1]]],["some",["tensor",0]])",
               "2"),
      2, "2"));
  for (int i = 0; i < 2; ++i)
    Check(Read(RunOnce(plan, {Floats({1}, {1}), Floats({1}, {2})})[0]) == Floats32{42},
          "its result");
}

void TestSeveralResults() {
  // More results than arguments; a list among them; one that nobody reads.
  operators["test::split."] = [](StableIValue* stack) {
    const Tensor x = to<Tensor>(stack[0]);
    stack[0] = from(Floats({1}, {Read(x)[0] + 1}));
    stack[1] = from(std::vector<Tensor>{Floats({1}, {10}), Floats({2}, {20, 21})});
    stack[2] = from(Floats({1}, {30}));
  };
  const std::string values =
      Row("input", 0, 1) + "," + Row("returned", 0, 1) + "," + Row("returned", 0, 2);
  Plan plan(Described(values, Operator("test::split", "", R"(["tensor",0])", "1,[null,2],null"), 1,
                      "2,1"));
  const auto outputs = RunOnce(plan, {Floats({1}, {5})});
  Check(Read(outputs[0]) == Floats32{20, 21} && Read(outputs[1]) == Floats32{6},
        "each goes to its value");
  Plan wrong(
      Described(values, Operator("test::split", "", R"(["tensor",0])", "1,[null],null"), 1, "1"));
  CheckThrows([&] { RunOnce(wrong, {Floats({1}, {5})}); },
              "a result of test::split has 2 tensors instead of 1");
  Plan other(
      Described(values, Operator("test::split", "", R"(["tensor",0])", "2,[null,1],null"), 1, "1"));
  CheckThrows([&] { RunOnce(other, {Floats({1}, {5})}); }, "a result of test::split is float32(1)");
}

void TestWhatIsRefused() {
  const std::string values =
      Row("input", 0, 1) + "," + Row("fresh", 0, 1) + "," + Row("returned", 0, 1);
  const auto refuses = [&](const std::string& arguments, const std::string& results,
                           const std::string& part) {
    CheckThrows(
        [&] { Plan(Described(values, Operator("test::x", "", arguments, results), 1, "")); }, part);
  };
  refuses(R"(["tensor",9])", "2", "no value 9");
  refuses(R"(["tensor",0])", "1", "an operator fills only returned values");
  refuses(R"(["complex",1])", "2", "no argument of the kind \"complex\"");
  refuses(R"(["layout","round"])", "2", "operators take no \"round\"");
  Plan gone(Described(values, Operator("test::gone", "", "", "2"), 1, "2"));
  CheckThrows([&] { RunOnce(gone, {Floats({1}, {0})}); }, "failed");
}

}  // namespace

int main() {
  TestEveryKindOfArgument();
  TestSeveralResults();
  TestWhatIsRefused();
}
