// Segments of weights that lie coded in a .hybrid file (encoding "huffman" of
// docs/hybrid_format.md): values that occur often take few bits.
//
// Use: BlocksOf divides a segment into blocks, each of which DecodeBlock decodes by itself, in any
// order and on any thread. Together they fill the whole of `decoded`.
//
// Ownership: blocks refer to both spans.
//
// Failure: both throw std::runtime_error that says what is wrong. Whatever the bytes are, nothing
// outside of the spans is read or written. DecodeBlock takes 256 KiB of memory at most.
#ifndef TORCH_HYBRID_BACKEND_CODED_SEGMENT_H_
#define TORCH_HYBRID_BACKEND_CODED_SEGMENT_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace torch_hybrid_backend {

// Of a block, decoded.
inline constexpr size_t kMostBlockBytes = size_t{1} << 18;
// How many times the bytes of the file a segment may have at most: a bit stands for 8 bytes.
inline constexpr uint64_t kMostExpansion = 64;

struct CodedBlock {
  std::span<const uint8_t> coded;
  std::span<uint8_t> decoded;
};

std::vector<CodedBlock> BlocksOf(std::span<const uint8_t> coded, std::span<uint8_t> decoded);

void DecodeBlock(const CodedBlock& block);

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_CODED_SEGMENT_H_
