// Plans on the host, kind of step by kind of step; those with a test of their own left out.
#include <torch/csrc/stable/stableivalue_conversions.h>

#include <cstdlib>
#include <thread>
#include <vector>

#include "check.h"
#include "guard.h"
#include "plan.h"
#include "plans.h"
#include "pytorch_tensors.h"

using namespace torch_hybrid_backend;
using Floats32 = std::vector<float>;

namespace {

const std::string library = std::getenv("HOST_KERNELS");

std::string Kernel(const std::string& symbol, const std::string& arguments,
                   const std::string& sizes = "") {
  return R"({"kind":"kernel","library":")" + library + R"(","symbol":")" + symbol +
         R"(","arguments":[)" + arguments + R"(],"sizes":[)" + sizes + "]}";
}

void TestHostKernels() {
  // out = 2 (2 x) + 5, over two places in the arena.
  Plan plan(Described(
      Row("input", 0, 3) + "," + Row("arena", 0, 3) + "," + Row("arena", 64, 3) + "," +
          Row("fresh", 0, 3),
      Kernel("double", "0,1") + "," + Kernel("double", "1,2") + "," + Kernel("plus", "2,3", "5"), 1,
      "3", R"(["cpu",128])"));
  const auto run = [&] {
    for (int i = 0; i < 50; ++i) {
      const auto x = static_cast<float>(i);
      Check(Read(RunOnce(plan, {Floats({3}, {x, 1, 2})})[0]) == Floats32{4 * x + 5, 9, 13},
            "kernels run one after the other, over an arena of the call's own");
    }
  };
  std::thread other(run);
  run();
  other.join();
  Plan failing(
      Described(Row("input", 0, 3) + "," + Row("fresh", 0, 3), Kernel("fail", "0,1"), 1, "1"));
  CheckThrows([&] { RunOnce(failing, {Floats({3}, {})}); },
              "the kernel fail failed with status -3");
  CheckThrows([] { Plan(Described(Row("input", 0, 3), Kernel("gone", "0"), 1, "")); },
              "has no kernel \"gone\"");
  CheckThrows([] { Plan(Described(Row("input", 0, 3, "cuda:0"), Kernel("double", "0"), 1, "")); },
              "a kernel on the CPU cannot read a value that is elsewhere");
}

void TestCopies() {
  const std::string values =
      R"(["input",0,"float32",[2,2],[2,1],"cpu"],["fresh",0,"float32",[2,2],[1,2],"cpu"])";
  Plan plan(Described(values, R"({"kind":"copy","source":0,"destination":1})", 1, "1"));
  Check(Read(RunOnce(plan, {Floats({2, 2}, {1, 2, 3, 4})})[0]) == Floats32{1, 3, 2, 4},
        "a copy has its own strides");
  CheckThrows(
      [] {
        Plan(Described(Row("input", 0, 1) + "," + Row("arena", 0, 1),
                       R"({"kind":"copy","source":0,"destination":1})", 1, "", R"(["cpu",64])"));
      },
      "a copy writes value 1");
}

void TestChecks() {
  // Between kernels, which share a team, and behind the last of them.
  const auto check = [](int flag) {
    return R"({"kind":"check","flags":[)" + std::to_string(flag) + R"(],"title":"not zero"})";
  };
  const std::string values = Row("input", 0, 3) + "," + Row("fresh", 0, 3) + "," +
                             Row("fresh", 0, 3) + "," + Row("fresh", 0, 3);
  for (const std::string& steps :
       {Kernel("double", "0,1") + "," + check(1) + "," + Kernel("double", "0,2"),
        Kernel("double", "0,2") + "," + Kernel("double", "0,1") + "," + check(1),
        Kernel("double", "0,2") + "," + Kernel("double", "0,3") + "," + Kernel("double", "0,1") +
            "," + check(1)}) {
    Plan plan(Described(values, steps, 1, "2"));
    Check(Read(RunOnce(plan, {Floats({3}, {0, 0, 0})})[0]) == Floats32{0, 0, 0},
          "a call of which all flags are 0 returns");
    CheckThrows([&] { RunOnce(plan, {Floats({3}, {0, 0, 1})}); }, "not zero");
    Check(Read(RunOnce(plan, {Floats({3}, {0, 0, 0})})[0]) == Floats32{0, 0, 0},
          "what was refused leaves nothing behind");
  }
  CheckThrows([&] { Plan(Described(Row("input", 0, 3), check(7), 1, "")); },
              "the plan has no value 7");
}

void TestCallbacks() {
  using torch::stable::detail::from;
  using torch::stable::detail::to;
  using Tensors = std::vector<torch::stable::Tensor>;
  bool raises = false;
  operators["torch_hybrid_backend::run_segment."] = [&](StableIValue* stack) {
    Check(to<int64_t>(stack[0]) == 7, "it finds its plan");
    Check(to<int64_t>(stack[1]) == 4, "and its function");
    Check(to<int64_t>(stack[2]) == 1, "which returns one tensor");
    const auto inputs = to<Tensors>(stack[3]);
    Tensors outputs{Floats({1}, {Read(inputs[0])[0] + 1})};
    if (raises) outputs.push_back(outputs[0]);
    stack[0] = from(outputs);
  };
  const std::string values =
      Row("raw_input", 0, 1) + "," + Row("returned", 0, 1) + "," + Row("fresh", 0, 1);
  Plan plan(Described(
      values,
      R"({"kind":"callback","function":4,"inputs":[0],"outputs":[1]},)" + Kernel("double", "1,2"),
      1, "2"));
  Check(Read(RunOnce(plan, {Floats({1}, {3})})[0]) == Floats32{8}, "kernels read what it returns");
  raises = true;
  const auto guard = std::make_shared<const Guard>(Tensors{}, GuardKind::kEveryByte);
  const RunResult result = plan.Run(7, Binding(guard, 0, {}, {}, {}, {}), {Floats({1}, {3})});
  Check(result.status == RunStatus::kCallbackRaised, "an exception ends the run");
  const auto time = [&](bool in_teams) {
    return plan.Time(7, Binding(guard, 0, {}, {}, {}, {}), {Floats({1}, {3})}, in_teams);
  };
  for (const bool in_teams : {false, true}) {
    const TimedResult timed = time(in_teams);
    Check(timed.result.status == RunStatus::kCallbackRaised && timed.nanoseconds.empty(),
          "and a timed one");
  }
  raises = false;
  for (const bool in_teams : {false, true}) {
    const TimedResult timed = time(in_teams);
    Check(Read(timed.result.outputs[0]) == Floats32{8}, "a timed run returns what a run returns");
    Check(timed.nanoseconds.size() == 2, "and the time of each step");
  }
}

