"""Everything private that this package uses of PyTorch: no other module imports or names it (`tests/test_layers.py`).

Private is a name with a part that begins with an underscore: `torch._ops.OpOverload`, `torch._C._get_schema`, and all of Dynamo, AOTAutograd
and inductor, also where PyTorch's documentation mentions them. PyTorch promises nothing about such names. So each has a canary in
`tests/test_torch_private.py`, which fails where a release renames it, or changes what is relied on. Operators (`torch.ops.aten._to_copy`) and
their overloads are not meant: they are what graphs consist of. Private attributes of PyTorch's objects (`operator._schema`) stay where they are
read; the canaries list them.

What `import torch` loads is imported here at once. The rest takes up to two seconds, and is imported when a name of it is first asked for: so
import this module's names inside a function where the package must stay cheap to import.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.fx
from torch import _conj as conjugate_view
from torch import _mkldnn as mkldnn_layout  # type: ignore[attr-defined]
from torch import _neg_view as negative_view
from torch._C import DisableTorchFunction, DispatchKey, TensorBase
from torch._C import _DisableAutocast as without_autocast
from torch._C import _DisablePythonDispatcher as without_python_dispatcher
from torch._C import _dispatch_keys as dispatch_keys
from torch._C import _dispatch_tls_local_exclude_set as _excluded_keys
from torch._C import _dispatch_tls_local_include_set as _included_keys
from torch._C import _get_function_stack_at as torch_function_mode_at
from torch._C import _get_schema as get_schema
from torch._C import _is_any_autocast_enabled as is_any_autocast_enabled
from torch._C import _len_torch_dispatch_stack as count_torch_dispatch_modes
from torch._C import _len_torch_function_stack as count_torch_function_modes
from torch._C._autograd import _profiler_enabled as profiler_enabled
from torch._C._functorch import peek_interpreter_stack
from torch._decomp import (
    core_aten_decompositions,
    decomposition_table,
    get_decompositions,
    global_decomposition_table,
    meta_table,
)
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._ops import HigherOrderOperator, OperatorBase, OpOverload, OpOverloadPacket
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.compiler._cache import CacheArtifact, CacheArtifactFactory, CacheArtifactManager
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule
from torch.fx._lazy_graph_module import _make_graph_module as make_graph_module
from torch.fx._lazy_graph_module import _use_lazy_graph_module as use_lazy_graph_module
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._python_dispatch import _disable_current_modes as without_modes
from torch.utils._pytree import SERIALIZED_TYPE_TO_PYTHON_TYPE as PYTREE_TYPES_BY_NAME
from torch.utils._pytree import (
    TreeSpec,
    register_pytree_node,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)

if TYPE_CHECKING:
    from torch._dynamo import compiled_autograd
    from torch._dynamo import config as dynamo_config
    from torch._dynamo import reset as reset_dynamo
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex as GetItemAsIndex
    from torch._dynamo.aot_compile_types import SerializableCallable
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.convert_frame import compile_lock
    from torch._dynamo.eval_frame import OptimizedModule
    from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit, ShortenTraceback, TorchRuntimeError
    from torch._dynamo.source import ConstantSource, TensorPropertySource
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.utils import same
    from torch._functorch import config as functorch_config
    from torch._functorch._aot_autograd.schemas import MutationType, OutputType, PlainTensorMeta
    from torch._inductor import aoti_compile_and_package as compile_aotinductor
    from torch._inductor import aoti_load_package as load_aotinductor
    from torch._inductor import compiler_bisector
    from torch._inductor import config as inductor_config
    from torch._inductor import list_options as inductor_options
    from torch.ao.quantization.fx import _decomposed as quantized_decomposed
    from torch.nn.attention.flex_attention import _vmap_for_bhqkv as vmap_over_scores
    from torch.utils._sympy.value_ranges import ValueRanges

# Functions that return sets of dispatch keys: what modes of this thread (inference mode, dispatch modes, transforms) add and take away.
thread_key_sets = (_included_keys, _excluded_keys)

# Beginnings of the names of modules whose functions are made for function transforms.
FUNCTORCH = ("torch._functorch", "torch._C._functorch")

# Names that are imported when they are first asked for -> where from: a module, or an attribute of one.
_LATER = {
    "BackendCompilerFailed": "torch._dynamo.exc:BackendCompilerFailed",
    "ConstantSource": "torch._dynamo.source:ConstantSource",
    "FailOnRecompileLimitHit": "torch._dynamo.exc:FailOnRecompileLimitHit",
    "InstructionTranslator": "torch._dynamo.symbolic_convert:InstructionTranslator",
    "MutationType": "torch._functorch._aot_autograd.schemas:MutationType",
    "OptimizedModule": "torch._dynamo.eval_frame:OptimizedModule",
    "OutputType": "torch._functorch._aot_autograd.schemas:OutputType",
    "PlainTensorMeta": "torch._functorch._aot_autograd.schemas:PlainTensorMeta",
    "SerializableCallable": "torch._dynamo.aot_compile_types:SerializableCallable",
    "ShortenTraceback": "torch._dynamo.exc:ShortenTraceback",
    "TensorPropertySource": "torch._dynamo.source:TensorPropertySource",
    "TorchRuntimeError": "torch._dynamo.exc:TorchRuntimeError",
    "ValueRanges": "torch.utils._sympy.value_ranges:ValueRanges",
    "aot_autograd": "torch._dynamo.backends.common:aot_autograd",
    "compile_aotinductor": "torch._inductor:aoti_compile_and_package",
    "compile_lock": "torch._dynamo.convert_frame:compile_lock",
    "compiled_autograd": "torch._dynamo.compiled_autograd",
    "compiler_bisector": "torch._inductor.compiler_bisector",
    "dynamo_config": "torch._dynamo.config",
    "functorch_config": "torch._functorch.config",
    "GetItemAsIndex": "torch._dynamo._trace_wrapped_higher_order_op:TransformGetItemToIndex",
    "inductor_config": "torch._inductor.config",
    "inductor_options": "torch._inductor:list_options",
    "load_aotinductor": "torch._inductor:aoti_load_package",
    "quantized_decomposed": "torch.ao.quantization.fx._decomposed",
    "reset_dynamo": "torch._dynamo:reset",
    "same": "torch._dynamo.utils:same",
    "vmap_over_scores": "torch.nn.attention.flex_attention:_vmap_for_bhqkv",
}

__all__ = [
    "FUNCTORCH",
    "PYTREE_TYPES_BY_NAME",
    "BackendCompilerFailed",
    "CacheArtifact",
    "CacheArtifactFactory",
    "CacheArtifactManager",
    "ConstantSource",
    "DataDependentOutputException",
    "DisableTorchFunction",
    "DispatchKey",
    "FailOnRecompileLimitHit",
    "FakeTensor",
    "FakeTensorMode",
    "FunctionalTensorMode",
    "GetItemAsIndex",
    "HigherOrderOperator",
    "InstructionTranslator",
    "LazyGraphModule",
    "MutationType",
    "OpOverload",
    "OpOverloadPacket",
    "OperatorBase",
    "OptimizedModule",
    "OutputType",
    "PlainTensorMeta",
    "SerializableCallable",
    "ShortenTraceback",
    "TensorBase",
    "TensorPropertySource",
    "TorchDispatchMode",
    "TorchRuntimeError",
    "TracingContext",
    "TreeSpec",
    "ValueRanges",
    "after_guards_are_built",
    "aot_autograd",
    "around_compilations",
    "below_autograd",
    "choose_conv_backends_by",
    "clear_fx_tracing_flag",
    "compile_aotinductor",
    "compile_lock",
    "compiled_autograd",
    "compiler_bisector",
    "conjugate_view",
    "core_aten_decompositions",
    "count_torch_dispatch_modes",
    "count_torch_function_modes",
    "decomposition_table",
    "deferred_full_gc",
    "detect_fake_mode",
    "dispatch_keys",
    "dynamo_config",
    "enable_python_dispatcher",
    "flex_attention_handlers",
    "functions_of_torch",
    "functorch_config",
    "get_decompositions",
    "get_schema",
    "global_decomposition_table",
    "graph_breaks_logger",
    "graph_from_pickle",
    "graph_to_pickle",
    "has_saved_tensors_hooks",
    "hint_of",
    "inductor_config",
    "inductor_options",
    "is_any_autocast_enabled",
    "is_compiled_ahead_of_time",
    "is_compiling_for",
    "is_traceable_wrapper_subclass",
    "kernel_switches",
    "load_aotinductor",
    "load_inductor",
    "make_graph_module",
    "meta_table",
    "mkldnn_layout",
    "negative_view",
    "own_store",
    "peek_interpreter_stack",
    "profiler_enabled",
    "quantized_decomposed",
    "quantized_operators",
    "ranks_of",
    "register_pytree_node",
    "registered_kernels",
    "reset_dynamo",
    "same",
    "suggest_memory_format",
    "thread_key_sets",
    "torch_function_mode_at",
    "tracing",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
    "treespec_dumps",
    "treespec_loads",
    "unset_fake_temporarily",
    "use_lazy_graph_module",
    "vmap_kernels",
    "vmap_over_scores",
    "while_compiling_for",
    "without_autocast",
    "without_modes",
    "without_python_dispatcher",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module, _, attribute = _LATER[name].partition(":")
        value = importlib.import_module(module)
        value = getattr(value, attribute) if attribute else value
        globals()[name] = value
        return value


@contextlib.contextmanager
def below_autograd() -> Iterator[None]:
    """Call operators below autograd, and below what records views and writes: the next to see them are modes and backends."""
    with torch._C._AutoDispatchBelowAutograd():
        above = torch._C.DispatchKeySet(DispatchKey.ADInplaceOrView)
        with torch._C._ExcludeDispatchKeyGuard(above):
            yield


def around_compilations(begin: Callable[[], None], end: Callable[[], None]) -> None:
    """Have Dynamo call `begin` when a compilation starts and `end` when it ends, from now on, also after `torch.compiler.reset`."""
    from torch._dynamo.callback import callback_handler

    clear = callback_handler.clear

    def register() -> None:
        callback_handler.register_start_callback(lambda _: begin())
        callback_handler.register_end_callback(lambda _: end())

    def clear_others() -> None:
        clear()
        register()

    callback_handler.clear = clear_others  # type: ignore[method-assign]
    register()


def while_compiling_for(package: str, context: Callable[[], contextlib.AbstractContextManager[object]]) -> None:
    """Have Dynamo enter a context while it compiles for a backend of a package, from now on, also after `torch.compiler.reset`."""
    entered: list[contextlib.ExitStack] = []  # one for each compilation that is under way

    def begin() -> None:
        entered.append(contextlib.ExitStack())
        if is_compiling_for(package):
            entered[-1].enter_context(context())

    def end() -> None:
        if entered:
            entered.pop().close()

    around_compilations(begin, end)


def after_guards_are_built(changed: Callable[[Any, Any, Any], None]) -> None:
    """Have Dynamo call `changed(guards, local variables, builder)` when it has built a frame's guards and found that they hold, from now on.

    `guards.root` is what will be evaluated in each call. `builder.scope["G"]`: the global variables.
    """
    from torch._dynamo import guards

    before = getattr(guards, "guard_manager_testing_hook_fn", None)

    def built(wrapper: Any, local_variables: Any, builder: Any) -> None:
        if before is not None:
            before(wrapper, local_variables, builder)
        changed(wrapper, local_variables, builder)

    guards.guard_manager_testing_hook_fn = built


def choose_conv_backends_by(chosen: Callable[..., Any]) -> None:
    """Have traces choose the library of a convolution by `chosen(choose, input, weight, **settings)`, from now on, where `choose` is what chose
    before."""
    torch._C._select_conv_backend = functools.partial(chosen, torch._C._select_conv_backend)


def is_compiling_for(package: str) -> bool:
    """True if Dynamo compiles on this thread right now for a backend of a package, whatever the backend is wrapped in."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_compile" and frame.f_globals.get("__name__") == "torch._dynamo.convert_frame":
            return any(_is_of(backend, package) for backend in _unwrapped(frame.f_locals.get("compiler_fn")))
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _is_of(backend: object, package: str) -> bool:
    return str(getattr(backend, "__module__", "")).partition(".")[0] == package


