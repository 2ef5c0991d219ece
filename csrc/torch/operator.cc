#include "operator.h"

#include <dlfcn.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/stableivalue_conversions.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "dtype.h"

namespace torch_hybrid_backend {
namespace {

using torch::headeronly::Layout;
using torch::headeronly::MemoryFormat;
using torch::headeronly::ScalarType;
using torch::stable::detail::from;
using torch::stable::detail::to;

// An argument as the dispatcher's C interface takes it, by the type that the operator's schema
// gives it: None, whole numbers, booleans and so on; Some is a value of an optional type.
struct Argument;
struct None {};
struct TensorOf {
  size_t number;  // among the tensors of a call
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
// what it is. `tensors`: how many came before.
Argument ReadArgument(const Json& description, size_t& tensors) {
  const std::vector<Json>& words = description.AsList();
  const std::string& kind = words.at(0).AsString();
  if (kind == "none") return {None{}};
  const Json& word = words.at(1);
  if (kind == "tensor") return {TensorOf{tensors++}};
  if (kind == "int") return {word.AsInt()};
  if (kind == "float") return {word.AsDouble()};
  if (kind == "bool") return {word.AsBool()};
  if (kind == "str") return {word.AsString()};
  if (kind == "dtype") return {static_cast<ScalarType>(DtypeNamed(word.AsString()))};
  if (kind == "layout") return {Named(kLayouts, word.AsString())};
  if (kind == "memory_format") return {Named(kMemoryFormats, word.AsString())};
  if (kind == "device") return {DeviceArgument{Device::Named(word.AsString())}};
  if (kind == "some") return {Some{{ReadArgument(word, tensors)}}};
  if (kind == "list") {
    List list;
    for (const Json& item : word.AsList()) list.items.push_back(ReadArgument(item, tensors));
    return {std::move(list)};
  }
  throw std::runtime_error("operators take no argument of the kind \"" + kind + "\"");
}

// The tensors of a call.
using Given = std::vector<const Tensor*>;

// A call by one of AOTInductor's C functions: for what the dispatcher's C interface cannot pass
// (Scalars), or returns wrongly (tensors among numbers). Gives the results of the schema that are
// tensors, and an undefined one for each that is a number.
class Shim {
 public:
  using Tensors = Operator::Tensors;
  using Call = Tensors (*)(void* function, const std::vector<Argument>& arguments,
                           const Given& given);

  // The one of that operator on the device; none (false) for an operator that needs none. Throws
  // where this torch does not have it.
  static Shim Find(const std::string& name, const Device& device);

  explicit operator bool() const { return call_ != nullptr; }
  Tensors Run(const std::vector<Argument>& arguments, const Given& given) const {
    return call_(function_, arguments, given);
  }

 private:
  void* function_ = nullptr;
  Call call_ = nullptr;
};

AtenTensorHandle HandleOf(const Argument& argument, const Given& given) {
  return given[std::get<TensorOf>(argument.value).number]->get();
}

const Argument* Optional(const Argument& argument) {
  const auto* some = std::get_if<Some>(&argument.value);
  return some == nullptr ? nullptr : some->value.data();
}

// (self, mat1, mat2, beta, alpha, use_gelu) -> result
Shim::Tensors AddmmActivation(void* function, const std::vector<Argument>& arguments,
                              const Given& given) {
  using Function = AOTITorchError (*)(AtenTensorHandle, AtenTensorHandle, AtenTensorHandle, double,
                                      double, int32_t, AtenTensorHandle*);
  AtenTensorHandle result = nullptr;
  TORCH_ERROR_CODE_CHECK(reinterpret_cast<Function>(function)(
      HandleOf(arguments.at(0), given), HandleOf(arguments.at(1), given),
      HandleOf(arguments.at(2), given), std::get<double>(arguments.at(3).value),
      std::get<double>(arguments.at(4).value), std::get<bool>(arguments.at(5).value), &result));
  return {Tensor(result)};
}

// (query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal, return_debug_mask,
// scale) -> (output, log_sumexp, 2 tensors, 2 numbers, 3 tensors)
Shim::Tensors CudnnAttention(void* function, const std::vector<Argument>& arguments,
                             const Given& given) {
  using Function =
      AOTITorchError (*)(AtenTensorHandle, AtenTensorHandle, AtenTensorHandle, AtenTensorHandle*,
                         int32_t, double, int32_t, int32_t, double*, AtenTensorHandle*,
                         AtenTensorHandle*, AtenTensorHandle*, AtenTensorHandle*, int64_t*,
                         int64_t*, AtenTensorHandle*, AtenTensorHandle*, AtenTensorHandle*);
  const Argument* const given_bias = Optional(arguments.at(3));
  AtenTensorHandle bias = given_bias == nullptr ? nullptr : HandleOf(*given_bias, given);
  const Argument* const given_scale = Optional(arguments.at(8));
  double scale = given_scale == nullptr ? 0 : std::get<double>(given_scale->value);
  AtenTensorHandle results[9] = {};
  int64_t numbers[2] = {};
  TORCH_ERROR_CODE_CHECK(reinterpret_cast<Function>(function)(
      HandleOf(arguments.at(0), given), HandleOf(arguments.at(1), given),
      HandleOf(arguments.at(2), given), given_bias == nullptr ? nullptr : &bias,
      std::get<bool>(arguments.at(4).value), std::get<double>(arguments.at(5).value),
      std::get<bool>(arguments.at(6).value), std::get<bool>(arguments.at(7).value),
      given_scale == nullptr ? nullptr : &scale, &results[0], &results[1], &results[2], &results[3],
      &numbers[0], &numbers[1], &results[6], &results[7], &results[8]));
  Shim::Tensors tensors;
  for (AtenTensorHandle result : results)
    tensors.push_back(result == nullptr ? Tensor() : Tensor(result));
  return tensors;
}

// As core/operator_schema.py has them (BY_C_FUNCTION).
constexpr std::pair<std::string_view, Shim::Call> kShims[] = {
    {"aten::_addmm_activation", &AddmmActivation},
    {"aten::_scaled_dot_product_cudnn_attention", &CudnnAttention}};

Shim Shim::Find(const std::string& name, const Device& device) {
  Shim shim;
  for (const auto& [known, call] : kShims) {
    if (known != name) continue;
    const std::string kind = device.IsCuda() ? "cuda" : "cpu";
    const std::string symbol = "aoti_torch_" + kind + "_" + name.substr(name.rfind(':') + 1);
    shim.function_ = dlsym(RTLD_DEFAULT, symbol.c_str());
    if (shim.function_ == nullptr) {
      // torch opens its libraries where RTLD_DEFAULT does not look.
      if (void* library = dlopen(("libtorch_" + kind + ".so").c_str(), RTLD_NOLOAD | RTLD_LAZY)) {
        shim.function_ = dlsym(library, symbol.c_str());
        dlclose(library);  // PyTorch keeps it
      }
    }
    if (shim.function_ == nullptr)
      throw std::runtime_error("this torch has no C function for " + name + " (" + symbol + ")");
    shim.call_ = call;
  }
  return shim;
}

// Through the dispatcher, as eager calls it: on PyTorch's threads or the caller's stream.
class DispatcherCall final : public Operator {
 public:
  DispatcherCall(std::string name, std::string overload, Shim shim, std::vector<Argument> arguments,
                 std::vector<bool> results)
      : name_(std::move(name)),
        overload_(std::move(overload)),
        shim_(shim),
        arguments_(std::move(arguments)),
        is_list_(std::move(results)) {}