void TestAliasesBeginAnywhere() {
  // The second half of a row, read by an operator's stand-in: a kernel, by its address.
  const std::string half = R"(["alias",0,"float32",[2],[1],"cpu",2])";
  Plan plan(Described(Row("input", 0, 4) + "," + half + "," + Row("fresh", 0, 2),
                      R"({"kind":"copy","source":1,"destination":2})", 1, "2,1"));
  const auto outputs = RunOnce(plan, {Floats({4}, {1, 2, 3, 4})});
  Check(Read(outputs[0]) == Floats32{3, 4} && Read(outputs[1]) == Floats32{3, 4},
        "a tensor and a view of it from its third element on");
  const auto refused = [](const std::string& value, const std::string& part) {
    CheckThrows([&] { Plan(Described(Row("input", 0, 4) + "," + value, "", 1, "")); }, part);
  };
  refused(R"(["alias",0,"float32",[3],[1],"cpu",2])", "fit in it");
  refused(R"(["alias",0,"float32",[2],[1],"cpu",-1])", "begin after");
  refused(R"(["fresh",0,"float32",[2],[1],"cpu",1])", "begin after");
}

struct Engine {
  int calls = 0;
  void* stream = nullptr;
};

// x, then y = 3 x.
int32_t Triple(void* context, void* const* arguments, int32_t count, void* stream) {
  auto* engine = static_cast<Engine*>(context);
  engine->stream = stream;
  if (++engine->calls > 1 || count != 2) return 9;
  *static_cast<float*>(arguments[1]) = 3 * *static_cast<const float*>(arguments[0]);
  return 0;
}

std::string External(Engine& engine, const std::string& device) {
  return R"({"kind":"external","title":"triple","arguments":[0,1],"function":)" +
         std::to_string(reinterpret_cast<int64_t>(&Triple)) + R"(,"context":)" +
         std::to_string(reinterpret_cast<int64_t>(&engine)) + device + "}";
}

void TestExternalCalls() {
  Engine engine;
  Plan plan(Described(Row("input", 0, 1) + "," + Row("fresh", 0, 1), External(engine, ""), 1, "1"));
  Check(Read(RunOnce(plan, {Floats({1}, {3})})[0]) == Floats32{9}, "it is given addresses");
  Check(engine.stream == nullptr, "the host has no streams");
  CheckThrows([&] { RunOnce(plan, {Floats({1}, {3})}); },
              "the external call triple failed with status 9");
  Engine other;
  Plan elsewhere(Described(Row("input", 0, 1, "cuda:1") + "," + Row("arena", 0, 1, "cuda:1"),
                           External(other, R"(,"device":"cuda:1")"), 1, "", R"(["cuda:1",256])"));
  current_stream = &other;
  RunOnce(elsewhere, {Floats({1}, {3}, kCuda, 1)});
  Check(other.stream == &other, "it is given the caller's stream");
  CheckThrows([&] { RunOnce(elsewhere, {Floats({1}, {3}, kCuda, 0)}); }, "input 0 is");
  current_stream = nullptr;
}

void TestWhatIsRefused() {
  CheckThrows([] { Plan("{\"version\": 2}"); }, "reads plans of version 1, not of version 2");
  CheckThrows([] { Plan("no text"); }, "no JSON");
  CheckThrows([] { Plan(Described("", R"({"kind":"dance"})", 0, "")); },
              "no kind of step is called \"dance\": it must be one of kernel, operator, copy, "
              "check, launch");
  CheckThrows([] { Plan(Described(Row("borrowed", 0, 1), "", 0, "")); },
              "no kind of value \"borrowed\"");
  CheckThrows([] { Plan(Described(R"(["fresh",0,"int5",[],[],"cpu"])", "", 0, "")); },
              "no dtype \"int5\"");
  CheckThrows([] { Plan(Described(Row("fresh", 0, 1, "moon"), "", 0, "")); },
              "no device is called \"moon\"");
  CheckThrows([] { Plan(Described(Row("arena", 32, 1), "", 0, "", R"(["cpu",128])")); },
              "off its alignment");
  CheckThrows([] { Plan(Described(Row("arena", 64, 1, "cuda"), "", 0, "", R"(["cuda:0",512])")); },
              "off its alignment");
  CheckThrows([] { Plan(Described(Row("arena", 0, 1, "cuda"), "", 0, "", R"(["cpu",512])")); },
              "outside the arena");
  CheckThrows([] { Plan(Described("", "", 0, "", R"(["meta",512])")); },
              "not on device type 100:0");
}

}  // namespace

int main() {
  TestHostKernels();
  TestCopies();
  TestChecks();
  TestCallbacks();
  TestExternalCalls();
  TestWhatIsRefused();
  TestAliasesBeginAnywhere();
}
