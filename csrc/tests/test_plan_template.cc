#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "plan_template.h"
#include "plans.h"
#include "pytorch_tensors.h"

using namespace torch_hybrid_backend;
using Floats32 = std::vector<float>;

namespace {

const std::string library = std::getenv("HOST_KERNELS");

std::string Value(const std::string& kind, const std::string& shape, const std::string& more = "") {
  return "[\"" + kind + "\"," + (kind == "alias" ? "3" : "0") + ",\"float32\",[" + shape +
         "],[1],\"cpu\"" + more + "]";
}

std::string Kernel(const std::string& symbol, const std::string& arguments,
                   const std::string& sizes = "") {
  return R"({"kind":"kernel","library":")" + library + R"(","symbol":")" + symbol +
         R"(","arguments":[)" + arguments + R"(],"sizes":[)" + sizes + "]}";
}

// out = 2 (2 x) + n of n elements, over two places in the arena, and a view of out from the element
// n - 2 on.
std::string OfRows() {
  const std::string n = R"({"size":0})";
  const std::string described = Described(
      Value("input", n) + "," + Value("arena", n) + "," + Value("arena", n) + "," +
          Value("fresh", n) + "," + Value("alias", "2", R"(,{"size":1})"),
      Kernel("double", "0,1") + "," + Kernel("double", "1,2") + "," + Kernel("plus", "2,3", n), 1,
      "3,4", R"(["cpu",0])");
  return described.substr(0, described.size() - 1) +
         R"(,"lives":[[[1,0,1],[2,1,2]]],"symbols":["n"],"sizes":["n",["+","n",-2]]})";
}

void CheckRun(PlanTemplate& made, int64_t n) {
  const std::unique_ptr<Plan> plan = made.At({n});
  std::vector<float> x;
  Floats32 expected;
  for (int64_t i = 0; i < n; ++i) {
    x.push_back(static_cast<float>(i));
    expected.push_back(static_cast<float>(4 * i + n));
  }
  const auto outputs = RunOnce(*plan, {Floats({n}, x)});
  Check(Read(outputs[0]) == expected, "kernels run at these sizes");
  Check(Read(outputs[1]) == Floats32(expected.end() - 2, expected.end()), "views follow them");
  CheckThrows([&] { RunOnce(*plan, {Floats({n + 1}, {})}); }, "the plan was built for");
}

void TestPlansOfSizes() {
  PlanTemplate made(Json::Parse(OfRows()));
  const auto run = [&] {
    for (int64_t i = 0; i < 50; ++i) CheckRun(made, 2 + i % 7);
  };
  std::thread other(run);
  run();
  other.join();
  Check(made.At({3})->ArenaBytes() == 128 && made.At({17})->ArenaBytes() == 256,
        "each set of sizes has an arena of its own");
}

void TestWhatIsRefused() {
  PlanTemplate made(Json::Parse(OfRows()));
  CheckThrows([&] { made.At({1}); }, "begin after the first element");
  CheckThrows([&] { made.At({int64_t{1} << 61}); }, "64 bits");
  CheckRun(made, 5);
  CheckThrows(
      [] { PlanTemplate(Json::Parse(R"({"symbols":[],"sizes":[],"values":[{"size":0}]})")); },
      "no size 0");
  CheckThrows(
      [] {
        PlanTemplate(Json::Parse(
            R"({"symbols":[],"sizes":[],"values":[],"arenas":[["cpu",0]],"lives":[]})"));
      },
      "of each arena");
}

}  // namespace

int main() {
  TestPlansOfSizes();
  TestWhatIsRefused();
}
