#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "pytorch_threads.h"
#include "team.h"
#include "tvm_backend.h"

using torch_hybrid_backend::AllocWorkspace;
using torch_hybrid_backend::FreeWorkspace;
using torch_hybrid_backend::ParallelGroupEnv;
using torch_hybrid_backend::ParallelLaunch;
using torch_hybrid_backend::RunInTeam;
using torch_hybrid_backend::Team;

namespace {

using Task = std::function<int(int task, int tasks)>;

// A kernel's parallel loop, as TVM launches it.
int Loop(int tasks, const Task& task) {
  const auto lambda = [](int number, ParallelGroupEnv* env, void* closure) {
    return (*static_cast<const Task*>(closure))(number, env->num_task);
  };
  return ParallelLaunch(lambda, const_cast<Task*>(&task), tasks);
}

// Loops of all sizes, one after the other: each task reads what tasks of the loop before wrote, in
// plain memory, so that a missing order between loops is a data race, and a task that runs twice
// or never a wrong sum.
void RunLoops(int rounds) {
  constexpr int kSizes[] = {1, 2, 3, 64, 65, 200};
  constexpr int kMost = 200;
  std::vector<int64_t> from(kMost, 1), to(kMost, 0);
  int64_t expected = 1;
  RunInTeam([&] {
    for (int round = 0; round < rounds; ++round) {
      for (const int size : kSizes) {
        const int status = Loop(size, [&](int task, int tasks) {
          for (int i = task; i < kMost; i += tasks) to[i] += from[i] + from[(i + 1) % kMost];
          return 0;
        });
        Check(status == 0, "loops without a failed task have status 0");
        Loop(0, [&](int task, int tasks) {
          for (int i = task; i < kMost; i += tasks) from[i] = to[i] % 1000003, to[i] = 0;
          return 0;
        });
        expected = 2 * expected % 1000003;
      }
    }
  });
  for (const int64_t value : from) Check(value == expected, "each task of each loop ran once");
}

void TestLoopsOfTeamsOfAllSizes() {
  for (const int threads : {1, 2, 3, 7, 70}) {
    pytorch_threads = threads;
    for (const int provided : {1 << 20, 2, 1}) {
      most_provided = provided;
      RunLoops(threads > 7 ? 2 : 20);
    }
  }
  pytorch_threads = 2;
  most_provided = 1 << 20;
}

void TestManyShortTeams() {
  for (int i = 0; i < 300; ++i) {
    pytorch_threads = 1 + i % 4;
    RunLoops(1);
  }
  pytorch_threads = 2;
}

void TestTeamsOfTwoThreadsAtOnce() {
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 2; ++caller) {
    callers.emplace_back([] {
      for (int i = 0; i < 50; ++i) RunLoops(2);
    });
  }
  for (std::thread& caller : callers) caller.join();
}

void TestLoopsInsideTasks() {
  for (const int threads : {1, 3}) {
    pytorch_threads = threads;
    std::vector<int> sums(8, 0);
    RunInTeam([&] {
      for (int i = 0; i < 20; ++i) {
        Loop(8, [&](int outer, int) {
          const auto here = std::this_thread::get_id();
          return Loop(5, [&, here](int inner, int) {
            Check(threads == 1 || std::this_thread::get_id() == here, "inner loops are serial");
            sums[outer] += inner;  // no other thread: plain memory
            return 0;
          });
        });
      }
    });
    for (const int sum : sums) Check(sum == 200, "each task of each inner loop ran once");
  }
  pytorch_threads = 2;
}

void TestFailedTasks() {
  for (const int threads : {1, 2, 5}) {
    pytorch_threads = threads;
    RunInTeam([] {
      for (int i = 0; i < 20; ++i) {
        std::vector<int> ran(9, 0);
        const int status = Loop(9, [&](int task, int) {
          ++ran[task];
          return task == i % 9 ? -7 : 0;
        });
        Check(status == -7, "the status of a failed task is the loop's");
        for (const int times : ran) Check(times == 1, "the other tasks run all the same");
        Check(Loop(3, [](int, int) { return 0; }) == 0, "the next loop starts anew");
      }
    });
  }
  pytorch_threads = 2;
}

void TestLeadersThatThrow() {
  for (const int threads : {1, 2, 5}) {
    pytorch_threads = threads;
    std::string caught;
    try {
      RunInTeam([] {
        Loop(4, [](int, int) { return 0; });
        throw std::domain_error("step 2");
      });
    } catch (const std::domain_error& error) {
      caught = error.what();
    }
    Check(caught == "step 2", "what a leader throws arrives as it was");
    Check(Team::Led() == nullptr, "no team outlives its leader");
    RunLoops(1);
  }
  pytorch_threads = 2;
}

void TestLoopsOfNoTeam() {
  for (const int threads : {1, 3}) {
    pytorch_threads = threads;
    std::vector<int> ran(10, 0);
    for (int i = 0; i < 20; ++i) {
      const int status = Loop(10, [&](int task, int tasks) {
        Check(tasks == 10, "tasks know their number");
        return ++ran[task] == 5 && task == 3 ? 4 : 0;
      });
      Check(status == (i == 4 ? 4 : 0), "a loop of its own region has its tasks' status");
    }
    for (const int times : ran) Check(times == 20, "each task ran once");
  }
  pytorch_threads = 2;
}

// Two blocks of one thread differ and keep their contents; a block given back is taken again.
void TestScratchMemory() {
  pytorch_threads = 3;
  RunInTeam([] {
    for (int i = 0; i < 50; ++i) {
      Loop(6, [](int task, int) {
        int* first = static_cast<int*>(AllocWorkspace(1, 0, 4000, 0, 32));
        int* second = static_cast<int*>(AllocWorkspace(1, 0, 400, 0, 32));
        Check(first != second, "two blocks in use are two");
        for (int j = 0; j < 1000; ++j) first[j] = task;
        second[0] = -1;
        for (int j = 0; j < 1000; ++j) Check(first[j] == task, "no other thread has the block");
        FreeWorkspace(1, 0, second);
        FreeWorkspace(1, 0, first);
        void* again = AllocWorkspace(1, 0, 4000, 0, 32);
        Check(again == first, "a block given back is taken again");
        return FreeWorkspace(1, 0, again);
      });
    }
  });
  int other = 0;
  Check(FreeWorkspace(1, 0, &other) != 0, "memory of others is refused");
  pytorch_threads = 2;
}

}  // namespace

int main() {
  TestLoopsOfTeamsOfAllSizes();
  TestManyShortTeams();
  TestTeamsOfTwoThreadsAtOnce();
  TestLoopsInsideTasks();
  TestFailedTasks();
  TestLeadersThatThrow();
  TestLoopsOfNoTeam();
  TestScratchMemory();
}