  std::vector<Tensors> Call(const Given& given) const override {
    std::vector<Tensors> taken;
    taken.reserve(is_list_.size());
    if (shim_) {
      for (Tensor& tensor : shim_.Run(arguments_, given)) taken.push_back({std::move(tensor)});
      return taken;
    }
    std::vector<StableIValue> stack;
    stack.reserve(std::max(arguments_.size(), is_list_.size()));
    for (const Argument& argument : arguments_) stack.push_back(Stable(argument, given));
    stack.resize(std::max(arguments_.size(), is_list_.size()));
    TORCH_ERROR_CODE_CHECK(
        torch_call_dispatcher(name_.c_str(), overload_.c_str(), stack.data(), TORCH_ABI_VERSION));
    // All are taken: none may be left behind.
    for (size_t i = 0; i < is_list_.size(); ++i)
      taken.push_back(is_list_[i] ? to<Tensors>(stack[i]) : Tensors{to<Tensor>(stack[i])});
    return taken;
  }

 private:
  static StableIValue Stable(const Argument& argument, const Given& given) {
    return std::visit(
        [&](const auto& value) -> StableIValue {
          using T = std::decay_t<decltype(value)>;
          if constexpr (std::is_same_v<T, None>) {
            return from(std::nullopt);
          } else if constexpr (std::is_same_v<T, TensorOf>) {
            return from(*given[value.number]);
          } else if constexpr (std::is_same_v<T, DeviceArgument>) {
            // As the C interface packs it: its own type of devices knows only the commonest.
            return static_cast<uint64_t>(static_cast<uint32_t>(value.device.index)) |
                   static_cast<uint64_t>(static_cast<uint32_t>(value.device.type)) << 32;
          } else if constexpr (std::is_same_v<T, Some>) {
            return from(new StableIValue(Stable(value.value[0], given)));
          } else if constexpr (std::is_same_v<T, List>) {
            StableListHandle list = nullptr;
            TORCH_ERROR_CODE_CHECK(torch_new_list_reserve_size(value.items.size(), &list));
            for (const Argument& item : value.items)
              TORCH_ERROR_CODE_CHECK(torch_list_push_back(list, Stable(item, given)));
            return from(static_cast<void*>(list));
          } else {
            return from(value);
          }
        },
        argument.value);
  }

  const std::string name_;
  const std::string overload_;
  const Shim shim_;
  const std::vector<Argument> arguments_;
  const std::vector<bool> is_list_;  // for each result of the schema
};

}  // namespace

std::unique_ptr<Operator> MakeOperator(const Json& description, const Device& device) {
  size_t tensors = 0;
  std::vector<Argument> arguments;
  for (const Json& argument : description["arguments"].AsList())
    arguments.push_back(ReadArgument(argument, tensors));
  std::vector<bool> is_list;
  for (const Json& result : description["results"].AsList()) is_list.push_back(result.IsList());
  const std::string& name = description["name"].AsString();
  return std::make_unique<DispatcherCall>(name, description["overload"].AsString(),
                                          Shim::Find(name, device), std::move(arguments),
                                          std::move(is_list));
}

}  // namespace torch_hybrid_backend
