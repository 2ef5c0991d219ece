// Model: an opened .hybrid file whose entries can be called (docs/hybrid_format.md).
//
// Use: construct it, then Run from any number of threads at once. Calls of a model with states wait
// for each other.
//
// Ownership: a model owns its plans and states, and shares its file.
//
// Failure: all throw std::runtime_error; opening one begins it with the file's path.
#ifndef TORCH_HYBRID_BACKEND_MODEL_H_
#define TORCH_HYBRID_BACKEND_MODEL_H_

#include <cstddef>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "artifact.h"
#include "artifact_plan.h"
#include "binding.h"
#include "plan.h"
#include "signatures.h"
#include "tensor.h"

namespace torch_hybrid_backend {

struct ModelOptions {
  int threads = 0;  // of a call; see ThreadsFor
  bool share = true;
  bool skip_sample = false;
  std::optional<std::vector<PublicKey>> keys;  // see CheckSigned
  std::string torch_folder;                    // see OpenTorch
};

// The tensors of a call, by the numbers of the entry's inputs or results: nothing for what is none.
using CallTensors = std::vector<std::optional<Tensor>>;

class Model {
 public:
  Model(const std::string& path, const ModelOptions& options);
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  const Artifact& artifact() const { return *artifact_; }
  const Manifest& manifest() const { return artifact_->manifest(); }

  // An entry at the sizes of a call. `sizes_of`: those of an input. Throws for sizes that it is not
  // for. What it points at lives as long as the model or the result.
  struct Function {
    Entry entry;
    std::shared_ptr<Plan> plan;
    const Binding* binding;
  };
  std::shared_ptr<const Function> At(
      size_t entry, const std::function<std::span<const int64_t>(size_t input)>& sizes_of);

  // Runs an entry and calls `use` with its results. `inputs` have the dtypes and sizes of the
  // entry's. A result that is borrowed (an input, a state, a constant, or a view of one) is good
  // until `use` returns.
  void Run(const Function& function, const CallTensors& inputs,
           const std::function<void(const CallTensors&)>& use);

  // Sets the states to what they are in the file.
  void Reset();

 private:
  // An entry at all its sizes. `kept`: at those met last, the last one first.
  struct Functions {
    std::unique_ptr<Binding> binding;
    std::unique_ptr<SizedPlans> plans;  // null where there is one set of sizes
    std::list<std::pair<std::vector<int64_t>, std::shared_ptr<const Function>>> kept;
  };
  struct Call;
  static constexpr size_t kMostKept = 64;

  Tensor ConstantTensor(size_t number) const;
  Tensor TensorOf(const Call& call, const Origin& origin) const;
  // Refuses inputs that share memory with what the call changes: a plan reads all of its inputs as
  // they were before the call.
  void CheckApart(const Call& call) const;
  void ApplyUpdates(const Call& call) const;
  std::optional<Tensor> Result(const Call& call, const CallResult& result) const;
  void CheckSample(const Sample& sample);

  const int threads_;
  std::shared_ptr<Artifact> artifact_;
  std::vector<Functions> functions_;  // one for each entry
  std::mutex functions_mutex_;
  std::vector<Tensor> states_;
  std::mutex states_mutex_;  // held by calls where there are states
};

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_MODEL_H_
