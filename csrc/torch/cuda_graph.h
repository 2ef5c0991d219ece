// CUDA graphs: launches that follow one another in a plan, handed to the driver together
// (steps/launch_graph.cc), and what must be known for it. See docs/adr/0026-cuda-graphs.md.
//
// No GPU has run one yet: csrc/tests/test_cuda_graph.cc tries it against a driver that records.
//
// Ownership: a frame owns its graphs, which therefore belong to one call at a time, and always run
// on the frame's stream.
//
// Failure: throws std::runtime_error with the driver's own word.
#ifndef TORCH_HYBRID_BACKEND_CUDA_GRAPH_H_
#define TORCH_HYBRID_BACKEND_CUDA_GRAPH_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "cuda_driver.h"
#include "frame.h"

namespace torch_hybrid_backend {

// Memory that a launch uses, from `begin` to before `end`: of the arena, or in a numbering of its
// own for memory elsewhere.
struct Access {
  int64_t begin;
  int64_t end;
  bool writes;
};

// For each launch those before it that it must wait for: one of the two writes what the other uses.
// Those that another one of them waits for are left out.
std::vector<std::vector<size_t>> Dependencies(const std::vector<std::vector<Access>>& launches);

// What a frame keeps for one graph of its plan.
struct FrameGraph final : StepState {
  bool used = false;  // by a call
  std::unique_ptr<CudaGraph> graph;
  // Of all nodes: the parameters that may change from call to call, in the last call and in this.
  std::vector<uint64_t> last;
  std::vector<uint64_t> now;
  std::vector<std::pair<size_t, KernelNode>> changed;
};

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_CUDA_GRAPH_H_
