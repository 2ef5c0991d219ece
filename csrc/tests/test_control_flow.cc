// Branches and loops: which plans they run, with which tensors, and what of these they return.
#include <torch/csrc/stable/stableivalue_conversions.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "guard.h"
#include "plan.h"
#include "plan_template.h"
#include "plans.h"
#include "pytorch_tensors.h"

using namespace torch_hybrid_backend;
using Floats32 = std::vector<float>;

namespace {

const std::string library = std::getenv("HOST_KERNELS");
const std::string truth = R"(["fresh",0,"bool",[1],[1],"cpu"])";

std::string Kernel(const std::string& symbol, const std::string& arguments,
                   const std::string& sizes = "") {
  return R"({"kind":"kernel","library":")" + library + R"(","symbol":")" + symbol +
         R"(","arguments":[)" + arguments + R"(],"sizes":[)" + sizes + "]}";
}

std::string Flow(const std::string& kind, const std::string& plans, const std::string& inputs,
                 const std::string& outputs, const std::string& more = "") {
  return R"({"kind":")" + kind + R"(","plans":[)" + plans + R"(],"inputs":[)" + inputs +
         R"(],"outputs":[)" + outputs + "]" + more + "}";
}

std::string With(const std::string& plan, const std::string& plans) {
  return plan.substr(0, plan.size() - 1) + R"(,"plans":[)" + plans + "]}";
}

// A plan of one input, and a kernel on it.
std::string Of(const std::string& symbol, const std::string& sizes = "") {
  return Described(Row("input", 0, 2) + "," + (symbol == "below" ? truth : Row("fresh", 0, 2)),
                   Kernel(symbol, "0,1", sizes), 1, "1");
}

const std::string same = Described(Row("raw_input", 0, 2), "", 1, "0");

// 2 x where x[0] < 3, else x + 5; and then twice that.
std::string Branching() {
  const std::string values =
      Row("input", 0, 2) + "," + truth + "," + Row("returned", 0, 2) + "," + Row("fresh", 0, 2);
  const std::string steps = Kernel("below", "0,1", "3") + "," +
                            Flow("branch", "0,1", "0", "2", R"(,"predicate":1)") + "," +
                            Kernel("double", "2,3");
  return With(Described(values, steps, 1, "2,3"), Of("double") + "," + Of("plus", "5"));
}

// 2 x as long as x[0] < 100.
std::string Looping(const std::string& body) {
  return With(Described(Row("input", 0, 2) + "," + Row("returned", 0, 2),
                        Flow("loop", "0,1", "0", "1"), 1, "1"),
              Of("below", "100") + "," + body);
}

void TestBranches() {
  Plan plan{Branching()};
  const auto run = [&] {
    for (int i = 0; i < 50; ++i) {
      auto outputs = RunOnce(plan, {Floats({2}, {1, 7})});
      Check(Read(outputs[0]) == Floats32{2, 14} && Read(outputs[1]) == Floats32{4, 28},
            "a true predicate runs the first plan, and later steps read what it returned");
      outputs = RunOnce(plan, {Floats({2}, {3, 7})});
      Check(Read(outputs[0]) == Floats32{8, 12} && Read(outputs[1]) == Floats32{16, 24},
            "a false one runs the second");
    }
  };
  std::thread other(run);
  run();
  other.join();
}

void TestLoops() {
  Plan plan{Looping(Of("double"))};
  Check(Read(RunOnce(plan, {Floats({2}, {3, 1})})[0]) == Floats32{192, 64},
        "a loop ends where its condition says so");
  const auto x = Floats({2}, {100, 1});
  const auto result = RunOnce(plan, {x})[0];
  Check(Read(result) == Floats32{100, 1} && result.data_ptr() != x.data_ptr(),
        "a loop of no iterations returns a tensor of its own");
}

void TestResultsAreNoOperands() {
  const std::string values =
      Row("input", 0, 2) + "," + truth + "," + Row("returned", 0, 2) + "," + Row("input", 1, 2);
  Plan plan{With(Described(values,
                           Kernel("below", "3,1", "3") + "," +
                               Flow("branch", "0,0", "0", "2", R"(,"predicate":1)"),
                           2, "2"),
                 same)};
  const auto x = Floats({4}, {1, 2, 3, 4});
  const auto part = ViewOf(x, 1, 2);
  const auto result = RunOnce(plan, {part, part})[0];
  Check(Read(result) == Floats32{2, 3} && result.data_ptr() != part.data_ptr(),
        "what a plan was given and returns is copied");
}

