#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#include "check.h"
#include "write_watch.h"

using torch_hybrid_backend::AddressRange;
using torch_hybrid_backend::PagesOf;
using torch_hybrid_backend::WriteWatch;

namespace {

constexpr size_t kPages = 16;
const auto page_bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));

class Memory {
 public:
  explicit Memory(int visibility = MAP_PRIVATE)
      : start_(static_cast<char*>(mmap(nullptr, kPages * page_bytes, PROT_READ | PROT_WRITE,
                                       visibility | MAP_ANONYMOUS, -1, 0))) {}
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() { munmap(start_, kPages * page_bytes); }

  volatile char& at(size_t page, size_t byte = 0) { return start_[page * page_bytes + byte]; }
  AddressRange pages(size_t first, size_t count) const {
    const auto begin = reinterpret_cast<uintptr_t>(start_) + first * page_bytes;
    return {begin, begin + count * page_bytes};
  }
  AddressRange all() const { return pages(0, kPages); }

 private:
  char* start_;
};

bool Equal(const std::vector<AddressRange>& left, const std::vector<AddressRange>& right) {
  return left.size() == right.size() &&
         std::equal(left.begin(), left.end(), right.begin(), [](const auto& a, const auto& b) {
           return a.begin == b.begin && a.end == b.end;
         });
}

void TestPages() {
  const uintptr_t page = page_bytes;
  Check(Equal(PagesOf({{3 * page + 5, 3 * page + 9}, {page, 2 * page + 1}, {7, 7}}),
              {{page, 4 * page}}),
        "ranges grow to pages and join where they touch");
  Check(Equal(PagesOf({{5 * page, 6 * page}, {0, 1}}), {{0, page}, {5 * page, 6 * page}}),
        "what does not touch stays apart");
}

void TestWrites() {
  Memory memory;
  memory.at(2) = 1;
  WriteWatch watch({memory.all()});
  Check(!watch.MayBeWritten(), "what was written before does not count");
  Check(memory.at(3) == 0 && !watch.MayBeWritten(), "reading does not count");

  memory.at(5, 17) = 1;
  memory.at(6) = 1;
  memory.at(9) = 1;
  Check(watch.MayBeWritten(), "a write is seen");
  Check(watch.MayBeWritten(), "until it is taken");
  Check(Equal(watch.TakeWritten().value(), {memory.pages(5, 2), memory.pages(9, 1)}),
        "the pages written to, joined");
  Check(!watch.MayBeWritten() && watch.TakeWritten().value().empty(), "each is returned once");
  memory.at(5) = 2;
  Check(Equal(watch.TakeWritten().value(), {memory.pages(5, 1)}), "later writes are seen");

  std::FILE* zeros = std::fopen("/dev/zero", "r");
  Check(std::fread(const_cast<char*>(&memory.at(12)), 1, page_bytes, zeros) == page_bytes, "read");
  std::fclose(zeros);
  Check(Equal(watch.TakeWritten().value(), {memory.pages(12, 1)}), "so is a system call's");
}

void TestSharedPages() {
  Memory memory;
  WriteWatch one({memory.pages(0, 4), memory.pages(8, 4)});
  memory.at(2) = 1;
  {
    WriteWatch other({memory.pages(2, 8)});
    Check(Equal(one.TakeWritten().value(), {memory.pages(2, 1)}),
          "another watch of the same page hides no write");
    memory.at(3) = 1;
    memory.at(6) = 1;
    Check(Equal(other.TakeWritten().value(), {memory.pages(3, 1), memory.pages(6, 1)}),
          "each watch sees its own pages");
    Check(one.MayBeWritten(), "a write that another watch took is not lost");
    Check(Equal(one.TakeWritten().value(), {memory.pages(3, 1)}), "nor is its page");
    Check(!other.MayBeWritten(), "and it is returned once");
  }
  memory.at(3) = 2;
  memory.at(9) = 2;
  Check(Equal(one.TakeWritten().value(), {memory.pages(3, 1), memory.pages(9, 1)}),
        "the end of one watch does not end another");
}

