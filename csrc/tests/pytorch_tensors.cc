#include "pytorch_tensors.h"

#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/stableivalue_conversions.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

#include "check.h"

namespace {

using torch::headeronly::ScalarType;

struct FakeTensor {
  std::shared_ptr<char> memory;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  int32_t dtype;
  int32_t device_type;
  int32_t device_index;
};

FakeTensor* Of(AtenTensorHandle handle) { return reinterpret_cast<FakeTensor*>(handle); }

AtenTensorHandle New(FakeTensor tensor) {
  return reinterpret_cast<AtenTensorHandle>(new FakeTensor(std::move(tensor)));
}

size_t ElementSize(int32_t dtype) {
  return dtype == static_cast<int32_t>(ScalarType::Byte) ? 1 : 4;
}

size_t SizeBytes(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
                 int32_t dtype) {
  int64_t span = 1;
  for (size_t d = 0; d < sizes.size(); ++d) span += (sizes[d] - 1) * strides[d];
  return span * ElementSize(dtype);
}

using StableList = std::vector<StableIValue>;
StableList* Of(StableListHandle handle) { return reinterpret_cast<StableList*>(handle); }
std::string* Of(StringHandle handle) { return reinterpret_cast<std::string*>(handle); }

}  // namespace

torch::stable::Tensor Floats(const std::vector<int64_t>& sizes, const std::vector<float>& values,
                             int32_t device_type, int32_t device_index) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0; stride *= sizes[d]) strides[d] = stride;
  AtenTensorHandle handle = nullptr;
  aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                           aoti_torch_dtype_float32(), device_type, device_index, &handle);
  std::copy(values.begin(), values.end(), reinterpret_cast<float*>(Of(handle)->memory.get()));
  return torch::stable::Tensor(handle);
}

torch::stable::Tensor ViewOf(const torch::stable::Tensor& tensor, int64_t first, int64_t count) {
  FakeTensor view = *Of(tensor.get());
  view.memory = std::shared_ptr<char>(view.memory, view.memory.get() + 4 * first);
  view.sizes = {count};
  view.strides = {1};
  return torch::stable::Tensor(New(std::move(view)));
}

std::vector<float> Read(const torch::stable::Tensor& tensor) {
  const FakeTensor& fake = *Of(tensor.get());
  std::vector<float> values(SizeBytes(fake.sizes, fake.strides, fake.dtype) / 4);
  std::memcpy(values.data(), fake.memory.get(), 4 * values.size());
  return values;
}

