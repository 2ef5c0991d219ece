// ArenaPool: calls that follow one another share a block, those that run at once have one each.
#include <new>
#include <utility>
#include <vector>

#include "arena_pool.h"
#include "check.h"

using torch_hybrid_backend::ArenaPool;
using torch_hybrid_backend::CallsAtOnce;
using Block = ArenaPool::Block;

namespace {

void* Call(size_t size_bytes) { return Block(size_bytes).data(); }

}  // namespace

int main() {
  ArenaPool& pool = ArenaPool::OfProcess();
  Check(&ArenaPool::OfProcess() == &pool, "a process has one");
  Check(Block(0).data() == nullptr, "no memory where none is needed");
  {
    const ArenaPool::Need forward(1 << 20);
    Call(1 << 20);
    void* grown = nullptr;
    {
      const ArenaPool::Need backward(3 << 20);
      grown = Call(3 << 20);
      Check(pool.idle() == 1, "a block that is too small makes room for a larger one");
      Check(Call(1 << 20) == grown, "a smaller arena lies in it");

      std::vector<Block> at_once;
      for (int i = 0; i < 4; ++i) at_once.emplace_back(3 << 20);
      for (size_t i = 1; i < 4; ++i)
        Check(at_once[i].data() != at_once[0].data(), "memory in use is not given out");
      Block moved = std::move(at_once.back());
      at_once.clear();
      Check(pool.idle() == 3, "blocks of calls that ran at once are kept");
      moved = Block();
      Check(pool.idle() == 4, "a block that was moved goes back once");
      for (size_t i = 0; i < 2 * CallsAtOnce::kCallsPerWindow; ++i) Call(3 << 20);
      Check(pool.idle() == 1, "calls one by one free what they have no use for");
    }
    Check(pool.idle() == 0, "what is larger than any plan needs goes with the last that needs it");
    Call(1 << 20);
    pool.KeepIdle(0);
    Check(pool.idle() == 0, "idle blocks can be freed");
    bool refused = false;
    try {
      Call(size_t{1} << 60);
    } catch (const std::bad_alloc&) {
      refused = true;
    }
    Check(refused, "more memory than there is raises");
    Call(1 << 20);
    Check(pool.idle() == 1, "and counts as no call");
  }
  Check(pool.idle() == 0, "nothing is kept without plans");
}
