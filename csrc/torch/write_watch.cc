#include "write_watch.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cinttypes>
#include <cstdio>
#include <iterator>
#include <memory>
#include <mutex>
#include <utility>

#include "any_in_parallel.h"

namespace torch_hybrid_backend {
namespace {

// The kernel's interface, as include/uapi/linux/{userfaultfd,fs}.h of Linux 6.7 have it: the
// headers that this is built with are often older than the kernel that it runs on.
struct UffdApi {
  uint64_t api, features, ioctls;
};
struct UffdRange {
  uint64_t start, length;
};
struct UffdRegister {
  UffdRange range;
  uint64_t mode, ioctls;
};
struct PageRegion {
  uint64_t start, end, categories;
};
struct ScanArguments {
  uint64_t size, flags, start, end, walk_end, regions, region_count, max_pages;
  uint64_t category_inverted, category_mask, category_anyof_mask, return_mask;
};

constexpr uint64_t kUffdVersion = 0xAA;
constexpr uint64_t kWriteProtectAsync = 1 << 15;
constexpr uint64_t kWriteProtectMode = 1 << 1;
constexpr int kUserModeOnly = 1;  // what needs no privilege
constexpr uint64_t kProtectMatching = 1 << 0;
constexpr uint64_t kOnlyWatched = 1 << 1;  // an error for memory that is not watched
constexpr uint64_t kWritten = 1 << 1;
constexpr uint64_t kFile = 1 << 2;  // a page of a file or of shared memory

#ifdef __linux__
const unsigned long kUffdioApi = _IOWR(0xAA, 0x3F, UffdApi);
const unsigned long kUffdioRegister = _IOWR(0xAA, 0x00, UffdRegister);
const unsigned long kUffdioUnregister = _IOR(0xAA, 0x01, UffdRange);
const unsigned long kPagemapScan = _IOWR('f', 16, ScanArguments);
#endif

// Each run is a mapping of its own to the kernel, of which a process may have 65,530.
constexpr size_t kMaxRuns = 2048;
// A page table's worth: 6 us where it is in no cache. Waking the other threads takes a microsecond
// or a few.
constexpr uintptr_t kPagesPerPart = 512;
constexpr int64_t kPartsPerTask = 8;

uintptr_t PageBytes() {
  static const auto bytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

using Ranges = std::vector<AddressRange>;

// What both have; both sorted and disjoint.
Ranges Common(const Ranges& left, const Ranges& right) {
  Ranges common;
  for (auto a = left.begin(), b = right.begin(); a != left.end() && b != right.end();) {
    const AddressRange both{std::max(a->begin, b->begin), std::min(a->end, b->end)};
    if (both.begin < both.end) common.push_back(both);
    a->end < b->end ? ++a : ++b;
  }
  return common;
}

// `ranges` without what `others` have; both sorted and disjoint.
Ranges Without(const Ranges& ranges, const Ranges& others) {
  Ranges left;
  auto other = others.begin();
  for (AddressRange range : ranges) {
    while (other != others.end() && other->end <= range.begin) ++other;
    for (auto next = other; next != others.end() && next->begin < range.end; ++next) {
      if (range.begin < next->begin) left.push_back({range.begin, next->begin});
      range.begin = std::max(range.begin, next->end);
    }
    if (range.begin < range.end) left.push_back(range);
  }
  return left;
}

// The ranges, cut into pieces of at most `size` bytes.
Ranges Cut(const Ranges& ranges, uintptr_t size) {
  Ranges pieces;
  for (AddressRange range : ranges) {
    for (; range.end - range.begin > size; range.begin += size) {
      pieces.push_back({range.begin, range.begin + size});
    }
    pieces.push_back(range);
  }
  return pieces;
}

// What of this process's memory other processes may write to.
Ranges SharedMappings() {
  Ranges shared;
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> maps(std::fopen("/proc/self/maps", "re"),
                                                             &std::fclose);
  std::array<char, 4096> line{};
  while (maps && std::fgets(line.data(), static_cast<int>(line.size()), maps.get()) != nullptr) {
    AddressRange range{};
    std::array<char, 5> permissions{};
    if (std::sscanf(line.data(), "%" SCNxPTR "-%" SCNxPTR " %4s", &range.begin, &range.end,
                    permissions.data()) == 3 &&
        permissions[3] == 's') {
      shared.push_back(range);
    }
  }
  return shared;
}

// A page that nobody has touched has no category yet.
void Touch(const Ranges& pages) {
  for (const AddressRange& range : pages) {
    for (uintptr_t page = range.begin; page < range.end; page += PageBytes()) {
      static_cast<void>(*reinterpret_cast<const volatile char*>(page));
    }
  }
}

class FileDescriptor {
 public:
  explicit FileDescriptor(int number) : number_(number) {}
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  ~FileDescriptor() {
    if (number_ >= 0) close(number_);
  }
  int number() const { return number_; }

 private:
  int number_;
};

}  // namespace

// What all watches of a process share. A forked child has one of its own: the kernel's objects of
// its parent are about its parent's memory.
class WriteTracker {
 public:
  static WriteTracker& OfProcess() {
    static std::once_flag once;
    std::call_once(once, [] {
      current_ = new WriteTracker;  // never destroyed: watches may outlive all static objects
      pthread_atfork(nullptr, nullptr, [] {
        WriteTracker* const of_parent = current_;
        current_ = new WriteTracker;
        of_parent->userfault_.reset();
        of_parent->pagemap_.reset();
      });
    });
    return *current_;
  }