def _unwrapped(backend: Any) -> list[Any]:
    """A backend as Dynamo holds it, and what it is wrapped in, one within the other."""
    found: list[Any] = []
    while backend is not None and backend not in found:
        found.append(backend)
        inner = (getattr(backend, name, None) for name in ("_torchdynamo_orig_backend", "compiler_fn", "func"))
        backend = next((b for b in inner if b is not None), None)
    return found


def clear_fx_tracing_flag() -> None:
    """Let compiled functions be called while torch.fx traces. The flag is set for all threads."""
    torch.fx._symbolic_trace._is_fx_tracing_flag = False


def graph_breaks_logger() -> logging.Logger:
    """Dynamo's logger of graph breaks."""
    from torch._logging._internal import getArtifactLogger

    logger: logging.Logger = getArtifactLogger("torch._dynamo.symbolic_convert", "graph_breaks")
    return logger


def has_saved_tensors_hooks() -> bool:
    """True where `torch.autograd.graph.saved_tensors_hooks` are set on this thread."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def hint_of(size: torch.SymInt) -> int:
    """The value that a symbolic size had in the call that was traced; nothing is assumed of later calls."""
    hint: int = size.node.hint
    return hint


def is_compiled_ahead_of_time() -> bool:
    """True while `torch.compile(...).aot_compile` calls a backend, which must return a `SerializableCallable`."""
    from torch._functorch import config

    return bool(getattr(config, "bundled_autograd_cache", False))


def graph_to_pickle(graph_module: torch.fx.GraphModule, metadata: Callable[[torch.fx.Node], dict[str, Any]]) -> bytes:
    """Pickle a graph of Dynamo's, fake tensors and symbolic sizes included; `metadata` gives that of a node. Raises what pickling raises."""
    from torch.fx._graph_pickler import GraphPickler, Options

    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    graph.output(graph.graph_copy(graph_module.graph, copies))
    for node, copy in copies.items():
        copy.meta = metadata(node)
    sources = [getattr(node, "_dynamo_source", None) for node in graph_module.graph.find_nodes(op="placeholder")]
    parameters = getattr(graph_module, "_param_name_to_source", {})
    options = Options(ops_filter=None, node_metadata_key_filter=None)
    pickled: bytes = GraphPickler.dumps((torch.fx.GraphModule(graph_module, graph), sources, parameters), options)
    return pickled