extern "C" {

int32_t aoti_torch_device_type_cpu() { return kCpu; }
int32_t aoti_torch_device_type_cuda() { return kCuda; }
int32_t aoti_torch_dtype_float32() { return static_cast<int32_t>(ScalarType::Float); }
int32_t aoti_torch_layout_strided() { return 0; }
uint64_t aoti_torch_abi_version() { return TORCH_ABI_VERSION; }

// Other numbers that the headers' switches name: told apart, and nothing else.
#define NUMBER(name, number) \
  int32_t name() { return number; }
NUMBER(aoti_torch_device_type_meta, 100)
NUMBER(aoti_torch_device_type_xpu, 101)
NUMBER(aoti_torch_device_type_mps, 102)
NUMBER(aoti_torch_device_type_privateuse1, 103)
NUMBER(aoti_torch_dtype_uint8, static_cast<int32_t>(ScalarType::Byte))
NUMBER(aoti_torch_dtype_int8, static_cast<int32_t>(ScalarType::Char))
NUMBER(aoti_torch_dtype_int16, static_cast<int32_t>(ScalarType::Short))
NUMBER(aoti_torch_dtype_int32, static_cast<int32_t>(ScalarType::Int))
NUMBER(aoti_torch_dtype_int64, static_cast<int32_t>(ScalarType::Long))
NUMBER(aoti_torch_dtype_float16, static_cast<int32_t>(ScalarType::Half))
NUMBER(aoti_torch_dtype_float64, static_cast<int32_t>(ScalarType::Double))
NUMBER(aoti_torch_dtype_complex32, static_cast<int32_t>(ScalarType::ComplexHalf))
NUMBER(aoti_torch_dtype_complex64, static_cast<int32_t>(ScalarType::ComplexFloat))
NUMBER(aoti_torch_dtype_complex128, static_cast<int32_t>(ScalarType::ComplexDouble))
NUMBER(aoti_torch_dtype_bool, static_cast<int32_t>(ScalarType::Bool))
NUMBER(aoti_torch_dtype_bfloat16, static_cast<int32_t>(ScalarType::BFloat16))
NUMBER(aoti_torch_dtype_float8_e5m2, static_cast<int32_t>(ScalarType::Float8_e5m2))
NUMBER(aoti_torch_dtype_float8_e4m3fn, static_cast<int32_t>(ScalarType::Float8_e4m3fn))
NUMBER(aoti_torch_dtype_float8_e5m2fnuz, static_cast<int32_t>(ScalarType::Float8_e5m2fnuz))
NUMBER(aoti_torch_dtype_float8_e4m3fnuz, static_cast<int32_t>(ScalarType::Float8_e4m3fnuz))
NUMBER(aoti_torch_dtype_uint16, static_cast<int32_t>(ScalarType::UInt16))
NUMBER(aoti_torch_dtype_uint32, static_cast<int32_t>(ScalarType::UInt32))
NUMBER(aoti_torch_dtype_uint64, static_cast<int32_t>(ScalarType::UInt64))
NUMBER(torch_dtype_float8_e8m0fnu, static_cast<int32_t>(ScalarType::Float8_e8m0fnu))
NUMBER(torch_dtype_float4_e2m1fn_x2, static_cast<int32_t>(ScalarType::Float4_e2m1fn_x2))
NUMBER(aoti_torch_layout_sparse_coo, 1)
NUMBER(aoti_torch_layout_sparse_csr, 2)
NUMBER(aoti_torch_layout_sparse_csc, 3)
NUMBER(aoti_torch_layout_sparse_bsr, 4)
NUMBER(aoti_torch_layout_sparse_bsc, 5)
NUMBER(aoti_torch_layout__mkldnn, 6)
NUMBER(aoti_torch_layout_jagged, 7)
NUMBER(aoti_torch_memory_format_contiguous_format, 20)
NUMBER(aoti_torch_memory_format_preserve_format, 21)
NUMBER(aoti_torch_memory_format_channels_last, 22)
NUMBER(aoti_torch_memory_format_channels_last_3d, 23)
#undef NUMBER

size_t aoti_torch_dtype_element_size(int32_t dtype) { return ElementSize(dtype); }

AOTITorchError torch_parse_device_string(const char* text, uint32_t* type, int32_t* index) {
  const std::string_view name(text);
  *type = name.starts_with("cuda") ? kCuda : name.starts_with("meta") ? 100 : kCpu;
  *index = name.find(':') == name.npos ? -1 : std::atoi(text + name.find(':') + 1);
  return name.starts_with("cpu") || *type != kCpu ? AOTI_TORCH_SUCCESS : AOTI_TORCH_FAILURE;
}

// Declared in builds with CUDA only; found by its name.
__attribute__((visibility("default"))) AOTITorchError
aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = current_stream;
  return AOTI_TORCH_SUCCESS;
}

// As PyTorch's allocator of a GPU, which keeps freed memory: work that is enqueued on its stream
// may still use it.
static void KeepMapped(char* memory) {
  static std::mutex mutex;
  static auto& freed = *new std::vector<char*>;
  const std::lock_guard<std::mutex> lock(mutex);
  freed.push_back(memory);
}