  // While a thread holds one, others that find no page written must ask again behind it: it may
  // just have taken, and protected anew, the pages that they look at.
  class Taking {
   public:
    explicit Taking(WriteTracker& tracker) : lock_(tracker.mutex_), takers_(tracker.takers_) {
      ++takers_;
    }
    Taking(const Taking&) = delete;
    Taking& operator=(const Taking&) = delete;
    ~Taking() { --takers_; }

   private:
    std::lock_guard<std::mutex> lock_;
    std::atomic<int>& takers_;
  };

  bool IsSupported() {
    const Taking taking(*this);
    if (!userfault_) Open();
    return userfault_->number() >= 0;
  }

  bool is_taking() const { return takers_ != 0; }

  void Add(WriteWatch& watch, const Ranges& pages) {
    if (!IsSupported() || pages.size() > kMaxRuns) return;
    const Taking taking(*this);
    for (const AddressRange& range : pages) {
      if (Register(range)) watch.pages_.push_back(range);
    }
    Touch(watch.pages_);
    DropShared(watch.pages_);
    // Not UFFDIO_WRITEPROTECT: a write that a watch of the same page has not seen yet would be
    // lost.
    const auto written = TakeWritten(watch.pages_);
    if (written) {
      Tell(*written, &watch);
      watches_.push_back(&watch);
    } else {
      Unregister(watch.pages_);
      watch.pages_.clear();
    }
    CutIntoParts(watch);
  }

  void Leave(WriteWatch& watch, const Ranges& pages) {
    const Taking taking(*this);
    watch.pages_ = Without(watch.pages_, pages);
    watch.pending_ = Without(PagesOf(std::move(watch.pending_)), pages);
    Unregister(pages);
    CutIntoParts(watch);
  }

  void Remove(WriteWatch& watch) {
    const Taking taking(*this);
    watches_.erase(std::remove(watches_.begin(), watches_.end(), &watch), watches_.end());
    Unregister(watch.pages_);
  }

  // Whether a page of the range was written to; true where that is not known.
  bool IsWritten(const AddressRange& range) const {
    PageRegion region{};
    ScanArguments scan = Scan(range, kOnlyWatched, kWritten, &region, 1);
    scan.max_pages = 1;
    return Run(scan) != 0;
  }

  std::optional<Ranges> Take(WriteWatch& watch) {
    const Taking taking(*this);
    auto written = TakeWritten(watch.pages_);
    if (!written) return std::nullopt;
    Tell(*written, &watch);
    written->insert(written->end(), watch.pending_.begin(), watch.pending_.end());
    watch.pending_.clear();
    watch.has_pending_ = false;
    return PagesOf(std::move(*written));
  }

 private:
  void Open() {
    int userfault = -1;
    int pagemap = -1;
#ifdef __linux__
    userfault = static_cast<int>(syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | kUserModeOnly));
    pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    UffdApi api{kUffdVersion, kWriteProtectAsync, 0};
    if (pagemap < 0 || userfault < 0 || ioctl(userfault, kUffdioApi, &api) != 0) {
      if (userfault >= 0) close(userfault);
      userfault = -1;
    }
#endif
    userfault_ = std::make_unique<FileDescriptor>(userfault);
    pagemap_ = std::make_unique<FileDescriptor>(pagemap);
  }

  static void CutIntoParts(WriteWatch& watch) {
    watch.parts_.Set(
        std::make_shared<const Ranges>(Cut(watch.pages_, kPagesPerPart * PageBytes())));
  }

  bool Register(const AddressRange& range) const {
#ifdef __linux__
    UffdRegister request{{range.begin, range.end - range.begin}, kWriteProtectMode, 0};
    return ioctl(userfault_->number(), kUffdioRegister, &request) == 0;
#else
    return false;
#endif
  }

  // What no watch needs any more. Where the memory is gone meanwhile there is nothing to undo.
  void Unregister(Ranges pages) const {
    for (const WriteWatch* other : watches_) pages = Without(pages, other->pages_);
#ifdef __linux__
    for (const AddressRange& range : pages) {
      UffdRange request{range.begin, range.end - range.begin};
      static_cast<void>(ioctl(userfault_->number(), kUffdioUnregister, &request));
    }
#endif
  }

