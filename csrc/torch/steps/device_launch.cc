#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <optional>
#include <stdexcept>
#include <utility>

#include "cuda_driver.h"
#include "launch.h"

namespace torch_hybrid_backend {
namespace {

// Stands for a null pointer among the scratch arguments.
constexpr int64_t kNull = -1;

struct Geometry {
  std::array<uint32_t, 3> grid;
  uint32_t threads;
  uint32_t shared_bytes;
};

// A kernel of a module, launched on the caller's current stream of a GPU, or on the host by a
// driver of its own. Its parameters are the addresses of its arguments, then its scalars, then the
// addresses of its scratch memory.
//
// The module is loaded while the plan is built, not with the first launch: a call may come while
// the caller captures a CUDA graph, where nothing can be loaded.
class DeviceLaunch final : public Launch {
 public:
  DeviceLaunch(const Driver& driver, std::shared_ptr<const ModuleImage> image, std::string symbol,
               Geometry geometry, std::vector<size_t> arguments, std::vector<uint64_t> scalars,
               std::vector<std::optional<size_t>> scratch, PlanParts& plan)
      : image_(std::move(image)),
        symbol_(std::move(symbol)),
        geometry_(geometry),
        arguments_(std::move(arguments)),
        scalars_(std::move(scalars)),
        scratch_(std::move(scratch)),
        on_host_(plan.device.is_host),
        stream_(on_host_ ? 0 : plan.StreamOf(plan.device)),
        first_(plan.parameters),
        function_(driver, image_, symbol_, plan.device.index, geometry_.shared_bytes) {
    for (size_t i = 0; !on_host_ && i < arguments_.size(); ++i) {
      const Value& value = plan.values[arguments_[i]];
      if (value.layout.device.is_host) by_value_.push_back({i, value.SizeBytes()});
    }
    for (const size_t value : Touched()) {
      const Value& root = plan.values[plan.values[value].root];
      if (root.layout.device == plan.device && root.kind != ValueKind::kArena)
        varying_.push_back(value);
    }
    plan.parameters += arguments_.size() + scalars_.size() + scratch_.size();
  }

  std::vector<size_t> Touched() const override {
    std::vector<size_t> touched = arguments_;
    for (const auto& value : scratch_) {
      if (value) touched.push_back(*value);
    }
    return touched;
  }

  // The driver reads each parameter where it is told that it lies, when it launches: addresses in
  // the frame's views, which change from call to call, scalars in the step.
  void Prepare(Frame& frame) const override {
    for (const size_t value : arguments_) frame.parameters.push_back(&frame.views[value].data);
    for (const uint64_t& scalar : scalars_)
      frame.parameters.push_back(const_cast<uint64_t*>(&scalar));
    for (const auto& value : scratch_) {
      static void* null = nullptr;
      frame.parameters.push_back(value ? &frame.views[*value].data : &null);
    }
  }

  bool Run(const RunContext& context) const override {
    if (!HasBlocks()) return true;
    Frame& frame = context.frame;
    try {
      function_.Launch(geometry_.grid, geometry_.threads, geometry_.shared_bytes,
                       on_host_ ? nullptr : frame.streams[stream_].second, Parameters(frame));
    } catch (const std::runtime_error& error) {
      throw std::runtime_error("the kernel " + symbol_ + ": " + error.what());
    }
    return true;
  }

  std::string Title() const override { return symbol_; }

  bool HasBlocks() const override {
    const auto& grid = geometry_.grid;
    return std::find(grid.begin(), grid.end(), 0U) == grid.end();
  }

  KernelNode Node(Frame& frame) const override {
    return {&function_, geometry_.grid, geometry_.threads, geometry_.shared_bytes,
            Parameters(frame)};
  }

  void AddVarying(const Frame& frame, std::vector<uint64_t>& words) const override {
    for (const size_t value : varying_)
      words.push_back(reinterpret_cast<uint64_t>(frame.views[value].data));
    for (const auto& [argument, bytes] : by_value_) {
      const size_t begin = words.size();
      words.resize(begin + (bytes + 7) / 8);
      std::memcpy(&words[begin], frame.views[arguments_[argument]].data, bytes);
    }
  }

 private:
  void** Parameters(Frame& frame) const {
    void** const parameters = frame.parameters.data() + first_;
    // The tensor's only element, which is read when the launch is queued.
    for (const auto& [i, bytes] : by_value_) parameters[i] = frame.views[arguments_[i]].data;
    return parameters;
  }

