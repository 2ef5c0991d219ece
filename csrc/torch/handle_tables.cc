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

HandleTable<const Artifact>& Artifacts() {
  static auto* const table = new HandleTable<const Artifact>("artifact");
  return *table;
}

}  // namespace torch_hybrid_backend