  void DropShared(Ranges& pages) const {
    const bool has_files = std::any_of(pages.begin(), pages.end(), [this](const auto& range) {
      PageRegion region{};
      ScanArguments scan = Scan(range, 0, kFile, &region, 1);
      scan.max_pages = 1;
      return Run(scan) != 0;
    });
    if (!has_files) return;  // the usual case; reading all mappings takes a millisecond
    const Ranges shared = Common(pages, SharedMappings());
    pages = Without(pages, shared);
    Unregister(shared);
  }

  static ScanArguments Scan(const AddressRange& range, uint64_t flags, uint64_t category,
                            PageRegion* regions, size_t count) {
    ScanArguments scan{};
    scan.size = sizeof(scan);
    scan.flags = flags;
    scan.start = range.begin;
    scan.end = range.end;
    scan.regions = reinterpret_cast<uint64_t>(regions);
    scan.region_count = count;
    // Nothing else: the kernel's fast way, 1 ns for a page instead of 27, is for this alone.
    scan.category_mask = category;
    scan.return_mask = category;
    return scan;
  }

  // The number of regions found, or below 0.
  int Run(ScanArguments& scan) const {
#ifdef __linux__
    return ioctl(pagemap_->number(), kPagemapScan, &scan);
#else
    return -1;
#endif
  }

  // The pages of `pages` that were written to, which are protected anew.
  std::optional<Ranges> TakeWritten(const Ranges& pages) const {
    Ranges written;
    std::array<PageRegion, 64> regions{};
    for (AddressRange range : pages) {
      while (range.begin < range.end) {
        ScanArguments scan =
            Scan(range, kProtectMatching | kOnlyWatched, kWritten, regions.data(), regions.size());
        const int found = Run(scan);
        if (found < 0) return std::nullopt;
        for (int i = 0; i < found; ++i) written.push_back({regions[i].start, regions[i].end});
        range.begin = scan.walk_end;
      }
    }
    return written;
  }

  void Tell(const Ranges& written, const WriteWatch* taker) const {
    for (WriteWatch* other : watches_) {
      const Ranges shared = other == taker ? Ranges() : Common(written, other->pages_);
      if (shared.empty()) continue;
      other->pending_.insert(other->pending_.end(), shared.begin(), shared.end());
      other->has_pending_ = true;
    }
  }

  static inline WriteTracker* current_ = nullptr;

  std::mutex mutex_;
  std::atomic<int> takers_{0};
  std::unique_ptr<FileDescriptor> userfault_;  // kept open: closing it ends all watches
  std::unique_ptr<FileDescriptor> pagemap_;
  std::vector<WriteWatch*> watches_;
};

std::vector<AddressRange> PagesOf(std::vector<AddressRange> ranges) {
  const uintptr_t page = PageBytes();
  std::sort(ranges.begin(), ranges.end(),
            [](const auto& a, const auto& b) { return a.begin < b.begin; });
  Ranges pages;
  for (const AddressRange& range : ranges) {
    if (range.begin == range.end) continue;
    const uintptr_t begin = range.begin / page * page;
    const uintptr_t end = (range.end + page - 1) / page * page;
    if (!pages.empty() && begin <= pages.back().end) {
      pages.back().end = std::max(pages.back().end, end);
    } else {
      pages.push_back({begin, end});
    }
  }
  return pages;
}

bool WriteWatch::IsSupported() { return WriteTracker::OfProcess().IsSupported(); }

WriteWatch::WriteWatch(std::vector<AddressRange> ranges) : tracker_(&WriteTracker::OfProcess()) {
  tracker_->Add(*this, PagesOf(std::move(ranges)));
}

WriteWatch::~WriteWatch() {
  if (tracker_ == &WriteTracker::OfProcess()) tracker_->Remove(*this);
}

bool WriteWatch::MayBeWritten() const {
  if (tracker_ != &WriteTracker::OfProcess()) return true;
  const std::shared_ptr<const Ranges> parts = parts_.Get();
  const auto is_written = [&](size_t part) { return tracker_->IsWritten((*parts)[part]); };
  // In this order: what another thread takes while the pages are looked at is seen behind them.
  return AnyInParallel(parts->size(), kPartsPerTask, is_written) || tracker_->is_taking() ||
         has_pending_;
}

std::optional<std::vector<AddressRange>> WriteWatch::TakeWritten() {
  if (tracker_ != &WriteTracker::OfProcess()) return std::nullopt;
  return tracker_->Take(*this);
}

void WriteWatch::Leave(const AddressRange& pages) {
  if (tracker_ == &WriteTracker::OfProcess()) tracker_->Leave(*this, {pages});
}

}  // namespace torch_hybrid_backend