  const std::shared_ptr<const ModuleImage> image_;
  const std::string symbol_;
  const Geometry geometry_;
  const std::vector<size_t> arguments_;
  const std::vector<uint64_t> scalars_;  // their bytes, from the first one on
  const std::vector<std::optional<size_t>> scratch_;
  const bool on_host_;
  const size_t stream_;
  const size_t first_;  // of its entries in the frame's parameters
  // Arguments on the host, of a launch elsewhere, and their bytes.
  std::vector<std::pair<size_t, size_t>> by_value_;
  std::vector<size_t> varying_;  // values whose addresses change
  const CudaFunction function_;
};

// ["int32", 5]: a number of C's, as the low bytes of eight.
uint64_t ReadScalar(const Json& description) {
  const std::vector<Json>& words = description.AsList();
  const std::string& dtype = words.at(0).AsString();
  const Json& number = words.at(1);
  if (dtype == "int64") return static_cast<uint64_t>(number.AsInt());
  if (dtype == "float32") return std::bit_cast<uint32_t>(static_cast<float>(number.AsDouble()));
  if (dtype == "float64") return std::bit_cast<uint64_t>(number.AsDouble());
  if (dtype != "int32")
    throw std::runtime_error("a launch takes no scalar of " + dtype +
                             ": it must be int32, int64, float32 or float64");
  const int64_t whole = number.AsInt();
  if (whole < std::numeric_limits<int32_t>::min() || whole > std::numeric_limits<int32_t>::max())
    throw std::runtime_error(std::to_string(whole) + " is no int32");
  return static_cast<uint32_t>(static_cast<int32_t>(whole));
}

uint32_t ReadCount(int64_t count, const char* noun) {
  if (count < 0 || count > std::numeric_limits<int32_t>::max())
    throw std::runtime_error(std::string("a launch cannot have ") + std::to_string(count) + " " +
                             noun);
  return static_cast<uint32_t>(count);
}

std::vector<size_t> ReadArguments(const std::vector<int64_t>& numbers, PlanParts& plan) {
  std::vector<size_t> arguments = plan.values.Checked(numbers);
  for (const size_t value : arguments) {
    const Layout& layout = plan.values[value].layout;
    if (layout.device == plan.device || !layout.device.is_host) {
      plan.values.Address(value, plan.device, "a launch");
    } else if (!layout.sizes.empty()) {
      throw std::runtime_error("a launch on " + plan.device.ToString() +
                               " takes only tensors of no dimensions from the CPU, not " +
                               layout.ToString());
    } else {
      plan.values.Address(value, Device::Host(), "a launch");
    }
  }
  return arguments;
}

}  // namespace

// {"device", "module": path, "symbol", "grid": [x, y, z], "threads", "shared_bytes",
//  "arguments": values; those on the CPU, of no dimensions, are passed by value,
//  "scalars": [[dtype, number]], "scratch": values, -1 for a null pointer,
//  "driver": the address of a FindFunction; without one it is NVIDIA's}
std::unique_ptr<Step> MakeDeviceLaunch(const Json& description, PlanParts& plan) {
  const Json* const find = description.Find("driver");
  if (find == nullptr && plan.device.is_host)
    throw std::runtime_error("a launch on the CPU needs a driver of its own");
  std::vector<size_t> arguments = ReadArguments(description["arguments"].AsInts(), plan);
  std::vector<uint64_t> scalars;
  for (const Json& scalar : description["scalars"].AsList()) scalars.push_back(ReadScalar(scalar));
  std::vector<std::optional<size_t>> scratch;
  for (const int64_t value : description["scratch"].AsInts()) {
    scratch.push_back(value == kNull ? std::nullopt
                                     : std::optional(plan.Addressed({value}, "a launch")[0]));
  }
  const std::vector<int64_t> grid = description["grid"].AsInts();
  if (grid.size() != 3) throw std::runtime_error("a launch's grid has three sizes");
  Geometry geometry{};
  for (size_t i = 0; i < 3; ++i) geometry.grid[i] = ReadCount(grid[i], "blocks");
  geometry.threads = ReadCount(description["threads"].AsInt(), "threads");
  geometry.shared_bytes = ReadCount(description["shared_bytes"].AsInt(), "bytes of shared memory");
  const Driver& driver =
      find == nullptr ? NvidiaDriver() : DriverOf(reinterpret_cast<FindFunction>(find->AsInt()));
  return std::make_unique<DeviceLaunch>(
      driver, OpenModule(description["module"].AsString()), description["symbol"].AsString(),
      geometry, std::move(arguments), std::move(scalars), std::move(scratch), plan);
}

}  // namespace torch_hybrid_backend
