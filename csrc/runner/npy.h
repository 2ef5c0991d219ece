// NumPy's files of one array (.npy), for hybrid-run.
//
// Source: NumPy's documentation, numpy.lib.format, versions 1 to 3.
//
// Failure: throws std::runtime_error that begins with the file's path.
#ifndef TORCH_HYBRID_BACKEND_NPY_H_
#define TORCH_HYBRID_BACKEND_NPY_H_

#include <cstdint>
#include <string>
#include <vector>

#include "hybrid_runner.h"

namespace torch_hybrid_backend {

struct Array {
  std::vector<char> bytes;
  DLDataType dtype;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;  // in elements
};

// Reads an array for an input of `wanted`. NumPy has no bfloat16 and no float8: their bits are read
// from unsigned integers of the same width.
Array ReadNpy(const std::string& path, DLDataType wanted);

// Writes a tensor. Elements of a dtype that NumPy has not become unsigned integers of the same
// width.
void WriteNpy(const std::string& path, const DLTensor& tensor);

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_NPY_H_
