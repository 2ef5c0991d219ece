// The operating system's permission to use AMX's tile registers.
//
// Linux gives it to a process that asks, once; children that are forked have it, programs that are
// executed do not. Without it the first instruction on tiles ends the process (SIGILL). Refused
// where the processor has no tiles, where the system does not know them, and where a thread's
// alternate signal stack is too small for them.
// Source: Linux, Documentation/arch/x86/xstate.rst.
#ifndef TORCH_HYBRID_BACKEND_TILE_PERMISSION_H_
#define TORCH_HYBRID_BACKEND_TILE_PERMISSION_H_

namespace torch_hybrid_backend {

// Asks, and says whether the process may. Any thread may call it; nothing happens when asked again.
bool MayUseTiles();

// The same by another function than the system's arch_prctl(code, feature), which returns 0 where
// it permits.
using ArchPrctl = long (*)(int code, unsigned long feature);
bool MayUseTiles(ArchPrctl arch_prctl);

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_TILE_PERMISSION_H_
