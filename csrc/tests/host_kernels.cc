// A kernel library as TVM exports one, for tests: y = 2 x and the like, and a kernel that fails.
#include "kernel_abi.h"

using namespace torch_hybrid_backend;

extern "C" int __tvm_ffi_double(void*, const TVMFFIAny* arguments, int32_t, TVMFFIAny*) {
  const auto* x = static_cast<const DLTensor*>(arguments[0].v_ptr);
  const auto* y = static_cast<const DLTensor*>(arguments[1].v_ptr);
  for (int64_t i = 0; i < x->shape[0]; ++i)
    static_cast<float*>(y->data)[i] = 2 * static_cast<const float*>(x->data)[i];
  return 0;
}

// y = x + size
extern "C" int __tvm_ffi_plus(void*, const TVMFFIAny* arguments, int32_t count, TVMFFIAny*) {
  if (count != 3 || arguments[2].type_index != kTVMFFIInt) return 1;
  const auto* x = static_cast<const DLTensor*>(arguments[0].v_ptr);
  const auto* y = static_cast<const DLTensor*>(arguments[1].v_ptr);
  for (int64_t i = 0; i < x->shape[0]; ++i) {
    static_cast<float*>(y->data)[i] =
        static_cast<const float*>(x->data)[i] + static_cast<float>(arguments[2].v_int64);
  }
  return 0;
}

extern "C" int __tvm_ffi_fail(void*, const TVMFFIAny*, int32_t, TVMFFIAny*) { return -3; }

// y = x[0] < size, one truth value
extern "C" int __tvm_ffi_below(void*, const TVMFFIAny* arguments, int32_t, TVMFFIAny*) {
  const auto* x = static_cast<const DLTensor*>(arguments[0].v_ptr);
  const auto* y = static_cast<const DLTensor*>(arguments[1].v_ptr);
  *static_cast<bool*>(y->data) =
      *static_cast<const float*>(x->data) < static_cast<float>(arguments[2].v_int64);
  return 0;
}
