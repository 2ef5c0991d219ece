"""Canaries: each private name of PyTorch is there, and does what this package relies on. A failure names what a release of PyTorch changed."""

from __future__ import annotations

import ast
import contextlib
import ctypes
import inspect
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx
from torch.overrides import TorchFunctionMode

from torch_hybrid_backend import torch_private as private

PACKAGE = Path(private.__file__).parent
ADD = torch.ops.aten.add.Tensor


def takes(function: Callable[..., Any], *names: str) -> bool:
    """True if parameters of these names can be passed to a function."""
    parameters = inspect.signature(function).parameters
    return parameters.keys() >= set(names) or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def with_fakes(use: Callable[[torch.Tensor], object]) -> object:
    with private.FakeTensorMode():
        return use(torch.empty(2, 3))


def dispatched(enter: Callable[[], Any] | None = None) -> list[object]:
    """Operators that a dispatch mode sees of one addition made inside `enter()`."""
    seen: list[object] = []

    class Mode(private.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        if enter is None:
            torch.zeros(2, device="cpu") + 1
        else:
            with enter():
                torch.zeros(2, device="cpu") + 1
    return seen


def traced_with(context: Any) -> bool:
    """True if a tracing context is the current one inside of `tracing` alone."""
    with private.tracing(context):
        inside = private.TracingContext.try_get() is context
    return inside and private.TracingContext.try_get() is None


def compilations_seen() -> list[object]:
    """Answers at the start and the end of a compilation, for a backend of this package."""
    seen: list[object] = []

    def mine(gm: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        return gm.forward

    private.around_compilations(
        lambda: seen.extend([private.is_compiling_for("tests"), private.is_compiling_for("torch_hybrid_backend")]),
        lambda: seen.append("end"),
    )
    torch.compiler.reset()  # which forgets others' callbacks
    torch.compile(lambda x: x + 1, backend=mine)(torch.zeros(2))
    return seen


def compiling_contexts() -> list[object]:
    """Notes of a context that is entered for compilations of this package: for a backend of this package and for another."""
    told: list[object] = []

    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        told.append("begin")
        yield
        told.append("end")

    def mine(gm: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        told.append("trace")
        return gm.forward

    private.while_compiling_for("tests", entered)
    for backend in (mine, "eager"):
        torch.compiler.reset()
        torch.compile(lambda x: x + 1, backend=backend)(torch.zeros(2))
    return told


def hooks_seen() -> list[bool]:
    """Answers without hooks on saved tensors, and with them."""
    before = private.has_saved_tensors_hooks()
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        return [before, private.has_saved_tensors_hooks()]


def choices_of_convolutions() -> int:
    """The number of times that a chooser of convolutions' libraries was asked for one that was traced."""
    asked: list[object] = []

    def noted(choose: Any, *args: Any, **settings: Any) -> Any:
        asked.append(args)
        return choose(*args, **settings)

    before = torch._C._select_conv_backend
    private.choose_conv_backends_by(noted)
    try:
        with private.FakeTensorMode():
            torch.conv2d(torch.empty(1, 3, 8, 8), torch.empty(4, 3, 3, 3))
    finally:
        torch._C._select_conv_backend = before
    return len(asked)


def guards_built() -> set[str]:
    """Accessors, and kinds of guards, of a function that calls a layer."""
    from torch._dynamo import guards as dynamo_guards

    found: set[str] = set()

    def visit(node: Any) -> None:
        found.update(type(guard).__name__ for guard in node.get_leaf_guards())
        assert all(hasattr(node, name) for name in ("is_guarded_value_immutable", "has_object_aliasing_guard"))
        for accessor, child in zip(node.get_accessors(), node.get_child_managers(), strict=True):
            found.add(accessor.repr())
            assert child.get_source()
            assert child.get_type_of_guarded_value()
            visit(child)

    def noted(built: Any, local_variables: Any, builder: Any) -> None:
        assert {"layer", "x"} <= set(local_variables)
        assert builder.scope["G"]["torch"] is torch
        visit(built.root)
        whole = built.root.clone_manager(lambda node: True)
        whole.add_lambda_guard(lambda variables: variables["layer"] is local_variables["layer"], ["a layer"], None)
        assert built.root.check(local_variables)
        assert whole.check(local_variables)
        assert not whole.check(dict(local_variables, layer=torch.nn.ReLU()))

    before = dynamo_guards.guard_manager_testing_hook_fn
    private.after_guards_are_built(noted)
    try:
        torch.compile(lambda layer, x: torch.relu(layer(x)), backend="eager")(torch.nn.Linear(2, 2), torch.ones(1, 2))
    finally:
        dynamo_guards.guard_manager_testing_hook_fn = before
    return found


def keys_of_modes() -> int:
    """The number of different sets of keys without a mode, in inference mode and in a dispatch mode."""
    seen = set()

    def note(*given: Any) -> None:
        seen.add(tuple(keys().raw_repr() for keys in private.thread_key_sets))

    class Mode(private.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    note()
    with torch.inference_mode():
        note()
    with Mode():
        note()
    return len(seen)


def scores_indexed() -> torch.Tensor:
    """Scores (1, 1, 1, 2) of zeros plus elements of a tensor at the keys' positions."""
    table, places = torch.tensor([3.0, 5.0]), [torch.arange(n) for n in (1, 1, 1, 2)]
    score_of = private.vmap_over_scores(lambda score, b, h, q, k: score + table[k], prefix=(0,), suffix=())
    with private.GetItemAsIndex():
        result: torch.Tensor = score_of(torch.zeros(1, 1, 1, 2), *places)
    return result


def flex_handlers() -> dict[Any, Any]:
    """The handlers of FlexAttention, once it is imported."""
    assert private.vmap_over_scores is not None  # imports it
    handlers = private.flex_attention_handlers()
    assert handlers is not None
    return handlers


def key_below_autograd() -> bool:
    """True if operators called there record no gradient."""
    with private.below_autograd():
        return not (torch.ones(2, requires_grad=True) * 2).requires_grad


def during_function_mode(use: Callable[[], object]) -> object:
    class Mode(TorchFunctionMode):
        pass

    with Mode() as mode:
        result = use()
        return mode if result is private.torch_function_mode_at(0) else result


def module_without_forward() -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    graph.output((graph.placeholder("x"),))
    with private.use_lazy_graph_module(True):
        return private.make_graph_module(torch.nn.Module(), graph, "Lazy")


def forced() -> torch.fx.GraphModule:
    module = module_without_forward()
    private.LazyGraphModule.force_recompile(module)
    return module


def translator_seen() -> bool:
    """True if `InstructionTranslator.current_tx()` and the tracing context tell a backend of the function that is compiled."""
    seen: list[Any] = []

    def backend(gm: torch.fx.GraphModule, _inputs: object) -> Callable[..., Any]:
        current = private.InstructionTranslator.current_tx()
        context = private.TracingContext.try_get()
        fake = private.detect_fake_mode([n.meta.get("example_value") for n in gm.graph.nodes])
        seen.extend((current.f_code.co_name, set(current.f_locals), current.output.graph, context, fake))
        return gm.forward

    def doubled(value: torch.Tensor) -> torch.Tensor:
        return value * 2

    torch.compile(doubled, backend=backend)(torch.zeros(3))
    name, local, graph, context, fake = seen
    return (
        name == "doubled"
        and "value" in local
        and isinstance(graph, torch.fx.Graph)
        and context.fakify_first_call is False
        and hasattr(context, "fw_metadata")
        and hasattr(context.guards_context, "aotautograd_guards")
        and isinstance(fake, private.FakeTensorMode)
    )


def graph_break_told() -> bool:
    """True if the logger tells of a graph break in Dynamo's form."""
    messages: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    def broken(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + 1

    logger, handler = private.graph_breaks_logger(), Handler()
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    try:
        torch.compile(broken, backend="eager")(torch.zeros(2))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
    return any("Graph break" in m and "in user code at" in m and "Graph Break Reason:" in m for m in messages)


def profiled() -> tuple[bool, bool]:
    before = private.profiler_enabled()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        return before, private.profiler_enabled()


def payload_is_found() -> bool:
    tensor = torch.empty(3)
    word = ctypes.sizeof(ctypes.c_void_p)
    words = (ctypes.c_void_p * (private.TensorBase.__basicsize__ // word)).from_address(id(tensor))
    return sum(value == tensor._cdata for value in words) == 1


def flag_is_cleared() -> bool:
    """True if the flag is set while torch.fx traces, and can be cleared."""
    from torch.fx.experimental.proxy_tensor import make_fx

    seen: list[bool] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.fx._symbolic_trace.is_fx_tracing())
        private.clear_fx_tracing_flag()
        seen.append(torch.fx._symbolic_trace.is_fx_tracing())
        return x * 2

    make_fx(function)(torch.zeros(2))
    return seen == [True, False]


def modules_of_vmap() -> list[str]:
    """Modules of the functions in the graph that Dynamo makes of `torch.vmap`."""
    modules: list[str] = []

    def backend(gm: torch.fx.GraphModule, _inputs: object) -> Callable[..., Any]:
        modules.extend(str(getattr(node.target, "__module__", "")) for node in gm.graph.nodes)
        return gm.forward

    torch.compile(torch.vmap(torch.sin), backend=backend)(torch.zeros(2, 2))
    return modules


def added_kernel() -> set[str]:
    with torch.library._scoped_library("aten", "IMPL") as library:
        before = private.registered_kernels()
        library.impl("sinc", lambda x: x, "XPU")
        return private.registered_kernels() - before


def bisector_is_as_used() -> bool:
    bisector = private.compiler_bisector
    return (
        list(bisector.BACKENDS)[:2] == ["eager", "aot_eager"]
        and "inductor" in bisector.BACKENDS
        and takes(bisector.BisectSubsystem, "name")
        and bisector.CompilerBisector.bisection_enabled is False
        and callable(bisector.CompilerBisector.get_subsystem)
        and takes(bisector.CompilerBisector.do_bisect, "fn")
        and list(inspect.signature(bisector.CompilerBisector.disable_subsystem).parameters)[:3]
        == ["backend", "subsystem", "debug_info"]
        and {"backend", "subsystem", "bisect_number", "debug_info"}
        <= set(inspect.signature(bisector.BisectionResult).parameters)
    )


def has_output_types() -> bool:
    return {"non_alias", "unsafe_view_alias", "alias_of_input"} <= set(private.OutputType.__members__)


def compiled_by(backend: Callable[..., Any], *, ahead: bool, dynamic: bool = False) -> None:
    """Have Dynamo compile a function of a tensor and a size."""
    x = torch.ones(3, 2)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    torch.compiler.reset()
    compiled = torch.compile(addition, backend=backend, fullgraph=True)
    with torch.no_grad():
        if ahead:
            compiled.aot_compile(((x,), {}))
        else:
            compiled(x)


def addition(x: torch.Tensor) -> torch.Tensor:
    return x + x.shape[0]


class _Graph(private.SerializableCallable):
    def __init__(self, graph_module: torch.fx.GraphModule) -> None:
        self.graph_module = graph_module

    @classmethod
    def serialize_compile_artifacts(cls, fn: Any) -> bytes:
        return b""

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> Any:
        return None

    def __call__(self, *args: Any) -> Any:
        return self.graph_module(*args)


def ahead_of_time() -> list[bool]:
    told: list[bool] = []

    def backend(graph_module: torch.fx.GraphModule, _: object) -> Any:
        told.append(private.is_compiled_ahead_of_time())
        return _Graph(graph_module)

    compiled_by(backend, ahead=False)
    compiled_by(backend, ahead=True)
    return told


def hints() -> list[int]:
    found: list[int] = []

    def backend(graph_module: torch.fx.GraphModule, inputs: Any) -> Any:
        found.extend(private.hint_of(value) for value in inputs if isinstance(value, torch.SymInt))
        return _Graph(graph_module)

    compiled_by(backend, ahead=True, dynamic=True)
    return found


def pickled_graph() -> bool:
    """True if a pickled graph of Dynamo's computes the same, with fake tensors of symbolic sizes and the sources of its inputs."""
    loaded: list[tuple[torch.fx.GraphModule, Any]] = []

    def backend(graph_module: torch.fx.GraphModule, _: object) -> Any:
        keep = {"example_value", "tensor_dict"}
        text = private.graph_to_pickle(graph_module, lambda node: {k: v for k, v in node.meta.items() if k in keep})
        loaded.append(private.graph_from_pickle(text))
        return _Graph(graph_module)

    compiled_by(backend, ahead=True, dynamic=True)
    graph_module, fake_mode = loaded[0]
    *_, x = graph_module.graph.find_nodes(op="placeholder")
    fake = x.meta["example_value"]
    (result,) = graph_module(5, torch.ones(5, 2))
    return fake.fake_mode is fake_mode and isinstance(fake.shape[0], torch.SymInt) and bool((result == 6).all())


def in_a_job(ask: Callable[[], object]) -> object:
    """The answer to a question in a job of one process."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, 1, is_master=True)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        return ask()
    finally:
        torch.distributed.destroy_process_group()


def own_store_is_apart() -> bool:
    """True if a store of one's own has names of its own, and what `ranks.peers` asks of it."""
    store = private.own_store("own", 5.0)
    absent = not store.check(["x"])
    first, second = store.compare_set("x", "", "1"), store.compare_set("x", "", "2")
    return absent and first == second == store.get("x") == b"1" and not private.own_store("other", 5.0).check(["x"])


# Name of `torch_private` -> a question that is answered with True as long as what we rely on holds.
CANARIES: dict[str, Callable[[], object]] = {
    "BackendCompilerFailed": lambda: issubclass(private.BackendCompilerFailed, Exception),
    "CacheArtifact": lambda: takes(private.CacheArtifact, "key", "content") and private.CacheArtifact.populate_cache,
    "CacheArtifactFactory": lambda: takes(private.CacheArtifactFactory.register, "artifact_cls"),
    "CacheArtifactManager": lambda: takes(
        private.CacheArtifactManager.record_artifact, "artifact_type", "key", "content"
    ),
    "ConstantSource": lambda: private.ConstantSource("s0") == private.ConstantSource("s0"),
    "DataDependentOutputException": lambda: issubclass(private.DataDependentOutputException, RuntimeError),
    "DisableTorchFunction": lambda: not isinstance(during_function_mode(_without_function), list),
    "DispatchKey": lambda: (
        private.DispatchKey.Meta and private.DispatchKey.Autograd and private.DispatchKey.CompositeImplicitAutograd
    ),
    "FUNCTORCH": lambda: any(name.startswith(private.FUNCTORCH) for name in modules_of_vmap()),
    "FailOnRecompileLimitHit": lambda: issubclass(private.FailOnRecompileLimitHit, Exception),
    "FakeTensor": lambda: with_fakes(lambda x: isinstance(x, private.FakeTensor) and x.fake_mode is not None),
    "FakeTensorMode": lambda: takes(private.FakeTensorMode, "shape_env", "allow_non_fake_inputs"),
    "HigherOrderOperator": lambda: isinstance(torch.ops.higher_order.cond, private.HigherOrderOperator),
    "InstructionTranslator": translator_seen,
    "LazyGraphModule": lambda: len(forced()(torch.zeros(2))) == 1,
    "MutationType": lambda: private.MutationType.NOT_MUTATED,
    "OpOverload": lambda: isinstance(ADD, private.OpOverload) and ADD.namespace == "aten" and ADD.overloadpacket,
    "OpOverloadPacket": lambda: isinstance(torch.ops.aten.add, private.OpOverloadPacket),
    "OperatorBase": lambda: isinstance(ADD, private.OperatorBase) and isinstance(ADD.py_kernels, dict),
    "OptimizedModule": lambda: isinstance(torch.compile(torch.nn.Linear(2, 2)), private.OptimizedModule),
    "OutputType": has_output_types,
    "PYTREE_TYPES_BY_NAME": lambda: private.PYTREE_TYPES_BY_NAME["builtins.dict"] is dict,
    "PlainTensorMeta": lambda: isinstance(private.PlainTensorMeta, type),
    "SerializableCallable": lambda: (
        {"serialize_compile_artifacts", "deserialize_compile_artifacts", "__call__"}
        == private.SerializableCallable.__abstractmethods__
    ),
    "ShortenTraceback": lambda: (
        takes(private.ShortenTraceback, "first_useful_frame") and private.ShortenTraceback.remove_dynamo_frames
    ),
    "TensorBase": payload_is_found,
    "TensorPropertySource": lambda: isinstance(private.TensorPropertySource, type),
    "TorchDispatchMode": lambda: ADD in dispatched(),
    "TorchRuntimeError": lambda: issubclass(private.TorchRuntimeError, Exception),
    "TracingContext": lambda: private.TracingContext.try_get() is None and translator_seen(),
    "TreeSpec": lambda: isinstance(private.tree_flatten([1])[1], private.TreeSpec),
    "ValueRanges": lambda: (private.ValueRanges(0, 9) & private.ValueRanges(2, 20)) == private.ValueRanges(2, 9),
    "aot_autograd": lambda: takes(
        private.aot_autograd,
        "fw_compiler",
        "bw_compiler",
        "inference_compiler",
        "decompositions",
        "partition_fn",
        "keep_inference_input_mutations",
    ),
    "clear_fx_tracing_flag": flag_is_cleared,
    "compile_aotinductor": lambda: takes(
        private.compile_aotinductor, "exported_program", "package_path", "inductor_configs"
    ),
    "compile_lock": lambda: private.compile_lock.acquire(blocking=False) and (private.compile_lock.release() is None),
    "compiled_autograd": lambda: private.compiled_autograd.in_compiled_autograd_region is False,
    "compiler_bisector": bisector_is_as_used,
    "conjugate_view": lambda: private.conjugate_view(torch.ones(2, dtype=torch.complex64)).is_conj(),
    "core_aten_decompositions": lambda: torch.ops.aten.addcmul.default in private.core_aten_decompositions(),
    "count_torch_dispatch_modes": lambda: private.count_torch_dispatch_modes() == 0,
    "count_torch_function_modes": lambda: during_function_mode(private.count_torch_function_modes) == 1,
    "decomposition_table": lambda: callable(private.decomposition_table[torch.ops.aten.addcmul.default]),
    "deferred_full_gc": lambda: private.deferred_full_gc() is None or callable(private.deferred_full_gc()),
    "detect_fake_mode": lambda: with_fakes(lambda x: private.detect_fake_mode([x]) is x.fake_mode),
    "dynamo_config": lambda: (
        private.dynamo_config.recompile_limit
        and private.dynamo_config.suppress_errors is False
        and private.dynamo_config.patch(fail_on_recompile_limit_hit=True)
    ),
    "enable_python_dispatcher": lambda: _entered(private.enable_python_dispatcher),
    "functions_of_torch": lambda: any(
        getattr(place, "linear", None) is torch.nn.functional.linear for place in private.functions_of_torch()
    ),
    "functorch_config": lambda: (
        private.functorch_config.get_hash().hex()
        and private.functorch_config.functionalize_rng_ops is False
        and private.functorch_config.patch(donated_buffer=False)
    ),
    "get_decompositions": lambda: callable(
        private.get_decompositions([torch.ops.aten.addcmul])[torch.ops.aten.addcmul.default]
    ),
    "get_schema": lambda: private.get_schema("aten::add", "Tensor").arguments[0].real_type.kind() == "TensorType",
    "global_decomposition_table": lambda: all(
        isinstance(table, dict) for table in private.global_decomposition_table.values()
    ),
    "graph_breaks_logger": graph_break_told,
    "graph_from_pickle": pickled_graph,
    "graph_to_pickle": pickled_graph,
    "hint_of": lambda: hints() == [3],
    "inductor_config": lambda: (
        private.inductor_config.freezing is False and private.inductor_config.max_autotune is False
    ),
    "inductor_options": lambda: "max_autotune" in private.inductor_options(),
    "is_any_autocast_enabled": lambda: not private.is_any_autocast_enabled() and _autocast(),
    "is_compiled_ahead_of_time": lambda: ahead_of_time() == [False, True],
    "is_traceable_wrapper_subclass": lambda: not private.is_traceable_wrapper_subclass(torch.zeros(1)),
    "kernel_switches": lambda: all(isinstance(each, bool) for each in private.kernel_switches()),
    "load_aotinductor": lambda: takes(private.load_aotinductor, "path"),
    "load_inductor": lambda: private.load_inductor() is None,
    "make_graph_module": lambda: takes(private.make_graph_module, "root", "graph", "class_name"),
    "mkldnn_layout": lambda: torch.zeros(2, 2).to_mkldnn().layout is private.mkldnn_layout,
    "negative_view": lambda: private.negative_view(torch.ones(2)).is_neg(),
    "own_store": lambda: in_a_job(own_store_is_apart),
    "has_saved_tensors_hooks": lambda: hooks_seen() == [False, True],
    "while_compiling_for": lambda: compiling_contexts() == ["begin", "trace", "end"],
    "choose_conv_backends_by": lambda: choices_of_convolutions() == 1,
    "after_guards_are_built": lambda: (
        guards_built()
        >= {
            *("GetGenericDictGuardAccessor", "DictGetItemGuardAccessor('weight')", "GlobalsGuardAccessor"),
            *("FrameLocalsGuardAccessor(key='layer', framelocals_idx=0)", "TYPE_MATCH", "TENSOR_MATCH"),
        }
    ),
    "around_compilations": lambda: compilations_seen() == [True, False, "end"],
    "below_autograd": key_below_autograd,
    "is_compiling_for": lambda: not private.is_compiling_for("tests") and True in compilations_seen(),
    "FunctionalTensorMode": lambda: private.FunctionalTensorMode in flex_handlers(),
    "flex_attention_handlers": lambda: all(map(callable, flex_handlers().values())),
    "GetItemAsIndex": lambda: scores_indexed().tolist() == [[[[3.0, 5.0]]]],
    "vmap_over_scores": lambda: scores_indexed().shape == (1, 1, 1, 2),
    "meta_table": lambda: torch.ops.aten.mm.default in private.meta_table,
    "peek_interpreter_stack": lambda: private.peek_interpreter_stack() is None and _inside_vmap() is not None,
    "profiler_enabled": lambda: profiled() == (False, True),
    "quantized_decomposed": lambda: (
        callable(private.quantized_decomposed.dequantize_per_channel_group)
        and callable(private.quantized_decomposed.choose_qparams_per_token)
    ),
    "quantized_operators": lambda: private.quantized_operators().dequantize_per_channel_group.default,
    "registered_kernels": lambda: added_kernel() == {"aten/sinc/XPU"},
    "ranks_of": lambda: in_a_job(lambda: private.ranks_of(torch.distributed.group.WORLD.group_name) == [0]),
    "register_pytree_node": lambda: takes(
        private.register_pytree_node, "cls", "flatten_fn", "unflatten_fn", "serialized_type_name"
    ),
    "dispatch_keys": lambda: (
        private.dispatch_keys(torch.ones(1)).raw_repr()
        != private.dispatch_keys(private.negative_view(torch.ones(1))).raw_repr()
    ),
    "reset_dynamo": lambda: private.reset_dynamo() is None,
    "same": lambda: private.same([torch.ones(1)], [torch.ones(1)], None, equal_nan=True, tol=0.0, log_error=print),
    "thread_key_sets": lambda: keys_of_modes() == 3,
    "suggest_memory_format": lambda: private.suggest_memory_format(torch.zeros(1, 2, 2)) is torch.contiguous_format,
    "torch_function_mode_at": lambda: isinstance(
        during_function_mode(lambda: private.torch_function_mode_at(0)), TorchFunctionMode
    ),
    "tracing": lambda: traced_with(private.TracingContext(private.FakeTensorMode())),
    "tree_flatten": lambda: private.tree_flatten({"a": [1, (2,)]})[0] == [1, 2],
    "tree_leaves": lambda: private.tree_leaves([None, {"a": 1}]) == [None, 1],
    "tree_map": lambda: private.tree_map(lambda x: x + 1, {"a": [1]}) == {"a": [2]},
    "tree_map_only": lambda: private.tree_map_only(int, lambda x: x + 1, [1, "a"]) == [2, "a"],
    "treespec_dumps": lambda: "builtins.dict" in private.treespec_dumps(private.tree_flatten({"a": [1]})[1]),
    "treespec_loads": lambda: (
        (spec := private.tree_flatten(((1,), {"a": [1]}))[1]) == private.treespec_loads(private.treespec_dumps(spec))
    ),
    "tree_unflatten": lambda: private.tree_unflatten(*private.tree_flatten({"a": [1]})) == {"a": [1]},
    "unset_fake_temporarily": lambda: with_fakes(lambda _: _real_inside_fakes()),
    "use_lazy_graph_module": lambda: isinstance(module_without_forward(), private.LazyGraphModule),
    "vmap_kernels": lambda: _inside_vmap() is not None and private.vmap_kernels() <= private.registered_kernels(),
    "without_autocast": lambda: _entered(private.without_autocast),
    "without_modes": lambda: dispatched(private.without_modes) == [],
    "without_python_dispatcher": lambda: _entered(private.without_python_dispatcher),
}


def _without_function() -> object:
    with private.DisableTorchFunction():
        return torch.zeros(1) + 1


def _entered(context: Callable[[], Any]) -> bool:
    with context():
        return bool((torch.zeros(1) + 1 == 1).all())


def _autocast() -> bool:
    with torch.autocast("cpu", torch.bfloat16):
        return private.is_any_autocast_enabled()


def _inside_vmap() -> object:
    seen: list[object] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(private.peek_interpreter_stack())
        return x + 1

    torch.vmap(function)(torch.zeros(2, 2))
    return seen[0]


def _real_inside_fakes() -> bool:
    with private.unset_fake_temporarily():
        return not isinstance(torch.zeros(1), private.FakeTensor)


@pytest.mark.parametrize("name", private.__all__)
def test_private_name_is_as_relied_on(name: str) -> None:
    """Every name has a canary."""
    assert CANARIES[name]()


def test_names_are_those_that_are_used() -> None:
    """No name is offered that no module imports, and no canary is left of one that is gone."""
    used = {
        alias.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == private.__name__
        for alias in node.names
    }
    assert used == set(private.__all__) == CANARIES.keys()


def test_importing_it_does_not_import_compilers() -> None:
    """Dynamo takes a second to import, inductor another: both wait until they are asked for."""
    code = (
        "import sys, torch; before = set(sys.modules); import torch_hybrid_backend.torch_private\n"
        "print([m for m in set(sys.modules) - before if m.startswith(('torch._dynamo', 'torch._inductor', 'sympy'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = private.nothing


# Private attribute of PyTorch's objects that modules read -> an example that has it as we read it.
ATTRIBUTES: dict[str, Callable[[], object]] = {
    "_ConvNd": lambda: issubclass(torch.nn.Conv2d, torch.nn.modules.conv._ConvNd),
    "_boxed_call": lambda: (
        "_boxed_call" in inspect.getsource(sys.modules[private.aot_autograd.__module__])
        or "_boxed_call" in inspect.getsource(torch._functorch.aot_autograd)
    ),
    "_cdata": lambda: (
        isinstance(torch.zeros(1).untyped_storage()._cdata, int) and isinstance(torch.zeros(1)._cdata, int)
    ),
    "_dispatch_cache": lambda: isinstance(ADD._dispatch_cache, dict),
    "_forward_hooks": lambda: torch.nn.Linear(1, 1)._forward_hooks == {},
    "_has_symbolic_sizes_strides": lambda: with_fakes(lambda x: x._has_symbolic_sizes_strides is False),
    "_opname": lambda: ADD._opname == "add",
    "_overloadname": lambda: ADD._overloadname == "Tensor",
    "_schema": lambda: ADD._schema.name == "aten::add" and len(ADD._schema.arguments) == 3,
    "_version": lambda: torch.zeros(1).add_(1)._version == 1,
}


def test_attributes_are_read() -> None:
    """No canary is left of an attribute that no module reads any more."""
    trees = (ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py"))
    read = {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert read >= ATTRIBUTES.keys()


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_private_attribute_is_as_relied_on(name: str) -> None:
    assert ATTRIBUTES[name]()
