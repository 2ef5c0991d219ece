// Plans from their descriptions, and their runs, for tests.
#ifndef TORCH_HYBRID_BACKEND_TESTS_PLANS_H_
#define TORCH_HYBRID_BACKEND_TESTS_PLANS_H_

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "binding.h"
#include "check.h"
#include "guard.h"
#include "plan.h"

// A JSON text of a plan without constants. `values`, `steps`, `arenas` and `outputs` are the
// insides of the lists.
inline std::string Described(const std::string& values, const std::string& steps, int inputs,
                             const std::string& outputs, const std::string& arenas = "") {
  return R"({"version":1,"values":[)" + values + R"(],"steps":[)" + steps +
         R"(],"ranges":[],"arenas":[)" + arenas + R"(],"inputs":)" + std::to_string(inputs) +
         R"(,"constants":0,"outputs":[)" + outputs + "]}";
}

// A value of `elements` float32 in a row.
inline std::string Row(const std::string& kind, int payload, int elements,
                       const std::string& device = "cpu") {
  return R"([")" + kind + R"(",)" + std::to_string(payload) + R"(,"float32",[)" +
         std::to_string(elements) + "],[1],\"" + device + "\"]";
}

inline std::vector<torch::stable::Tensor> RunOnce(
    torch_hybrid_backend::Plan& plan, const std::vector<torch::stable::Tensor>& inputs) {
  using namespace torch_hybrid_backend;
  const auto guard =
      std::make_shared<const Guard>(std::vector<torch::stable::Tensor>{}, GuardKind::kEveryByte);
  const Binding binding(guard, 0, {}, {}, {}, {});
  RunResult result = plan.Run(/*key=*/7, binding, inputs);
  Check(result.status == RunStatus::kDone, "the run is done");
  return std::move(result.outputs);
}

#endif  // TORCH_HYBRID_BACKEND_TESTS_PLANS_H_
