// AMX's tile registers in plain C++, so that kernels for it run on any processor. Each thread has
// registers of its own, as on the processor. Sources: Intel 64 and IA-32 Architectures Software
// Developer's Manual, volume 1 chapter 18 and volume 2 (LDTILECFG, TDPBF16PS, TDPFP16PS, TDPBUSD,
// TDPBSSD).
//
// What would fault, or give a result that kernels must not rely on, ends the process: a
// configuration that is none, an instruction without one, a tile that is too large for it.
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

constexpr int kTiles = 8, kRows = 16, kRowBytes = 64;

struct Registers {
  bool configured = false;
  int rows[kTiles] = {};
  int row_bytes[kTiles] = {};
  alignas(64) uint8_t data[kTiles][kRows][kRowBytes] = {};
};

thread_local Registers registers;
std::atomic<int> configured_threads{0};
std::atomic<int64_t> products{0};

void Require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "AMX emulation: %s\n", what);
  std::abort();
}

void RequireTile(int tile) {
  Require(registers.configured, "no configuration is loaded");
  Require(tile >= 0 && tile < kTiles && registers.rows[tile] > 0, "no such tile");
}

void RequireProduct(int sums, int a, int b) {
  for (const int tile : {sums, a, b}) RequireTile(tile);
  const Registers& r = registers;
  Require(sums != a && sums != b && a != b, "two operands are one register");
  Require(r.rows[sums] == r.rows[a] && r.row_bytes[a] / 4 == r.rows[b] &&
              r.row_bytes[sums] == r.row_bytes[b],
          "tiles do not fit");
  products.fetch_add(1, std::memory_order_relaxed);
}

void RequireLines(const uint8_t* memory, int64_t stride) {
  Require(reinterpret_cast<uintptr_t>(memory) % kRowBytes == 0 && stride % kRowBytes == 0,
          "rows of a tile are not lines of the caches");
}

float Flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

float OfBfloat16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float x = 0;
  std::memcpy(&x, &wide, 4);
  return Flushed(x);
}

// Denormal numbers are themselves here, unlike those of bfloat16.
float OfFloat16(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  float x = std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
  if (exponent == 0) x = std::ldexp(static_cast<float>(fraction), -24);
  if (exponent == 31) x = fraction != 0 ? NAN : INFINITY;
  return bits & 0x8000 ? -x : x;
}

// One row of sums: for each column the even products and the odd ones by fused multiply-adds from
// zero, their sum, and that added; denormal results are zero.
template <float (*Of)(uint16_t)>
void FloatRow(const uint16_t* a, const float (*b)[2][kRows], int words, float* sums) {
  float even[kRows] = {}, odd[kRows] = {};
  for (int k = 0; k < words; ++k) {
    const float a0 = Of(a[2 * k]), a1 = Of(a[2 * k + 1]);
    for (int n = 0; n < kRows; ++n) even[n] = Flushed(std::fma(a0, b[k][0][n], even[n]));
    for (int n = 0; n < kRows; ++n) odd[n] = Flushed(std::fma(a1, b[k][1][n], odd[n]));
  }
  for (int n = 0; n < kRows; ++n) sums[n] = Flushed(Flushed(sums[n]) + Flushed(even[n] + odd[n]));
}

template <float (*Of)(uint16_t)>
void FloatProduct(int sums, int a, int b) {
  RequireProduct(sums, a, b);
  Registers& r = registers;
  float wide[kRows][2][kRows] = {};
  for (int k = 0; k < r.rows[b]; ++k) {
    uint16_t row[kRowBytes / 2];
    std::memcpy(row, r.data[b][k], kRowBytes);
    for (int n = 0; n < kRows; ++n) {
      for (const int odd : {0, 1}) wide[k][odd][n] = Of(row[2 * n + odd]);
    }
  }
  for (int m = 0; m < r.rows[sums]; ++m) {
    float total[kRowBytes / 4];
    std::memcpy(total, r.data[sums][m], kRowBytes);
    uint16_t row[kRowBytes / 2];
    std::memcpy(row, r.data[a][m], kRowBytes);
    FloatRow<Of>(row, wide, r.row_bytes[a] / 4, total);
    std::memcpy(r.data[sums][m], total, r.row_bytes[sums]);
  }
}

template <typename A>
void IntegerProduct(int sums, int a, int b) {
  RequireProduct(sums, a, b);
  Registers& r = registers;
  for (int m = 0; m < r.rows[sums]; ++m) {
    uint32_t total[kRowBytes / 4];
    std::memcpy(total, r.data[sums][m], kRowBytes);
    const A* row = reinterpret_cast<const A*>(r.data[a][m]);
    for (int k = 0; k < r.row_bytes[a]; ++k) {
      const int8_t* column = reinterpret_cast<const int8_t*>(r.data[b][k / 4]) + k % 4;
      for (int n = 0; n < r.row_bytes[sums] / 4; ++n) {
        total[n] += static_cast<uint32_t>(static_cast<int32_t>(row[k]) * column[4 * n]);
      }
    }
    std::memcpy(r.data[sums][m], total, kRowBytes);
  }
}

}  // namespace

// By LLVM's names of the intrinsics, behind "emulated_".
extern "C" {

void emulated_ldtilecfg(const uint8_t* memory) {
  Require(memory[0] == 1, "the palette is not 1");
  Registers& r = registers;
  if (!r.configured) configured_threads.fetch_add(1);
  r = Registers();
  r.configured = true;
  for (int tile = 0; tile < kTiles; ++tile) {
    uint16_t row_bytes = 0;
    std::memcpy(&row_bytes, memory + 16 + 2 * tile, 2);
    r.row_bytes[tile] = row_bytes;
    r.rows[tile] = memory[48 + tile];
    Require(row_bytes <= kRowBytes && r.rows[tile] <= kRows, "a tile is too large");
  }
}

void emulated_tilerelease() {
  if (registers.configured) configured_threads.fetch_sub(1);
  registers = Registers();
}

void emulated_tilezero(int tile) {
  RequireTile(tile);
  std::memset(registers.data[tile], 0, sizeof registers.data[tile]);
}

void emulated_tileloadd64(int tile, const uint8_t* memory, int64_t stride) {
  emulated_tilezero(tile);
  RequireLines(memory, stride);
  for (int row = 0; row < registers.rows[tile]; ++row) {
    std::memcpy(registers.data[tile][row], memory + row * stride, registers.row_bytes[tile]);
  }
}

// A hint to the caches alone.
void emulated_tileloaddt164(int tile, const uint8_t* memory, int64_t stride) {
  emulated_tileloadd64(tile, memory, stride);
}

void emulated_tilestored64(int tile, uint8_t* memory, int64_t stride) {
  RequireTile(tile);
  RequireLines(memory, stride);
  for (int row = 0; row < registers.rows[tile]; ++row) {
    std::memcpy(memory + row * stride, registers.data[tile][row], registers.row_bytes[tile]);
  }
}

void emulated_tdpbf16ps(int sums, int a, int b) { FloatProduct<OfBfloat16>(sums, a, b); }
void emulated_tdpfp16ps(int sums, int a, int b) { FloatProduct<OfFloat16>(sums, a, b); }
void emulated_tdpbusd(int sums, int a, int b) { IntegerProduct<uint8_t>(sums, a, b); }
void emulated_tdpbssd(int sums, int a, int b) { IntegerProduct<int8_t>(sums, a, b); }

// What tests ask: threads that have not released their tiles, and products so far.
int configured_threads_now() { return configured_threads.load(); }
int64_t products_so_far() { return products.load(); }
}
