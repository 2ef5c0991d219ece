// Launches as CUDA graphs on a GPU that is not there: what a driver is asked for that records
// (recording_driver.h), and that kernels which it runs in any order that the graph allows compute
// the same. It does not show that a GPU would do it.
#include <dlfcn.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "cuda_graph.h"
#include "plans.h"
#include "pytorch_tensors.h"
#include "recording_driver.h"

using namespace torch_hybrid_backend;
using Floats32 = std::vector<float>;
using Calls = std::vector<std::string>;
using Edges = std::vector<std::vector<size_t>>;
using Tensors = std::vector<torch::stable::Tensor>;

namespace {

const Recording* driver = nullptr;
const RecordingGraphs* graphs = nullptr;
std::string module_path;
int stream_a = 0;
int stream_b = 0;
constexpr size_t kAll = 1000;

const std::string kAsk = "cuStreamIsCapturing";
const std::string kLaunch = "cuLaunchKernelEx";
const std::string kCreate = "cuGraphCreate";
const std::string kAdd = "cuGraphAddKernelNode_v2";
const std::string kInstantiate = "cuGraphInstantiateWithFlags";
const std::string kChange = "cuGraphExecKernelNodeSetParams_v2";
const std::string kLaunchGraph = "cuGraphLaunch";

// y = 2 x, of three elements.
std::string Double(int x, int y, const std::string& grid = "1,1,1") {
  return R"({"kind":"launch","device":"cuda:0","module":")" + module_path +
         R"(","symbol":"double","arguments":[)" + std::to_string(x) + "," + std::to_string(y) +
         R"(],"scalars":[["int32",3]],"grid":[)" + grid +
         R"(],"threads":128,"shared_bytes":0,"scratch":[]})";
}

std::string Graph(const std::string& launches, const std::string& writes) {
  return R"({"kind":"graph","device":"cuda:0","launches":[)" + launches + R"(],"writes":[)" +
         writes + "]}";
}

std::string OnGpu(const std::string& kind, int payload) { return Row(kind, payload, 3, "cuda:0"); }

torch::stable::Tensor Given(float x) { return Floats({3}, {x, x + 1, x + 2}, kCuda); }

uint64_t Address(const torch::stable::Tensor& tensor) {
  return reinterpret_cast<uint64_t>(tensor.data_ptr());
}

const std::string kArena = R"(["cuda:0",1024])";

// out = 2 (2 (2 x)), by way of two places in the arena.
std::string Chain() {
  return Described(OnGpu("input", 0) + "," + OnGpu("arena", 0) + "," + OnGpu("arena", 512) + "," +
                       OnGpu("fresh", 0),
                   Graph(Double(0, 1) + "," + Double(1, 2) + "," + Double(2, 3), "[1],[2],[3]"), 1,
                   "3", kArena);
}

void TakeWarnings(Calls& into) {
  operators["torch_hybrid_backend::warn."] = [&](StableIValue* stack) {
    into.push_back(*std::unique_ptr<std::string>(reinterpret_cast<std::string*>(stack[0])));
  };
}

void CheckEightfold(const torch::stable::Tensor& out, float x) {
  Check(Read(out) == Floats32{8 * x, 8 * x + 8, 8 * x + 16}, "8 x, of the call's own input");
}

void TestWhatTheDriverIsAskedFor() {
  current_stream = &stream_a;
  Plan plan(Chain());
  driver->take();
  graphs->take_calls();
  Tensors alive;
  const auto run = [&](const torch::stable::Tensor& given) {
    alive.push_back(given);
    alive.push_back(RunOnce(plan, {given})[0]);
    return graphs->take_calls();
  };
  Check(run(Given(0)) == Calls{kAsk, kLaunch, kLaunch, kLaunch}, "a first call makes no graph");
  Check(run(Given(1)) == Calls{kAsk, kCreate, kAdd, kAdd, kAdd, kInstantiate, kLaunchGraph},
        "the second one does");
  const auto third = Given(2);
  Check(run(third) == Calls{kAsk, kChange, kChange, kLaunchGraph},
        "then only the kernels that read the input and write the output are changed");
  Check(run(third) == Calls{kAsk, kChange, kLaunchGraph}, "or only the one with a new output");
  Check(graphs->edges() == Edges{{}, {0}, {1}}, "each kernel waits for the one before it");
  std::vector<Launch> launches = driver->take();
  Check(launches.size() == 12, "three kernels in each call");
  Check(launches[9].parameters[0] == Address(third) &&
            launches[11].parameters[1] == Address(alive.back()),
        "kernels are given the tensors themselves: nothing is copied");
  Check(std::all_of(launches.begin(), launches.end(),
                    [](const Launch& launch) { return launch.stream == &stream_a; }),
        "on the caller's stream");
  // All of it runs only now, as on a GPU that is behind.
  driver->wait(&stream_a, kAll);
  for (int i = 0; i < 4; ++i) CheckEightfold(alive[2 * i + 1], static_cast<float>(std::min(i, 2)));
  Check(driver->contexts_pushed() == 0, "the thread has the context that it had");
}

