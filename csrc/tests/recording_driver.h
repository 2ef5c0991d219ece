// A driver library as NVIDIA's, for tests: it records what it is asked for, and runs launches on
// the host's memory when a stream is waited for, in the stream's order, as a GPU would later.
//
// A module's image is a text: the bytes of each parameter of its kernel, "8 8 4". All modules have
// the kernels "double" (x, y, ..., int32 count: y = 2 x) and "nothing". To events each block of a
// launch's first axis takes a millisecond.
#ifndef TORCH_HYBRID_BACKEND_TESTS_RECORDING_DRIVER_H_
#define TORCH_HYBRID_BACKEND_TESTS_RECORDING_DRIVER_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

struct Launch {
  std::string symbol;
  std::vector<unsigned> grid;
  std::vector<unsigned> block;
  unsigned shared_bytes;
  int shared_bytes_allowed;
  void* stream;
  int device;  // of the context that was the thread's
  std::vector<uint64_t> parameters;
};

// What a loaded driver is reached by: the symbol "recording".
struct Recording {
  // Everything launched since the last call.
  std::vector<Launch> (*take)();
  // Runs what was launched on the stream, in its order, and at most so many launches.
  void (*wait)(void* stream, size_t most);
  int (*modules_loaded)();
  // Contexts that are pushed on the calling thread.
  int (*contexts_pushed)();
  // Launches fail from here on.
  void (*fail)(bool fails);
};

// Of the same driver: the symbol "recording_graphs". A graph's kernels run in another order than
// they were added in, as far as what they wait for allows.
struct RecordingGraphs {
  // The functions called since the last call, by name: those that launch, and those of graphs.
  std::vector<std::string> (*take_calls)();
  // For each node of the graph instantiated last: those that it waits for.
  std::vector<std::vector<size_t>> (*edges)();
  // The function of that name fails from here on; none where it is empty.
  void (*fail)(const std::string& function);
  // Whether the stream is being captured from here on: what is launched on it then does not run.
  void (*capture)(void* stream, bool begins);
  // Executable graphs, and graphs, that are not destroyed.
  int (*alive)();
};

#endif  // TORCH_HYBRID_BACKEND_TESTS_RECORDING_DRIVER_H_
