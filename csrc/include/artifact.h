// Artifact: a .hybrid file in memory, checked (docs/hybrid_format.md). Nothing of it has run.
//
// Use: Open, then Read; then plans are made by PlanOf (artifact_plan.h), constants are read where
// they lie. Whoever wants to know where a file is from verifies `signatures` between the two:
// checksums find damage alone, and Read trusts nothing but works on all that is in the file.
//
// The file is mapped once: other processes that open it share its memory, page by page, until a
// process writes to a page. Later writes to the file may show through, hence the owner and
// permissions that a shared file must have. With `share` false it is copied instead. Segments that
// are coded in the file are decoded when it is read, to memory of this process.
//
// Ownership: it owns the memory of all segments and constants; its users share it. The file may be
// deleted or replaced once it is open, but not be truncated while it is shared (SIGBUS).
//
// Failure: Open, Read and LibraryPath, and SegmentBytes and ConstantAddress for what only other
// variants use (manifest.h), throw std::runtime_error that begins with the file's path and
// says what is wrong and what to do, whatever the bytes are. Memory is bounded by the file's size,
// or 65 times that where segments are coded, and a constant.
#ifndef TORCH_HYBRID_BACKEND_ARTIFACT_H_
#define TORCH_HYBRID_BACKEND_ARTIFACT_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "manifest.h"

namespace torch_hybrid_backend {

// Ed25519, of the manifest's text, as it lies in the file. Not verified.
struct Signature {
  std::array<uint8_t, 32> key;
  std::array<uint8_t, 64> signature;
};
static_assert(sizeof(Signature) == 96);

class Artifact {
 public:
  // Reads the header and the manifest's text, and compares the text's checksum. Until Read has
  // returned, only `manifest_text` and `signatures` may be asked for.
  static std::shared_ptr<Artifact> Open(const std::string& path, bool share);
  Artifact(const Artifact&) = delete;
  Artifact& operator=(const Artifact&) = delete;
  ~Artifact();

  // Checks and decodes all the rest, once. `threads`: how many do so; they end before it returns.
  // `runs`: the variant for this machine is chosen, and a file that has none is refused; of a file
  // with several, only what that one uses is checked, and may be asked for. Without, all variants
  // are checked, `manifest` is that of the last, and there is no library.
  void Read(unsigned threads, bool runs = true);

  const std::string& path() const { return path_; }
  const std::string& manifest_text() const { return manifest_text_; }
  const Manifest& manifest() const { return manifest_; }
  // The number of the variant that `manifest` is of (manifest.h).
  size_t variant() const { return variant_; }
  const std::vector<Signature>& signatures() const { return signatures_; }

  // Both by number, which must be one of the manifest's; decoded. The memory may be written to:
  // that changes it for all users of this object, and neither the file nor other processes.
  std::span<uint8_t> SegmentBytes(size_t segment) const;
  void* ConstantAddress(size_t constant) const;

  // True if the file has a library for this machine.
  bool HasLibrary() const { return target_.has_value(); }
  // Of the file's library for this machine: its segment, and the path that the loader opens it by,
  // a copy in memory that nobody can change, while this object lives.
  const Segment& LibrarySegment() const;
  std::string LibraryPath() const;

 private:
  explicit Artifact(const std::string& path) : path_(path) {}

  void ReadManifestText(bool share);
  void ReadHeader(int file, uint64_t file_bytes);
  void Map(int file, uint64_t file_bytes, bool share);
  void CheckPadding() const;
  void CheckSegments(unsigned threads) const;
  void DecodeSegments(unsigned threads);
  void CheckPlans() const;
  std::span<uint8_t> Bytes(uint64_t offset, uint64_t size) const {
    return {memory_ + offset, static_cast<size_t>(size)};
  }

  const std::string path_;
  uint8_t* memory_ = nullptr;  // of the whole file; mapped
  size_t memory_bytes_ = 0;
  uint8_t* decoded_ = nullptr;  // of all coded segments; mapped
  size_t decoded_bytes_ = 0;
  std::vector<uint64_t> decoded_offsets_;  // by segment
  uint64_t manifest_bytes_ = 0;
  Sha256Digest manifest_digest_{};
  std::string manifest_text_;
  Manifest manifest_;
  size_t variant_ = 0;
  std::vector<bool> used_;  // by segment: checked, and decoded
  std::vector<Signature> signatures_;
  std::optional<size_t> target_;

  mutable std::mutex mutex_;
  mutable int library_file_ = -1;
  mutable std::string library_path_;
};

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_ARTIFACT_H_