void TestNothingToChange() {
  current_stream = nullptr;
  Plan plan(Described(OnGpu("input", 0) + "," + OnGpu("arena", 0),
                      Graph(Double(0, 1) + "," + Double(1, 1), "[1],[1]"), 1, "", kArena));
  const auto x = Given(1);
  RunOnce(plan, {x});
  RunOnce(plan, {x});
  graphs->take_calls();
  RunOnce(plan, {x});
  Check(graphs->take_calls() == Calls{kLaunchGraph},
        "one call of the driver for all kernels; the default stream is never captured");
  driver->wait(nullptr, kAll);
}

// What kernels wait for, and with the driver's own order among what may run at any time, that it is
// enough.
void TestWhatKernelsWaitFor() {
  current_stream = &stream_a;
  const auto edges = [](const std::string& values, const std::string& steps, int inputs,
                        const std::string& outputs, const std::vector<Floats32>& expected) {
    Plan plan(Described(values, steps, inputs, outputs, kArena));
    Tensors given;
    for (int i = 0; i < inputs; ++i) given.push_back(Given(1));
    for (int call = 0; call < 2; ++call) {
      const Tensors out = RunOnce(plan, given);
      driver->wait(&stream_a, kAll);
      for (size_t i = 0; i < out.size(); ++i)
        Check(Read(out[i]) == expected[i], "what it computes");
    }
    return graphs->edges();
  };
  const Floats32 twice{2, 4, 6};
  const Floats32 fourfold{4, 8, 12};
  const std::string x = OnGpu("input", 0);
  const std::string fresh = OnGpu("fresh", 0);
  Check(edges(x + "," + fresh + "," + fresh + "," + fresh,
              Graph(Double(0, 1) + "," + Double(0, 2) + "," + Double(1, 3), "[1],[2],[3]"), 1,
              "1,2,3", {twice, twice, fourfold}) == Edges{{}, {}, {0}},
        "kernels that only read what they share wait for nothing");
  const std::string place = OnGpu("arena", 256);
  Check(edges(x + "," + place + "," + fresh + "," + place + "," + fresh,
              Graph(Double(0, 1) + "," + Double(1, 2) + "," + Double(0, 3) + "," + Double(3, 4),
                    "[1],[2],[3],[4]"),
              1, "2,4", {fourfold, fourfold}) == Edges{{}, {0}, {1}, {2}},
        "a place in the arena is written again when its readers are done");
  Check(edges(x + "," + OnGpu("input", 1) + "," + fresh + "," + fresh,
              Graph(Double(0, 0) + "," + Double(1, 2) + "," + Double(1, 3), "[0],[2],[3]"), 2,
              "2,3", {twice, twice}) == Edges{{}, {0}, {0}},
        "inputs may share their memory: one is read when a write to another is done");
  Check(edges(x + "," + fresh + "," + fresh,
              Double(0, 1) + "," + Graph(Double(0, 1) + "," + Double(0, 2), "[1],[2]"), 1, "1,2",
              {twice, twice}) == Edges{{}, {0}},
        "so may a tensor that was there before the graph, with what was made of it");
  const auto uses = [](int64_t begin, int64_t end, bool writes) {
    return std::vector<Access>{{begin, end, writes}};
  };
  Check(Dependencies({uses(0, 8, true), uses(4, 12, true), uses(0, 12, false), uses(12, 16, true),
                      uses(4, 4, true)}) == Edges{{}, {0}, {1}, {}, {}},
        "by bytes, and without what another one waits for; nothing lies in an empty place");
}

