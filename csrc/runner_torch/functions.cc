// libhybrid_runner_torch.so: torch_functions.h, over operator.h with LibTorch's tensors.
#include <dlfcn.h>
#include <torch/csrc/stable/ops.h>

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "json.h"
#include "operator.h"
#include "torch_functions.h"
#include "value.h"

namespace torch_hybrid_backend {
namespace {

thread_local std::string last_error;

// 0, or 1 and an error where the function throws.
template <typename Function>
int32_t Status(const Function& function) {
  try {
    function();
    return 0;
  } catch (const std::exception& error) {
    last_error = error.what();
    return 1;
  }
}

// at::set_num_threads, which LibTorch's stable interface lacks. Null where this LibTorch has none
// of that name.
using SetThreads = void (*)(int threads);

SetThreads FindSetThreads() {
  // In the very library that the functions called here are in: it may not be a global one.
  Dl_info found;
  if (dladdr(reinterpret_cast<void*>(&torch_get_num_threads), &found) == 0) return nullptr;
  void* const library = dlopen(found.dli_fname, RTLD_NOLOAD | RTLD_LAZY);
  if (library == nullptr) return nullptr;
  auto* const function = reinterpret_cast<SetThreads>(dlsym(library, "_ZN2at15set_num_threadsEi"));
  dlclose(library);  // the process keeps it: this library is linked to it
  return function;
}

// Sets how many threads PyTorch's operators run on, in the calling thread, while it lives.
class ThreadsOfTorch {
 public:
  explicit ThreadsOfTorch(int threads)
      : before_(static_cast<int>(torch::stable::get_num_threads())) {
    if (threads != before_) Set(threads);
    is_set_ = threads != before_;
  }
  ThreadsOfTorch(const ThreadsOfTorch&) = delete;
  ThreadsOfTorch& operator=(const ThreadsOfTorch&) = delete;
  ~ThreadsOfTorch() {
    if (is_set_) Set(before_);
  }

 private:
  static void Set(int threads) {
    static const SetThreads set = FindSetThreads();
    if (set != nullptr) set(threads);
  }

  const int before_;
  bool is_set_ = false;
};

using Owner = std::unique_ptr<void, void (*)(void*)>;

Owner OwnerOf(const HandedTensor& tensor) {
  static constexpr auto kNothing = [](void*) {};
  return {tensor.owner, tensor.release == nullptr ? +kNothing : tensor.release};
}

Tensor FromHanded(const HandedTensor& given, Owner owner) {
  const std::vector<int64_t> sizes(given.sizes, given.sizes + given.dimensions);
  const std::vector<int64_t> strides(given.strides, given.strides + given.dimensions);
  if (!owner) {
    return Borrowed(given.data,
                    Layout{static_cast<Dtype>(given.dtype), sizes, strides, Device::Host()});
  }
  Tensor tensor = torch::stable::from_blob(
      given.data, sizes, strides, torch::stable::Device(torch::headeronly::DeviceType::CPU),
      static_cast<torch::headeronly::ScalarType>(given.dtype),
      [owner = owner.get(), release = given.release](void*) { release(owner); });
  owner.release();  // it is the tensor's
  return tensor;
}

void Hand(const Tensor& tensor, size_t result, TakeTensor take, void* context) {
  HandedTensor handed{};
  handed.dimensions = -1;
  if (tensor.get() == nullptr || !tensor.defined()) return take(context, result, &handed);
  handed.data = IsOnHost(tensor) ? MemoryOf(tensor) : nullptr;
  if (handed.data == nullptr && tensor.numel() > 0)
    throw std::runtime_error("it gives a tensor that is not one of strides on the CPU");
  handed.sizes = tensor.sizes().data();
  handed.strides = tensor.strides().data();
  handed.dimensions = static_cast<int32_t>(tensor.dim());
  handed.dtype = static_cast<int32_t>(DtypeOf(tensor));
  handed.owner = new Tensor(tensor);
  handed.release = [](void* owner) { delete static_cast<Tensor*>(owner); };
  take(context, result, &handed);
}

void* Make(const char* description, size_t length) {
  std::unique_ptr<Operator> made;
  Status([&] { made = MakeOperator(Json::Parse({description, length}), Device::Host()); });
  return made.release();
}

void Free(void* made) { delete static_cast<Operator*>(made); }

int32_t Call(const void* made, const HandedTensor* tensors, size_t count, int32_t threads,
             TakeTensor take, void* context) {
  return Status([&] {
    std::vector<Owner> owners;
    owners.reserve(count);
    for (size_t i = 0; i < count; ++i) owners.push_back(OwnerOf(tensors[i]));
    std::vector<Tensor> given;
    given.reserve(count);
    std::vector<const Tensor*> pointers;
    for (size_t i = 0; i < count; ++i) {
      given.push_back(FromHanded(tensors[i], std::move(owners[i])));
      pointers.push_back(&given.back());
    }
    const ThreadsOfTorch for_call(threads);
    const std::vector<Operator::Tensors> results =
        static_cast<const Operator*>(made)->Call(pointers);
    for (size_t i = 0; i < results.size(); ++i) {
      for (const Tensor& tensor : results[i]) Hand(tensor, i, take, context);
    }
  });
}

const char* Error() { return last_error.c_str(); }

}  // namespace
}  // namespace torch_hybrid_backend

extern "C" const torch_hybrid_backend::TorchFunctions* hybrid_torch_functions() {
  using namespace torch_hybrid_backend;
  static const TorchFunctions functions{
      TorchFunctions::kVersion, aoti_torch_abi_version(), &Make, &Free, &Call, &Error};
  return &functions;
}
