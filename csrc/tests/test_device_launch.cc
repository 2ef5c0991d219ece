// Launches on a GPU that is not there: with a driver that records (recording_driver.h), and memory
// of a made-up device (pytorch_tensors.h). It shows what the driver is asked for, not that a GPU
// would do it.
#include <dlfcn.h>

#include <bit>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "cuda_driver.h"
#include "plans.h"
#include "pytorch_tensors.h"
#include "recording_driver.h"

using namespace torch_hybrid_backend;
using Floats32 = std::vector<float>;
using Grid = std::vector<unsigned>;

namespace {

const Recording* driver = nullptr;
std::string folder;
int stream_a = 0;
int stream_b = 0;
constexpr size_t kAll = 1000;

std::string Module(const std::string& name, const std::string& parameters) {
  std::ofstream(folder + "/" + name) << parameters;
  return folder + "/" + name;
}

std::string LaunchOf(const std::string& module, const std::string& symbol,
                     const std::string& arguments, const std::string& scalars,
                     const std::string& grid = "2,3,4", const std::string& more = R"("scratch":[])",
                     const std::string& device = "cuda:0", int shared_bytes = 0) {
  return R"({"kind":"launch","device":")" + device + R"(","module":")" + module +
         R"(","symbol":")" + symbol + R"(","arguments":[)" + arguments + R"(],"scalars":[)" +
         scalars + R"(],"grid":[)" + grid + R"(],"threads":128,"shared_bytes":)" +
         std::to_string(shared_bytes) + "," + more + "}";
}

uint64_t Address(const torch::stable::Tensor& tensor) {
  return reinterpret_cast<uint64_t>(tensor.data_ptr());
}

// Two launches by way of the arena: out = 2 (2 x).
std::string Doubling(const std::string& module, const std::string& device = "cuda:0") {
  const auto launch = [&](const std::string& arguments) {
    return LaunchOf(module, "double", arguments, R"(["int32",3])", "1,1,1", R"("scratch":[])",
                    device);
  };
  return Described(Row("input", 0, 3, device) + "," + Row("arena", 0, 70, device) + "," +
                       Row("arena", 512, 3, device) + "," + Row("fresh", 0, 3, device),
                   launch("0,2") + "," + launch("2,3"), 1, "3", R"([")" + device + R"(",768])");
}

void TestWhatTheDriverIsAskedFor() {
  const std::string module = Module("every", "8 8 4 4 8 8 4 8 8");
  current_stream = &stream_a;
  // Its parameters: x, out, a number on the CPU, then scalars, then scratch.
  Plan plan(
      Described(Row("input", 0, 3, "cuda:1") + "," + Row("fresh", 0, 3, "cuda:1") +
                    R"(,["input",1,"float32",[],[],"cpu"],)" + Row("arena", 256, 1, "cuda:1"),
                LaunchOf(module, "nothing", "0,1,2",
                         R"(["int32",-5],["int64",1099511627776],["float64",0.5],["float32",0.25])",
                         "2,3,4", R"("scratch":[3,-1])", "cuda:1", 100000),
                2, "1", R"(["cuda:1",512])"));
  Check(driver->modules_loaded() == 1, "a module is loaded with the plan, not with the first call");
  const auto x = Floats({3}, {}, kCuda, 1);
  std::vector<Launch> launches;
  std::vector<torch::stable::Tensor> out;
  for (const float number : {1.5F, 2.5F}) {
    out = RunOnce(plan, {x, Floats({}, {number})});
    for (Launch& launch : driver->take()) launches.push_back(launch);
    Check(launches.back().parameters[2] == std::bit_cast<uint32_t>(number),
          "a number on the CPU is passed by value, in each call its own");
  }
  Check(launches.size() == 2, "one launch in each call");
  const Launch& last = launches.back();
  Check(last.symbol == "nothing" && last.grid == Grid{2, 3, 4} && last.block == Grid{128, 1, 1},
        "of that kernel, with that grid");
  Check(last.shared_bytes == 100000 && last.shared_bytes_allowed == 100000,
        "shared memory beyond what all may have is asked for");
  Check(last.stream == &stream_a && last.device == 1,
        "on the caller's stream, in its device's context");
  Check(last.parameters[0] == Address(x) && last.parameters[1] == Address(out[0]),
        "addresses of tensors");
  Check(last.parameters[3] == static_cast<uint32_t>(-5) &&
            last.parameters[4] == uint64_t{1} << 40 &&
            last.parameters[5] == std::bit_cast<uint64_t>(0.5) &&
            last.parameters[6] == std::bit_cast<uint32_t>(0.25F),
        "scalars of each type");
  Check(
      last.parameters[7] % kDeviceAlignment == 0 && last.parameters[7] == launches[0].parameters[7],
      "scratch in the arena, which a stream keeps");
  Check(last.parameters[8] == 0, "and a null pointer");
  Check(driver->modules_loaded() == 1, "and once");
  Check(driver->contexts_pushed() == 0, "the thread has the context that it had");
}