void TestNumbersOfTheHost() {
  current_stream = &stream_a;
  const std::string with_number = R"({"kind":"launch","device":"cuda:0","module":")" + module_path +
                                  R"(","symbol":"nothing","arguments":[0,2,1],"scalars":[],)"
                                  R"("grid":[1,1,1],"threads":32,"shared_bytes":0,"scratch":[]})";
  Plan plan(
      Described(OnGpu("input", 0) + R"(,["input",1,"float32",[],[],"cpu"],)" + OnGpu("arena", 0),
                Graph(with_number + "," + Double(0, 2), "[2],[2]"), 2, "", kArena));
  const auto x = Given(1);
  driver->take();
  for (const float number : {1.5F, 2.5F, 3.5F}) {
    graphs->take_calls();
    RunOnce(plan, {x, Floats({}, {number})});
    Check(driver->take()[0].parameters[2] == std::bit_cast<uint32_t>(number),
          "a number is the call's own, as the seed of a dropout must be");
  }
  Check(graphs->take_calls() == Calls{kAsk, kChange, kLaunchGraph}, "it changes its kernel alone");
  driver->wait(&stream_a, kAll);
}

void TestStreamsAndThreads() {
  const int before = graphs->alive();
  std::optional<Plan> plan(std::in_place, Chain());
  Tensors given;
  Tensors results;
  for (int i = 0; i < 8; ++i) {
    current_stream = i % 2 == 0 ? &stream_a : &stream_b;
    given.push_back(Given(static_cast<float>(i)));
    results.push_back(RunOnce(*plan, {given.back()})[0]);
  }
  for (int i = 0; i < 4; ++i) {
    driver->wait(&stream_b, 1);
    driver->wait(&stream_b, 2);
    driver->wait(&stream_a, 2);
  }
  driver->wait(&stream_a, kAll);
  driver->wait(&stream_b, kAll);
  for (int i = 0; i < 8; ++i) CheckEightfold(results[i], static_cast<float>(i));
  Check(graphs->alive() == before + 4, "each stream has a graph of its own");
  const auto run = [&](void* stream) {
    current_stream = stream;
    for (int i = 0; i < 50; ++i) {
      const auto x = Given(static_cast<float>(i));
      const auto out = RunOnce(*plan, {x});
      driver->wait(stream, kAll);
      CheckEightfold(out[0], static_cast<float>(i));
    }
  };
  std::thread other(run, &stream_b);
  run(&stream_a);
  other.join();
  plan.reset();
  Check(graphs->alive() == before, "graphs go with their plan");
}

void TestInsideTheCallersCapture() {
  current_stream = &stream_a;
  Plan plan(Chain());
  const auto x = Given(1);
  Tensors results;
  const auto arena = [&] {
    results.push_back(RunOnce(plan, {x})[0]);
    return driver->take().front().parameters[1];
  };
  driver->take();
  const uint64_t outside = arena();
  Check(arena() == outside, "a stream keeps its memory");
  graphs->take_calls();
  graphs->capture(&stream_a, true);
  const uint64_t inside = arena();
  graphs->capture(&stream_a, false);
  Check(graphs->take_calls() == Calls{kAsk, kLaunch, kLaunch, kLaunch}, "launches are recorded");
  Check(inside != outside, "over memory of the recording's own");
  Check(arena() == outside, "which no other call gets");
  Check(graphs->take_calls() == Calls{kAsk, kChange, kLaunchGraph},
        "and the plan's graph is whole");
  driver->wait(&stream_a, kAll);
  for (const size_t call : {0, 1, 3}) CheckEightfold(results[call], 1);
}

void TestWhatFails() {
  current_stream = &stream_a;
  Calls warnings;
  TakeWarnings(warnings);
  const int before = graphs->alive();
  for (const std::string& function : {kCreate, kAdd, kInstantiate, kChange, kLaunchGraph}) {
    Plan plan(Chain());
    warnings.clear();
    Tensors alive;  // else a call may find its memory where the last one had it
    for (int call = 0; call < 4; ++call) {
      graphs->fail(call == 0 ? "" : function);
      alive.push_back(Given(static_cast<float>(call)));
      alive.push_back(RunOnce(plan, {alive.back()})[0]);
      driver->wait(&stream_a, kAll);
      CheckEightfold(alive.back(), static_cast<float>(call));
    }
    Check(warnings.size() == 1, "one warning");
    Check(warnings[0].starts_with("kernels are launched one by one, not as a CUDA graph: ") &&
              warnings[0].ends_with(" failed: CUDA_ERROR_SOMETHING (1)"),
          "that names the reason");
    graphs->fail("");
    graphs->take_calls();
    const auto x = Given(0);
    const auto out = RunOnce(plan, {x});
    driver->wait(&stream_a, kAll);
    Check(graphs->take_calls() == Calls{kAsk, kLaunch, kLaunch, kLaunch},
          "from then on kernels are launched one by one");
    Check(graphs->alive() == before, "what was made is destroyed");
  }
  Plan plan(Chain());
  const auto x = Given(1);
  const auto out = RunOnce(plan, {x});
  warnings.clear();
  driver->fail(true);
  CheckThrows([&] { RunOnce(plan, {x}); },
              "the kernel double: launching it failed: CUDA_ERROR_ILLEGAL_ADDRESS (700)");
  driver->fail(false);
  Check(warnings.empty(), "where nothing can be launched, that is an error and no warning");
  Check(driver->contexts_pushed() == 0, "failures leave no context behind");
  driver->wait(&stream_a, kAll);
}

