"""The backend: what `torch.compile` calls. With `hybrid_graph` and `stages` it wires all rooms together. Read it first.

torch.compile(model, backend="hybrid")
  -> capture      Dynamo's graph -> functional ATen graphs
  -> passes       fold, simplify; split off what depends on parameters alone (hoist)
  -> partition    regions and who may run them
  -> engines      regions -> compiled regions
  -> first call   every candidate checked against eager and priced (partition.placement), on the real inputs
  -> runtime      the winners as one C++ plan
  -> whole call   the plan priced against Dynamo's graph in eager (partition.whole_call)
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
import torch.fx

from torch_hybrid_backend.arguments import check_model, described, is_compiled, uncompiled
from torch_hybrid_backend.builds.background import InBackground, copies_of, wait_for_builds
from torch_hybrid_backend.capture.aot import capture
from torch_hybrid_backend.capture.cache.aot_cache import AotCache
from torch_hybrid_backend.capture.graph_breaks import telling_graph_breaks
from torch_hybrid_backend.capture.model_name import model_name
from torch_hybrid_backend.config import Config, apply_log_level
from torch_hybrid_backend.core.captured import CapturedGraph
from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.device import CPU, Device
from torch_hybrid_backend.core.engine import CompiledRegion
from torch_hybrid_backend.core.plan import GraphBreak, Plan, Unconverted
from torch_hybrid_backend.core.precision import AS_WRITTEN, PRECISIONS
from torch_hybrid_backend.core.verdict import Reason, Refused
from torch_hybrid_backend.driver.bisection import applied_in_capture, is_running
from torch_hybrid_backend.driver.errors_as_written import as_written, raising_as_written
from torch_hybrid_backend.driver.garbage import collector_paused
from torch_hybrid_backend.driver.hybrid_graph import HybridGraph, OnPlan, OnRegions, pricing_of
from torch_hybrid_backend.driver.prepared import copy_of, hindrance
from torch_hybrid_backend.driver.profiling import PlannedGraph, Timeable, WholeGraph, profile_calls, warm_up
from torch_hybrid_backend.driver.ready import Ready
from torch_hybrid_backend.driver.refused_forms import refused_operator
from torch_hybrid_backend.driver.session import Session, open_session
from torch_hybrid_backend.errors import ArgumentError, ConfigError, delivered
from torch_hybrid_backend.graph.devices import is_on_host
from torch_hybrid_backend.graph.eager_graph import EagerGraph, with_right_text
from torch_hybrid_backend.graph.values import holds_collectives, is_repeatable
from torch_hybrid_backend.machine import lacking_instructions
from torch_hybrid_backend.partition.seen_graphs import SeenGraphs, graph_key
from torch_hybrid_backend.partition.whole_call import PricedCall
from torch_hybrid_backend.progress import Progress
from torch_hybrid_backend.quantization.ranges import left_in_float
from torch_hybrid_backend.report import Explanation, about_call
from torch_hybrid_backend.torch_private import (
    FailOnRecompileLimitHit,
    OpOverload,
    ShortenTraceback,
    TorchRuntimeError,
    dynamo_config,
)

log = logging.getLogger(__name__)


class _Unwrapped(ShortenTraceback):
    """An error on its way through Dynamo, which takes any other for a fault of its backend's, with forty lines of a report around it."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error), first_useful_frame=None)
        self._error = error

    def remove_dynamo_frames(self) -> BaseException:  # type: ignore[override]
        """Return the error that Dynamo raises at its end."""
        return self._error


class _UnwrappedConfigError(_Unwrapped, ConfigError):
    """The same of settings: a ConfigError also for who calls the backend directly."""


_UnwrappedConfigError.__qualname__ = ConfigError.__qualname__  # a traceback shows the name that users catch
_UnwrappedConfigError.__module__ = ConfigError.__module__


@contextlib.contextmanager
def _errors_unwrapped() -> Iterator[None]:
    """Bring errors that are no fault of a compilation to Dynamo's caller as they are: those that were delivered from outside, and settings."""
    try:
        yield
    except ConfigError as error:
        raise _UnwrappedConfigError(error.with_traceback(None)) from None
    except Exception as error:
        found = delivered(error)
        if found is None:
            raise
        raise _Unwrapped(found) from found


