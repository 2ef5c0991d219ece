#include "sha256.h"

#include <algorithm>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace torch_hybrid_backend {
namespace {

// FIPS 180-4, 4.2.2 and 5.3.3.
constexpr std::array<uint32_t, 64> kRounds = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
constexpr std::array<uint32_t, 8> kStart = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                            0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

uint32_t BigEndian(const uint8_t* bytes) {
  return uint32_t{bytes[0]} << 24 | uint32_t{bytes[1]} << 16 | uint32_t{bytes[2]} << 8 | bytes[3];
}

template <typename Number>
void StoreBigEndian(Number number, uint8_t* bytes) {
  for (size_t i = 0; i < sizeof(Number); ++i) {
    bytes[i] = static_cast<uint8_t>(number >> (8 * (sizeof(Number) - 1 - i)));
  }
}

}  // namespace

void Sha256::CompressPortably(State& state, const uint8_t* blocks, size_t count) {
  for (; count > 0; --count, blocks += kBlockBytes) {
    std::array<uint32_t, 64> words;
    for (size_t t = 0; t < 16; ++t) words[t] = BigEndian(blocks + 4 * t);
    for (size_t t = 16; t < 64; ++t) {
      const uint32_t before = words[t - 15];
      const uint32_t last = words[t - 2];
      words[t] = words[t - 16] + words[t - 7] +
                 (std::rotr(before, 7) ^ std::rotr(before, 18) ^ (before >> 3)) +
                 (std::rotr(last, 17) ^ std::rotr(last, 19) ^ (last >> 10));
    }
    auto [a, b, c, d, e, f, g, h] = state;
    for (size_t t = 0; t < 64; ++t) {
      const uint32_t first = h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) +
                             ((e & f) ^ (~e & g)) + kRounds[t] + words[t];
      const uint32_t second =
          (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
      h = g;
      g = f;
      f = e;
      e = d + first;
      d = c;
      c = b;
      b = a;
      a = first + second;
    }
    const State added = {a, b, c, d, e, f, g, h};
    for (size_t i = 0; i < state.size(); ++i) state[i] += added[i];
  }
}

#if defined(__x86_64__)

bool HasSha256Instructions() {
  // By CPUID: not every compiler's __builtin_cpu_supports knows them.
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0) return false;
  constexpr unsigned kSsse3 = 1U << 9, kSse41 = 1U << 19, kSha = 1U << 29;
  if ((ecx & kSsse3) == 0 || (ecx & kSse41) == 0) return false;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (ebx & kSha) != 0;
}

namespace {

// The instructions keep the state in two registers, (A B E F) and (C D G H), the first named in the
// highest lane, and do two rounds each. Four rounds and their words are a group.
#define WITH_SHA256_INSTRUCTIONS [[gnu::target("sha,sse4.1,ssse3")]]

WITH_SHA256_INSTRUCTIONS inline __m128i Load(const void* memory) {
  return _mm_loadu_si128(static_cast<const __m128i*>(memory));
}

WITH_SHA256_INSTRUCTIONS inline void DoRounds(__m128i& abef, __m128i& cdgh, __m128i words,
                                              size_t group) {
  const __m128i sums = _mm_add_epi32(words, Load(kRounds.data() + 4 * group));
  cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sums);
  abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sums, 0x0e));
}

// The words of the group behind these four.
WITH_SHA256_INSTRUCTIONS inline __m128i Next(__m128i first, __m128i second, __m128i third,
                                             __m128i fourth) {
  const __m128i sums =
      _mm_add_epi32(_mm_sha256msg1_epu32(first, second), _mm_alignr_epi8(fourth, third, 4));
  return _mm_sha256msg2_epu32(sums, fourth);
}

}  // namespace

WITH_SHA256_INSTRUCTIONS void Sha256::CompressByInstructions(State& state, const uint8_t* blocks,
                                                             size_t count) {
  const auto [a, b, c, d, e, f, g, h] = state;
  std::array<uint32_t, 4> first = {f, e, b, a}, second = {h, g, d, c};
  __m128i abef = Load(first.data());
  __m128i cdgh = Load(second.data());
  const __m128i swap = _mm_set_epi8(12, 13, 14, 15, 8, 9, 10, 11, 4, 5, 6, 7, 0, 1, 2, 3);
  for (; count > 0; --count, blocks += kBlockBytes) {
    const __m128i abef_before = abef, cdgh_before = cdgh;
    __m128i w0 = _mm_shuffle_epi8(Load(blocks), swap);
    __m128i w1 = _mm_shuffle_epi8(Load(blocks + 16), swap);
    __m128i w2 = _mm_shuffle_epi8(Load(blocks + 32), swap);
    __m128i w3 = _mm_shuffle_epi8(Load(blocks + 48), swap);
    for (size_t group = 0;; group += 4) {
      DoRounds(abef, cdgh, w0, group);
      DoRounds(abef, cdgh, w1, group + 1);
      DoRounds(abef, cdgh, w2, group + 2);
      DoRounds(abef, cdgh, w3, group + 3);
      if (group == 12) break;
      w0 = Next(w0, w1, w2, w3);
      w1 = Next(w1, w2, w3, w0);
      w2 = Next(w2, w3, w0, w1);
      w3 = Next(w3, w0, w1, w2);
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }
  _mm_storeu_si128(reinterpret_cast<__m128i*>(first.data()), abef);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(second.data()), cdgh);
  state = {first[3], first[2], second[3], second[2], first[1], first[0], second[1], second[0]};
}

