// Compiled beside the headers of an installed tvm_ffi (tests/runtime/test_csrc.py): it does not
// compile where include/kernel_abi.h says anything else than they do.
#include <dlpack/dlpack.h>
#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/module.h>

#include "kernel_abi.h"

namespace ours = torch_hybrid_backend;

#define SAME_SIZE(type) static_assert(sizeof(ours::type) == sizeof(::type))
#define SAME_FIELD(type, field)                                           \
  static_assert(offsetof(ours::type, field) == offsetof(::type, field) && \
                sizeof(ours::type::field) == sizeof(::type::field))
#define SAME_NUMBER(name) static_assert(static_cast<int>(ours::name) == static_cast<int>(::name))

SAME_SIZE(DLDataType);
SAME_FIELD(DLDataType, code);
SAME_FIELD(DLDataType, bits);
SAME_FIELD(DLDataType, lanes);

SAME_SIZE(DLDevice);
SAME_FIELD(DLDevice, device_type);
SAME_FIELD(DLDevice, device_id);

SAME_SIZE(DLTensor);
SAME_FIELD(DLTensor, data);
SAME_FIELD(DLTensor, device);
SAME_FIELD(DLTensor, ndim);
SAME_FIELD(DLTensor, dtype);
SAME_FIELD(DLTensor, shape);
SAME_FIELD(DLTensor, strides);
SAME_FIELD(DLTensor, byte_offset);

SAME_SIZE(TVMFFIAny);
SAME_FIELD(TVMFFIAny, type_index);
SAME_FIELD(TVMFFIAny, zero_padding);
SAME_FIELD(TVMFFIAny, v_int64);
SAME_FIELD(TVMFFIAny, v_ptr);

SAME_NUMBER(kDLCPU);
SAME_NUMBER(kDLInt);
SAME_NUMBER(kDLUInt);
SAME_NUMBER(kDLFloat);
SAME_NUMBER(kDLOpaqueHandle);
SAME_NUMBER(kDLBfloat);
SAME_NUMBER(kDLBool);
SAME_NUMBER(kTVMFFIInt);
SAME_NUMBER(kTVMFFIDLTensorPtr);

static_assert(ours::kSymbolPrefix == tvm::ffi::symbol::tvm_ffi_symbol_prefix);

// TVM declares the functions that it calls, and so those that it exports, with this type.
static_assert(sizeof(ours::KernelFunction) == sizeof(TVMFFISafeCallType));
