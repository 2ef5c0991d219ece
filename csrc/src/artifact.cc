#include "artifact.h"

#include <fcntl.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <exception>
#include <functional>
#include <new>
#include <numeric>
#include <stdexcept>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

#include "coded_segment.h"
#include "elf_header.h"
#include "tile_permission.h"

namespace torch_hybrid_backend {
namespace {

constexpr std::string_view kMagic = "\x89HYBRID\n";
constexpr size_t kMostSignatures = 41;
constexpr size_t kSignatureBytes = 96;
constexpr size_t kSignaturesOffset = 64;
constexpr size_t kChecksumOffset = kHybridPage - 32;

[[noreturn]] void Refuse(const std::string& why) { throw std::runtime_error(why); }

[[noreturn]] void RefuseDamaged(const std::string& why) {
  Refuse("it is damaged: " + why + ": copy it again, or export the model again");
}

std::string SystemError() { return std::generic_category().message(errno); }

// Throws what `action` threw, behind the file's path.
template <typename Action>
auto Named(const std::string& path, const Action& action) {
  try {
    return action();
  } catch (const std::bad_alloc&) {
    throw std::runtime_error(path + ": there is too little memory to open it");
  } catch (const std::exception& error) {
    throw std::runtime_error(path + ": " + error.what());
  }
}

// Does the work for each number below `count`, on up to so many threads. Throws what one threw,
// when all have ended.
void OnThreads(unsigned threads, size_t count, const std::function<void(size_t)>& work) {
  std::atomic<size_t> next{0};
  std::mutex mutex;
  std::exception_ptr thrown;
  const auto run = [&] {
    try {
      for (size_t i = next++; i < count; i = next++) work(i);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex);
      thrown = std::current_exception();
      next = count;
    }
  };
  std::vector<std::thread> helpers;
  const size_t wanted = std::min<size_t>(std::max(threads, 1U), count);
  helpers.reserve(wanted);
  try {
    while (helpers.size() + 1 < wanted) helpers.emplace_back(run);
  } catch (const std::system_error&) {
    // The system has no more threads: fewer do.
  }
  run();
  for (std::thread& helper : helpers) helper.join();
  if (thrown) std::rethrow_exception(thrown);
}

// A file descriptor that is closed with the object.
class File {
 public:
  explicit File(int descriptor) : descriptor_(descriptor) {}
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  int get() const { return descriptor_; }
  int Release() { return std::exchange(descriptor_, -1); }

 private:
  int descriptor_;
};

template <typename Number>
Number LittleEndian(const uint8_t* bytes) {
  Number number = 0;
  for (size_t i = 0; i < sizeof(Number); ++i) number |= Number{bytes[i]} << (8 * i);
  return number;
}

bool IsZero(std::span<const uint8_t> bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](uint8_t byte) { return byte == 0; });
}

