"""A program compiled, and what distinguishes it from eager."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.random_programs.noise import QUANTISE, REDUCTION, add_noise, on_grid
from tests.random_programs.program import Input, Module, Program, namespace, run_lines, widths
from tests.random_programs.quantized import NUDGES
from torch_hybrid_backend.backend import compile_graph
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.lazy_bits import LazyBits
from torch_hybrid_backend.core.plan import Plan
from torch_hybrid_backend.core.verdict import Reason

# The first goes through the Python executor, the second is the C++ plan's first, the third finds everything warm.
CALLS = 3
# "dynamic": sizes are symbols, and the program is called with others too. "training": gradients are compared as well.
MODES = ("static", "dynamic", "training")
NOISY_RUNS = 6


@dataclass(frozen=True)
class Report:
    """The outcome of a check. `why` tells what differs, "" where nothing does. `operators` counts those of all graphs, `taken` those that the
    engine ran."""

    why: str
    operators: int
    taken: int


def check(program: Program, engine: str, cache_dir: Path, mode: str = "static") -> Report:
    """Run the program compiled by the engine, forced and unverified ("": the backend as users have it), and compare it with float64 and eager.

    Outputs and the inputs' final contents: dtypes, shapes and strides equal eager's, what is no float equals it, and floats lie as near to the
    float64 run as the program's tolerances say. What shares memory in eager does so here. Nor may the backend warn of anything: a region that
    it gave up is a fault that eager hides.
    """
    config = _settings(engine, cache_dir)
    plans: list[Plan] = []
    with _forced(config), _warned() as told:
        why = _fault(program, functools.partial(compile_graph, config=config, on_plan=plans.append), mode)
    if told and not why:
        why = f"Warning: {told[0]}"
    nodes = [node for plan in plans for node in plan.nodes]
    return Report(why, len(nodes), sum(node.engine == (engine or "tvm") for node in nodes))


def _settings(engine: str, cache_dir: Path) -> Config:
    options: dict[str, object] = {"cache_dir": cache_dir, "compile_threads": 2}
    if engine:
        options |= {"placement": "estimate", "engines": engine, "strict": True, "verify": "off"}
    else:
        options |= {"measure_budget_s": 0.02}
    return Config().with_options(options, None)


def fails_upstream(program: Program, mode: str = "static") -> bool:
    """True if torch's own aot_eager, which runs the captured graph as it is, fails on it as well."""
    return bool(_fault(program, "aot_eager", mode))


def _fault(program: Program, backend: Any, mode: str) -> str:
    trained = mode == "training"
    truth = _Truth.of(program, trained)
    if truth is None:  # what is written in place is needed for gradients: eager itself cannot train it
        return ""
    torch._dynamo.reset()
    run = torch.compile(Module(program, trained), backend=backend, dynamic=mode == "dynamic")
    try:
        for call in range(CALLS):
            found = _differences(truth, _call(run, program, trained))
            if found:
                return f"call {call + 1}: {found}"
        others = _resized(program) if mode == "dynamic" else iter(())
        for other, size in itertools.islice(others, 2):
            found = _differences(other, _call(run, other.program, trained))
            if found:
                return f"call with {size} as {size + 1}: {found}"
    except Exception as error:  # whatever a compiled program raises, the program as written did not
        cause = getattr(error, "inner_exception", error)  # Dynamo's own words are long, and the same for all
        return f"{type(cause).__name__}: {' '.join(str(cause).split())[:600]}"
    return ""


@contextlib.contextmanager
def _forced(config: Config) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        if config.engines:  # estimates would leave regions this small to eager
            stack.enter_context(mock.patch("torch_hybrid_backend.partition.placement.eager_us", return_value=math.inf))
        yield


