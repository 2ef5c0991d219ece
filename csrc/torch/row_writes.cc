#include "row_writes.h"

#include <cstddef>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace torch_hybrid_backend {
namespace {

// A dimension of both sides of a copy; strides in bytes.
struct Dim {
  int64_t size;
  int64_t to;
  int64_t from;
};

void CopyFrom(std::span<const Dim> dims, std::byte* to, const std::byte* from, size_t bytes) {
  if (dims.empty()) {
    std::memmove(to, from, bytes);
    return;
  }
  const Dim& outer = dims.front();
  for (int64_t i = 0; i < outer.size; ++i)
    CopyFrom(dims.subspan(1), to + i * outer.to, from + i * outer.from, bytes);
}

// A write as addresses: `dims` of a slice, the innermost `bytes` in one piece.
struct Slices {
  std::byte* to;
  const std::byte* from;
  std::vector<Dim> dims;
  size_t bytes;
  int64_t positions;  // of the target
  int64_t count;      // that are written
  int64_t to_stride, from_stride;
  const int64_t* index;
  int64_t index_stride;

  // From 0 on. Throws where the target has none of that number.
  int64_t Position(int64_t i) const {
    const int64_t position = index[i * index_stride];
    if (position < -positions || position >= positions) {
      throw std::out_of_range("index " + std::to_string(position) +
                              " is out of bounds for a dimension of size " +
                              std::to_string(positions));
    }
    return position < 0 ? position + positions : position;
  }
};

bool IsPlain(const Tensor& tensor) { return IsOnHost(tensor) && MemoryOf(tensor) != nullptr; }

// False where the tensors are of another form than a `RowWrite` has.
bool SlicesOf(const RowWrite& write, Slices& slices) {
  const auto& [target, dim, index, source] = write;
  const auto rank = static_cast<int64_t>(target.sizes().size());
  const int64_t missing = rank - static_cast<int64_t>(source.sizes().size());
  if (!IsPlain(target) || !IsPlain(index) || !IsPlain(source) || missing < 0 || dim < missing ||
      dim >= rank || DtypeOf(index) != Dtype::kInt64 || index.sizes().size() != 1 ||
      DtypeOf(target) != DtypeOf(source)) {
    return false;
  }
  const int64_t element = ElementBytes(DtypeOf(target));
  const auto to_stride = [&](int64_t d) { return target.strides()[d] * element; };
  const auto from_stride = [&](int64_t d) { return source.strides()[d - missing] * element; };
  slices = {static_cast<std::byte*>(MemoryOf(target)),
            static_cast<const std::byte*>(MemoryOf(source)),
            {},
            static_cast<size_t>(element),
            target.sizes()[dim],
            index.sizes()[0],
            to_stride(dim),
            from_stride(dim),
            static_cast<const int64_t*>(MemoryOf(index)),
            index.strides()[0]};
  if (source.sizes()[dim - missing] != slices.count) return false;
  bool is_whole = true;  // as long as what lies further in is one piece in both
  for (int64_t d = rank - 1; d >= 0; --d) {
    const int64_t size = target.sizes()[d];
    if (d < missing ? size != 1 : d != dim && source.sizes()[d - missing] != size) return false;
    if (d == dim || d < missing || size == 1) continue;
    const auto piece = static_cast<int64_t>(slices.bytes);
    is_whole &= to_stride(d) == piece && from_stride(d) == piece;
    if (is_whole) {
      slices.bytes *= static_cast<size_t>(size);
    } else {
      slices.dims.insert(slices.dims.begin(), {size, to_stride(d), from_stride(d)});
    }
  }
  return true;
}

}  // namespace

bool WriteRows(std::span<const RowWrite> writes) {
  std::vector<Slices> all(writes.size());
  for (size_t w = 0; w < writes.size(); ++w)
    if (!SlicesOf(writes[w], all[w])) return false;
  for (const Slices& slices : all)
    for (int64_t i = 0; i < slices.count; ++i) slices.Position(i);
  for (const Slices& slices : all) {
    for (int64_t i = 0; i < slices.count; ++i) {
      CopyFrom(slices.dims, slices.to + slices.Position(i) * slices.to_stride,
               slices.from + i * slices.from_stride, slices.bytes);
    }
  }
  return true;
}

}  // namespace torch_hybrid_backend
