#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/stableivalue_conversions.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string_view>
#include <utility>
#include <variant>

#include "step.h"

namespace torch_hybrid_backend {
namespace {

using torch::headeronly::Layout;
using torch::headeronly::MemoryFormat;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using torch::stable::detail::from;
using torch::stable::detail::to;

// An argument as the dispatcher's C interface takes it, by the type that the operator's schema
// gives it: None, whole numbers, booleans and so on; Some is a value of an optional type.
struct Argument;
struct None {};
struct TensorOf {
  size_t value;
};
struct DeviceArgument {
  Device device;
};
struct Some {
  std::vector<Argument> value;  // one
};
struct List {
  std::vector<Argument> items;
};
struct Argument {
  std::variant<None, TensorOf, int64_t, double, bool, std::string, ScalarType, Layout, MemoryFormat,
               DeviceArgument, Some, List>
      value;
};

constexpr std::pair<std::string_view, Layout> kLayouts[] = {
    {"strided", Layout::Strided},      {"sparse_coo", Layout::Sparse},
    {"sparse_csr", Layout::SparseCsr}, {"sparse_csc", Layout::SparseCsc},
    {"sparse_bsr", Layout::SparseBsr}, {"sparse_bsc", Layout::SparseBsc},
    {"_mkldnn", Layout::Mkldnn},       {"jagged", Layout::Jagged}};

constexpr std::pair<std::string_view, MemoryFormat> kMemoryFormats[] = {
    {"contiguous_format", MemoryFormat::Contiguous},
    {"preserve_format", MemoryFormat::Preserve},
    {"channels_last", MemoryFormat::ChannelsLast},
    {"channels_last_3d", MemoryFormat::ChannelsLast3d}};

template <typename T, size_t N>
T Named(const std::pair<std::string_view, T> (&names)[N], const std::string& name) {
  for (const auto& [known, named] : names) {
    if (known == name) return named;
  }
  throw std::runtime_error("operators take no \"" + name + "\"");
}

// ["int", 5], ["tensor", value], ["some", argument], ["list", [arguments]], ["none"]: the kind, and
// what it is. `tensors` grows by the values it reads.
Argument ReadArgument(const Json& description, PlanParts& plan, std::vector<size_t>& tensors) {
  const std::vector<Json>& words = description.AsList();
  const std::string& kind = words.at(0).AsString();
  if (kind == "none") return {None{}};
  const Json& word = words.at(1);
  if (kind == "tensor") {
    tensors.push_back(plan.Tensor(word.AsInt(), "an operator reads", true));
    return {TensorOf{tensors.back()}};
  }
  if (kind == "int") return {word.AsInt()};
  if (kind == "float") return {word.AsDouble()};
  if (kind == "bool") return {word.AsBool()};
  if (kind == "str") return {word.AsString()};
  if (kind == "dtype") return {DtypeNamed(word.AsString())};
  if (kind == "layout") return {Named(kLayouts, word.AsString())};
  if (kind == "memory_format") return {Named(kMemoryFormats, word.AsString())};
  if (kind == "device") return {DeviceArgument{Device::Named(word.AsString())}};
  if (kind == "some") return {Some{{ReadArgument(word, plan, tensors)}}};
  if (kind == "list") {
    List list;
    for (const Json& item : word.AsList()) list.items.push_back(ReadArgument(item, plan, tensors));
    return {std::move(list)};
  }
  throw std::runtime_error("operators take no argument of the kind \"" + kind + "\"");
}

// How the results of the schema become values: one tensor each, or a list of them. A tensor that
// nobody reads, or that the operator leaves undefined, has no value.
struct Result {
  bool is_list;
  std::vector<std::optional<size_t>> values;
};

// An operator of PyTorch, called through the dispatcher as eager calls it: on PyTorch's threads or
// the caller's stream, its results new tensors.
class OperatorCall final : public Step {
 public:
  OperatorCall(std::string name, std::string overload, std::vector<Argument> arguments,
               std::vector<size_t> tensors, std::vector<Result> results)
      : name_(std::move(name)),
        overload_(std::move(overload)),
        arguments_(std::move(arguments)),
        results_(std::move(results)),
        touched_(std::move(tensors)) {
    for (const Result& result : results_) {
      for (const auto& value : result.values) {
        if (value) touched_.push_back(*value);
      }
    }
    const std::string shown = overload_.empty() ? name_ : name_ + "." + overload_;
    from_ =
        (results_.size() == 1 && !results_[0].is_list ? "the result of " : "a result of ") + shown;
  }

