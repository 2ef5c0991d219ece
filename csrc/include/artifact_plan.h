// Plans of .hybrid files.
#ifndef TORCH_HYBRID_BACKEND_ARTIFACT_PLAN_H_
#define TORCH_HYBRID_BACKEND_ARTIFACT_PLAN_H_

#include <cstddef>
#include <memory>

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

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_ARTIFACT_PLAN_H_