void ReadInto(int file, std::span<uint8_t> memory) {
  for (size_t done = 0; done < memory.size();) {
    const ssize_t got =
        pread(file, memory.data() + done, memory.size() - done, static_cast<off_t>(done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) Refuse("it cannot be read: " + SystemError());
    if (got == 0) RefuseDamaged("it became shorter while it was read");
    done += got;
  }
}

void WriteFrom(int file, std::span<const uint8_t> memory) {
  while (!memory.empty()) {
    const ssize_t written = write(file, memory.data(), memory.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) Refuse("its library cannot be copied to memory: " + SystemError());
    memory = memory.subspan(written);
  }
}

void CheckPermissions(const struct stat& status) {
  constexpr char kCure[] =
      ", so that they could change it while it is in use: open it with share=False, which copies "
      "it, or ";
  if (status.st_uid != 0 && status.st_uid != geteuid()) {
    Refuse("it belongs to another user" + std::string(kCure) + "make it yours: chown");
  }
  if ((status.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
    Refuse("others may write to it" + std::string(kCure) + "forbid it: chmod go-w");
  }
}

// A path of the open file that no library was ever opened under: the loader takes one of equal name
// for the same library. Descriptors are used again, so a count is written into the path, its bits
// as "/." and "/". The runtime's Python side makes such paths too, which begin otherwise
// (runtime/native/libraries.py).
std::string UniquePath(int file) {
  static std::atomic<uint64_t> count{0};
  std::string bits;
  for (uint64_t left = ++count; left > 0; left >>= 1) bits += (left & 1) != 0 ? "/." : "/";
  return "/proc/./self/fd" + bits + "/" + std::to_string(file);
}

// This machine as this process may use it. Asks for AMX where a library would use it.
Processor UsableBy(const ManifestText& text) {
  const auto is_amx = [](const std::string& feature) { return feature.starts_with("amx"); };
  bool wanted = false;
  for (size_t variant = 0; variant < text.variants(); ++variant) {
    for (const Json& target : text.Of(variant, "targets").AsList()) {
      for (const Json& feature : target["features"].AsList()) wanted |= is_amx(feature.AsString());
    }
  }
  Processor machine = ThisProcessor();
  if (wanted && !MayUseTiles()) std::erase_if(machine.features, is_amx);
  return machine;
}

// What `read` reads of a manifest.
template <typename Read>
auto AsDemanded(const Read& read) {
  try {
    return read();
  } catch (const std::runtime_error& error) {
    Refuse(std::string("its manifest is not as the format demands: ") + error.what() +
           ": export the model again");
  }
}

}  // namespace

std::shared_ptr<Artifact> Artifact::Open(const std::string& path, bool share) {
  if (const size_t zero = path.find('\0'); zero != path.npos) {
    Refuse(path.substr(0, zero) + ": no path of a file has a character 0 in it");
  }
  return Named(path, [&] {
    std::shared_ptr<Artifact> artifact(new Artifact(path));
    artifact->ReadManifestText(share);
    return artifact;
  });
}

Artifact::~Artifact() {
  if (memory_ != nullptr) munmap(memory_, memory_bytes_);
  if (decoded_ != nullptr) munmap(decoded_, decoded_bytes_);
  if (library_file_ >= 0) close(library_file_);
}

void Artifact::Read(unsigned threads, bool runs) {
  Named(path_, [&] {
    const auto text = AsDemanded([&] { return ManifestText(manifest_text_, memory_bytes_); });
    const size_t count = AsDemanded([&] { return text.variants(); });
    size_t first = 0, last = count - 1;
    if (runs) {
      const VariantChoice choice = AsDemanded([&] { return ChooseVariant(text, UsableBy(text)); });
      if (!choice.refusal.empty()) Refuse(choice.refusal);
      first = last = choice.variant;
      target_ = choice.target;
    }
    for (variant_ = first;; ++variant_) {
      manifest_ = AsDemanded([&] { return ReadManifest(text, variant_); });
      if (variant_ == first) {
        used_ = runs && count > 1 ? manifest_.UsedSegments()
                                  : std::vector<bool>(manifest_.segments.size(), true);
        CheckPadding();
        CheckSegments(threads);
        DecodeSegments(threads);
      }
      CheckPlans();
      if (variant_ == last) break;
    }
  });
}

void Artifact::ReadManifestText(bool share) {
  // Not blocking: a pipe would wait for its writer.
  const File file(open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.get() < 0) Refuse("it cannot be opened: " + SystemError());
  struct stat status{};
  if (fstat(file.get(), &status) != 0) Refuse("it cannot be opened: " + SystemError());
  if (!S_ISREG(status.st_mode)) Refuse("it is no regular file: name one that export wrote");
  if (share) CheckPermissions(status);
  const auto file_bytes = static_cast<uint64_t>(status.st_size);
  ReadHeader(file.get(), file_bytes);
  Map(file.get(), file_bytes, share);
  const std::span<uint8_t> text = Bytes(kHybridPage, manifest_bytes_);
  manifest_text_.assign(text.begin(), text.end());
  if (Sha256Of({reinterpret_cast<const uint8_t*>(manifest_text_.data()), manifest_text_.size()}) !=
      manifest_digest_) {
    RefuseDamaged("the checksum of its manifest is wrong");
  }
}

void Artifact::ReadHeader(int file, uint64_t file_bytes) {
  std::array<uint8_t, kHybridPage> header{};
  const std::span<uint8_t> there(header.data(), std::min<size_t>(file_bytes, header.size()));
  ReadInto(file, there);
  if (there.size() < kMagic.size() ||
      !std::equal(kMagic.begin(), kMagic.end(), header.begin(),
                  [](char a, uint8_t b) { return static_cast<uint8_t>(a) == b; })) {
    Refuse("it is no .hybrid file, as it begins otherwise: name one that export wrote");
  }
  if (there.size() < header.size()) {
    RefuseDamaged("its " + std::to_string(file_bytes) + " bytes end within the header");
  }
  const auto format = LittleEndian<uint32_t>(header.data() + 8);
  if (format > kHybridFormat) {
    Refuse("it is of format " + std::to_string(format) + ", and this build reads format " +
           std::to_string(kHybridFormat) +
           ": install a newer torch_hybrid_backend, one that reads format " +
           std::to_string(format));
  }
  const auto checksum = Sha256Of(std::span(header).first(kChecksumOffset));
  if (format != kHybridFormat ||
      !std::equal(checksum.begin(), checksum.end(), header.begin() + kChecksumOffset)) {
    RefuseDamaged("the checksum of its header is wrong");
  }
  const auto said_bytes = LittleEndian<uint64_t>(header.data() + 56);
  if (said_bytes != file_bytes) {
    RefuseDamaged("it has " + std::to_string(file_bytes) + " bytes instead of " +
                  std::to_string(said_bytes));
  }
  const auto count = LittleEndian<uint32_t>(header.data() + 12);
  manifest_bytes_ = LittleEndian<uint64_t>(header.data() + 16);
  if (count > kMostSignatures || manifest_bytes_ > Json::kMostUntrustedBytes ||
      manifest_bytes_ > file_bytes - kHybridPage) {
    Refuse("its header is not as the format demands: " + std::to_string(count) +
           " signatures of at most 41, a manifest of " + std::to_string(manifest_bytes_) +
           " bytes, of at most 16 MiB and within the file: export the model again");
  }
  std::copy_n(header.begin() + 24, manifest_digest_.size(), manifest_digest_.begin());
  const uint8_t* at = header.data() + kSignaturesOffset;
  for (uint32_t i = 0; i < count; ++i) {
    Signature& read = signatures_.emplace_back();
    std::copy_n(at, read.key.size(), read.key.begin());
    std::copy_n(at + read.key.size(), read.signature.size(), read.signature.begin());
    at += kSignatureBytes;
  }
  if (!IsZero({at, header.data() + kChecksumOffset})) {
    Refuse(
        "its header is not as the format demands: what no signature uses must be zero: export "
        "the model again");
  }
}

void Artifact::Map(int file, uint64_t file_bytes, bool share) {
  // Writable, as tensors are: a page that is written to becomes this process's own.
  void* const memory =
      mmap(nullptr, file_bytes, PROT_READ | PROT_WRITE,
           share ? MAP_PRIVATE : MAP_PRIVATE | MAP_ANONYMOUS, share ? file : -1, 0);
  if (memory == MAP_FAILED) {
    Refuse("its " + std::to_string(file_bytes) + " bytes cannot be mapped: " + SystemError());
  }
  memory_ = static_cast<uint8_t*>(memory);
  memory_bytes_ = file_bytes;
  if (!share) ReadInto(file, {memory_, memory_bytes_});
}

void Artifact::CheckPadding() const {
  uint64_t end = kHybridPage + manifest_bytes_;
  for (const Segment& segment : manifest_.segments) {
    if (!IsZero(Bytes(end, segment.offset - end))) {
      RefuseDamaged("bytes between its parts are not zero");
    }
    end = segment.offset + segment.size;
  }
}

void Artifact::CheckSegments(unsigned threads) const {
  // The largest first: what is left for the end is small.
  std::vector<size_t> order(manifest_.segments.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](size_t one, size_t other) {
    return manifest_.segments[one].size > manifest_.segments[other].size;
  });
  std::erase_if(order, [&](size_t i) { return !used_[i]; });
  OnThreads(threads, order.size(), [&](size_t i) {
    const Segment& segment = manifest_.segments[order[i]];
    if (Sha256Of(Bytes(segment.offset, segment.size)) != segment.digest) {
      RefuseDamaged("the checksum of its segment " + Quoted(segment.name) + " is wrong");
    }
  });
}

