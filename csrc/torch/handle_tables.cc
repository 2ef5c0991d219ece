#include "handle_tables.h"

namespace torch_hybrid_backend {

HandleTable<Plan>& Plans() {
  static auto* const table = new HandleTable<Plan>("plan");
  return *table;
}

HandleTable<const Guard>& Guards() {
  static auto* const table = new HandleTable<const Guard>("guard");
  return *table;
}

HandleTable<const Binding>& Bindings() {
  static auto* const table = new HandleTable<const Binding>("binding");
  return *table;
}

HandleTable<Artifact>& Artifacts() {
  static auto* const table = new HandleTable<Artifact>("artifact");
  return *table;
}

HandleTable<PlanTemplate>& PlanTemplates() {
  static auto* const table = new HandleTable<PlanTemplate>("plan template");
  return *table;
}

HandleTable<const SizedPlans>& SizedPlansOfFiles() {
  static auto* const table = new HandleTable<const SizedPlans>("entry of a file");
  return *table;
}

HandleTable<const SizeTable>& SizeTables() {
  static auto* const table = new HandleTable<const SizeTable>("table of sizes");
  return *table;
}

}  // namespace torch_hybrid_backend