  std::vector<size_t> Touched() const override { return touched_; }

  bool Run(const RunContext& context) const override {
    std::vector<StableIValue> stack;
    stack.reserve(std::max(arguments_.size(), results_.size()));
    for (const Argument& argument : arguments_) stack.push_back(Stable(argument, context));
    stack.resize(std::max(arguments_.size(), results_.size()));
    TORCH_ERROR_CODE_CHECK(
        torch_call_dispatcher(name_.c_str(), overload_.c_str(), stack.data(), TORCH_ABI_VERSION));
    // All are taken before any is looked at: what is refused must not leave the others behind.
    std::vector<std::vector<Tensor>> taken;
    taken.reserve(results_.size());
    for (size_t i = 0; i < results_.size(); ++i) {
      taken.push_back(results_[i].is_list ? to<std::vector<Tensor>>(stack[i])
                                          : std::vector<Tensor>{to<Tensor>(stack[i])});
    }
    for (size_t i = 0; i < results_.size(); ++i) Receive(context, results_[i], taken[i]);
    return true;
  }

 private:
  static StableIValue Stable(const Argument& argument, const RunContext& context) {
    return std::visit(
        [&](const auto& value) -> StableIValue {
          using T = std::decay_t<decltype(value)>;
          if constexpr (std::is_same_v<T, None>) {
            return from(std::nullopt);
          } else if constexpr (std::is_same_v<T, TensorOf>) {
            return from(context.values.TensorOf(context.frame, value.value));
          } else if constexpr (std::is_same_v<T, DeviceArgument>) {
            // As the C interface packs it: its own type of devices knows only the commonest.
            return static_cast<uint64_t>(static_cast<uint32_t>(value.device.index)) |
                   static_cast<uint64_t>(static_cast<uint32_t>(value.device.type)) << 32;
          } else if constexpr (std::is_same_v<T, Some>) {
            return from(new StableIValue(Stable(value.value[0], context)));
          } else if constexpr (std::is_same_v<T, List>) {
            StableListHandle list = nullptr;
            TORCH_ERROR_CODE_CHECK(torch_new_list_reserve_size(value.items.size(), &list));
            for (const Argument& item : value.items)
              TORCH_ERROR_CODE_CHECK(torch_list_push_back(list, Stable(item, context)));
            return from(static_cast<void*>(list));
          } else {
            return from(value);
          }
        },
        argument.value);
  }

  void Receive(const RunContext& context, const Result& result,
               std::vector<Tensor>& tensors) const {
    if (tensors.size() != result.values.size()) {
      throw std::runtime_error(from_ + " has " + std::to_string(tensors.size()) +
                               " tensors instead of " + std::to_string(result.values.size()));
    }
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (result.values[i])
        context.values.Receive(context.frame, *result.values[i], std::move(tensors[i]), from_);
    }
  }

  const std::string name_;
  const std::string overload_;
  const std::vector<Argument> arguments_;
  const std::vector<Result> results_;
  std::vector<size_t> touched_;
  std::string from_;  // for errors
};

std::optional<size_t> ReadResult(const Json& value, PlanParts& plan) {
  if (value.IsNull()) return std::nullopt;
  return plan.Returned(value.AsInt(), "an operator");
}

}  // namespace

// {"name": "namespace::operator", "overload", "arguments": in the order of its schema (see
// ReadArgument), "results": for each result of the schema a value, null, or a list of these}
std::unique_ptr<Step> MakeOperatorCall(const Json& description, PlanParts& plan) {
  std::vector<size_t> tensors;
  std::vector<Argument> arguments;
  for (const Json& argument : description["arguments"].AsList())
    arguments.push_back(ReadArgument(argument, plan, tensors));
  std::vector<Result> results;
  for (const Json& result : description["results"].AsList()) {
    results.push_back({result.IsList(), {}});
    if (!result.IsList()) {
      results.back().values.push_back(ReadResult(result, plan));
      continue;
    }
    for (const Json& value : result.AsList())
      results.back().values.push_back(ReadResult(value, plan));
  }
  return std::make_unique<OperatorCall>(description["name"].AsString(),
                                        description["overload"].AsString(), std::move(arguments),
                                        std::move(tensors), std::move(results));
}

}  // namespace torch_hybrid_backend