@_errors_unwrapped()
def hybrid(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, object] | None = None,
) -> Callable[..., Any]:
    """The Dynamo backend: compiles one graph; `torch.compile(model, backend="hybrid")` calls it.

    mode, options: as given to `torch.compile`; see `config.Config`. Raises ConfigError for unknown settings or values; no
    fault of an engine reaches the caller unless `strict` is set.
    """
    config = Config.from_env(os.environ).with_options(options, mode)
    return compile_for_dynamo(gm, example_inputs, config, **(_listening.get() or {}))


@_errors_unwrapped()
def compile_for_dynamo(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], config: Config, **told: Callable[..., None]
) -> Callable[..., Any]:
    """`compile_graph`, called by Dynamo."""
    return compile_graph(gm, example_inputs, config, **told)


@collector_paused()
def compile_graph(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    config: Config,
    on_plan: OnPlan | None = None,
    on_regions: OnRegions | None = None,
    on_background: Callable[[InBackground], None] | None = None,
    on_graph: Callable[[Timeable], None] = lambda _: None,
) -> Callable[..., Any]:
    """Compile one Dynamo graph under `config`; `on_plan` gets each plan when it is made (in the graph's first call),
    `on_regions` what its regions were compiled to, `on_background` what is built off the call, `on_graph` what can be timed."""
    apply_log_level(config)
    if (refused := refused_operator(gm)) is not None:
        log.warning("a graph runs as written, as eager refuses an operator of it: %s", refused)
        return as_written(gm)
    ready = Ready(model_name(), config)
    with ready.working():
        return _compile_graph(gm, example_inputs, config, ready, on_plan, on_regions, on_background, on_graph)


def _compile_graph(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    config: Config,
    ready: Ready,
    on_plan: OnPlan | None,
    on_regions: OnRegions | None,
    on_background: Callable[[InBackground], None] | None,
    on_graph: Callable[[Timeable], None],
) -> Callable[..., Any]:
    config = with_instructions(config)
    shared = open_session(config)
    deadline = Deadline(config.compile_deadline_s)
    devices = {CPU, *(Device.of(value.device) for value in example_inputs if isinstance(value, torch.Tensor))}
    key = graph_key(
        gm,
        example_inputs,
        f"{config.precision} {config.weight_form} {[shared.versions(device) for device in sorted(devices, key=str)]}",
    )
    in_eager = with_right_text(gm)
    calls: list[tuple[PricedCall, bool]] = []  # with whether it is built off the call
    runs_twice: list[bool] = []

    @collector_paused()  # a backward graph may be compiled later, when backward is called
    def compile_captured(captured: CapturedGraph) -> Callable[[list[Any]], list[Any]]:
        if captured.kind == "forward" and config.precision != AS_WRITTEN:
            _warn_once(f"precision={config.precision} is for inference: graphs for training are computed as written")
        why_not = _not_off_the_call(captured) if config.background else ""
        if why_not:
            log.warning("a graph is compiled in its call, not in the background: %s", why_not)
        in_background = config.background and not why_not
        if captured.kind != "backward":
            runs_twice.append(hindrance(captured.graph_module) is None)
        own = Ready(ready.title, config) if captured.kind == "backward" else ready
        take_plan = own.telling(on_plan)
        make = functools.partial(
            HybridGraph,
            captured,
            shared,
            config,
            name=ready.title,
            deadline=deadline,
            on_regions=on_regions,
            meanwhile=meanwhile if in_background else None,
            working=own.working,
            on_graph=lambda graph: on_graph(PlannedGraph(graph)),
        )
        if not _is_priced_whole(captured, config):
            if not in_background:
                return make(on_plan=take_plan)
            written = EagerGraph(copy_of(captured.graph_module))  # before passes change it
            return meanwhile(f"a {captured.kind} graph", written, make(on_plan=take_plan))
        sizes = [k for k, value in enumerate(example_inputs) if isinstance(value, int | torch.SymInt)]
        # Only calls on the host are priced whole.
        pricing = functools.partial(pricing_of, shared, config, deadline, CPU)
        nodes = None if config.verify == "off" else as_written(gm)
        call = PricedCall(in_eager.forward, nodes, key, sizes, config.measure_budget_s, pricing, take_plan, own.working)
        calls.append((call, in_background))
        on_graph(WholeGraph(call, in_eager))
        return make(on_plan=call.take_plan)

    def meanwhile(title: str, eager: EagerGraph, graph: HybridGraph) -> Callable[[list[Any]], list[Any]]:
        return off_the_call(
            title, _without_grad(eager), graph, lambda _: not graph.is_ready, lambda inputs: [graph.copied(inputs)]
        )

    def off_the_call(
        title: str,
        eager: Callable[..., Any],
        planned: Callable[..., Any],
        waits: Callable[..., bool],
        copied: Callable[..., Sequence[Any]],
        *,
        once: bool = True,
    ) -> Callable[..., Any]:
        made = InBackground(title, eager, planned, waits, copied, once=once, strict=config.strict)
        if on_background is not None:
            on_background(made)
        return made.call

    def compiled_whole() -> Callable[..., Any]:
        with Progress("tracing"):
            planned = capture(gm, example_inputs, compile_captured, keep_ops, kept, applied_in_capture())
        if all(runs_twice):
            planned = raising_as_written(planned, gm)
        if not calls:
            return planned
        priced, in_background = calls[0]
        call = priced.around(planned)
        if not in_background:
            return call
        return off_the_call(
            "a graph",
            in_eager.forward,
            call,
            priced.waits,
            lambda *inputs: copies_of(inputs, _is_static),
            once=not any(isinstance(value, int | torch.SymInt) for value in example_inputs),
        )

    keep_ops = frozenset[OpOverload]().union(*(engine.keep_ops for engine in shared.engines))
    kept = AotCache(shared.services.store) if config.cache and not is_running() else None
    known = SeenGraphs(shared.services.store)
    if key in known:
        return compiled_whole()
    shared.prepare(len(gm.graph.nodes))  # what engines need to compile starts while AOTAutograd traces
    compiled = compiled_whole()
    known.add(key)
    return compiled


