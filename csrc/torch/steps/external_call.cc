#include <stdexcept>
#include <utility>

#include "step.h"

namespace torch_hybrid_backend {
namespace {

// What an engine gives as the address of its function: it is called with the engine's own context,
// the addresses of the arguments' elements in order, how many they are, and the caller's current
// stream (a CUstream; null on the host). It returns 0, or the status of what failed, and throws
// nothing. It may return before its work on the stream has ended.
using ExternalFunction = int32_t (*)(void* context, void* const* arguments, int32_t count,
                                     void* stream);

class ExternalCall final : public Step {
 public:
  ExternalCall(ExternalFunction function, void* engine, std::string title,
               std::vector<size_t> values, PlanParts& plan)
      : function_(function),
        engine_(engine),
        title_(std::move(title)),
        values_(std::move(values)),
        first_(plan.parameters),
        on_host_(plan.device.is_host),
        stream_(on_host_ ? 0 : plan.StreamOf(plan.device)) {
    plan.parameters += values_.size();
  }

  std::vector<size_t> Touched() const override { return values_; }

  void Prepare(Frame& frame) const override {
    frame.parameters.resize(frame.parameters.size() + values_.size());
  }

  bool Run(const RunContext& context) const override {
    Frame& frame = context.frame;
    void** const arguments = frame.parameters.data() + first_;
    for (size_t i = 0; i < values_.size(); ++i) arguments[i] = frame.views[values_[i]].data;
    void* const stream = on_host_ ? nullptr : frame.streams[stream_].second;
    const int32_t status =
        function_(engine_, arguments, static_cast<int32_t>(values_.size()), stream);
    if (status != 0) {
      throw std::runtime_error("the external call " + title_ + " failed with status " +
                               std::to_string(status));
    }
    return true;
  }

  std::string Title() const override { return title_; }

 private:
  const ExternalFunction function_;
  void* const engine_;
  const std::string title_;
  const std::vector<size_t> values_;
  const size_t first_;  // of its entries in the frame's parameters
  const bool on_host_;
  const size_t stream_;
};

}  // namespace

// {"function", "context": addresses, "title", "arguments": values}
std::unique_ptr<Step> MakeExternalCall(const Json& description, PlanParts& plan) {
  std::vector<size_t> values =
      plan.Addressed(description["arguments"].AsInts(), "an external call");
  const auto function = reinterpret_cast<ExternalFunction>(description["function"].AsInt());
  if (function == nullptr) throw std::runtime_error("an external call has no function");
  return std::make_unique<ExternalCall>(function,
                                        reinterpret_cast<void*>(description["context"].AsInt()),
                                        description["title"].AsString(), std::move(values), plan);
}

}  // namespace torch_hybrid_backend
