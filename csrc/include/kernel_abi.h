// What a kernel of TVM's takes: the few C structs of its calling convention, as this library needs
// them, so that it is built without TVM's headers. (PyTorch's own ATen/dlpack.h is closed to
// libraries on the stable ABI.)
//
// Source: dlpack/dlpack.h of DLPack 1 and tvm/ffi/c_api.h of tvm_ffi 0.1, both fixed by their
// versions. csrc/tests/same_abi_as_tvm.cc compares them with the headers of an installed tvm_ffi.
#ifndef TORCH_HYBRID_BACKEND_KERNEL_ABI_H_
#define TORCH_HYBRID_BACKEND_KERNEL_ABI_H_

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace torch_hybrid_backend {

// DLPack: an element's type.
enum DLDataTypeCode : uint8_t {
  kDLInt = 0,
  kDLUInt = 1,
  kDLFloat = 2,
  kDLOpaqueHandle = 3,
  kDLBfloat = 4,
  kDLBool = 6,
};

struct DLDataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

constexpr int32_t kDLCPU = 1;

struct DLDevice {
  int32_t device_type;
  int32_t device_id;
};

// A tensor that somebody else owns. Null strides: row-major and compact.
struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

// tvm_ffi: one argument of a function, its type told by a number.
constexpr int32_t kTVMFFIInt = 1;
constexpr int32_t kTVMFFIDLTensorPtr = 7;

struct TVMFFIAny {
  int32_t type_index;
  uint32_t zero_padding;
  union {
    int64_t v_int64;
    void* v_ptr;
  };
};

// The same on every platform with pointers of 64 bits.
static_assert(sizeof(DLDataType) == 4 && offsetof(DLDataType, lanes) == 2);
static_assert(sizeof(DLDevice) == 8 && offsetof(DLDevice, device_id) == 4);
static_assert(sizeof(DLTensor) == 48 && offsetof(DLTensor, device) == 8 &&
              offsetof(DLTensor, ndim) == 16 && offsetof(DLTensor, dtype) == 20 &&
              offsetof(DLTensor, shape) == 24 && offsetof(DLTensor, strides) == 32 &&
              offsetof(DLTensor, byte_offset) == 40);
static_assert(sizeof(TVMFFIAny) == 16 && offsetof(TVMFFIAny, zero_padding) == 4 &&
              offsetof(TVMFFIAny, v_int64) == 8 && offsetof(TVMFFIAny, v_ptr) == 8);

// The calling convention of TVM's exported functions: 0, or the status of what failed. Kernels
// check nothing but that they get the scratch memory they ask for.
using KernelFunction = int (*)(void* self, const TVMFFIAny* arguments, int32_t count,
                               TVMFFIAny* result);

// What a library's symbol for a kernel begins with.
inline constexpr std::string_view kSymbolPrefix = "__tvm_ffi_";

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_KERNEL_ABI_H_