def graph_from_pickle(data: bytes) -> tuple[torch.fx.GraphModule, FakeTensorMode]:
    """A pickled graph, as Dynamo hands graphs to AOTAutograd, and the mode of its fake tensors. Bytes of others can run any code."""
    from torch.fx._graph_pickler import GraphPickler
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    fake_mode = FakeTensorMode(shape_env=ShapeEnv())
    loaded: Any = GraphPickler.loads(data, fake_mode)
    graph_module, sources, parameters = loaded
    for node, source in zip(graph_module.graph.find_nodes(op="placeholder"), sources, strict=True):
        node._dynamo_source = source
    graph_module._param_name_to_source = parameters
    graph_module.meta["dynamo_compile_id"] = None  # AOTAutograd takes graphs that have one for Dynamo's
    graph_module.recompile()
    return graph_module, fake_mode


def deferred_full_gc() -> Callable[[], AbstractContextManager[None]] | None:
    """Dynamo's own means of holding full garbage collections back, from torch 2.15 on; None before."""
    import torch._dynamo.utils

    return getattr(torch._dynamo.utils, "deferred_full_gc", None)


def registered_kernels() -> set[str]:
    """Kernels that Python code registered with `torch.library`, as "namespace/operator/key"."""
    return set(torch.library._impls)