def _not_off_the_call(captured: CapturedGraph) -> str:
    """The reason why a graph cannot be tried on copies of its inputs while calls go on; "" where it can."""
    module = captured.graph_module
    if is_running():
        return "PyTorch's compiler bisector runs"
    if holds_collectives(module):
        return "it works with other processes, and all of them have to do the same in each call"
    if (node := hindrance(module)) is not None:
        return f"it calls {node.target}, which may do more than compute: it cannot be run twice unnoticed"
    if not is_on_host(captured.graph_module):
        return "it runs on a GPU, where building beside calls was never tried"
    return ""


def _without_grad(graph: EagerGraph) -> Callable[[list[Any]], list[Any]]:
    def run(inputs: list[Any]) -> list[Any]:
        with torch.no_grad():
            return graph(inputs)

    return run


def _is_static(_position: int, value: object) -> bool:
    """True if Dynamo takes a tensor for one that keeps its memory: a parameter or a buffer."""
    return isinstance(value, torch.nn.Parameter) or getattr(value, "_dynamo_static_input_type", None) is not None


@functools.cache
def _warn_once(text: str) -> None:
    """A WARNING once in a process: it is the same for all graphs of a program."""
    log.warning("%s", text)


# What needs instructions -> precision -> the one to be used without them.
_WITHOUT: Mapping[str, Mapping[str, str]] = {
    "int8": {"int8": AS_WRITTEN, "int8+bf16": "bf16"},
    "bf16": {"bf16": AS_WRITTEN, "int8+bf16": "int8"},
    "fp16": {"fp16": AS_WRITTEN},
}


def _parts(precision: str) -> tuple[str, ...]:
    """Parts of a precision that need instructions."""
    return tuple(part for part, without in _WITHOUT.items() if precision in without)


