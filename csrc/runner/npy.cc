#include "npy.h"

#include <cctype>
#include <cstring>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string_view>

namespace torch_hybrid_backend {
namespace {

constexpr std::string_view kMagic = "\x93NUMPY";

// NumPy's letter of a dtype; 0 for one that it has not.
char LetterOf(DLDataType dtype) {
  switch (dtype.code) {
    case kDLInt:
      return 'i';
    case kDLUInt:
      return 'u';
    case kDLFloat:
      return 'f';
    case kDLComplex:
      return dtype.bits >= 64 ? 'c' : 0;
    case kDLBool:
      return 'b';
    default:
      return 0;
  }
}

size_t BytesOf(DLDataType dtype) { return (size_t{dtype.bits} * dtype.lanes + 7) / 8; }

// "<f4"
std::string DescriptionOf(DLDataType dtype) {
  const size_t bytes = BytesOf(dtype);
  const char letter = LetterOf(dtype);
  return std::string(bytes == 1 ? "|" : "<") + (letter == 0 ? 'u' : letter) + std::to_string(bytes);
}

// The text behind 'name': in a header, which is a dictionary as Python writes it.
std::string_view Member(std::string_view header, std::string_view name) {
  const size_t at = header.find("'" + std::string(name) + "'");
  const size_t colon = at == header.npos ? at : header.find(':', at);
  if (colon == header.npos)
    throw std::runtime_error("its header has no '" + std::string(name) + "'");
  const size_t begin = header.find_first_not_of(' ', colon + 1);
  return begin == header.npos ? "" : header.substr(begin);
}

std::string ReadText(std::string_view member) {
  const size_t end = member.starts_with('\'') ? member.find('\'', 1) : member.npos;
  if (end == member.npos) throw std::runtime_error("its dtype is no simple one");
  return std::string(member.substr(1, end - 1));
}

std::vector<int64_t> ReadSizes(std::string_view member) {
  const size_t end = member.starts_with('(') ? member.find(')') : member.npos;
  if (end == member.npos) throw std::runtime_error("its shape is no tuple");
  std::vector<int64_t> sizes;
  for (size_t at = 1; at < end; ++at) {
    if (std::isdigit(static_cast<unsigned char>(member[at])) == 0) continue;
    int64_t size = 0;
    for (; std::isdigit(static_cast<unsigned char>(member[at])) != 0; ++at) {
      if (size > (int64_t{1} << 50)) throw std::runtime_error("its shape is too large");
      size = 10 * size + (member[at] - '0');
    }
    sizes.push_back(size);
  }
  return sizes;
}

Array Parse(const std::vector<char>& file, DLDataType wanted) {
  const std::string_view text(file.data(), file.size());
  if (!text.starts_with(kMagic) || text.size() < 12) throw std::runtime_error("it is no .npy file");
  const bool is_first = text[6] == 1;
  size_t length = 0;
  for (size_t i = 0; i < (is_first ? 2U : 4U); ++i)
    length |= size_t{static_cast<unsigned char>(text[8 + i])} << (8 * i);
  const size_t begin = is_first ? 10 : 12;
  if (length > text.size() - begin) throw std::runtime_error("it ends within its header");
  const std::string_view header = text.substr(begin, length);
  const std::string description = ReadText(Member(header, "descr"));
  if (description != DescriptionOf(wanted)) {
    throw std::runtime_error("its elements are '" + description + "', and the input takes '" +
                             DescriptionOf(wanted) + "'");
  }
  Array array{{}, wanted, ReadSizes(Member(header, "shape")), {}};
  const bool is_fortran = Member(header, "fortran_order").starts_with("True");
  array.strides.resize(array.sizes.size());
  size_t bytes = BytesOf(wanted);
  int64_t stride = 1;
  for (size_t i = 0; i < array.sizes.size(); ++i) {
    const size_t d = is_fortran ? i : array.sizes.size() - 1 - i;
    array.strides[d] = stride;
    if (array.sizes[d] > 0 && stride > (int64_t{1} << 50) / array.sizes[d])
      throw std::runtime_error("its shape is too large");
    stride *= array.sizes[d];
  }
  bytes *= static_cast<size_t>(stride);
  const std::string_view data = text.substr(begin + length);
  if (data.size() < bytes) {
    throw std::runtime_error("it has " + std::to_string(data.size()) +
                             " bytes of elements instead of " + std::to_string(bytes));
  }
  array.bytes.assign(data.begin(), data.begin() + static_cast<std::ptrdiff_t>(bytes));
  return array;
}

// Appends the tensor's elements from dimension `d` on, in row-major order.
void Append(const DLTensor& tensor, size_t bytes, int32_t d, const char* from, std::string& out) {
  if (d == tensor.ndim) {
    out.append(from, bytes);
    return;
  }
  int64_t stride = 1;
  for (int32_t inner = d + 1; inner < tensor.ndim; ++inner) stride *= tensor.shape[inner];
  if (tensor.strides != nullptr) stride = tensor.strides[d];
  for (int64_t i = 0; i < tensor.shape[d]; ++i)
    Append(tensor, bytes, d + 1, from + i * stride * static_cast<int64_t>(bytes), out);
}

}  // namespace

Array ReadNpy(const std::string& path, DLDataType wanted) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(path + ": it cannot be opened");
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  try {
    return Parse(bytes, wanted);
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(path + ": " + error.what());
  }
}

void WriteNpy(const std::string& path, const DLTensor& tensor) {
  std::string header =
      "{'descr': '" + DescriptionOf(tensor.dtype) + "', 'fortran_order': False, 'shape': (";
  for (int32_t d = 0; d < tensor.ndim; ++d) header += std::to_string(tensor.shape[d]) + ",";
  header += "), }";
  // With the text before it, a multiple of 64 bytes.
  header.append(63 - (10 + header.size()) % 64, ' ');
  header += '\n';
  std::string out(kMagic);
  out += {1, 0, static_cast<char>(header.size() & 255), static_cast<char>(header.size() >> 8)};
  out += header;
  Append(tensor, BytesOf(tensor.dtype), 0,
         static_cast<const char*>(tensor.data) + tensor.byte_offset, out);
  std::ofstream file(path, std::ios::binary);
  file.write(out.data(), static_cast<std::streamsize>(out.size()));
  file.close();
  if (!file) throw std::runtime_error(path + ": it cannot be written");
}

}  // namespace torch_hybrid_backend