void Artifact::DecodeSegments(unsigned threads) {
  decoded_offsets_.resize(manifest_.segments.size());
  for (size_t i = 0; i < decoded_offsets_.size(); ++i) {
    const Segment& segment = manifest_.segments[i];
    decoded_offsets_[i] = decoded_bytes_;
    if (segment.is_coded && used_[i]) {
      decoded_bytes_ += (segment.decoded + kHybridPage - 1) / kHybridPage * kHybridPage;
    }
  }
  if (decoded_bytes_ == 0) return;
  void* const memory =
      mmap(nullptr, decoded_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    Refuse("there is no memory for its " + std::to_string(decoded_bytes_) +
           " decoded bytes: " + SystemError());
  }
  decoded_ = static_cast<uint8_t*>(memory);
  std::vector<CodedBlock> blocks;
  try {
    for (size_t i = 0; i < decoded_offsets_.size(); ++i) {
      const Segment& segment = manifest_.segments[i];
      if (!segment.is_coded || !used_[i]) continue;
      const auto own = BlocksOf(Bytes(segment.offset, segment.size), SegmentBytes(i));
      blocks.insert(blocks.end(), own.begin(), own.end());
    }
    OnThreads(threads, blocks.size(), [&](size_t i) { DecodeBlock(blocks[i]); });
  } catch (const std::runtime_error& error) {
    Refuse(std::string("its coded weights are not as the format demands: ") + error.what() +
           ": export the model again");
  }
}