@contextlib.contextmanager
def _warned() -> Iterator[list[str]]:
    """Warnings of the backend meanwhile, but for deadlines: those are the machine's."""
    told: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if f": {Reason.DEADLINE}: " not in record.getMessage():
                told.append(record.getMessage())

    listener, logger = Listener(logging.WARNING), logging.getLogger("torch_hybrid_backend")
    logger.addHandler(listener)
    try:
        yield told
    finally:
        logger.removeHandler(listener)


@dataclass(frozen=True)
class _Results:
    """A call's outputs followed by its inputs as it left them, and the gradients by the names of what they belong to."""

    tensors: tuple[torch.Tensor, ...]
    gradients: dict[str, torch.Tensor]


@dataclass(frozen=True)
class _Truth:
    """The answers of eager, and float64. `noisy` are float64 runs with errors added: made where no tolerance is known.

    `sides`: float64 runs that take other sides at ties of what is quantized; none where only exact values are.
    """

    program: Program
    expected: _Results
    exact: _Results
    noisy: Callable[[], list[_Results]]
    sides: list[_Results]

    @staticmethod
    def of(program: Program, trained: bool) -> _Truth | None:
        """None where eager raises."""
        try:
            expected = _call(Module(program, trained), program, trained)
            exact = _wide(program, trained)
            moved = NUDGES if any(line.kind == QUANTISE for line in program.lines) else ()
            sides = [_wide(program, trained, nudge) for nudge in moved]
        except (RuntimeError, IndexError, ValueError):
            return None
        noisy = functools.cache(lambda: [_noisy(program, trained, seed) for seed in range(NOISY_RUNS)])
        return _Truth(program, expected, exact, noisy, sides)


def _resized(program: Program) -> Iterator[tuple[_Truth, int]]:
    """The program with a size of its inputs larger by one, where eager takes that, and the size."""
    sizes = {size for item in program.inputs if not item.weight for size in item.shape if size > 1}
    for size in sorted(sizes):
        inputs = tuple(
            item
            if item.weight or item.values is not None
            else replace(item, shape=tuple(n + (n == size) for n in item.shape))
            for item in program.inputs
        )
        try:
            truth = _Truth.of(replace(program, inputs=inputs, tolerances={}), trained=False)
        except AssertionError:  # so operators on quantized tensors refuse sizes that are not their scales'
            continue
        if truth is not None and all(t.isfinite().all() for t in truth.expected.tensors):
            yield truth, size


def _call(run: Any, program: Program, trained: bool) -> _Results:
    given = {item.name: item.tensor() for item in program.inputs if not item.weight}
    weights = {item.name: getattr(run, item.name) for item in program.inputs if item.weight}
    leaves = _leaves(program, given | weights) if trained else {}
    with torch.set_grad_enabled(trained), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outputs = run(*given.values())
        gradients = _gradients(outputs, leaves)
    return _results(program, outputs, given, gradients)


def _results(
    program: Program,
    outputs: Sequence[torch.Tensor],
    given: dict[str, torch.Tensor],
    gradients: dict[str, torch.Tensor],
) -> _Results:
    inputs = [given[item.name] for item in program.inputs if not item.weight]
    return _Results(tuple(tensor.detach() for tensor in (*outputs, *inputs)), gradients)


def _leaves(program: Program, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those that gradients are taken for: all of floating point that the program does not write to."""
    written = _written(program)
    leaves = {name: t for name, t in tensors.items() if t.dtype.is_floating_point and name not in written}
    for tensor in leaves.values():
        tensor.requires_grad_()
    return leaves


def _written(program: Program) -> set[str]:
    scope = namespace(False)
    given = {item.name: item.tensor() for item in program.inputs}
    before = {name: tensor._version for name, tensor in given.items()}
    scope.update(given)
    run_lines(program.lines, scope, wide=False)
    values = {item.name: item.tensor() for item in program.inputs}
    # Batch norms count no version of the statistics that they write.
    return {n for n, tensor in given.items() if tensor._version != before[n] or not torch.equal(tensor, values[n])}


def _gradients(outputs: Sequence[torch.Tensor], leaves: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients of a weighted sum of the outputs; zeros where they do not depend on a leaf."""
    summed = [
        (output, Input("", tuple(output.shape), output.dtype, seed=k).tensor())
        for k, output in enumerate(outputs)
        if output.requires_grad
    ]
    if not summed or not leaves:
        return {}
    of, weights = zip(*summed, strict=True)
    found = torch.autograd.grad(of, list(leaves.values()), weights, allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, found, strict=True))