void TestLifetimes() {
  auto memory = std::make_unique<Memory>();
  auto watch = std::make_unique<WriteWatch>(std::vector{memory->all()});
  watch.reset();
  memory->at(1) = 1;  // nobody watches: nothing happens
  watch = std::make_unique<WriteWatch>(std::vector{memory->all()});
  memory.reset();
  Check(!watch->TakeWritten() || watch->TakeWritten()->empty(), "memory that is gone");
  watch.reset();

  Memory shared(MAP_SHARED);
  shared.at(0) = 1;
  const Memory own;
  const WriteWatch both({shared.all(), own.all()});
  Check(Equal(both.pages(), {own.all()}), "what other processes may write to is not watched");
}

void TestLeave() {
  Memory memory;
  WriteWatch watch({memory.all()});
  WriteWatch other({memory.all()});
  memory.at(4) = 1;
  memory.at(5) = 1;
  Check(other.TakeWritten().has_value(), "another watch takes both");
  watch.Leave(memory.pages(5, 1));
  Check(Equal(watch.TakeWritten().value(), {memory.pages(4, 1)}), "a page that was left is gone");
  memory.at(5) = 2;
  Check(!watch.MayBeWritten(), "its writes do not count");
  Check(Equal(other.TakeWritten().value(), {memory.pages(5, 1)}), "but for other watches");
  other.Leave(memory.pages(0, kPages));
  memory.at(6) = 1;
  Check(Equal(watch.TakeWritten().value(), {memory.pages(6, 1)}), "nor do others end the watch");
}

void TestFork() {
  Memory memory;
  WriteWatch watch({memory.all()});
  const pid_t child = fork();
  if (child == 0) {
    const bool lost = watch.MayBeWritten() && !watch.TakeWritten();
    WriteWatch anew({memory.all()});
    memory.at(4) = 1;
    const auto written = anew.TakeWritten();
    _exit(lost && written && Equal(*written, {memory.pages(4, 1)}) ? 0 : 1);
  }
  int status = 1;
  waitpid(child, &status, 0);
  Check(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a forked child watches anew");
  Check(!watch.MayBeWritten(), "its writes are its own");
  memory.at(7) = 1;
  Check(Equal(watch.TakeWritten().value(), {memory.pages(7, 1)}), "its parent goes on watching");
}

// Two watches of the same pages, asked by two threads while a third writes: each must see a write
// that was done before it asked.
void TestThreads() {
  Memory memory;
  WriteWatch one({memory.all()});
  WriteWatch other({memory.all()});
  std::atomic<int> turn{0};  // 2k: write; 2k + 1: both look
  std::atomic<int> done{0};
  constexpr int kTurns = 500;
  const auto look = [&](WriteWatch& watch) {
    for (int k = 0; k < kTurns; ++k) {
      while (turn != 2 * k + 1) std::this_thread::yield();
      Check(watch.MayBeWritten(), "the write is seen though another thread takes it");
      Check(Equal(watch.TakeWritten().value(), {memory.pages(k % kPages, 1)}), "its page as well");
      ++done;
    }
  };
  std::thread first([&] { look(one); });
  std::thread second([&] { look(other); });
  for (int k = 0; k < kTurns; ++k) {
    memory.at(k % kPages) = 1;
    turn = 2 * k + 1;
    while (done != 2 * (k + 1)) std::this_thread::yield();
  }
  first.join();
  second.join();
}

}  // namespace

int main() {
  TestPages();
  if (!WriteWatch::IsSupported()) {
    std::puts("this kernel watches no writes (Linux 6.7 does): nothing to test");
    return 0;
  }
  TestWrites();
  TestSharedPages();
  TestLeave();
  TestLifetimes();
  TestFork();
  TestThreads();
}
