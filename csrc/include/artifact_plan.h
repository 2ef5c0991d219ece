// Plans of .hybrid files.
#ifndef TORCH_HYBRID_BACKEND_ARTIFACT_PLAN_H_
#define TORCH_HYBRID_BACKEND_ARTIFACT_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "artifact.h"
#include "plan.h"

namespace torch_hybrid_backend {

// The plan in that segment, over the file's library for this machine, which is opened with the
// first of its plans and closed with the last: from then on code of the file runs.
//
// Ownership: the plan keeps the artifact, and with it the memory that bindings have addresses of.
//
// Failure: throws std::runtime_error, behind the file's path, for a segment that is no plan and for
// what could never run.
std::shared_ptr<Plan> PlanOf(std::shared_ptr<const Artifact> artifact, size_t segment);

// The plans of an entry for many sizes, each checked when it is made. As PlanOf, a plan keeps the
// artifact. Threads may share it.
class SizedPlans {
 public:
  SizedPlans(std::shared_ptr<const Artifact> artifact, size_t entry);

  // The entry at these values of its symbols, and its plan. Throws for sizes that it is not for.
  std::pair<Entry, std::shared_ptr<Plan>> At(const std::vector<int64_t>& values) const;

 private:
  struct Held;
  std::shared_ptr<Held> held_;
};

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_ARTIFACT_PLAN_H_