def _wide(program: Program, trained: bool, nudge: float = 0.0) -> _Results:
    given = {item.name: item.tensor(wide=True) for item in program.inputs}
    leaves = _leaves(program, given) if trained else {}
    with widths(True), torch.set_grad_enabled(trained), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outputs = program.function(True, nudge)(*given.values())
        gradients = _gradients(outputs, leaves)
    return _results(program, outputs, given, gradients)


def _noisy(program: Program, trained: bool, seed: int) -> _Results:
    """Run wide as `_wide` does, with an error in every value and every gradient that is not exact."""
    generator = torch.Generator().manual_seed(seed)
    eager, wide = namespace(False), namespace(True)
    eager.update({item.name: item.tensor() for item in program.inputs})
    given = {item.name: item.tensor(wide=True) for item in program.inputs}
    leaves = _leaves(program, given) if trained else {}
    wide.update(given)
    for line in program.lines:
        run_lines([line], eager, wide=False)
        run_lines([line], wide, wide=True, trained=trained)
        before = {wide[name].untyped_storage().data_ptr() for name in line.reads}
        for target in line.targets or line.reads[:1]:
            value, dtype = wide[target], eager[target].dtype
            is_view = bool(line.targets) and value.untyped_storage().data_ptr() in before
            if not dtype.is_floating_point or is_view or target in given:
                continue
            if not on_grid(value.detach()):
                add_noise(value, dtype, line.kind, generator)
            if value.requires_grad:
                value.register_hook(functools.partial(_with_noise, dtype, generator))
    outputs = [wide[name] for name in program.outputs]
    return _results(program, outputs, given, _gradients(outputs, leaves))


def _with_noise(dtype: torch.dtype, generator: torch.Generator, gradient: torch.Tensor) -> torch.Tensor:
    noisy = gradient.clone(memory_format=torch.contiguous_format)
    add_noise(noisy, dtype, REDUCTION, generator)
    return noisy


def _differences(truth: _Truth, actual: _Results) -> str:
    program, expected = truth.program, truth.expected
    names = [*program.outputs, *(item.name for item in program.inputs if not item.weight)]
    if len(actual.tensors) != len(expected.tensors):
        return f"{len(actual.tensors)} results instead of {len(expected.tensors)}"
    for k, (name, got, want) in enumerate(zip(names, actual.tensors, expected.tensors, strict=True)):
        if (got.dtype, got.shape) != (want.dtype, want.shape):
            return f"{name} is {got.dtype} {list(got.shape)}, eager's {want.dtype} {list(want.shape)}"
        if not LazyBits.of(want).are_of(got):
            return f"{name} has {LazyBits.of(got)}, eager's {LazyBits.of(want)}"
        if want.numel() and _meaningful(got) != _meaningful(want) and _meaningful(got) != _told_strides(program, name):
            return f"{name} has strides {got.stride()}, eager's {want.stride()} (shape {list(want.shape)})"
        noisy = functools.partial(_picked, truth.noisy, lambda results, k=k: results.tensors[k])
        if not want.dtype.is_floating_point:
            known = bool(program.tolerances) or all(torch.equal(other, want) for other in noisy())
            wrong = (got.double() - want.double()).abs() > _by_ties(truth, k, want)
            if known and bool(wrong.any()):
                return f"{name} differs from eager's in {int(wrong.sum())} of {want.numel()} elements"
            continue
        true = truth.exact.tensors[k]
        error = _largest(got, true, _by_ties(truth, k, true))
        allowed = program.tolerances[name] if name in program.tolerances else _spread(want, true, noisy())
        if not error <= allowed:
            return f"{name} ({want.dtype}) is off by {error:.3g}, eager by {_largest(want, true):.3g}, allowed is {allowed:.3g}"
    if _sharing(actual.tensors) != _sharing(expected.tensors):
        pairs = zip(names, _sharing(actual.tensors), _sharing(expected.tensors), strict=True)
        differing = [f"{n} with {names[a]}, eager's with {names[b]}" for n, a, b in pairs if a != b]
        return f"what shares memory differs: {'; '.join(differing[:4])}"
    return _differing_gradients(truth, actual)


