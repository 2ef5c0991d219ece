#include <array>
#include <cstdint>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "coded_segment.h"
#include "huffman.h"

using namespace torch_hybrid_backend;

namespace {

using Bytes = std::vector<uint8_t>;

// Two words, of one bit each: 0 for symbol 0 and 1 for symbol 1.
std::array<uint8_t, 256> TwoWords() {
  std::array<uint8_t, 256> lengths{};
  lengths[0] = lengths[1] = 1;
  return lengths;
}

// A block of numbers that have the two values.
Bytes BlockOf(size_t width, const Bytes& values, const Bytes& symbols) {
  Bytes block{static_cast<uint8_t>(width)};
  if (width > 1) block.push_back(static_cast<uint8_t>(values.size() / width - 1));
  if (width > 1) block.insert(block.end(), values.begin(), values.end());
  Bytes lengths(128, 0);
  lengths[0] = 0x11;
  block.insert(block.end(), lengths.begin(), lengths.end());
  Bytes coded((symbols.size() + 7) / 8);
  HuffmanEncode(symbols, TwoWords(), coded);
  block.insert(block.end(), coded.begin(), coded.end());
  return block;
}

// Of blocks and the bytes that each has decoded.
Bytes SegmentOf(const std::vector<std::pair<Bytes, size_t>>& blocks) {
  Bytes segment;
  const auto number = [&](size_t value) {
    for (int k = 0; k < 4; ++k) segment.push_back(static_cast<uint8_t>(value >> (8 * k)));
  };
  number(blocks.size());
  for (const auto& [block, decoded] : blocks) {
    number(block.size());
    number(decoded);
  }
  for (const auto& [block, _] : blocks) segment.insert(segment.end(), block.begin(), block.end());
  return segment;
}

Bytes SegmentOf(const Bytes& block, size_t decoded) { return SegmentOf({{block, decoded}}); }

// From memory of exactly the size: the address sanitiser sees whatever is read behind it.
Bytes Decoded(const Bytes& segment, size_t size) {
  const auto coded = std::make_unique<uint8_t[]>(segment.size());
  std::copy(segment.begin(), segment.end(), coded.get());
  Bytes decoded(size);
  for (const CodedBlock& block : BlocksOf({coded.get(), segment.size()}, decoded))
    DecodeBlock(block);
  return decoded;
}

void CheckDecoded(const Bytes& segment, const Bytes& expected) {
  Check(Decoded(segment, expected.size()) == expected, "the bytes are the decoded ones");
}

// A segment of one block.
void CheckBlock(const Bytes& block, const Bytes& expected) {
  CheckDecoded(SegmentOf(block, expected.size()), expected);
}

void CheckRefused(const Bytes& segment, size_t size, const std::string& why) {
  CheckThrows([&] { Decoded(segment, size); }, why);
}

void CheckBlockRefused(const Bytes& block, size_t size, const std::string& why) {
  CheckRefused(SegmentOf(block, size), size, why);
}

void TestWidths() {
  CheckBlock({0, 7, 8, 9}, {7, 8, 9});
  CheckBlock(BlockOf(1, {}, {1, 0, 1}), {1, 0, 1});
  CheckBlock(BlockOf(2, {5, 6, 7, 8}, {1, 0}), {7, 8, 5, 6});
  CheckBlock(BlockOf(4, {1, 2, 3, 4, 5, 6, 7, 8}, {1, 1}), {5, 6, 7, 8, 5, 6, 7, 8});
  const Bytes two{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
  CheckBlock(BlockOf(8, two, {1}), {9, 10, 11, 12, 13, 14, 15, 16});
}

void TestSeveralBlocks() {
  const Bytes ones(kMostBlockBytes / 4, 1);
  Bytes expected(kMostBlockBytes, 2);
  expected.push_back(9);
  CheckDecoded(
      SegmentOf(
          {{BlockOf(4, {1, 1, 1, 1, 2, 2, 2, 2}, ones), kMostBlockBytes}, {{0}, 0}, {{0, 9}, 1}}),
      expected);
  CheckDecoded({0, 0, 0, 0}, {});
}

void TestWhatIsRefused() {
  const Bytes good = BlockOf(2, {5, 6, 7, 8}, {1, 0});
  CheckRefused({}, 1, "ends too early");
  CheckRefused({1, 0, 0, 0, 9, 0, 0}, 1, "fewer coded blocks");
  CheckRefused({255, 255, 255, 255}, 1, "fewer coded blocks");
  CheckRefused(SegmentOf(good, 4), 3, "more bytes than it says");
  CheckRefused(SegmentOf(good, 4), 5, "fewer bytes than it says");
  CheckRefused(SegmentOf(good, kMostBlockBytes + 2), kMostBlockBytes + 2, "256 KiB");
  Bytes shorter = SegmentOf(good, 4);
  shorter.pop_back();
  CheckRefused(shorter, 4, "ends too early");
  Bytes longer = SegmentOf(good, 4);
  longer.push_back(0);
  CheckRefused(longer, 4, "behind its last");
  CheckBlockRefused({}, 1, "ends too early");
  CheckBlockRefused({0, 1, 2}, 3, "another size");
  CheckBlockRefused({3, 1, 2}, 3, "another width");
  CheckBlockRefused(good, 5, "no whole number");
  CheckBlockRefused({2, 255, 1, 2}, 4, "ends too early");
  CheckBlockRefused(BlockOf(2, {5, 6}, {0, 0}), 4, "stands for no value");
  CheckBlockRefused(good, 40, "too few coded bytes");
  Bytes no_code = good;
  no_code[6] = 1;  // one word of one bit
  CheckBlockRefused(no_code, 4, "too few words");
}

void TestAnyBytes() {
  std::mt19937 random(0);
  for (int i = 0; i < 20000; ++i) {
    const size_t count = random() % 64;
    Bytes segment = SegmentOf(BlockOf(2, {5, 6, 7, 8}, Bytes(count, 1)), 2 * count);
    for (unsigned k = random() % 4; k > 0; --k)
      segment[random() % segment.size()] = static_cast<uint8_t>(random());
    try {
      Decoded(segment, 2 * count);
    } catch (const std::runtime_error&) {
      // Refused.
    }
  }
}

}  // namespace

int main() {
  TestWidths();
  TestSeveralBlocks();
  TestWhatIsRefused();
  TestAnyBytes();
}