#undef WITH_SHA256_INSTRUCTIONS

#elif defined(__aarch64__)

bool HasSha256Instructions() { return (getauxval(AT_HWCAP) & HWCAP_SHA2) != 0; }

// The instructions keep the state in two registers, A to D and E to H, and do four rounds each.
#if defined(__clang__)
#define WITH_SHA256_INSTRUCTIONS [[gnu::target("sha2")]]
#else
#define WITH_SHA256_INSTRUCTIONS [[gnu::target("+crypto")]]
#endif

WITH_SHA256_INSTRUCTIONS void Sha256::CompressByInstructions(State& state, const uint8_t* blocks,
                                                             size_t count) {
  uint32x4_t abcd = vld1q_u32(state.data());
  uint32x4_t efgh = vld1q_u32(state.data() + 4);
  for (; count > 0; --count, blocks += kBlockBytes) {
    const uint32x4_t abcd_before = abcd, efgh_before = efgh;
    std::array<uint32x4_t, 4> words;
    for (size_t i = 0; i < words.size(); ++i) {
      words[i] = vreinterpretq_u32_u8(vrev32q_u8(vld1q_u8(blocks + 16 * i)));
    }
    for (size_t group = 0; group < kRounds.size() / 4; ++group) {
      uint32x4_t& now = words[group % 4];
      const uint32x4_t sums = vaddq_u32(now, vld1q_u32(kRounds.data() + 4 * group));
      const uint32x4_t abcd_then = abcd;
      abcd = vsha256hq_u32(abcd, efgh, sums);
      efgh = vsha256h2q_u32(efgh, abcd_then, sums);
      // The words of the group that is four further.
      now = vsha256su1q_u32(vsha256su0q_u32(now, words[(group + 1) % 4]), words[(group + 2) % 4],
                            words[(group + 3) % 4]);
    }
    abcd = vaddq_u32(abcd, abcd_before);
    efgh = vaddq_u32(efgh, efgh_before);
  }
  vst1q_u32(state.data(), abcd);
  vst1q_u32(state.data() + 4, efgh);
}

#undef WITH_SHA256_INSTRUCTIONS

#else

bool HasSha256Instructions() { return false; }

void Sha256::CompressByInstructions(State& state, const uint8_t* blocks, size_t count) {
  CompressPortably(state, blocks, count);
}

#endif

Sha256::Sha256(Sha256Form form) : state_(kStart) {
  static const bool has_instructions = HasSha256Instructions();
  compress_ = form == Sha256Form::kFastest && has_instructions ? &CompressByInstructions
                                                               : &CompressPortably;
}

void Sha256::Update(std::span<const uint8_t> bytes) {
  const size_t pending = total_bytes_ % kBlockBytes;
  total_bytes_ += bytes.size();
  if (pending > 0) {
    const size_t taken = std::min(kBlockBytes - pending, bytes.size());
    std::copy_n(bytes.begin(), taken, pending_.begin() + pending);
    bytes = bytes.subspan(taken);
    if (pending + taken < kBlockBytes) return;
    compress_(state_, pending_.data(), 1);
  }
  compress_(state_, bytes.data(), bytes.size() / kBlockBytes);
  const auto rest = bytes.last(bytes.size() % kBlockBytes);
  std::copy(rest.begin(), rest.end(), pending_.begin());
}

Sha256Digest Sha256::Finish() {
  const uint64_t bits = 8 * total_bytes_;
  // A one, zeros up to eight bytes before the end of a block, and the number of bits.
  std::array<uint8_t, 2 * kBlockBytes> end{0x80};
  const size_t zeros_end = kBlockBytes - 8;
  const size_t pending = total_bytes_ % kBlockBytes;
  const size_t size = (pending < zeros_end ? zeros_end : zeros_end + kBlockBytes) - pending;
  StoreBigEndian(bits, end.data() + size);
  Update(std::span(end).first(size + 8));
  Sha256Digest digest;
  for (size_t i = 0; i < state_.size(); ++i) StoreBigEndian(state_[i], digest.data() + 4 * i);
  return digest;
}

Sha256Digest Sha256Of(std::span<const uint8_t> bytes, Sha256Form form) {
  Sha256 sha256(form);
  sha256.Update(bytes);
  return sha256.Finish();
}

std::string Hexadecimal(std::span<const uint8_t> bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  text.reserve(2 * bytes.size());
  for (const uint8_t byte : bytes) {
    text.push_back(kDigits[byte >> 4]);
    text.push_back(kDigits[byte & 15]);
  }
  return text;
}

}  // namespace torch_hybrid_backend