AOTITorchError aoti_torch_empty_strided(int64_t dims, const int64_t* sizes, const int64_t* strides,
                                        int32_t dtype, int32_t device_type, int32_t device_index,
                                        AtenTensorHandle* out) {
  FakeTensor tensor{nullptr, {sizes, sizes + dims}, {strides, strides + dims},
                    dtype,   device_type,           device_index};
  const size_t size_bytes = SizeBytes(tensor.sizes, tensor.strides, dtype);
  // As PyTorch's allocators: 512 bytes on a GPU, 64 on the host.
  const size_t alignment = device_type == kCpu ? 64 : 512;
  void* memory = std::aligned_alloc(alignment, (size_bytes / alignment + 1) * alignment);
  tensor.memory = std::shared_ptr<char>(
      static_cast<char*>(memory), device_type == kCpu ? [](char* p) { std::free(p); } : KeepMapped);
  *out = New(std::move(tensor));
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError torch_from_blob(void* data, int64_t dims, const int64_t* sizes,
                               const int64_t* strides, int64_t, int32_t dtype, int32_t device_type,
                               int32_t device_index, AtenTensorHandle* out, int32_t, const uint8_t*,
                               int64_t, void (*deleter)(void*, void*), void* context) {
  const auto free = [deleter, context](char* p) { deleter(p, context); };
  *out = New({std::shared_ptr<char>(static_cast<char*>(data), free),
              {sizes, sizes + dims},
              {strides, strides + dims},
              dtype,
              device_type,
              device_index});
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_create_tensor_from_blob(void* data, int64_t dims, const int64_t* sizes,
                                                  const int64_t* strides, int64_t, int32_t dtype,
                                                  int32_t device_type, int32_t device_index,
                                                  AtenTensorHandle* out) {
  *out = New({std::shared_ptr<char>(static_cast<char*>(data), [](char*) {}),
              {sizes, sizes + dims},
              {strides, strides + dims},
              dtype,
              device_type,
              device_index});
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch__reinterpret_tensor(AtenTensorHandle self, int64_t dims,
                                              const int64_t* sizes, const int64_t* strides,
                                              int64_t offset, AtenTensorHandle* out) {
  FakeTensor tensor = *Of(self);
  const auto whole = tensor.memory;
  tensor.memory = std::shared_ptr<char>(
      whole, whole.get() + offset * static_cast<int64_t>(ElementSize(tensor.dtype)));
  tensor.sizes.assign(sizes, sizes + dims);
  tensor.strides.assign(strides, strides + dims);
  *out = New(std::move(tensor));
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_new_tensor_handle(AtenTensorHandle self, AtenTensorHandle* out) {
  *out = New(*Of(self));
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle self) {
  delete Of(self);
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_new_uninitialized_tensor(AtenTensorHandle* out) {
  *out = New({});
  return AOTI_TORCH_SUCCESS;
}

// Of float32 tensors of two dimensions or fewer.
AOTITorchError aoti_torch_copy_(AtenTensorHandle self, AtenTensorHandle source, int32_t) {
  const FakeTensor& from = *Of(source);
  FakeTensor& to = *Of(self);
  const size_t dims = from.sizes.size();
  const int64_t rows = dims > 1 ? from.sizes[0] : 1;
  const int64_t columns = dims > 0 ? from.sizes[dims - 1] : 1;
  const auto at = [&](const FakeTensor& t, int64_t i, int64_t j) {
    const int64_t offset =
        (dims > 1 ? i * t.strides[0] : 0) + (dims > 0 ? j * t.strides[dims - 1] : 0);
    return reinterpret_cast<float*>(t.memory.get()) + offset;
  };
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) *at(to, i, j) = *at(from, i, j);
  }
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_get_data_ptr(AtenTensorHandle self, void** out) {
  *out = Of(self)->memory.get();
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError torch_get_mutable_data_ptr(AtenTensorHandle self, void** out) {
  return aoti_torch_get_data_ptr(self, out);
}

AOTITorchError torch_get_const_data_ptr(AtenTensorHandle self, const void** out) {
  *out = Of(self)->memory.get();
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_get_dim(AtenTensorHandle self, int64_t* out) {
  *out = static_cast<int64_t>(Of(self)->sizes.size());
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_get_numel(AtenTensorHandle self, int64_t* out) {
  *out = 1;
  for (const int64_t size : Of(self)->sizes) *out *= size;
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_get_sizes(AtenTensorHandle self, int64_t** out) {
  *out = Of(self)->sizes.data();
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_get_strides(AtenTensorHandle self, int64_t** out) {
  *out = Of(self)->strides.data();
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_get_dtype(AtenTensorHandle self, int32_t* out) {
  *out = Of(self)->dtype;
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_get_device_type(AtenTensorHandle self, int32_t* out) {
  *out = Of(self)->device_type;
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_get_device_index(AtenTensorHandle self, int32_t* out) {
  *out = Of(self)->device_index;
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_get_layout(AtenTensorHandle, int32_t* out) {
  *out = aoti_torch_layout_strided();
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_record_function_start(const char*, IValueMapHandle, const C10IValueHandle*,
                                          uint64_t, AtenRecordFunctionHandle*) {
  return AOTI_TORCH_FAILURE;  // no profiler is on
}

AOTITorchError aoti_record_function_end(AtenRecordFunctionHandle) { return AOTI_TORCH_SUCCESS; }

AOTITorchError torch_new_list_reserve_size(size_t, StableListHandle* out) {
  *out = reinterpret_cast<StableListHandle>(new StableList);
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError torch_list_push_back(StableListHandle list, StableIValue item) {
  Of(list)->push_back(item);
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError torch_list_size(StableListHandle list, size_t* out) {
  *out = Of(list)->size();
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError torch_list_get_item(StableListHandle list, size_t index, StableIValue* out) {
  *out = Of(list)->at(index);
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError torch_delete_list(StableListHandle list) {
  delete Of(list);
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError torch_new_string_handle(const char* data, size_t length, StringHandle* out) {
  *out = reinterpret_cast<StringHandle>(new std::string(data, length));
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError torch_string_length(StringHandle text, size_t* out) {
  *out = Of(text)->size();
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError torch_string_c_str(StringHandle text, const char** out) {
  *out = Of(text)->c_str();
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError torch_delete_string(StringHandle text) {
  delete Of(text);
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError torch_call_dispatcher(const char* name, const char* overload, StableIValue* stack,
                                     uint64_t) {
  const auto found = operators.find(std::string(name) + "." + overload);
  if (found == operators.end()) return AOTI_TORCH_FAILURE;
  found->second(stack);
  return AOTI_TORCH_SUCCESS;
}
}
