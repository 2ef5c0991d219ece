// PlanTemplate: a plan whose sizes are known only at run time, and the plans at given sizes.
//
// Use: construct it from a description, then At for each set of values. The description is a plan's
// (plan.h) in which {"size": n}, the n-th size of a table, may stand for any number, with three
// more members:
//
//   "symbols", "sizes": see size_table.h
//   "lives": for each of the arenas [[value, first step, last step], ...]; so have its "plans"
//
// Bytes of arenas and offsets in them are no part of it: they are planned for each set of values.
//
// Ownership: a plan does not refer to its template. Kernels keep their libraries.
//
// Failure: throws std::runtime_error for what could never run, and At for values at which sizes do
// not fit in 64 bits or contradict one another.
#ifndef TORCH_HYBRID_BACKEND_PLAN_TEMPLATE_H_
#define TORCH_HYBRID_BACKEND_PLAN_TEMPLATE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "arena.h"
#include "json.h"
#include "plan.h"
#include "size_table.h"

namespace torch_hybrid_backend {

class PlanTemplate {
 public:
  explicit PlanTemplate(Json description, LibraryPaths library_path = PathsAsTheyAre);
  PlanTemplate(const PlanTemplate&) = delete;
  PlanTemplate& operator=(const PlanTemplate&) = delete;

  const std::vector<std::string>& symbols() const { return symbols_; }

  // The plan for these values of the symbols, in order. `check` is given its description, and may
  // throw. Threads may call it at once.
  std::unique_ptr<Plan> At(
      const std::vector<int64_t>& values,
      const std::function<void(const Json&)>& check = [](const Json&) {});

 private:
  // A value in an arena: its description, and when it is alive.
  struct Life {
    std::vector<Json>* value;
    int64_t element_bytes;
    int64_t first;
    int64_t last;
  };
  struct Arena {
    Json* size_bytes;
    int64_t alignment;
    std::vector<Life> lives;
  };

  void FindArenas(Json& description);
  static void Place(const Arena& arena);

  const LibraryPaths library_path_;
  const std::vector<std::string> symbols_;
  const SizeTable sizes_;
  std::mutex mutex_;
  SizedText description_;  // of the last plan that was made
  std::vector<Arena> arenas_;
};

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_PLAN_TEMPLATE_H_