void TestCallbacksInside() {
  using torch::stable::detail::from;
  using torch::stable::detail::to;
  using Tensors = std::vector<torch::stable::Tensor>;
  bool raises = false;
  operators["torch_hybrid_backend::run_segment."] = [&](StableIValue* stack) {
    Check(to<int64_t>(stack[0]) == 7 && to<int64_t>(stack[1]) == 4,
          "it finds the outermost plan, and its function");
    const auto inputs = to<Tensors>(stack[3]);
    Tensors outputs{Floats({2}, {10 * Read(inputs[0])[0], 1})};
    if (raises) outputs.push_back(outputs[0]);
    stack[0] = from(outputs);
  };
  const std::string body =
      Described(Row("raw_input", 0, 2) + "," + Row("returned", 0, 2),
                R"({"kind":"callback","function":4,"inputs":[0],"outputs":[1]})", 1, "1");
  Plan plan{Looping(body)};
  Check(Read(RunOnce(plan, {Floats({2}, {3, 3})})[0]) == Floats32{300, 1}, "a callback in a loop");
  raises = true;
  const auto guard = std::make_shared<const Guard>(Tensors{}, GuardKind::kEveryByte);
  const Binding binding(guard, 0, {}, {}, {}, {});
  Check(plan.Run(7, binding, {Floats({2}, {3, 3})}).status == RunStatus::kCallbackRaised,
        "an exception ends the loop and the run");
  Check(plan.Time(7, binding, {Floats({2}, {3, 3})}, true).result.status ==
            RunStatus::kCallbackRaised,
        "and a timed one");
}

void TestSizes() {
  const std::string n = R"({"size":0})";
  const auto value = [&](const std::string& kind) {
    return R"([")" + kind + R"(",0,"float32",[)" + n + R"(],[1],"cpu"])";
  };
  const auto with_lives = [](const std::string& plan, const std::string& lives) {
    return plan.substr(0, plan.size() - 1) + R"(,"lives":[)" + lives + "]}";
  };
  const std::string inner = with_lives(
      Described(value("input") + "," + value("arena") + "," + value("fresh"),
                Kernel("double", "0,1") + "," + Kernel("plus", "1,2", n), 1, "2", R"(["cpu",0])"),
      "[[1,0,1]]");
  std::string whole =
      With(with_lives(Described(value("input") + "," + truth + "," + value("returned"),
                                Kernel("below", "0,1", "3") + "," +
                                    Flow("branch", "0,0", "0", "2", R"(,"predicate":1)"),
                                1, "2"),
                      ""),
           inner);
  whole = whole.substr(0, whole.size() - 1) + R"(,"symbols":["n"],"sizes":["n"]})";
  PlanTemplate made{Json::Parse(whole)};
  for (const int64_t size : {2, 40, 3}) {
    const std::vector<float> x(static_cast<size_t>(size), 1.0F);
    const auto outputs = RunOnce(*made.At({size}), {Floats({size}, x)});
    Check(Read(outputs[0]) == Floats32(static_cast<size_t>(size), 2.0F + static_cast<float>(size)),
          "plans that steps run are laid out for each set of sizes too");
  }
}

void TestWhatIsRefused() {
  const auto refused = [](const std::string& steps, const std::string& plans,
                          const std::string& part) {
    const std::string values = Row("input", 0, 2) + "," + truth + "," + Row("returned", 0, 2);
    CheckThrows([&] { Plan(With(Described(values, steps, 1, ""), plans)); }, part);
  };
  const std::string predicate = R"(,"predicate":1)";
  refused(Flow("branch", "0,2", "0", "2", predicate), same + "," + same, "there is no plan 2");
  refused(Flow("branch", "0,-1", "0", "2", predicate), same, "there is no plan -1");
  refused(Flow("branch", "0", "0", "2", predicate), same, "a branch has two plans");
  refused(Flow("branch", "0,0", "0,0", "2", predicate), same, "plan 0 takes 1 inputs");
  refused(Flow("branch", "0,0", "0", "2,2", predicate), same, "has 1 outputs");
  refused(Flow("branch", "0,0", "0", "0", predicate), same, "control flow fills only returned");
  refused(Flow("branch", "0,0", "0", "2", R"(,"predicate":0)"), same, "one truth value on the CPU");
  refused(Flow("loop", "0,0", "0", "2"), same, "tells whether a loop goes on must be one truth");
  refused(Flow("loop", "0,0", "0", "2,-1"), same, "carries more than it is given");
  refused("", Described("", "", 0, "7"), "the plan has no value 7");
  std::string nested = same;
  const std::string values = Row("input", 0, 2) + "," + truth + "," + Row("returned", 0, 2);
  const auto around = [&](int inner) {
    const std::string plan = std::to_string(inner);
    return Described(
        values,
        Kernel("below", "0,1", "3") + "," + Flow("branch", plan + "," + plan, "0", "2", predicate),
        1, "2");
  };
  for (int inner = 0; inner < 30; ++inner) nested += "," + around(inner);
  Plan deep{With(around(30), nested)};
  Check(deep.depth() == 32 && Read(RunOnce(deep, {Floats({2}, {1, 2})})[0]) == Floats32{1, 2},
        "32 plans are within each other");
  CheckThrows([&] { Plan(With(around(31), nested + "," + around(30))); }, "more than 32 deep");
}

}  // namespace

int main() {
  TestBranches();
  TestLoops();
  TestResultsAreNoOperands();
  TestCallbacksInside();
  TestSizes();
  TestWhatIsRefused();
}