void Artifact::CheckPlans() const {
  std::vector<std::optional<PlanOutline>> outlines(manifest_.segments.size());
  std::vector<bool> has_sizes(outlines.size());  // those are checked at each set of sizes
  for (const Entry& entry : manifest_.entries) {
    if (entry.any_sizes) has_sizes[entry.plan] = true;
  }
  std::string where;
  try {
    for (const Entry& entry : manifest_.entries) {
      if (entry.any_sizes) continue;
      where = "entry " + Quoted(entry.name) + ": ";
      if (has_sizes[entry.plan]) throw std::runtime_error("its plan is one for many sizes");
      if (!outlines[entry.plan]) {
        where = "segment " + Quoted(manifest_.segments[entry.plan].name) + ": ";
        const std::span<uint8_t> text = SegmentBytes(entry.plan);
        outlines[entry.plan] = OutlineOf(
            Json::ParseUntrusted({reinterpret_cast<const char*>(text.data()), text.size()}));
        where = "entry " + Quoted(entry.name) + ": ";
      }
      CheckEntry(manifest_, entry, *outlines[entry.plan]);
    }
  } catch (const std::runtime_error& error) {
    Refuse("its plans are not as the format demands: " + where + error.what() +
           ": export the model again");
  }
}

std::span<uint8_t> Artifact::SegmentBytes(size_t number) const {
  const Segment& segment = manifest_.segments[number];
  if (!used_[number]) {
    Refuse(path_ + ": segment " + Quoted(segment.name) + " is none of the variant that runs here");
  }
  if (!segment.is_coded) return Bytes(segment.offset, segment.size);
  return {decoded_ + decoded_offsets_[number], static_cast<size_t>(segment.decoded)};
}

void* Artifact::ConstantAddress(size_t number) const {
  const Constant& constant = manifest_.constants[number];
  return SegmentBytes(constant.segment).data() + constant.offset;
}

const Segment& Artifact::LibrarySegment() const {
  return manifest_.segments[manifest_.targets[target_.value()].library];
}

std::string Artifact::LibraryPath() const {
  return Named(path_, [&] {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (library_file_ >= 0) return library_path_;
    if (!target_) Refuse("it has no library of kernels");
    const Segment& segment = LibrarySegment();
    const auto mapped = Bytes(segment.offset, segment.size);
    // What is run is what is compared here: the mapped file could have changed since.
    const std::vector<uint8_t> library(mapped.begin(), mapped.end());
    if (Sha256Of(library) != segment.digest) RefuseDamaged("its library has changed");
    CheckIsForThisProcess(library);
    // glibc has a function for it from 2.27 on.
    File file(
        static_cast<int>(syscall(SYS_memfd_create, "hybrid", MFD_CLOEXEC | MFD_ALLOW_SEALING)));
    if (file.get() < 0) Refuse("its library cannot be copied to memory: " + SystemError());
    WriteFrom(file.get(), library);
    // Where the system knows no seals, only this process could write to it.
    fcntl(file.get(), F_ADD_SEALS, F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE);
    library_path_ = UniquePath(file.get());
    library_file_ = file.Release();
    return library_path_;
  });
}

}  // namespace torch_hybrid_backend
