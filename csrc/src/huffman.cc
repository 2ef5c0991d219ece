#include "huffman.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <stdexcept>
#include <string>

namespace torch_hybrid_backend {
namespace {

constexpr size_t kEntries = size_t{1} << kLongestWord;

// Words by symbol, their first bit lowest, as they lie in the coded bytes.
using Words = std::array<uint16_t, 256>;

// Throws where the lengths are those of no prefix code, or of one that leaves bits without meaning.
Words WordsOf(WordLengths lengths) {
  std::array<size_t, kLongestWord + 1> counts{};
  for (const uint8_t length : lengths) {
    if (length > kLongestWord) {
      throw std::runtime_error("a word of " + std::to_string(length) + " bits; there are at most " +
                               std::to_string(kLongestWord));
    }
    ++counts[length];
  }
  std::array<size_t, kLongestWord + 1> next{};  // word of each length, its first bit highest
  size_t used = 0;                              // of all words of the greatest length
  for (int length = 1; length <= kLongestWord; ++length) {
    next[length] = used >> (kLongestWord - length);
    used += counts[length] << (kLongestWord - length);
  }
  if (used != kEntries) {
    throw std::runtime_error(std::string("the lengths of its words are of ") +
                             (used < kEntries ? "too few words" : "too many words"));
  }
  Words words{};
  for (size_t symbol = 0; symbol < lengths.size(); ++symbol) {
    const int length = lengths[symbol];
    if (length == 0) continue;
    const size_t word = next[length]++;
    for (int bit = 0; bit < length; ++bit) {
      words[symbol] |= static_cast<uint16_t>((word >> (length - 1 - bit) & 1) << bit);
    }
  }
  return words;
}

uint64_t LittleEndian(uint64_t word) {
  if constexpr (std::endian::native == std::endian::little) return word;
  return __builtin_bswap64(word);
}

// The bits from the one at `at` on, at least 57 of them; zeros behind the end.
uint64_t BitsAt(std::span<const uint8_t> coded, uint64_t at) {
  uint64_t word = 0;
  const size_t first = at / 8;
  if (first + sizeof(word) <= coded.size()) {
    std::memcpy(&word, coded.data() + first, sizeof(word));
  } else if (first < coded.size()) {
    std::memcpy(&word, coded.data() + first, coded.size() - first);
  }
  return LittleEndian(word) >> (at % 8);
}

}  // namespace

void HuffmanEncode(std::span<const uint8_t> symbols, WordLengths lengths,
                   std::span<uint8_t> coded) {
  const Words words = WordsOf(lengths);
  uint64_t pending = 0;
  int bits = 0;
  size_t at = 0;
  const auto flush = [&](size_t bytes) {
    if (coded.size() - at < bytes) throw std::runtime_error("the coded bytes have too little room");
    const uint64_t word = LittleEndian(pending);
    std::memcpy(coded.data() + at, &word, bytes);
    at += bytes;
  };
  for (const uint8_t symbol : symbols) {
    if (lengths[symbol] == 0) {
      throw std::runtime_error("the symbol " + std::to_string(symbol) + " has no word");
    }
    pending |= uint64_t{words[symbol]} << bits;
    bits += lengths[symbol];
    if (bits >= 32) {
      flush(4);
      pending >>= 32;
      bits -= 32;
    }
  }
  if (bits > 0) flush(static_cast<size_t>(bits + 7) / 8);
  if (at != coded.size()) throw std::runtime_error("the coded bytes have too much room");
}

void HuffmanDecode(std::span<const uint8_t> coded, WordLengths lengths,
                   std::span<uint8_t> symbols) {
  const Words words = WordsOf(lengths);
  struct Entry {
    uint8_t symbol;
    uint8_t length;
  };
  std::array<Entry, kEntries> table;  // by the next bits
  for (size_t symbol = 0; symbol < lengths.size(); ++symbol) {
    if (lengths[symbol] == 0) continue;
    const size_t step = size_t{1} << lengths[symbol];
    for (size_t entry = words[symbol]; entry < kEntries; entry += step) {
      table[entry] = {static_cast<uint8_t>(symbol), lengths[symbol]};
    }
  }
  // A word has a bit at least; and the position below cannot overflow.
  if (symbols.size() / 8 > coded.size()) throw std::runtime_error("there are too few coded bytes");
  uint64_t at = 0;  // in bits
  constexpr size_t kAtOnce = 4;
  static_assert(kAtOnce * kLongestWord <= 57);
  // Not into `symbols` one by one: as far as the compiler knows, bytes may lie in any variable.
  const auto next = [&table, coded](uint64_t& at, size_t count) {
    uint64_t bits = BitsAt(coded, at);
    std::array<uint8_t, kAtOnce> found{};
    for (size_t k = 0; k < count; ++k) {
      const Entry entry = table[bits % kEntries];
      found[k] = entry.symbol;
      bits >>= entry.length;
      at += entry.length;
    }
    return found;
  };
  const size_t rest = symbols.size() % kAtOnce;
  uint8_t* to = symbols.data();
  uint8_t* const end = to + symbols.size() - rest;
  for (; to != end; to += kAtOnce) std::memcpy(to, next(at, kAtOnce).data(), kAtOnce);
  if (rest > 0) std::memcpy(to, next(at, rest).data(), rest);
  if ((at + 7) / 8 != coded.size()) {
    throw std::runtime_error(at > coded.size() * 8 ? "there are too few coded bytes"
                                                   : "there are coded bytes behind the last word");
  }
  if (at % 8 != 0 && coded.back() >> (at % 8) != 0) {
    throw std::runtime_error("there are bits behind the last word");
  }
}

}  // namespace torch_hybrid_backend