def vmap_kernels() -> set[str]:
    """Those of them that the first use of `torch.vmap` registers."""
    from torch._functorch import predispatch

    library = predispatch.VMAP_DECOMPOSITIONS_LIB
    return set() if library is None else set(library._op_impls)


def flex_attention_handlers() -> dict[Any, Any] | None:
    """Functions that run FlexAttention's operator under a dispatch mode, by the mode's class; None where nothing has imported the operator."""
    if "torch._higher_order_ops.flex_attention" not in sys.modules:
        return None
    handlers: dict[Any, Any] = torch.ops.higher_order.flex_attention.python_key_table
    return handlers


def functions_of_torch() -> tuple[Any, ...]:
    """Modules of compiled functions that Dynamo's graphs call."""
    return torch._C, torch._C._nn, getattr(torch._C, "_special", None)


def kernel_switches() -> tuple[bool, ...]:
    """State of the switches that decide which kernels PyTorch calls, and so which operators are traced."""
    return (
        torch._C._get_deterministic_fill_uninitialized_memory(),
        torch._C._get_mkldnn_enabled(),
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
    )


def own_store(prefix: str, request_s: float) -> Any:
    """The store that the ranks of the job have met in, with a prefix to all names. A store that is asked over a network is asked by a
    connection of its own, and raises RuntimeError for a request that takes more than `request_s` seconds."""
    c10d: Any = torch.distributed
    store = c10d.distributed_c10d._get_default_store()
    if isinstance(getattr(store, "_underlying_non_prefix_store", store), c10d.TCPStore):
        store = store.clone()
        store.set_timeout(datetime.timedelta(seconds=request_s))
    return c10d.PrefixStore(prefix, store)


def ranks_of(group: str) -> list[int]:
    """The ranks of a process group, by its name in graphs."""
    c10d: Any = torch.distributed
    return list(c10d.get_process_group_ranks(c10d.distributed_c10d._resolve_process_group(group)))


def load_inductor() -> None:
    """Import PyTorch's own compiler, which its first compilation would do otherwise."""
    importlib.import_module("torch._inductor.compile_fx")


def quantized_operators() -> Any:
    """`torch.ops.quantized_decomposed`, whose operators exist once torch.ao's module is imported."""
    importlib.import_module("torch.ao.quantization.fx._decomposed")
    return torch.ops.quantized_decomposed