void TestOneModuleForPlansAndDevices() {
  const std::string module = Module("double", "8 8 4");
  const int before = driver->modules_loaded();
  Plan first(Doubling(module));
  Plan second(Doubling(module));
  Plan elsewhere(Doubling(module, "cuda:1"));
  std::vector<torch::stable::Tensor> alive;  // until the launches have run
  for (Plan* const plan : {&first, &second, &elsewhere, &first, &elsewhere}) {
    alive.push_back(Floats({3}, {}, kCuda, plan == &elsewhere ? 1 : 0));
    alive.push_back(RunOnce(*plan, {alive.back()})[0]);
  }
  Check(driver->modules_loaded() == before + 2, "it is loaded once on each device");
  driver->wait(&stream_a, kAll);
}

// A model that is compiled again brings the same kernels, after those of the first are closed.
void TestEqualModulesAreLoadedOnce() {
  const std::string bytes = "8 8 4";
  const int before = driver->modules_loaded();
  for (int i = 0; i < 3; ++i) {
    const std::string module = Module("again" + std::to_string(i), bytes);
    {
      Plan plan(Doubling(module));
      const auto x = Floats({3}, {1, 2, 3}, kCuda);  // alive until the launches have run
      const auto out = RunOnce(plan, {x});
      driver->wait(&stream_a, kAll);
      Check(Read(out[0]) == Floats32{4, 8, 12}, "its kernels are the ones that are there");
    }
    CloseModule(module);
  }
  Check(driver->modules_loaded() == before, "by whatever path they come");
  Plan other(Doubling(Module("other", bytes + " ")));
  Check(driver->modules_loaded() == before + 1, "another one is loaded");
}

// The work of all calls runs after the last call has returned, as on a GPU.
void TestCallsDoNotShareWhatStillRuns() {
  Plan plan(Doubling(folder + "/double"));
  std::vector<torch::stable::Tensor> given;
  std::vector<torch::stable::Tensor> results;
  for (int i = 0; i < 6; ++i) {
    current_stream = i % 2 == 0 ? &stream_a : &stream_b;
    const auto x = static_cast<float>(i);
    given.push_back(Floats({3}, {x, x + 1, x + 2}, kCuda));
    results.push_back(RunOnce(plan, {given.back()})[0]);
  }
  // By turns, as two streams may run.
  for (int i = 0; i < 6; ++i) {
    driver->wait(&stream_b, 1);
    driver->wait(&stream_a, 1);
  }
  for (int i = 0; i < 6; ++i) {
    const auto x = static_cast<float>(i);
    Check(Read(results[i]) == Floats32{4 * x, 4 * x + 4, 4 * x + 8},
          "every call has its own result");
  }
}

void TestThreadsOnTheirStreams() {
  Plan plan(Doubling(folder + "/double"));
  const auto run = [&](void* stream) {
    current_stream = stream;
    for (int i = 0; i < 100; ++i) {
      const auto x = static_cast<float>(i);
      const auto given = Floats({3}, {x, 1, 2}, kCuda);
      const auto out = RunOnce(plan, {given});
      driver->wait(stream, kAll);
      Check(Read(out[0]) == Floats32{4 * x, 4, 8}, "threads share a plan");
    }
  };
  std::thread other(run, &stream_b);
  run(&stream_a);
  other.join();
}

