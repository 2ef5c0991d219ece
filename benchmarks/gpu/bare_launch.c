// Launches of one kernel in a loop, with nothing around them: what the driver alone takes.
#include <stdint.h>
#include <time.h>

// As cuda.h has it: CUlaunchConfig.
struct Config {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  void* stream;
  void* attributes;
  unsigned attribute_count;
};

typedef int (*Launch)(const struct Config*, void* function, void** parameters, void** extra);

// In place of the driver's, where there is none: for trying this benchmark without a GPU.
int NoLaunch(const struct Config* config, void* function, void** parameters, void** extra) {
  (void)config, (void)function, (void)parameters, (void)extra;
  return 0;
}

// The nanoseconds of `count` launches, or minus the driver's status where one fails.
int64_t BareLaunches(Launch launch, unsigned grid, unsigned threads, unsigned shared_bytes,
                     void* function, void** parameters, int count) {
  struct Config config = {{grid, 1, 1}, {threads, 1, 1}, shared_bytes, 0, 0, 0};
  struct timespec start, end;
  clock_gettime(CLOCK_MONOTONIC, &start);
  for (int i = 0; i < count; ++i) {
    int status = launch(&config, function, parameters, 0);
    if (status != 0) return -status;
  }
  clock_gettime(CLOCK_MONOTONIC, &end);
  return (end.tv_sec - start.tv_sec) * 1000000000LL + (end.tv_nsec - start.tv_nsec);
}
