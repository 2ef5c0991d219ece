#include "host_kernel.h"

#include <stdexcept>
#include <utility>

namespace torch_hybrid_backend {

HostKernel::HostKernel(LoadedKernel kernel, std::string symbol, std::vector<size_t> values,
                       std::vector<int64_t> sizes, PlanParts& plan)
    : function_(kernel.function),
      library_(std::move(kernel.library)),
      symbol_(std::move(symbol)),
      first_argument_(plan.arguments),
      values_(std::move(values)),
      sizes_(std::move(sizes)) {
  plan.arguments += arguments();
}

void HostKernel::Prepare(Frame& frame) const {
  for (const size_t value : values_) {
    TVMFFIAny argument{};
    argument.type_index = kTVMFFIDLTensorPtr;
    argument.v_ptr = &frame.views[value];
    frame.arguments.push_back(argument);
  }
  for (const int64_t size : sizes_) {
    TVMFFIAny argument{};
    argument.type_index = kTVMFFIInt;
    argument.v_int64 = size;
    frame.arguments.push_back(argument);
  }
}

void HostKernel::Fail(int status) const {
  throw std::runtime_error(
      "the kernel " + symbol_ + " failed with status " + std::to_string(status) +
      ": kernels fail only where there is too little memory for their scratch space");
}

// {"library", "symbol", "arguments": values, "sizes": further arguments, after the values}
std::unique_ptr<Step> MakeHostKernel(const Json& description, PlanParts& plan) {
  std::vector<size_t> values = plan.Addressed(description["arguments"].AsInts(), "a kernel");
  const std::string& symbol = description["symbol"].AsString();
  LoadedKernel kernel = FindKernel(plan.library_path(description["library"].AsString()), symbol);
  return std::make_unique<HostKernel>(std::move(kernel), symbol, std::move(values),
                                      description["sizes"].AsInts(), plan);
}

}  // namespace torch_hybrid_backend
