#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/stableivalue_conversions.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <limits>
#include <mutex>
#include <set>
#include <stdexcept>
#include <utility>

#include "cuda_graph.h"
#include "launch.h"

namespace torch_hybrid_backend {
namespace {

// Says it in Python's log, once in the process.
void WarnOnce(const std::string& message) {
  static std::mutex mutex;
  static auto* const said = new std::set<std::string>;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (!said->insert(message).second) return;
  }
  using torch::stable::detail::from;
  std::array<StableIValue, 1> stack{from(message)};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("torch_hybrid_backend::warn", "", stack.data(), TORCH_ABI_VERSION));
}

// Launches of one device, handed to the driver together from the second call of a frame on: what
// runs once is not worth a graph. The graph keeps what the last call's launches were given, so a
// call changes only what differs: nothing is copied, and results are new tensors as ever.
//
// Where the driver cannot, the launches are made one by one, as while the caller captures the
// stream.
class LaunchGraph final : public Step {
 public:
  // `accesses`: of each launch that has blocks.
  LaunchGraph(std::vector<std::unique_ptr<Launch>> launches,
              const std::vector<std::vector<Access>>& accesses, PlanParts& plan)
      : launches_(std::move(launches)),
        after_(Dependencies(accesses)),
        on_host_(plan.device.is_host),
        stream_(on_host_ ? 0 : plan.StreamOf(plan.device)),
        number_(plan.states++) {
    for (const auto& launch : launches_) {
      if (launch->HasBlocks()) nodes_.push_back(launch.get());
    }
  }

  std::vector<size_t> Touched() const override {
    std::vector<size_t> touched;
    for (const auto& launch : launches_) {
      const std::vector<size_t> own = launch->Touched();
      touched.insert(touched.end(), own.begin(), own.end());
    }
    return touched;
  }

  void Prepare(Frame& frame) const override {
    for (const auto& launch : launches_) launch->Prepare(frame);
    frame.states.push_back(std::make_unique<FrameGraph>());
  }

  bool Run(const RunContext& context) const override {
    Frame& frame = context.frame;
    auto& own = static_cast<FrameGraph&>(*frame.states[number_]);
    std::string failure;
    if (own.used && !nodes_.empty() && !frame.is_captured && !gave_up_) {
      try {
        LaunchTogether(frame, own);
        return true;
      } catch (const std::runtime_error& error) {
        failure = error.what();
        gave_up_ = true;
        own.graph.reset();
      }
    }
    own.used = true;
    for (const auto& launch : launches_) launch->Run(context);
    // Last: where nothing can be launched at all, that is the error.
    if (!failure.empty())
      WarnOnce("kernels are launched one by one, not as a CUDA graph: " + failure);
    return true;
  }

  std::string Title() const override {
    return "CUDA graph of " + std::to_string(nodes_.size()) + " kernels";
  }

 private:
  void LaunchTogether(Frame& frame, FrameGraph& own) const {
    own.now.clear();
    own.changed.clear();
    for (size_t i = 0; i < nodes_.size(); ++i) {
      const size_t begin = own.now.size();
      nodes_[i]->AddVarying(frame, own.now);
      if (!own.graph ||
          !std::equal(own.now.begin() + begin, own.now.end(), own.last.begin() + begin)) {
        own.changed.emplace_back(i, nodes_[i]->Node(frame));
      }
    }
    if (!own.graph) {
      std::vector<KernelNode> all;
      for (const auto& [i, node] : own.changed) all.push_back(node);
      own.graph = std::make_unique<CudaGraph>(all, after_);
      own.changed.clear();
    }
    own.graph->Launch(own.changed, on_host_ ? nullptr : frame.streams[stream_].second);
    std::swap(own.last, own.now);
  }

  const std::vector<std::unique_ptr<Launch>> launches_;
  std::vector<const Launch*> nodes_;  // those with blocks
  const std::vector<std::vector<size_t>> after_;
  const bool on_host_;
  const size_t stream_;
  const size_t number_;  // of its entry in the frame's states
  mutable std::atomic<bool> gave_up_ = false;
};

// The memory of a launch. A tensor that is new in each call, and that no step before the graph
// uses, shares its memory with nothing else. All other tensors may share theirs with one another:
// inputs as the caller likes, what an operator returns with what it was given.
std::vector<Access> AccessesOf(const Launch& launch, const std::vector<size_t>& written,
                               const PlanParts& plan) {
  constexpr int64_t kElsewhere = std::numeric_limits<int64_t>::max() / 2;
  std::vector<Access> accesses;
  for (const size_t touched : launch.Touched()) {
    const size_t root = plan.values[touched].root;
    const Value& value = plan.values[root];
    if (value.layout.device != plan.device) continue;  // a number of the host: passed by value
    const bool writes = std::any_of(written.begin(), written.end(),
                                    [&](size_t value) { return plan.values[value].root == root; });
    if (value.kind == ValueKind::kArena) {
      accesses.push_back(
          {value.payload, value.payload + static_cast<int64_t>(value.SizeBytes()), writes});
    } else {
      const bool is_new = value.kind == ValueKind::kFresh && !plan.touched[root];
      const int64_t place = kElsewhere + (is_new ? 1 + static_cast<int64_t>(root) : 0);
      accesses.push_back({place, place + 1, writes});
    }
  }
  return accesses;
}

}  // namespace

// {"device", "launches": descriptions (see device_launch.cc), "writes": for each of them the values
// that it writes}
std::unique_ptr<Step> MakeLaunchGraph(const Json& description, PlanParts& plan) {
  const std::vector<Json>& described = description["launches"].AsList();
  const std::vector<Json>& writes = description["writes"].AsList();
  if (described.empty() || described.size() != writes.size())
    throw std::runtime_error("a graph has launches, and says of each what it writes");
  std::vector<std::unique_ptr<Launch>> launches;
  std::vector<std::vector<Access>> accesses;
  for (size_t i = 0; i < described.size(); ++i) {
    std::unique_ptr<Step> step = MakeDeviceLaunch(described[i], plan);
    launches.emplace_back(static_cast<Launch*>(step.release()));
    const std::vector<size_t> written = plan.values.Checked(writes[i].AsInts());
    if (launches.back()->HasBlocks())
      accesses.push_back(AccessesOf(*launches.back(), written, plan));
  }
  return std::make_unique<LaunchGraph>(std::move(launches), accesses, plan);
}

}  // namespace torch_hybrid_backend
