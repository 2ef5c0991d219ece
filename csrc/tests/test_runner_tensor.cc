// The runner's tensors: copies between any strides, beside a copy element by element.
#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

#include "check.h"
#include "difference.h"
#include "value.h"
#include "worker_threads.h"

using namespace torch_hybrid_backend;

namespace {

using Numbers = std::vector<int64_t>;

Tensor New(Dtype dtype, const Numbers& sizes, const Numbers& strides) {
  return Empty(Layout{dtype, sizes, strides, Device::Host()});
}

// Calls `use` with the offsets in bytes of each element, in row-major order.
template <typename Use>
void ForEach(const Tensor& tensor, const Use& use) {
  const int64_t bytes = ElementBytes(tensor.dtype());
  int64_t count = 1;
  for (const int64_t size : tensor.sizes()) count *= size;
  for (int64_t i = 0; i < count; ++i) {
    int64_t rest = i;
    int64_t offset = 0;
    for (size_t d = tensor.sizes().size(); d-- > 0;) {
      offset += rest % tensor.sizes()[d] * tensor.strides()[d];
      rest /= tensor.sizes()[d];
    }
    use(i, static_cast<uint8_t*>(tensor.data_ptr()) + offset * bytes);
  }
}

uint8_t ByteOf(int64_t element, int64_t byte) {
  return static_cast<uint8_t>(element * 31 + byte * 7 + (element >> 8));
}

void TestCopy(Dtype dtype, const Numbers& sizes, const Numbers& from, const Numbers& to) {
  const int64_t bytes = ElementBytes(dtype);
  const Tensor source = New(dtype, sizes, from);
  const Tensor destination = New(dtype, sizes, to);
  ForEach(source, [&](int64_t i, uint8_t* at) {
    for (int64_t b = 0; b < bytes; ++b) at[b] = ByteOf(i, b);
  });
  CopyElements(source, destination);
  bool same = true;
  ForEach(destination, [&](int64_t i, const uint8_t* at) {
    for (int64_t b = 0; b < bytes; ++b) same &= at[b] == ByteOf(i, b);
  });
  Check(same, "each element is where it belongs");
}

void TestCopies() {
  for (const Dtype dtype :
       {Dtype::kBool, Dtype::kFloat16, Dtype::kFloat32, Dtype::kInt64, Dtype::kComplex128}) {
    TestCopy(dtype, {}, {}, {});
    TestCopy(dtype, {0, 3}, {3, 1}, {1, 0});
    TestCopy(dtype, {2, 3, 4}, {12, 4, 1}, {12, 4, 1});
    TestCopy(dtype, {2, 3, 4}, {12, 4, 1}, {1, 2, 6});
    TestCopy(dtype, {2, 1, 4}, {4, 99, 1}, {5, 7, 1});
    TestCopy(dtype, {1, 3, 224, 225}, {151200, 50400, 225, 1}, {151200, 1, 675, 3});
    TestCopy(dtype, {1, 3, 224, 225}, {151200, 1, 675, 3}, {151200, 50400, 225, 1});
    TestCopy(dtype, {2, 2, 2, 2, 2, 2, 2, 2, 3}, {384, 192, 96, 48, 24, 12, 6, 3, 1},
             {1, 2, 4, 8, 16, 32, 64, 128, 256});
  }
  // Repeated and backwards.
  std::vector<float> row(4);
  std::iota(row.begin(), row.end(), 0.0F);
  const Tensor repeated(nullptr, row.data(), Dtype::kFloat32, {2, 4}, {0, 1});
  const Tensor backwards(nullptr, row.data() + 3, Dtype::kFloat32, {4}, {-1});
  const auto copied = [](const Tensor& tensor) {
    const Tensor copy = RowMajorCopy(tensor);
    const auto* const data = static_cast<const float*>(copy.data_ptr());
    return std::vector<float>(data, data + (tensor.sizes().size() == 2 ? 8 : 4));
  };
  Check(copied(repeated) == std::vector<float>{0, 1, 2, 3, 0, 1, 2, 3}, "a stride of 0");
  Check(copied(backwards) == std::vector<float>{3, 2, 1, 0}, "a negative stride");
}

void TestDifferences() {
  const auto halves = [](std::vector<uint16_t> bits, Dtype dtype) {
    const Tensor tensor = New(dtype, {static_cast<int64_t>(bits.size())}, {1});
    std::memcpy(tensor.data_ptr(), bits.data(), 2 * bits.size());
    return tensor;
  };
  const Difference half = DifferenceOf(halves({0x3c00, 0x0001, 0x7e00}, Dtype::kFloat16),
                                       halves({0xc000, 0x0000, 0x7e00}, Dtype::kFloat16));
  Check(half.largest == 3 && half.largest_value == 2, "1 and -2 in float16; NaN is NaN");
  const Difference brain = DifferenceOf(halves({0x3f80, 0x7f80}, Dtype::kBfloat16),
                                        halves({0x4000, 0x4000}, Dtype::kBfloat16));
  Check(brain.largest > 1e30 && brain.largest_value == 2, "an infinity where there was none");
  const Tensor whole = New(Dtype::kInt64, {1}, {1});
  std::memset(whole.data_ptr(), 0, 8);
  const Tensor other = RowMajorCopy(whole);
  Check(DifferenceOf(whole, other).largest == 0, "equal integers");
  *static_cast<int64_t*>(other.data_ptr()) = 1;
  Check(DifferenceOf(whole, other).largest > 1, "other integers");
}

void TestThreads() {
  Check(ThreadsFor(1) == 1 && ThreadsFor(3) == 3, "as many as are wanted");
  const ThreadsOfCall threads(3);
  Check(ThreadCount() == 3, "a call has its own number of threads");
  const ThreadsOfCall one(1);
  Check(ThreadCount() == 1, "until another one begins");
}

}  // namespace

int main() {
  TestCopies();
  TestDifferences();
  TestThreads();
}
