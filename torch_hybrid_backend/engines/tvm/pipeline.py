"""How kernels pass through TVM: its standard pipeline, less the passes that a kernel emitted as finished loops is better off without."""

from __future__ import annotations

from typing import Any

# The simplifiers substitute bound values where they are used: a polynomial of a polynomial then grows exponentially. They also
# treat floats as reals (`x - x` is 0, `x != x` is false). `loops.index` has simplified addresses already; LLVM does the rest.
# Common subexpressions are bound by the printer.
# The storage rewriter forgets that a buffer is to live on the stack (`Builder.alloc`). The rest find nothing to do in such kernels, and take
# longer than LLVM to find nothing in a long expression.
DISABLED_PASSES = (
    "s_tir.StmtSimplify",
    "tirx.StmtSimplify",
    "tirx.CommonSubexprElim",
    "tirx.StorageRewrite",
    "s_tir.CompactBufferAllocation",  # overflows its own bounds where sizes are only known at run time
    "s_tir.InjectPermutedLayout",
    "s_tir.InjectVirtualThread",
    "s_tir.HoistIfThenElse",
    "s_tir.RenormalizeSplitPattern",
    "tirx.RemoveNoOp",
    # Every buffer is 1-D as it is; the pass simplified each address again, in 40% of the time that the pipeline and LLVM took together.
    "tirx.FlattenBuffer",
)
# Kernels are called by the runtime alone, which makes their arguments from the same description: TVM's checks of each argument's type, shape,
# strides and device at every call are left out. They are most of a small kernel's code and compile time (8 arguments: 63 ms with, 34 ms
# without, 2-core Zen 5), and the only thing that would tie a kernel library to libtvm_ffi.
_CONFIG = {"tirx.disable_assert": True}


def build(name: str, function: Any, target: Any) -> Any:
    """A PrimFunc compiled for a `tvm.target.Target`: an executable module. Raises what TVM raises."""
    import tvm

    with tvm.transform.PassContext(opt_level=3, config=_CONFIG, disabled_pass=list(DISABLED_PASSES)):
        return tvm.tirx.build(tvm.IRModule({name: function}), target=target)