void TestHowManyThereAre() {
  current_stream = &stream_a;
  Calls warnings;
  TakeWarnings(warnings);
  const int before = graphs->alive();
  std::string steps;
  for (int i = 0; i <= kMostGraphs; ++i) steps += (i == 0 ? "" : ",") + Graph(Double(0, 1), "[1]");
  {
    Plan plan(Described(OnGpu("input", 0) + "," + OnGpu("arena", 0), steps, 1, "", kArena));
    const auto x = Given(1);
    RunOnce(plan, {x});
    RunOnce(plan, {x});
    Check(graphs->alive() == before + 2 * kMostGraphs, "there is a limit");
    Check(warnings.size() == 1 && warnings[0].ends_with("1024 CUDA graphs in use, and no more are "
                                                        "made"),
          "beyond it kernels are launched one by one");
    driver->wait(&stream_a, 4 * kMostGraphs);
  }
  Plan plan(Chain());
  const auto x = Given(1);
  Tensors results;
  for (int call = 0; call < 2; ++call) results.push_back(RunOnce(plan, {x})[0]);
  Check(graphs->alive() == before + 2, "those of a plan that is gone make room");
  driver->wait(&stream_a, kAll);
}

void TestGridsWithoutBlocks() {
  current_stream = &stream_a;
  Plan plan(Described(
      OnGpu("input", 0) + "," + OnGpu("fresh", 0) + "," + OnGpu("fresh", 0),
      Graph(Double(0, 1) + "," + Double(0, 1, "1,0,1") + "," + Double(0, 2), "[1],[1],[2]"), 1,
      "1,2"));
  const auto x = Given(1);
  for (int call = 0; call < 2; ++call) {
    const Tensors out = RunOnce(plan, {x});
    driver->wait(&stream_a, kAll);
    Check(Read(out[1]) == Floats32{2, 4, 6}, "the others run");
  }
  Check(graphs->edges() == Edges{{}, {}}, "a launch of nothing is no node");
  Plan nothing(Described(OnGpu("input", 0), Graph(Double(0, 0, "0,1,1"), "[0]"), 1, ""));
  graphs->take_calls();
  for (int call = 0; call < 2; ++call) RunOnce(nothing, {x});
  Check(graphs->take_calls() == Calls{kAsk, kAsk}, "a graph of nothing is none");
}

void TestWhatIsRefused() {
  const auto refuses = [](const std::string& step, const std::string& part) {
    CheckThrows([&] { Plan(Described(OnGpu("input", 0), step, 1, "")); }, part);
  };
  refuses(Graph("", ""), "a graph has launches, and says of each what it writes");
  refuses(Graph(Double(0, 0), ""), "a graph has launches, and says of each what it writes");
  refuses(Graph(Double(0, 0), "[1]"), "the plan has no value 1");
}

}  // namespace

int main() {
  UseDriver(std::getenv("RECORDING_DRIVER"));
  void* const library = dlopen(std::getenv("RECORDING_DRIVER"), RTLD_NOW);
  Check(library != nullptr, dlerror());
  driver = static_cast<const Recording*>(dlsym(library, "recording"));
  graphs = static_cast<const RecordingGraphs*>(dlsym(library, "recording_graphs"));
  module_path = std::string(std::getenv("MODULES")) + "/graphs";
  std::ofstream(module_path) << "8 8 4";
  TestWhatTheDriverIsAskedFor();
  TestNothingToChange();
  TestWhatKernelsWaitFor();
  TestNumbersOfTheHost();
  TestStreamsAndThreads();
  TestInsideTheCallersCapture();
  TestWhatFails();
  TestHowManyThereAre();
  TestGridsWithoutBlocks();
  TestWhatIsRefused();
}