def with_instructions(config: Config) -> Config:
    """`config` in a precision that this machine has instructions for. One WARNING in a process where it lacks those of what was asked for."""
    precision, lacks = config.precision, []
    for part, without in _WITHOUT.items():
        if precision in without and (lacking := lacking_instructions(part)):
            lacks.append(f"{part} (one of: {', '.join(lacking)})")
            precision = without[precision]
    if not lacks:
        return config
    instead = precision if precision == AS_WRITTEN else f"in {precision}"
    fast = [
        name for name in PRECISIONS if name != AS_WRITTEN and all(not lacking_instructions(p) for p in _parts(name))
    ]
    _warn_once(
        f"this machine has no instructions for {' and '.join(lacks)}: with precision={config.precision} graphs are computed {instead}; "
        f"use one of {', '.join(fast)}, which run fast here"
    )
    return dataclasses.replace(config, precision=precision)


def _is_priced_whole(captured: CapturedGraph, config: Config) -> bool:
    """True if whole calls of the graph can be timed, and are to be: not where nothing is timed, or all is compared with eager anyway."""
    if captured.kind != "inference" or captured.writes_inputs or is_running():
        return False
    if config.placement == "estimate" or config.verify == "always":
        return False
    return is_on_host(captured.graph_module) and is_repeatable(captured.graph_module)


def explain(
    model: Callable[..., Any],
    *args: Any,
    options: Mapping[str, object] | None = None,
    dynamic: bool | None = None,
    profile: bool = False,
    **kwargs: Any,
) -> Explanation:
    """The plans of every graph that `model(*args, **kwargs)` compiles, in order, and where Dynamo leaves the model to Python.

    The model is compiled anew (earlier compilations of it stay valid) and called once, in the caller's grad mode; under grad mode
    only the forward graph is compiled by the call, as nothing calls backward. `options` and `dynamic` as for `torch.compile`: Dynamo
    makes sizes symbolic that it has seen vary, also in earlier compilations of the same code, unless `dynamic=False`. A model whose graphs
    hold collectives is explained by all ranks or by none: the call is a call. The result prints as text; `to_json()`, `to_html()` and
    `to_model_explorer()` give the other forms, `write_kernels(folder)` the text of every kernel. Under the setting `background` it says how
    many graphs are still being compiled, and its `updated()` what became of them.

    `profile`: call the model for two seconds more, ten times at least, and tell the time of each kernel (`docs/profile.md`).

        with torch.no_grad():
            print(torch_hybrid_backend.explain(model, x))
    """
    check_model(model, "explain")
    model = uncompiled(model)
    config = Config.from_env(os.environ).with_options(options, None)
    told = _Told()
    # Dynamo recognises a compilation by its backend object: a new partial is a new compilation.
    backend: Callable[..., Any] = functools.partial(compile_for_dynamo, config=config, **told.hooks)  # type: ignore[arg-type]
    compiled = torch.compile(model, backend=backend, dynamic=dynamic)
    with telling_graph_breaks(told.take_graph_break):
        _without_report(model, lambda: compiled(*args, **kwargs), args, kwargs)
    if profile:
        wait_for_builds()
        told.profile(lambda: compiled(*args, **kwargs), open_session(with_instructions(config)))
    return told.of(model, about_call(model, args, kwargs))


