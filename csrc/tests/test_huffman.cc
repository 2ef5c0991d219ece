#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"
#include "huffman.h"

using torch_hybrid_backend::HuffmanDecode;
using torch_hybrid_backend::HuffmanEncode;
using torch_hybrid_backend::kLongestWord;
using torch_hybrid_backend::WordLengths;

namespace {

using Lengths = std::array<uint8_t, 256>;
using Random = std::mt19937;

size_t Below(Random& random, size_t limit) { return random() % limit; }

// Words that make a complete code: one is split in two until there are `symbols` of them.
Lengths CompleteCode(Random& random, size_t symbols) {
  std::vector<uint8_t> words{1, 1};
  while (words.size() < symbols) {
    const size_t split = Below(random, words.size());
    if (words[split] < kLongestWord) words.push_back(++words[split]);
  }
  words.resize(256, 0);
  std::shuffle(words.begin(), words.end(), random);
  Lengths lengths{};
  std::copy(words.begin(), words.end(), lengths.begin());
  return lengths;
}

std::vector<uint8_t> SymbolsOf(Random& random, const Lengths& lengths, size_t count) {
  std::vector<uint8_t> symbols;
  while (symbols.size() < count) {
    const auto symbol = static_cast<uint8_t>(random());
    if (lengths[symbol] != 0) symbols.push_back(symbol);
  }
  return symbols;
}

std::vector<uint8_t> Encoded(const std::vector<uint8_t>& symbols, const Lengths& lengths) {
  size_t bits = 0;
  for (const uint8_t symbol : symbols) bits += lengths[symbol];
  std::vector<uint8_t> coded((bits + 7) / 8);
  HuffmanEncode(symbols, WordLengths(lengths), coded);
  return coded;
}

// From memory of exactly the size: the address sanitiser sees whatever is read behind it.
std::vector<uint8_t> Decoded(const std::vector<uint8_t>& coded, const Lengths& lengths,
                             size_t count) {
  const auto bytes = std::make_unique<uint8_t[]>(coded.size());
  std::copy(coded.begin(), coded.end(), bytes.get());
  const auto symbols = std::make_unique<uint8_t[]>(count);
  HuffmanDecode({bytes.get(), coded.size()}, WordLengths(lengths), {symbols.get(), count});
  return {symbols.get(), symbols.get() + count};
}

void WordsAreCanonical() {
  Lengths lengths{};
  lengths['a'] = 2;
  lengths['b'] = 1;
  lengths['c'] = 3;
  lengths['d'] = 3;
  // b = 0, a = 10, c = 110, d = 111, their first bits lowest.
  Check(Encoded({'b', 'a', 'c', 'd'}, lengths) == std::vector<uint8_t>{0b11011010, 0b00000001},
        "words are numbered by length, then by symbol");
  Check(Encoded({}, lengths).empty() && Decoded({}, lengths, 0).empty(), "nothing has no bytes");
}

void RoundTrips(Random& random) {
  for (int round = 0; round < 200; ++round) {
    const Lengths lengths = CompleteCode(random, 2 + Below(random, 255));
    const auto symbols = SymbolsOf(random, lengths, Below(random, 300));
    Check(Decoded(Encoded(symbols, lengths), lengths, symbols.size()) == symbols,
          "what is decoded is what was encoded");
  }
}

void RefusesWhatIsNoCode(Random& random) {
  Lengths lengths{};
  const std::vector<uint8_t> coded{0, 0};
  CheckThrows([&] { Decoded(coded, lengths, 1); }, "too few words");
  lengths[7] = 1;
  CheckThrows([&] { Decoded(coded, lengths, 1); }, "too few words");
  lengths[8] = lengths[9] = 1;
  CheckThrows([&] { Decoded(coded, lengths, 1); }, "too many words");
  lengths.fill(255);
  CheckThrows([&] { Decoded(coded, lengths, 1); }, "at most 12");
  lengths.fill(1);
  CheckThrows([&] { Decoded(coded, lengths, 1); }, "too many words");

  lengths = CompleteCode(random, 20);
  const auto symbols = SymbolsOf(random, lengths, 50);
  std::vector<uint8_t> whole = Encoded(symbols, lengths);
  CheckThrows([&] { Decoded(whole, lengths, size_t{1} << 20); }, "too few coded bytes");
  whole.push_back(0);
  CheckThrows([&] { Decoded(whole, lengths, 50); }, "behind the last word");
  whole.resize(whole.size() - 2);
  CheckThrows([&] { Decoded(whole, lengths, 50); }, "too few coded bytes");
  std::vector<uint8_t> small(1), large(100);
  CheckThrows([&] { HuffmanEncode(symbols, WordLengths(lengths), small); }, "too little room");
  CheckThrows([&] { HuffmanEncode(symbols, WordLengths(lengths), large); }, "too much room");
  lengths[symbols[0]] = 0;
  CheckThrows([&] { HuffmanEncode(symbols, WordLengths(lengths), large); }, "too few words");
}

// Damaged bytes and lengths give an error or other symbols; the sanitisers watch the rest.
void SurvivesDamage(Random& random) {
  int refused = 0;
  for (int round = 0; round < 5000; ++round) {
    Lengths lengths = CompleteCode(random, 2 + Below(random, 255));
    auto coded = Encoded(SymbolsOf(random, lengths, 1 + Below(random, 100)), lengths);
    switch (Below(random, 4)) {
      case 0:
        coded[Below(random, coded.size())] ^= static_cast<uint8_t>(1 + Below(random, 255));
        break;
      case 1:
        coded.resize(Below(random, coded.size()));
        break;
      case 2:
        lengths[Below(random, 256)] = static_cast<uint8_t>(random());
        break;
      default:
        for (uint8_t& byte : coded) byte = static_cast<uint8_t>(random());
    }
    try {
      Decoded(coded, lengths, Below(random, 200));
    } catch (const std::runtime_error&) {
      ++refused;
    }
  }
  Check(refused > 2500, "most damage is noticed");
}

}  // namespace

int main() {
  Random random(15);
  WordsAreCanonical();
  RoundTrips(random);
  RefusesWhatIsNoCode(random);
  SurvivesDamage(random);
}
