// The objects that Python refers to by number, each kind in its table.
//
// Ownership: the tables live as long as the process: Python's finalisers may free handles while it
// exits.
#ifndef TORCH_HYBRID_BACKEND_HANDLE_TABLES_H_
#define TORCH_HYBRID_BACKEND_HANDLE_TABLES_H_

#include "artifact.h"
#include "artifact_plan.h"
#include "binding.h"
#include "guard.h"
#include "handle_table.h"
#include "plan.h"
#include "plan_template.h"
#include "size_table.h"

namespace torch_hybrid_backend {

HandleTable<Plan>& Plans();
HandleTable<const Guard>& Guards();
HandleTable<const Binding>& Bindings();
HandleTable<Artifact>& Artifacts();
HandleTable<PlanTemplate>& PlanTemplates();
HandleTable<const SizedPlans>& SizedPlansOfFiles();
HandleTable<const SizeTable>& SizeTables();

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_HANDLE_TABLES_H_