def _by_ties(truth: _Truth, output: int, centre: torch.Tensor) -> torch.Tensor:
    """The distance from `centre` at which each element of an output may lie, as other sides were taken at ties: nowhere, but where some run has
    done so.

    One step for integers, as the accuracy gate allows, and what such steps make of what is computed from them.
    """
    runs = [run.tensors[output].double() for run in (*truth.sides, truth.expected, truth.exact)]
    if not truth.sides:
        return torch.zeros(())
    return 2 * torch.stack([(run - centre.double()).abs() for run in runs]).amax(0)


def _differing_gradients(truth: _Truth, actual: _Results) -> str:
    for name, want in truth.expected.gradients.items():
        if name not in actual.gradients:
            return f"{name} gets no gradient"
        got, true = actual.gradients[name], truth.exact.gradients[name]
        if (got.dtype, got.shape) != (want.dtype, want.shape):
            return f"the gradient of {name} is {got.dtype} {list(got.shape)}, eager's {want.dtype} {list(want.shape)}"
        others = _picked(truth.noisy, lambda results, name=name: results.gradients[name])
        if not all(t.isfinite().all() for t in (want, true, *others)):
            continue  # at a pole, or so large that nothing can be told
        error, allowed = _largest(got, true), _spread(want, true, others)
        if not error <= allowed:
            what = f"the gradient of {name} ({want.dtype})"
            return f"{what} is off by {error:.3g}, eager's by {_largest(want, true):.3g}, allowed is {allowed:.3g}"
    return ""


def _picked(noisy: Callable[[], list[_Results]], pick: Callable[[_Results], torch.Tensor]) -> list[torch.Tensor]:
    return [pick(results) for results in noisy()]


def _spread(want: torch.Tensor, true: torch.Tensor, noisy: Sequence[torch.Tensor]) -> float:
    """The allowed distance between an answer as careful as eager's and float64's, judged by how far errors added on purpose have led."""
    largest = float(true.abs().max()) if true.numel() else 0.0
    spread = max((_largest(other, true) for other in noisy), default=0.0)
    return 1e-12 + 10 * spread + 8 * _largest(want, true) + 32 * torch.finfo(want.dtype).eps * largest


def _told_strides(program: Program, name: str) -> list[int]:
    """Strides that PyTorch's own metadata tell: where operands' strides contradict each other, they differ from what its kernels do (2.13)."""
    with FakeTensorMode() as mode, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outputs = program.function()(*map(mode.from_tensor, program.tensors()))
    told = dict(zip(program.outputs, outputs, strict=True)).get(name)
    return [] if told is None else _meaningful(told)


def _meaningful(tensor: torch.Tensor) -> list[int]:
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1]


def _largest(got: torch.Tensor, true: torch.Tensor, slack: torch.Tensor | float = 0.0) -> float:
    difference = (got.double() - true).abs() - slack
    return float(difference.max()) if difference.numel() else 0.0  # NaN where one of them is: no tolerance covers that


def _sharing(tensors: Sequence[torch.Tensor]) -> list[int]:
    """For each tensor the first that lies in the same memory."""
    first: dict[int, int] = {}
    return [first.setdefault(t.untyped_storage().data_ptr() if t.numel() else -k - 1, k) for k, t in enumerate(tensors)]