// Functions that a step brings along, for the host's memory.
void* FindOfRecording(const char* name) {
  static void* const library = dlopen(std::getenv("RECORDING_DRIVER"), RTLD_NOW);
  return dlsym(library, name);
}

void TestDriverOfAStep() {
  const int before = driver->modules_loaded();
  const std::string find =
      R"("scratch":[],"driver":)" + std::to_string(reinterpret_cast<intptr_t>(&FindOfRecording));
  const auto launch = [&](const std::string& arguments) {
    return LaunchOf(folder + "/double", "double", arguments, R"(["int32",3])", "1,1,1", find,
                    "cpu");
  };
  Plan plan(Described(Row("input", 0, 3) + "," + Row("arena", 64, 3) + "," + Row("fresh", 0, 3),
                      launch("0,1") + "," + launch("1,2"), 1, "2", R"(["cpu",128])"));
  Check(driver->modules_loaded() == before + 1, "modules are each driver's own");
  const auto x = Floats({3}, {1, 2, 3});  // alive until the launches have run
  const auto out = RunOnce(plan, {x});
  driver->wait(nullptr, kAll);
  Check(Read(out[0]) == Floats32{4, 8, 12},
        "a step's own driver launches it on the host, without a stream");
}

// Kernels read and write 16 bytes at once. Of an input, and of what an operator returns.
void TestAddressesAreAligned() {
  driver->take();
  current_stream = &stream_a;
  const auto whole = Floats({8}, {0, 1, 2, 3, 4, 5, 6, 7}, kCuda);
  const auto launch = LaunchOf(Module("one", "8"), "nothing", "0", "", "1,1,1") + "," +
                      LaunchOf(folder + "/one", "nothing", "1", "", "1,1,1");
  const auto call = [](const std::string& name, const std::string& arguments,
                       const std::string& results) {
    return R"({"kind":"operator","name":")" + name + R"(","overload":"","arguments":[)" +
           arguments + R"(],"results":[)" + results + "]}";
  };
  std::vector<torch::stable::Tensor> seen;
  operators["test::view."] = [&](StableIValue* stack) {
    stack[0] = torch::stable::detail::from(ViewOf(whole, 2, 3));
  };
  operators["test::look."] = [&](StableIValue* stack) {
    for (int i = 0; i < 2; ++i)
      seen.push_back(torch::stable::detail::to<torch::stable::Tensor>(stack[i]));
    stack[0] = torch::stable::detail::from(whole);
  };
  Plan plan(Described(Row("input", 0, 3, "cuda") + "," + Row("returned", 0, 3, "cuda") + "," +
                          Row("returned", 0, 8, "cuda"),
                      call("test::view", "", "1") + "," + launch + "," +
                          call("test::look", R"(["tensor",0],["tensor",1])", "2"),
                      1, "2"));
  const auto view = ViewOf(whole, 1, 3);
  Check(Address(view) % kAddressAlignment != 0, "a view may begin anywhere");
  RunOnce(plan, {view});
  auto launches = driver->take();
  for (size_t i = 0; i < 2; ++i) {
    const float first = i == 0 ? 1 : 2;
    Check(launches[i].parameters[0] % kAddressAlignment == 0, "an address is aligned");
    Check(launches[i].parameters[0] == Address(seen[i]) &&
              Read(seen[i]) == Floats32{first, first + 1, first + 2},
          "of a copy");
  }
  const auto aligned = ViewOf(whole, 4, 3);
  RunOnce(plan, {aligned});
  Check(driver->take()[0].parameters[0] == Address(aligned), "what is aligned is not copied");
  driver->wait(&stream_a, kAll);
}

void TestNothingToDo() {
  driver->take();
  Plan plan(Described(Row("input", 0, 3, "cuda"),
                      LaunchOf(folder + "/double", "double", "0,0", R"(["int32",0])", "0,1,1"), 1,
                      ""));
  RunOnce(plan, {Floats({3}, {}, kCuda)});
  Check(driver->take().empty(),
        "a grid without blocks is not launched: the driver would refuse it");
}

