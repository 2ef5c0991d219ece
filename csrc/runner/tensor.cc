#include "tensor.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <new>
#include <stdexcept>

#include "parallel.h"
#include "value.h"

namespace torch_hybrid_backend {
namespace {

// Two copies of 64 KiB take about as long as it takes to wake another thread.
constexpr int64_t kBytesPerTask = 65536;

// A dimension of a copy; strides in bytes.
struct Dim {
  int64_t size;
  int64_t from;
  int64_t to;
};

// The dimensions of a copy, the innermost one last, and as few as there can be. Empty where there
// is one element.
std::vector<Dim> DimsOf(const Tensor& source, const Tensor& destination, int64_t element) {
  std::vector<Dim> dims;
  for (size_t d = 0; d < source.sizes().size(); ++d) {
    if (source.sizes()[d] != 1) {
      dims.push_back(
          {source.sizes()[d], source.strides()[d] * element, destination.strides()[d] * element});
    }
  }
  std::stable_sort(dims.begin(), dims.end(),
                   [](const Dim& a, const Dim& b) { return std::abs(a.to) > std::abs(b.to); });
  std::vector<Dim> joined;
  for (const Dim& dim : dims) {
    if (!joined.empty() && joined.back().from == dim.from * dim.size &&
        joined.back().to == dim.to * dim.size) {
      joined.back() = {joined.back().size * dim.size, dim.from, dim.to};
    } else {
      joined.push_back(dim);
    }
  }
  // Rows of a few elements cost more than longer ones that are not in order (an image's channels).
  const size_t count = joined.size();
  if (count > 1 && joined[count - 1].size < 16 && joined[count - 2].size > joined[count - 1].size)
    std::swap(joined[count - 1], joined[count - 2]);
  return joined;
}

template <size_t kBytes>
void CopyRow(const std::byte* from, std::byte* to, const Dim& dim) {
  for (int64_t i = 0; i < dim.size; ++i, from += dim.from, to += dim.to)
    std::memcpy(to, from, kBytes);
}

void CopyRow(const std::byte* from, std::byte* to, const Dim& dim, int64_t element) {
  if (dim.from == element && dim.to == element) {
    std::memcpy(to, from, static_cast<size_t>(dim.size * element));
    return;
  }
  switch (element) {
    case 1:
      return CopyRow<1>(from, to, dim);
    case 2:
      return CopyRow<2>(from, to, dim);
    case 4:
      return CopyRow<4>(from, to, dim);
    case 8:
      return CopyRow<8>(from, to, dim);
    default:
      return CopyRow<16>(from, to, dim);
  }
}

// Rows `first` to `last` of all, counted over the dimensions but the innermost one.
void CopyRows(const std::byte* from, std::byte* to, const std::vector<Dim>& dims, int64_t first,
              int64_t last, int64_t element) {
  const size_t outer = dims.size() - 1;
  std::vector<int64_t> at(outer);
  for (int64_t rest = first, d = static_cast<int64_t>(outer) - 1; d >= 0; --d) {
    at[d] = rest % dims[d].size;
    rest /= dims[d].size;
    from += at[d] * dims[d].from;
    to += at[d] * dims[d].to;
  }
  for (int64_t row = first; row < last; ++row) {
    CopyRow(from, to, dims.back(), element);
    for (size_t d = outer; d-- > 0;) {
      from += dims[d].from;
      to += dims[d].to;
      if (++at[d] < dims[d].size) break;
      from -= dims[d].size * dims[d].from;
      to -= dims[d].size * dims[d].to;
      at[d] = 0;
    }
  }
}

std::shared_ptr<AlignedBlock> NewBlock(size_t size_bytes) {
  try {
    return std::make_shared<AlignedBlock>(size_bytes);
  } catch (const std::bad_alloc&) {
    if (!KeptBlocks::FreeIdle()) throw;
  }
  return std::make_shared<AlignedBlock>(size_bytes);
}

}  // namespace

Tensor Empty(const Layout& layout) {
  try {
    std::shared_ptr<AlignedBlock> block =
        NewBlock(static_cast<size_t>(layout.Span() * ElementBytes(layout.dtype)));
    void* const data = block->data();
    return Tensor(std::move(block), data, layout.dtype, layout.sizes, layout.strides);
  } catch (const std::bad_alloc&) {
    throw std::runtime_error("could not allocate a tensor of " + layout.ToString() + " on " +
                             layout.device.ToString());
  }
}

Tensor Over(AlignedBlock block, const Layout& layout, const std::shared_ptr<KeptBlocks>& kept) {
  void* const data = block.data();
  // Shared: a deleter must be copyable, a block is not.
  auto owned = std::make_shared<AlignedBlock>(std::move(block));
  std::shared_ptr<void> owner(data, [owned = std::move(owned), kept = std::weak_ptr(kept)](void*) {
    if (const auto alive = kept.lock()) alive->GiveBack(std::move(*owned));
  });
  return Tensor(std::move(owner), data, layout.dtype, layout.sizes, layout.strides);
}

void CopyElements(const Tensor& source, const Tensor& destination) {
  const int64_t element = ElementBytes(source.dtype());
  const auto* from = static_cast<const std::byte*>(source.data_ptr());
  auto* to = static_cast<std::byte*>(destination.data_ptr());
  const std::vector<int64_t>& sizes = source.sizes();
  if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) return;
  std::vector<Dim> dims = DimsOf(source, destination, element);
  if (dims.empty()) dims.push_back({1, element, element});
  int64_t rows = 1;
  for (size_t d = 0; d + 1 < dims.size(); ++d) rows *= dims[d].size;
  const int64_t rows_per_task = std::max<int64_t>(kBytesPerTask / (dims.back().size * element), 1);
  ParallelFor(0, rows, rows_per_task,
              [&](int64_t first, int64_t last) { CopyRows(from, to, dims, first, last, element); });
}

Tensor Restride(const Tensor& tensor, const Layout& expected) {
  Tensor copy = Empty(expected);
  CopyElements(tensor, copy);
  return copy;
}

Tensor Reinterpret(const Tensor& tensor, const Layout& layout, int64_t offset) {
  auto* const data =
      static_cast<std::byte*>(tensor.data_ptr()) + offset * ElementBytes(tensor.dtype());
  return Tensor(tensor.owner(), data, layout.dtype, layout.sizes, layout.strides);
}

Tensor Borrowed(void* data, const Layout& layout) {
  return Tensor(nullptr, data, layout.dtype, layout.sizes, layout.strides);
}

}  // namespace torch_hybrid_backend
