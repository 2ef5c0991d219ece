// What a TVM kernel asks of its runtime: threads and scratch memory.
//
// In `_runtime.so` every parallel loop runs on PyTorch's own threads and honours
// torch.set_num_threads, in the runner on its own (worker_threads.h): on those of
// the team that the calling thread leads (team.h), else in a parallel region of its own; a launch
// inside another's region runs serially on the calling thread. No second thread pool exists.
//
// Ownership: scratch memory belongs to the calling thread, which keeps it for the next kernel.
//
// Failure: these are C callbacks: nothing throws; a launch returns the status of a task that
// failed, an allocation returns null.
#ifndef TORCH_HYBRID_BACKEND_TVM_BACKEND_H_
#define TORCH_HYBRID_BACKEND_TVM_BACKEND_H_

#include <cstdint>

namespace torch_hybrid_backend {

// As in TVM's runtime/c_backend_api.h, which the wheel's headers need not carry.
struct ParallelGroupEnv {
  void* sync_handle;
  int32_t num_task;
};
using ParallelLambda = int (*)(int task_id, ParallelGroupEnv* env, void* closure);

// Runs tasks 0 .. num_task-1; as many as there are threads where num_task is 0.
int ParallelLaunch(ParallelLambda lambda, void* closure, int num_task);

void* AllocWorkspace(int device_type, int device_id, uint64_t size_bytes, int dtype_code,
                     int dtype_bits);
int FreeWorkspace(int device_type, int device_id, void* memory);

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_TVM_BACKEND_H_
