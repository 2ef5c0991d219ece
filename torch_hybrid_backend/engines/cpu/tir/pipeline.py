"""Passes from a TIR function to machine code: the few of TVM's that a kernel emitted as finished loops needs, then LLVM.

TVM's own pipeline has fifty passes. Those left out here find nothing to do in such kernels (without them the code is the same, instruction by
instruction), or do harm:

- The simplifiers substitute bound values where they are used: a polynomial of a polynomial then grows exponentially. They also
  treat floats as reals (`x - x` is 0, `x != x` is false). `loops.index` has simplified addresses already; LLVM does the rest.
- Common subexpressions are bound by the printer, and every buffer is 1-D as it is: `FlattenBuffer` simplified each address again.
- The storage rewriter forgets that a buffer is to live on the stack (`Builder.alloc`).
- `CompactBufferAllocation` overflows its own bounds where sizes are only known at run time.
- `AnnotateEntryFunc` adds a second copy of the function's entrance, called main.
- The legalisers of bfloat16 and float8: `printer` makes bits of the former and knows not the latter.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any


@functools.cache
def _passes() -> tuple[Any, ...]:
    """TVM's passes, in the order in which its own pipeline has them."""
    from tvm import s_tir, tirx

    return (
        tirx.transform.VectorizeLoop(True),
        tirx.transform.UnrollLoop(),
        s_tir.transform.RewriteUnsafeSelect(),
        tirx.transform.MakePackedAPI(),
        # Kernels are called by the runtime alone, which makes their arguments from the same description: TVM's checks of each argument's
        # type, shape, strides and device at every call are left out. They are most of a small kernel's code and compile time (8 arguments:
        # 63 ms with, 34 ms without, 2-core Zen 5), and the only thing that would tie a kernel library to libtvm_ffi, which `linker` refuses.
        tirx.transform.SkipAssert(),
        tirx.transform.LowerTVMBuiltin(),
        tirx.transform.LowerIntrin(),
    )


def build(name: str, function: Any, target: Any) -> Any:
    """A PrimFunc compiled for a `tvm.target.Target`: an executable module. Raises what TVM raises."""
    return build_all({name: function}, target)


def build_all(functions: Mapping[str, Any], target: Any) -> Any:
    """Like `build`, several functions in one module, by their names."""
    import tvm

    target = target.with_host(target)
    with tvm.transform.PassContext(opt_level=3):
        module = tvm.tirx.transform.BindTarget(target)(tvm.IRModule(dict(functions)))
        for lower in _passes():
            module = lower(module)
        return tvm.get_global_func(f"target.build.{target.kind.name}")(module, target)
