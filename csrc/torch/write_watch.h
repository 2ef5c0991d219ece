// WriteWatch: tells which pages of memory were written to, by whoever and however.
//
// The kernel write-protects the pages, lets the first write to each go through, and remembers it
// (Linux 6.7: userfaultfd's asynchronous write protection and the ioctl PAGEMAP_SCAN). Asking costs
// about 0.3 us for each run of neighbouring pages and 1 ns for each page, 15 where the page table
// is in no cache; the first write to a page after each answer costs its writer a page fault, about
// 1 us.
//
// Seen is every write of this process, system calls included. Not seen are writes of other
// processes to shared memory, which is not watched therefore, and those of a device to memory that
// was pinned for it before.
//
// Ownership: it holds addresses, not memory: ask only while the memory is still mapped. A watch
// may outlive it. Threads may ask at once, and any number of watches may share a page.
//
// Failure: nothing throws but std::bad_alloc. Pages that cannot be watched are left out of pages(),
// all of them where the kernel cannot or may not do it.
#ifndef TORCH_HYBRID_BACKEND_WRITE_WATCH_H_
#define TORCH_HYBRID_BACKEND_WRITE_WATCH_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "shared_value.h"

namespace torch_hybrid_backend {

// Addresses from `begin` up to, not including, `end`.
struct AddressRange {
  uintptr_t begin;
  uintptr_t end;
};

class WriteTracker;

// The ranges grown to whole pages, sorted, and joined where they touch.
std::vector<AddressRange> PagesOf(std::vector<AddressRange> ranges);

class WriteWatch {
 public:
  // From here on writes to the pages that hold `ranges` are seen.
  explicit WriteWatch(std::vector<AddressRange> ranges);
  WriteWatch(const WriteWatch&) = delete;
  WriteWatch& operator=(const WriteWatch&) = delete;
  ~WriteWatch();

  // Whether this process may watch memory, and its kernel can.
  static bool IsSupported();

  // What is watched: whole pages, sorted and disjoint. Not while another thread calls Leave.
  const std::vector<AddressRange>& pages() const { return pages_; }

  // False where no page was written to since it was last among TakeWritten's. Looks on PyTorch's
  // threads.
  bool MayBeWritten() const;

  // The pages written to since they were last returned. Nothing where that is not known any more:
  // in a forked child, or where the memory was unmapped.
  std::optional<std::vector<AddressRange>> TakeWritten();

  // Watches these pages no more.
  void Leave(const AddressRange& pages);

 private:
  friend class WriteTracker;

  WriteTracker* tracker_;
  // Guarded by the tracker, but for parts_, which is replaced as a whole.
  std::vector<AddressRange> pages_;
  SharedValue<std::vector<AddressRange>> parts_;  // of bounded size
  std::vector<AddressRange> pending_;             // taken by another watch
  std::atomic<bool> has_pending_{false};
};

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_WRITE_WATCH_H_
