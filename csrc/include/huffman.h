// Huffman's coding of bytes, canonical: a code is known by the lengths of its words. The format is
// that of docs/compressed_format.md.
//
// Failure: both throw std::runtime_error for lengths that are no complete prefix code. Decoding
// throws it for coded bytes that are not exactly `symbols.size()` words and zero bits up to the
// next byte; encoding for a symbol without a word and for `coded` of another size than the words
// need. What was written by then is undefined. Whatever the bytes are, nothing outside of the spans
// is read or written, and nothing is allocated.
//
// Source: Huffman 1952; canonical words as in DEFLATE (RFC 1951, 1996).
#ifndef TORCH_HYBRID_BACKEND_HUFFMAN_H_
#define TORCH_HYBRID_BACKEND_HUFFMAN_H_

#include <cstddef>
#include <cstdint>
#include <span>

namespace torch_hybrid_backend {

// Words of up to 12 bits: a table of all that can come next (8 KiB) stays in the fastest cache.
inline constexpr int kLongestWord = 12;

// By symbol: the bits of its word, or 0 where it has none.
using WordLengths = std::span<const uint8_t, 256>;

void HuffmanEncode(std::span<const uint8_t> symbols, WordLengths lengths, std::span<uint8_t> coded);

void HuffmanDecode(std::span<const uint8_t> coded, WordLengths lengths, std::span<uint8_t> symbols);

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_HUFFMAN_H_