def _without_report(
    model: Callable[..., Any], call: Callable[[], object], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Make a call of the compiled model. Where the model does not take these inputs, raise what it raises itself, not Dynamo's report of it."""
    try:
        call()
    except TorchRuntimeError as error:
        refused = error
    else:
        return
    model(*args, **kwargs)
    raise refused


def warmup(model: Callable[..., Any], *inputs: Any) -> Explanation:
    """Compile a model for several inputs before it serves, and return the plans of what was compiled.

    model: what `torch.compile(..., backend="hybrid")` returned, or a module after `model.compile(backend="hybrid")`. inputs: one call each: a
    tuple of positional arguments, a dict of keyword arguments, or a single argument. The calls are made in order, in the caller's grad mode,
    and what they begin to build off the call (`background`) is waited for. Graphs that were compiled before have no plan in the result.
    One WARNING tells how many inputs torch does not compile, as the function was compiled for too many others.

        model = torch.compile(model, backend="hybrid", dynamic=False)
        with torch.no_grad():
            print(torch_hybrid_backend.warmup(model, torch.randn(1, 3, 224, 224), torch.randn(8, 3, 224, 224)))

    Raises ArgumentError for a model that is not compiled, or without inputs.
    """
    if (
        not is_compiled(model) and getattr(model, "_compiled_call_impl", None) is None
    ):  # the second is set by `model.compile()`
        raise ArgumentError(
            f"warmup got {described(model)} that is not compiled; pass what torch.compile(model, backend='hybrid') returns, "
            "as the server will call it"
        )
    if not inputs:
        raise ArgumentError("warmup got no inputs; pass one for each shape that the model will be called with")
    told, plain, in_eager = _Told(), uncompiled(model), 0
    before = _listening.set(told.hooks)
    try:
        for each in inputs:
            args, kwargs = ((), each) if isinstance(each, dict) else (each if isinstance(each, tuple) else (each,), {})
            call = functools.partial(model, *args, **kwargs)
            try:
                # Dynamo does not take both settings.
                with dynamo_config.patch(fail_on_recompile_limit_hit=not dynamo_config.suppress_errors):
                    _without_report(plain, call, args, kwargs)
            except FailOnRecompileLimitHit:
                in_eager += 1
    finally:
        _listening.reset(before)
    if in_eager:
        log.warning(
            "warmup: %d of %d inputs are not compiled, so their calls run in eager, or raise under fullgraph=True: torch compiles a function "
            "at most %d times; raise torch._dynamo.config.recompile_limit, or mark the dimensions that vary with torch._dynamo.mark_dynamic",
            in_eager,
            len(inputs),
            dynamo_config.recompile_limit,
        )
    wait_for_builds()
    return told.of(plain, about_call(plain, inputs, {}))


class _Told:
    """Plans and regions of the graphs that are compiled meanwhile."""

    def __init__(self) -> None:
        self._plans: list[Plan] = []
        self._regions: list[Mapping[str, CompiledRegion]] = []
        self._in_background: list[InBackground] = []
        self._graphs: list[Timeable] = []
        self._call_us: float | None = None
        self._graph_breaks: dict[GraphBreak, None] = {}

    @property
    def hooks(self) -> dict[str, Callable[..., None]]:
        """Callbacks for `compile_graph`."""
        return {
            "on_plan": self._plans.append,
            "on_regions": self._regions.append,
            "on_background": self._in_background.append,
            "on_graph": self._graphs.append,
        }

    def profile(self, call: Callable[[], object], session: Session) -> None:
        """Time calls of the model; the plans are told anew, with times."""
        warm_up(call, self._graphs)
        self._plans.clear()
        self._call_us = profile_calls(call, tuple(self._graphs), session)

    def take_graph_break(self, found: GraphBreak) -> None:
        """Take a graph break that Dynamo met, maybe not for the first time."""
        self._graph_breaks[found] = None

    def of(self, model: object, about: Mapping[str, str]) -> Explanation:
        """The plans so far, with what a quantised model knows of its layers."""
        why = left_in_float(model) if isinstance(model, torch.nn.Module) else {}
        compiling = sum(graph.compiling for graph in self._in_background)
        plans = tuple(with_reasons(plan, why) for plan in self._plans)
        now = functools.partial(self.of, model, about) if self._in_background else None
        return Explanation(plans, tuple(self._regions), compiling, now, self._call_us, tuple(self._graph_breaks), about)


# What graphs that are compiled meanwhile are told to.
_listening: ContextVar[Mapping[str, Callable[..., None]] | None] = ContextVar("listening", default=None)


def with_reasons(plan: Plan, why: Mapping[str, Refused]) -> Plan:
    """The plan with what a quantised model knows of its layers in floating point, by site."""
    if plan.conversion is None or not why:
        return plan

    def told(layer: Unconverted) -> Unconverted:
        # Where graph and model count a forward's layers differently: attention's projections have names of their own.
        known = why.get(layer.site, why.get(layer.site.partition("#")[0]))
        if known is None or layer.code is not Reason.EXCLUDED:
            return layer
        return dataclasses.replace(layer, code=known.code, why=known.why)

    left = tuple(map(told, plan.conversion.left))
    return dataclasses.replace(plan, conversion=dataclasses.replace(plan.conversion, left=left))
