"""The backend: what `torch.compile` calls. It is the door of `driver`, which wires all rooms together. Read it first.

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
from torch_hybrid_backend.builds.background import InBackground, wait_for_builds
from torch_hybrid_backend.capture.fixes.convolution_layouts import trace_convolutions_of_all_sizes
from torch_hybrid_backend.capture.fixes.recurrent_layers import trace_recurrent_layers
from torch_hybrid_backend.capture.graph_breaks import telling_graph_breaks
from torch_hybrid_backend.capture.model_name import model_name
from torch_hybrid_backend.config import Config, apply_log_level
from torch_hybrid_backend.core.engine import CompiledRegion
from torch_hybrid_backend.core.plan import GraphBreak, Plan, Unconverted
from torch_hybrid_backend.core.precision import AS_WRITTEN, PRECISIONS
from torch_hybrid_backend.core.verdict import Reason, Refused
from torch_hybrid_backend.driver.errors_as_written import as_written
from torch_hybrid_backend.driver.garbage import collector_paused
from torch_hybrid_backend.driver.graph_compilation import GraphCompilation, Listeners, warn_once
from torch_hybrid_backend.driver.head_start import begin_with_first_trace
from torch_hybrid_backend.driver.hybrid_graph import OnPlan, OnRegions
from torch_hybrid_backend.driver.mega_cache import register
from torch_hybrid_backend.driver.module_guards import shorten_module_guards
from torch_hybrid_backend.driver.profiling import Timeable, profile_calls, warm_up
from torch_hybrid_backend.driver.ready import Ready
from torch_hybrid_backend.driver.refused_forms import refused_operator
from torch_hybrid_backend.driver.session import Session, open_session
from torch_hybrid_backend.engines.cpu.target import NATIVE, Target
from torch_hybrid_backend.errors import ArgumentError, ConfigError, delivered
from torch_hybrid_backend.machine import lacking_among, lacking_instructions
from torch_hybrid_backend.quantization.ranges import left_in_float
from torch_hybrid_backend.ranks.peers import at_work
from torch_hybrid_backend.report import Explanation, about_call
from torch_hybrid_backend.torch_private import (
    FailOnRecompileLimitHit,
    ShortenTraceback,
    TorchRuntimeError,
    dynamo_config,
    is_compiled_ahead_of_time,
)

log = logging.getLogger(__name__)
register()
trace_recurrent_layers(__package__)
trace_convolutions_of_all_sizes(__package__)
begin_with_first_trace(__package__)
shorten_module_guards(__package__)


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
        own_error = delivered(error)
        if own_error is None:
            raise
        raise _Unwrapped(own_error) from own_error


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
    if is_compiled_ahead_of_time():
        from torch_hybrid_backend.driver.ahead_of_time import AheadOfTimeGraph

        return AheadOfTimeGraph.compile(gm, example_inputs, options, mode)
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
    after: Callable[[GraphCompilation, Callable[..., Any]], None] = lambda _compilation, _compiled: None,
) -> Callable[..., Any]:
    """Compile one Dynamo graph under `config`; `on_plan` gets each plan when it is made (in the graph's first call),
    `on_regions` what its regions were compiled to, `on_background` what is built off the call, `on_graph` what can be timed. `after` is called
    with the compilation and what is returned."""
    apply_log_level(config)
    if (refused := refused_operator(gm)) is not None:
        log.warning("a graph runs as written, as eager refuses an operator of it: %s", refused)
        return as_written(gm)
    ready = Ready(model_name(), config)
    with ready.working(), at_work(is_on=config.ranks_agree):
        config = with_instructions(config)
        listeners = Listeners(on_plan, on_regions, on_background, on_graph)
        compilation = GraphCompilation(gm, example_inputs, config, open_session(config), ready, listeners)
        compiled = compilation.compiled(example_inputs)
        after(compilation, compiled)
        return compiled


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
    """`config` in a precision that its target has instructions for. One WARNING in a process where it lacks those of what was asked for.

    Raises ConfigError for a target that does not exist.
    """
    lacking_of, whose = lacking_instructions, "this machine"
    if config.target != NATIVE:
        lacking_of, whose = (
            functools.partial(lacking_among, features=Target.named(config.target).features),
            config.target,
        )
    precision, lacks = config.precision, []
    for part, without in _WITHOUT.items():
        if precision in without and (lacking := lacking_of(part)):
            lacks.append(f"{part} (one of: {', '.join(lacking)})")
            precision = without[precision]
    if not lacks:
        return config
    instead = precision if precision == AS_WRITTEN else f"in {precision}"
    fast = [name for name in PRECISIONS if name != AS_WRITTEN and all(not lacking_of(p) for p in _parts(name))]
    warn_once(
        f"{whose} has no instructions for {' and '.join(lacks)}: with precision={config.precision} graphs are computed {instead}; "
        f"use one of {', '.join(fast)}, which run fast there"
    )
    return dataclasses.replace(config, precision=precision)


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

    def take_graph_break(self, graph_break: GraphBreak) -> None:
        """Take a graph break that Dynamo met, maybe not for the first time."""
        self._graph_breaks[graph_break] = None

    def of(self, model: object, about: Mapping[str, str]) -> Explanation:
        """The plans so far, with what a quantized model knows of its layers."""
        why = left_in_float(model) if isinstance(model, torch.nn.Module) else {}
        compiling = sum(graph.compiling for graph in self._in_background)
        plans = tuple(with_reasons(plan, why) for plan in self._plans)
        now = functools.partial(self.of, model, about) if self._in_background else None
        return Explanation(plans, tuple(self._regions), compiling, now, self._call_us, tuple(self._graph_breaks), about)


# What graphs that are compiled meanwhile are told to.
_listening: ContextVar[Mapping[str, Callable[..., None]] | None] = ContextVar("listening", default=None)


def with_reasons(plan: Plan, why: Mapping[str, Refused]) -> Plan:
    """The plan with what a quantized model knows of its layers in floating point, by site."""
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