void TestLaunchesAreTimedByEvents() {
  const std::string module = Module("double", "8 8 4");
  const auto launch = [&](const std::string& arguments, const std::string& grid) {
    return LaunchOf(module, "nothing", arguments, R"(["int32",3])", grid);
  };
  const auto row = [](const char* kind) { return Row(kind, 0, 3, "cuda:0"); };
  Plan plan(Described(row("input") + "," + row("fresh") + "," + row("fresh"),
                      launch("0,1", "7,1,1") + "," + launch("1,2", "20,1,1"), 1, "2"));
  const auto guard =
      std::make_shared<const Guard>(std::vector<torch::stable::Tensor>{}, GuardKind::kEveryByte);
  current_stream = &stream_a;
  const std::vector<int64_t> times =
      plan.Time(7, Binding(guard, 0, {}, {}, {}, {}), {Floats({3}, {}, kCuda)}, false).nanoseconds;
  Check(times.size() == 2 && times[0] >= 7000000 && times[0] < 20000000 && times[1] >= 20000000,
        "a step takes what its work takes on the device, where the host took less");
  driver->take();
  driver->wait(&stream_a, kAll);
}

void TestWhatFails() {
  const std::string x = Row("input", 0, 3, "cuda");
  const std::string module = folder + "/double";
  const auto refuses = [](const std::string& values, const std::string& step,
                          const std::string& part) {
    CheckThrows([&] { Plan(Described(values, step, 1, "")); }, part);
  };
  refuses(x, LaunchOf(folder + "/gone", "double", "0", ""),
          "cannot open the module " + folder + "/gone");
  refuses(Row("input", 0, 3), LaunchOf(module, "double", "0", ""), "only tensors of no dimensions");
  refuses(Row("input", 0, 3, "cuda:1"), LaunchOf(module, "double", "0", ""), "that is elsewhere");
  refuses(x, LaunchOf(module, "double", "0", R"(["int8",1])"), "no scalar of int8");
  refuses(x, LaunchOf(module, "double", "0", R"(["int32",2147483648])"), "2147483648 is no int32");
  refuses(x, LaunchOf(module, "double", "0", "", "1,1"), "a launch's grid has three sizes");
  refuses(x, LaunchOf(module, "double", "0", "", "-1,1,1"), "cannot have -1 blocks");
  refuses(x, LaunchOf(module, "double", "0", "", "1,1,1", R"("scratch":[])", "meta"),
          "that is elsewhere");
  refuses(x, LaunchOf(module, "gone", "0", ""),
          "finding the kernel gone failed: CUDA_ERROR_SOMETHING (500)");
  refuses(x, LaunchOf(Module("text", "no image"), "double", "0", ""),
          "loading the module of double failed");
  refuses(Row("input", 0, 3),
          LaunchOf(module, "double", "0", "", "1,1,1", R"("scratch":[])", "cpu"),
          "a launch on the CPU needs a driver of its own");
  CheckThrows([&] { UseDriver(folder + "/another.so"); }, "by the driver " + folder);
  Plan plan(Described(x, LaunchOf(module, "double", "0,0", R"(["int32",0])"), 1, ""));
  driver->fail(true);
  CheckThrows([&] { RunOnce(plan, {Floats({3}, {}, kCuda)}); },
              "the kernel double: launching it failed: CUDA_ERROR_ILLEGAL_ADDRESS (700)");
  driver->fail(false);
  Check(driver->contexts_pushed() == 0, "failures leave no context behind");
}

}  // namespace

int main() {
  UseDriver(std::getenv("RECORDING_DRIVER"));
  void* const library = dlopen(std::getenv("RECORDING_DRIVER"), RTLD_NOW);
  Check(library != nullptr, dlerror());
  driver = static_cast<const Recording*>(dlsym(library, "recording"));
  folder = std::getenv("MODULES");
  TestWhatTheDriverIsAskedFor();
  TestOneModuleForPlansAndDevices();
  TestEqualModulesAreLoadedOnce();
  TestCallsDoNotShareWhatStillRuns();
  TestThreadsOnTheirStreams();
  TestDriverOfAStep();
  TestAddressesAreAligned();
  TestNothingToDo();
  TestLaunchesAreTimedByEvents();
  TestWhatFails();
}
