#include <cstring>
#include <new>
#include <utility>

#include "check.h"
#include "kept_blocks.h"

using torch_hybrid_backend::AlignedBlock;
using torch_hybrid_backend::KeptBlocks;

int main() {
  const auto kept = KeptBlocks::OfProcess();
  Check(KeptBlocks::OfProcess() == kept, "a process has one");
  kept->Expect(1000);

  AlignedBlock first = kept->Take(1000);
  void* memory = first.data();
  std::memset(memory, 1, 1000);
  const AlignedBlock other = kept->Take(1000);
  Check(other.data() != memory, "memory in use is not given out");

  kept->GiveBack(std::move(first));
  const AlignedBlock small = kept->Take(700);
  Check(small.data() != memory, "a block much larger than needed stays");
  AlignedBlock again = kept->Take(900);
  Check(again.data() == memory, "memory given back is given out again");
  Check(again.size_bytes() == 1000, "it is as large as it was");

  AlignedBlock late(400);
  void* late_memory = late.data();
  kept->GiveBack(std::move(again));
  kept->GiveBack(std::move(late));  // 1,400 bytes are more than the largest tensor
  const AlignedBlock kept_late = kept->Take(400);
  Check(kept_late.data() == late_memory, "what was given back last is kept");
  bool refused = false;
  try {
    kept->Take(size_t{1} << 60);
  } catch (const std::bad_alloc&) {
    refused = true;
  }
  Check(refused, "more memory than there is raises");
  kept->GiveBack(AlignedBlock(1001));
  kept->GiveBack(AlignedBlock(1000));
  Check(KeptBlocks::FreeIdle(), "what is idle can be freed");
  Check(!KeptBlocks::FreeIdle(), "then nothing is left");
  kept->GiveBack(AlignedBlock());
}
