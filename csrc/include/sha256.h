// SHA-256 (FIPS 180-4), by the processor's own instructions where x86-64 and
// AArch64 have them.
//
// Use: Sha256Of for bytes that lie in one piece; Sha256, Update by Update, for those that come in
// several.
//
// Failure: none.
#ifndef TORCH_HYBRID_BACKEND_SHA256_H_
#define TORCH_HYBRID_BACKEND_SHA256_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace torch_hybrid_backend {

using Sha256Digest = std::array<uint8_t, 32>;

// kPortable: without the instructions, for tests of both forms.
enum class Sha256Form { kFastest, kPortable };

class Sha256 {
 public:
  explicit Sha256(Sha256Form form = Sha256Form::kFastest);

  void Update(std::span<const uint8_t> bytes);
  // The digest of all bytes so far. The object cannot be used afterwards.
  Sha256Digest Finish();

 private:
  using State = std::array<uint32_t, 8>;
  using Compress = void (*)(State& state, const uint8_t* blocks, size_t count);
  static constexpr size_t kBlockBytes = 64;

  static void CompressPortably(State& state, const uint8_t* blocks, size_t count);
  static void CompressByInstructions(State& state, const uint8_t* blocks, size_t count);

  Compress compress_;
  State state_;
  uint64_t total_bytes_ = 0;
  std::array<uint8_t, kBlockBytes> pending_;  // the first total_bytes_ % kBlockBytes are in use
};

Sha256Digest Sha256Of(std::span<const uint8_t> bytes, Sha256Form form = Sha256Form::kFastest);

// True if this processor has the instructions.
bool HasSha256Instructions();

// Two lower-case hexadecimal digits for each byte.
std::string Hexadecimal(std::span<const uint8_t> bytes);

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_SHA256_H_
