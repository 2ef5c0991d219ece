#include "coded_segment.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <string>

#include "huffman.h"

namespace torch_hybrid_backend {
namespace {

constexpr size_t kLengthsBytes = 128;
constexpr size_t kNumberBytes = 4;

[[noreturn]] void Refuse(const char* why) { throw std::runtime_error(why); }

// Takes bytes from the beginning of a span.
std::span<const uint8_t> Take(std::span<const uint8_t>& from, size_t bytes) {
  if (bytes > from.size()) Refuse("a coded block ends too early");
  const auto taken = from.first(bytes);
  from = from.subspan(bytes);
  return taken;
}

size_t Number(std::span<const uint8_t> bytes) {
  size_t number = 0;
  for (size_t i = 0; i < bytes.size(); ++i) number |= size_t{bytes[i]} << (8 * i);
  return number;
}

std::array<uint8_t, 256> LengthsIn(std::span<const uint8_t> packed) {
  std::array<uint8_t, 256> lengths;
  for (size_t i = 0; i < kLengthsBytes; ++i) {
    lengths[2 * i] = packed[i] & 15;
    lengths[2 * i + 1] = packed[i] >> 4;
  }
  return lengths;
}

// Writes the value of each symbol.
template <size_t kWidth>
void Expand(std::span<const uint8_t> symbols, std::span<const uint8_t> values, uint8_t* to) {
  std::array<uint8_t, 256 * kWidth> table{};
  std::copy(values.begin(), values.end(), table.begin());
  for (const uint8_t symbol : symbols) {
    std::memcpy(to, table.data() + size_t{symbol} * kWidth, kWidth);
    to += kWidth;
  }
}

}  // namespace

std::vector<CodedBlock> BlocksOf(std::span<const uint8_t> coded, std::span<uint8_t> decoded) {
  const size_t count = Number(Take(coded, kNumberBytes));
  if (count > coded.size() / (2 * kNumberBytes)) Refuse("it has fewer coded blocks than it says");
  auto sizes = Take(coded, count * 2 * kNumberBytes);
  std::vector<CodedBlock> blocks;
  blocks.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    const size_t bytes = Number(Take(sizes, kNumberBytes));
    const size_t decoded_bytes = Number(Take(sizes, kNumberBytes));
    if (decoded_bytes > kMostBlockBytes) Refuse("a coded block is of more than 256 KiB");
    if (decoded_bytes > decoded.size()) Refuse("its coded blocks are of more bytes than it says");
    blocks.push_back({Take(coded, bytes), decoded.first(decoded_bytes)});
    decoded = decoded.subspan(decoded_bytes);
  }
  if (!coded.empty()) Refuse("it has bytes behind its last coded block");
  if (!decoded.empty()) Refuse("its coded blocks are of fewer bytes than it says");
  return blocks;
}

void DecodeBlock(const CodedBlock& block) {
  auto coded = block.coded;
  const std::span<uint8_t> decoded = block.decoded;
  const size_t width = Take(coded, 1)[0];
  if (width == 0) {
    if (coded.size() != decoded.size()) Refuse("a stored block has another size");
    std::copy(coded.begin(), coded.end(), decoded.begin());
    return;
  }
  if (width != 1 && width != 2 && width != 4 && width != 8)
    Refuse("values of a coded block have another width than 1, 2, 4 or 8 bytes");
  if (decoded.size() % width != 0) Refuse("a coded block is no whole number of values");
  if (width == 1) {
    const auto lengths = LengthsIn(Take(coded, kLengthsBytes));
    HuffmanDecode(coded, lengths, decoded);
    return;
  }
  const size_t count = Take(coded, 1)[0] + size_t{1};
  const auto values = Take(coded, count * width);
  const auto lengths = LengthsIn(Take(coded, kLengthsBytes));
  if (std::any_of(lengths.begin() + count, lengths.end(), [](uint8_t length) { return length; }))
    Refuse("a word of a coded block stands for no value");
  std::vector<uint8_t> symbols(decoded.size() / width);
  HuffmanDecode(coded, lengths, symbols);
  switch (width) {
    case 2:
      return Expand<2>(symbols, values, decoded.data());
    case 4:
      return Expand<4>(symbols, values, decoded.data());
    default:
      return Expand<8>(symbols, values, decoded.data());
  }
}

}  // namespace torch_hybrid_backend
