// The header of a shared library (ELF): which processor its code is for.
//
// Use: CheckIsForThisProcess before a library is given to the loader, whatever its file says of it.
//
// Failure: std::runtime_error with the library's processor and this process's.
#ifndef TORCH_HYBRID_BACKEND_ELF_HEADER_H_
#define TORCH_HYBRID_BACKEND_ELF_HEADER_H_

#include <cstdint>
#include <span>

namespace torch_hybrid_backend {

// Throws where the library's word size, byte order or processor is another than this process's.
void CheckIsForThisProcess(std::span<const uint8_t> library);

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_ELF_HEADER_H_
