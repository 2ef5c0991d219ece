// FramePool: as many frames are kept as calls run at once.
#include <memory>
#include <thread>
#include <vector>

#include "check.h"
#include "frame.h"

using torch_hybrid_backend::CallsAtOnce;
using torch_hybrid_backend::Frame;
using torch_hybrid_backend::FramePool;

namespace {

using Lease = std::unique_ptr<FramePool::Lease>;

Lease Begin(FramePool& pool, size_t& made) {
  std::unique_ptr<Frame> frame = pool.TakeIdle({});
  if (!frame) {
    frame = std::make_unique<Frame>();
    ++made;
  }
  return std::make_unique<FramePool::Lease>(pool, std::move(frame));
}

void Burst(FramePool& pool, size_t calls, size_t& made) {
  std::vector<Lease> leases;
  for (size_t i = 0; i < calls; ++i) leases.push_back(Begin(pool, made));
}

void TestBurst() {
  FramePool pool;
  size_t made = 0;
  Burst(pool, 16, made);
  Check(pool.idle() == 16, "frames of a burst are kept for another");
  for (size_t i = 0; i < 2 * CallsAtOnce::kCallsPerWindow; ++i) Burst(pool, 1, made);
  Check(pool.idle() == 1, "calls one by one free what they have no use for");
  Check(made == 16, "and make none");
}

void TestSteadyUse() {
  FramePool pool;
  size_t made = 0;
  for (size_t i = 0; i < 10 * CallsAtOnce::kCallsPerWindow; ++i) {
    Burst(pool, 1, made);
    if (i % CallsAtOnce::kCallsPerWindow == 0) Burst(pool, 4, made);
  }
  Check(made == 4, "calls that run at once now and then find their frames");
}

void TestThreadsThatEnd() {
  FramePool pool;
  size_t made = 0;
  Lease own = Begin(pool, made);
  std::thread other([&] { Burst(pool, 8, made); });
  other.join();
  Check(pool.idle() == 1, "as many frames as threads are left");
}

}  // namespace

int main() {
  TestBurst();
  TestSteadyUse();
  TestThreadsThatEnd();
}
