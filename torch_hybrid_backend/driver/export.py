"""Export: a model as one `.hybrid` file. Part of the wiring.

torch.export      -> ExportedProgram
capture.exported  -> ATen graph, and what becomes of its outputs, as data
HybridGraph       -> a plan, by the passes, partitions, timings and accuracy checks of a call
artifact          -> the plan, one library of its kernels, packed weights, a report and a sample call in a file

For several targets the last three make one variant of the file for each target, over weights in common.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from torch_hybrid_backend._version import __version__
from torch_hybrid_backend.arguments import described, is_compiled
from torch_hybrid_backend.artifact.calls import bits_in_words, finish
from torch_hybrid_backend.artifact.functions import functions_to_text
from torch_hybrid_backend.artifact.manifest import (
    MAX_VARIANTS,
    CopyUpdate,
    Entry,
    Form,
    Generation,
    Kernel,
    LibraryTarget,
    Limit,
    LiteralForm,
    LiteralResult,
    Manifest,
    Origin,
    Result,
    RowsUpdate,
    Sample,
    Segment,
    SizeSymbol,
    State,
    Structure,
    TensorForm,
    ViewResult,
)
from torch_hybrid_backend.artifact.writer import Writer
from torch_hybrid_backend.backend import with_instructions
from torch_hybrid_backend.capture.exported import (
    Copied,
    ExportedGraph,
    GraphInput,
    GraphOutput,
    Rows,
    ViewOf,
    capture_exported,
)
from torch_hybrid_backend.capture.fixes.convolution_layouts import convolutions_of_all_sizes
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.engine import LinkedLibrary
from torch_hybrid_backend.core.hoisted_inputs import CallInput
from torch_hybrid_backend.core.plan import Plan
from torch_hybrid_backend.core.program import KernelCall, OperatorCall
from torch_hybrid_backend.driver.hybrid_graph import HybridGraph
from torch_hybrid_backend.driver.ready import Ready
from torch_hybrid_backend.driver.saved_graph import saved_graph
from torch_hybrid_backend.driver.session import Session, open_session
from torch_hybrid_backend.driver.stages import Assignment
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.errors import ArgumentError, ConfigError, NotExportableError, failures
from torch_hybrid_backend.progress import Progress
from torch_hybrid_backend.report import Explanation, about_call
from torch_hybrid_backend.runtime.executor import PlanOutput, SavedPlan
from torch_hybrid_backend.runtime.native.description import PlanDescription
from torch_hybrid_backend.sizes.forms import linear
from torch_hybrid_backend.sizes.size import MAX_SIZE, Size, Symbol, symbols
from torch_hybrid_backend.torch_private import OpOverload, compile_lock, tree_flatten, tree_unflatten, treespec_dumps

ENTRY = "forward"
# The name of the library in a file's plans, whatever it is linked for.
LIBRARY = "library"

# How far the outputs of the sample call may be off on another machine, whose mathematical functions round otherwise.
_TOLERANCE = 1e-3
# Where a graph rounds to such numbers, the last bit of float32 decides to which side, and outputs of any dtype differ by as much.
_TOLERANCES = {torch.float16: 1e-2, torch.int8: 1e-2, torch.bfloat16: 5e-2}
_ROUNDS_TO = {
    "bf16": torch.bfloat16,
    "int8+bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.int8,
    "int8-weights": torch.int8,  # kernels may round activations
    "int4-weights": torch.int8,
}
# Lines of PyTorch's text about what it cannot trace that an error repeats: enough for the line of the model.
_MAX_LINES = 8


@dataclass(frozen=True, slots=True)
class ExportReport:
    """The outcome of an export. Prints as text.

    `python_parts`: what only Python can run, one text for each: `load` runs such a file, the runner refuses it. `needs_torch`: operators of
    PyTorch are among its steps, which the runner needs LibTorch for. `sizes`: the ranges of those that may differ from call to call, one text
    for each. `processors`: those that its kernels are for where this machine cannot time them, in words; else "". `targets`: names of the
    targets that it has kernels for, in the order in which a processor that supports several prefers them; `explanation` is of the first.
    """

    path: Path
    size_bytes: int
    entries: tuple[str, ...]
    explanation: Explanation
    python_parts: tuple[str, ...]
    needs_torch: bool
    sizes: tuple[str, ...] = ()
    processors: str = ""
    targets: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.python_parts:
            runs = "runs with torch_hybrid_backend.load; the runner without Python refuses it (not_exportable):"
            needs = "\n".join([runs, *(f"  {part}" for part in self.python_parts)])
        elif self.needs_torch:
            version = torch.__version__
            needs = f"runs with torch_hybrid_backend.load, and in the runner beside LibTorch {version}: it calls operators of PyTorch"
            if self.processors:
                needs += " (for aarch64 the wheels have both; for riscv64 there is none)"
        else:
            needs = "runs with torch_hybrid_backend.load, and in the runner without Python and PyTorch"
        sizes = "".join(f"serves {size}\n" for size in self.sizes)
        if len(self.targets) > 1:
            needs += f"\nfor {', '.join(self.targets)}: a processor runs the first of them that it supports; below is the plan of the first"
        if self.processors:
            needs += f"\nfor {self.processors}: engines and kernels were chosen by estimates, as this machine cannot time them"
        return f"{self.path}: {self.size_bytes / 1e6:.1f} MB, {', '.join(self.entries)}\n{needs}\n{sizes}\n{self.explanation}"


# Positional and keyword arguments of a call.
Call = tuple[Sequence[Any], Mapping[str, Any]]


def export(
    model: torch.nn.Module | torch.export.ExportedProgram | str | os.PathLike[str],
    args: Sequence[Any] | Mapping[str, Call] | None,
    path: str | os.PathLike[str],
    *,
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    options: Mapping[str, object] | None = None,
) -> ExportReport:
    """Compile a model for inference and write it to one file, which `load` and the runner open without tracing or compiling anything.

    model: a module, as it is to be called (`model.eval()`), an `ExportedProgram`, or a `.pt2` file of one. args, kwargs: a call of it; engines
    are chosen on these inputs, as in the first call of a compiled model, and the call is kept in the file as a sample. None: those that the
    program was exported with. dynamic_shapes: as for `torch.export.export`. options: settings, as for `torch.compile`; under `precision`
    weights are stored in the form that kernels read; `target` names the processor, and for one of another architecture ("neoverse-n1")
    engines and kernels are chosen by estimates; a list of targets (["x86-64-v3", "x86-64-v4"]) makes a file with kernels for each, of which a
    machine runs those of the target with most features that it supports. Regions stay with kernels even where an operator of PyTorch's would
    be faster, so that the runner needs PyTorch for few files. Under `dynamic_shapes` the file serves all sizes in their ranges, which are in
    the report.

    A module that is called with several sets of sizes becomes one file with an entry for each: `args` is then a dict from the name of an entry
    to the (args, kwargs) of its call, `dynamic_shapes` one from names to those of the entries that have some. Entries share the weights, and
    the buffers that calls change. `load(path).entry(name)` calls one.

    Raises ArgumentError for what cannot be exported at all, NotExportableError for a model that no file can hold, ConfigError for settings, and
    OSError where the file cannot be written.

        report = torch_hybrid_backend.export(model.eval(), (torch.randn(1, 3, 224, 224),), "resnet50.hybrid")
    """
    path = check_path(Path(path))
    config = Config.from_env(os.environ).with_options(options, None)
    calls = _calls(model, args, kwargs)
    shapes = _shapes(args, dynamic_shapes)
    with compile_lock:  # what traces graphs is global in PyTorch
        programs = {entry: traced_program(model, *call, shapes.get(entry)) for entry, call in calls.items()}
        examples = {entry: _example(programs[entry], *call) for entry, call in calls.items()}
        return write_programs(model, programs, examples, path, config)


def write_programs(
    model: object,
    programs: Mapping[str, torch.export.ExportedProgram],
    calls: Mapping[str, Call],
    path: Path,
    config: Config,
    generation: Generation | None = None,
) -> ExportReport:
    """Compile programs of one model, each on a call of it, and write them to a file as entries. `generation`: what those of a decoder are."""
    name = type(model).__name__ if isinstance(model, torch.nn.Module) else "Model"
    targets = Target.names(config.target)
    if len(targets) > MAX_VARIANTS:
        raise ConfigError(f"there are {len(targets)} targets; a file holds kernels for at most {MAX_VARIANTS}")
    configs = [_for_target(config, target) for target in targets]
    for each in configs:
        open_session(each)  # refuses a target before anything is compiled for another
    shared = _Shared()
    variants = [
        _compiled_variant(model, name, programs, calls, each, shared, f"{each.target}/" if len(configs) > 1 else "")
        for each in configs
    ]
    with Progress("writing"):
        return _written(path, name, shared, variants, generation)


def _for_target(config: Config, target: str) -> Config:
    """The settings of an export for one target."""
    config = with_instructions(dataclasses.replace(config, target=target, background=False, prefer_kernels=True))
    if Target.foreign(target) is not None:
        config = dataclasses.replace(config, placement="estimate")  # this machine cannot time such kernels
    return config


def _compiled_variant(
    model: object,
    name: str,
    programs: Mapping[str, torch.export.ExportedProgram],
    calls: Mapping[str, Call],
    config: Config,
    shared: _Shared,
    prefix: str,
) -> _Variant:
    """Compile the programs for the target in `config`. `prefix`: how names of the variant's segments begin."""
    session = open_session(config)
    ready = Ready(f"{name} for {config.target}" if prefix else name, config)
    plans: dict[str, Plan] = {}
    shared.writer.begin_segment()
    with ready.working():
        with Progress("tracing"):
            keep_ops = frozenset[OpOverload]().union(*(engine.keep_ops for engine in session.engines))
            graphs = {entry: capture_exported(program, keep_ops) for entry, program in programs.items()}
        changed = _changed(list(graphs.values()))
        exporter = _Exporter(session, changed, shared, config, prefix)
        for entry, captured in graphs.items():
            graph = _without_static(captured, changed)
            args, kwargs = calls[entry]
            flat, _ = tree_flatten((tuple(args), dict(kwargs)))
            inputs = [tensor for _, tensor in graph.tensors] + [
                flat[position].detach().clone() for position in graph.arguments
            ]
            tell = ready.telling(lambda plan: plans.update({plan.graph: plan}))  # those of control flow too
            title = name if len(graphs) == 1 else f"{name}.{entry}"
            compiled = HybridGraph(graph.captured, session, config, tell, title)
            with torch.no_grad():
                outputs = compiled(list(inputs))
            exporter.add(entry, programs[entry], graph, compiled, inputs, outputs, flat)
        first = next(iter(calls.values()))
        about = about_call(model, *first) if callable(model) else {"model": name}
        return exporter.finished(Explanation(tuple(plans.values()), about=about))


def _written(
    path: Path, model: str, shared: _Shared, variants: Sequence[_Variant], generation: Generation | None
) -> ExportReport:
    """Write the file."""
    best_first = sorted(variants, key=lambda each: -sum(len(target.features) for target in each.targets))
    # A variant without kernels runs everywhere: no other one is reached, and it is among the last.
    without = [each for each in best_first if not each.targets]
    kept = [each for each in best_first if each.targets] + without[:1]
    for variant in kept:
        for segment in variant.segments:
            shared.writer.add_segment(*segment)

    def manifests(segments: tuple[Segment, ...]) -> list[Manifest]:
        return [
            Manifest(
                package=__version__,
                torch=torch.__version__,
                model=model,
                segments=segments,
                targets=variant.targets,
                kernels=variant.kernels,
                constants=shared.writer.constants,
                states=tuple(shared.states.values()),
                entries=variant.entries,
                samples=variant.samples,
                report=variant.report,
                generation=generation,
            )
            for variant in kept
        ]

    size_bytes = shared.writer.write(path, manifests)
    entries = [entry for variant in kept for entry in variant.entries]
    foreign = [target.label for variant in kept if (target := Target.foreign(variant.target)) is not None]
    return ExportReport(
        path,
        size_bytes,
        tuple(entry.name for entry in kept[0].entries),
        kept[0].explanation,
        tuple(dict.fromkeys(part for entry in entries for part in entry.python_parts)),
        any(entry.needs_torch for entry in entries),
        tuple(dict.fromkeys(each for entry in entries for each in entry.served)),
        " and ".join(foreign),
        tuple(variant.target for variant in kept),
    )


def check_path(path: Path) -> Path:
    """The path of a file to be written. Raises ArgumentError where none can be."""
    if path.is_dir():
        raise ArgumentError(
            f"cannot write {path}: it is a folder; give the name of a file in it, such as {path / 'model.hybrid'}"
        )
    if path.exists() and not path.is_file():
        raise ArgumentError(
            f"cannot write {path}: it is no regular file, and would be replaced by one; give another name"
        )
    if not path.parent.is_dir():
        raise ArgumentError(f"cannot write {path}: there is no folder {path.parent}; make the folder first")
    return path


def _calls(model: Any, args: Any, kwargs: Any) -> dict[str, tuple[Any, Any]]:
    """The arguments of each entry."""
    if not isinstance(args, Mapping):
        return {ENTRY: (args, kwargs)}
    if isinstance(model, torch.export.ExportedProgram | str | os.PathLike):
        raise ArgumentError("several entries are traced from a module; an exported program is one entry")
    for entry, call in args.items():
        if not (
            isinstance(entry, str)
            and isinstance(call, tuple | list)
            and len(call) == 2
            and isinstance(call[0], tuple | list)
            and isinstance(call[1], Mapping)
        ):
            raise ArgumentError(
                f"export got {described(call)} for the entry {entry!r}; args of several entries is a dict of names and pairs: "
                "{'decode': ((ids, positions), {})}, of a tuple of positional arguments and a dict of keyword arguments"
            )
    if not args or kwargs is not None:
        raise ArgumentError(
            "args of several entries is a dict of at least one name, and has their keyword arguments in it: leave out kwargs"
        )
    return dict(args)


def _shapes(args: Any, dynamic_shapes: Any) -> Mapping[str, Any]:
    """The `dynamic_shapes` of each entry that has some."""
    if not isinstance(args, Mapping):
        return {ENTRY: dynamic_shapes}
    if not isinstance(dynamic_shapes or {}, Mapping) or (dynamic_shapes or {}).keys() - args.keys():
        raise ArgumentError(
            f"dynamic_shapes of several entries is a dict from names of entries ({', '.join(map(repr, args))}) to the dynamic_shapes of each: "
            "{'prefill': ({1: Dim('n')}, None)}"
        )
    return dynamic_shapes or {}


def traced_program(model: Any, args: Any, kwargs: Any, dynamic_shapes: Any) -> torch.export.ExportedProgram:
    """The program of what `export` takes for a model. Raises ArgumentError for others, NotExportableError as `exported_program` does."""
    if isinstance(model, torch.export.ExportedProgram | str | os.PathLike):
        if dynamic_shapes is not None:
            raise ArgumentError(
                "dynamic_shapes is for a module; sizes of an exported program were chosen when it was exported"
            )
        return model if isinstance(model, torch.export.ExportedProgram) else _loaded_program(Path(model))
    if is_compiled(model):
        raise ArgumentError("export got a compiled model; pass the model that was given to torch.compile")
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError(
            f"export got {described(model)}; its first argument must be a model (torch.nn.Module), an ExportedProgram, or the path of a .pt2 "
            "file"
        )
    if not isinstance(args, tuple | list):
        raise ArgumentError(
            f"export got {described(args)} as args; it must be a tuple of positional arguments, () if there are none"
        )
    return exported_program(model, args, kwargs, dynamic_shapes)


def _loaded_program(path: Path) -> torch.export.ExportedProgram:
    try:
        return torch.export.load(path)
    except failures(Exception) as error:  # whatever PyTorch raises for a file that is none, or damaged
        raise ArgumentError(f"{path} is no program that torch.export.save wrote: {_first_lines(error)}") from error


def exported_program(
    model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None, dynamic_shapes: Any = None
) -> torch.export.ExportedProgram:
    """`torch.export.export` of a module. Raises NotExportableError for what it cannot trace."""
    positional, keywords = _apart(model, tuple(args), dict(kwargs or {}))
    with torch.no_grad(), convolutions_of_all_sizes():
        try:
            return torch.export.export(model, positional, keywords, dynamic_shapes=dynamic_shapes, strict=False)
        except failures(Exception) as error:  # torch.export raises many kinds of errors for what it cannot trace
            raise NotExportableError(
                f"torch.export cannot trace {type(model).__name__}: {_first_lines(error)}; "
                "https://docs.pytorch.org/docs/stable/user_guide/torch_compiler/export.html says what it can trace"
            ) from error


def _first_lines(error: Exception) -> str:
    """The first lines of an error's text as one, or its kind where it has none, without advice on how to debug PyTorch."""
    text = str(error).partition("The error above occurred")[0]
    lines = [line.strip() for line in text.splitlines() if not line.startswith(("For ", "If you suspect "))]
    return " ".join([line for line in lines if line][:_MAX_LINES]) or type(error).__name__


def _apart(model: torch.nn.Module, *arguments: Any) -> Any:
    """The arguments, with a copy of each tensor whose memory is that of another one or of the model, or whose elements share memory.

    `torch.export` takes equal tensors for one, and its program then reads one of them in place of both.
    """
    leaves, structure = tree_flatten(arguments)
    seen = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and leaf.numel():
            memory = leaf.untyped_storage().data_ptr()
            if any(stride == 0 and size > 1 for size, stride in zip(leaf.shape, leaf.stride(), strict=True)):
                leaves[number] = leaf.detach().clone(memory_format=torch.contiguous_format)
            elif memory in seen:
                leaves[number] = copy.deepcopy(leaf.detach())  # with its strides
            seen.add(memory)
    return tree_unflatten(leaves, structure)


def _example(program: torch.export.ExportedProgram, args: Any, kwargs: Any) -> Call:
    """The call that the program is compiled on."""
    if args is not None:
        return args, kwargs or {}
    if program.example_inputs is None:
        raise ArgumentError("the exported program has no example inputs; pass args and kwargs of a call")
    example: Call = program.example_inputs
    return example


# Tells tensors of a model apart: those of two programs are one if their memory is.
_Key = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]


def _key(tensor: torch.Tensor) -> _Key:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _changed(graphs: Sequence[ExportedGraph]) -> frozenset[_Key]:
    """The tensors of the model that calls change. Raises NotExportableError where another tensor of the model shares memory with one."""
    tensors = [tensor for graph in graphs for _, tensor in graph.tensors if tensor.numel()]
    changed = {
        _key(graph.tensors[update.position][1]): graph.tensors[update.position]
        for graph in graphs
        for update in graph.updates
        if update.position < len(graph.tensors)
    }
    for key, (name, state) in changed.items():
        memory = state.untyped_storage().data_ptr()
        if any(each.untyped_storage().data_ptr() == memory and _key(each) != key for each in tensors):
            raise NotExportableError(
                f"calls change {name}, and another tensor of the model is a view of its memory: copy one"
            )
    return frozenset(changed)


def _without_static(graph: ExportedGraph, changed: frozenset[_Key]) -> ExportedGraph:
    """The graph; what other entries change is not folded into it."""
    placeholders = graph.captured.graph_module.graph.find_nodes(op="placeholder")
    states = {
        node.name for node, (_, tensor) in zip(placeholders, graph.tensors, strict=False) if _key(tensor) in changed
    }
    captured = dataclasses.replace(graph.captured, static_inputs=graph.captured.static_inputs - states)
    return dataclasses.replace(graph, captured=captured)


@dataclass(slots=True, eq=False)
class _Shared:
    """Parts of a file that its variants have in common: tensors, and states by the tensors that they begin as."""

    writer: Writer = field(default_factory=Writer)
    states: dict[_Key, State] = field(default_factory=dict)
    state_tensors: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class _Variant:
    """Parts of a file that are for one target, the setting `target`. `segments`: kind, name and content of each."""

    target: str
    segments: tuple[tuple[str, str, bytes], ...]
    targets: tuple[LibraryTarget, ...]
    kernels: tuple[Kernel, ...]
    entries: tuple[Entry, ...]
    samples: tuple[Sample, ...]
    report: str
    explanation: Explanation


class _Exporter:
    """Collects the entries of one variant. Tensors that entries share are written once, and states that they share are one."""

    def __init__(
        self, session: Session, changed: frozenset[_Key], shared: _Shared, config: Config, prefix: str
    ) -> None:
        self._session = session
        self._config = config
        self._changed = changed
        self._writer = shared.writer
        self._states = shared.states
        self._state_tensors = shared.state_tensors
        self._prefix = prefix
        self._segments: list[tuple[str, str, bytes]] = []
        self._libraries: dict[str, None] = {}
        self._kernels: dict[str, Kernel] = {}
        self._engines: set[str] = set()
        self._tensors: dict[int, torch.Tensor] = {}  # of constants, by number
        self._entries: list[Entry] = []
        self._samples: list[Sample] = []

    def add(
        self,
        name: str,
        program: torch.export.ExportedProgram,
        graph: ExportedGraph,
        compiled: HybridGraph,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[Any],
        flat: Sequence[Any],
    ) -> None:
        """Add an entry. `inputs`, `outputs`: of the graph, in the call that chose its engines; `flat`: that call's arguments."""
        whole = saved_graph(compiled, inputs, self._config)
        saved, limits = whole.plan, whole.limits
        for assignment in whole.assignments:
            self._take_libraries(assignment)
        self._take_kernels(saved.description)
        description = dataclasses.replace(saved.description, titles=())
        segment = self._add_segment("plan", f"plan.{name}", description.text(lambda _member, _path: LIBRARY).encode())
        functions = None
        if saved.functions:
            functions = self._add_segment("functions", f"functions.{name}", functions_to_text(saved.functions))
        origin = self._origins(graph, saved)
        inputs_of_call = _input_forms(program, graph, flat)
        entry = Entry(
            name=name,
            plan=segment,
            functions=functions,
            python_parts=whole.python_parts,
            needs_torch=any(isinstance(step, OperatorCall) for step in saved.description.all_steps),
            inputs=inputs_of_call,
            sources=tuple(map(origin, saved.inputs)),
            slots=tuple(self._writer.add_tensor(tensor) for tensor in saved.slots),
            updates=tuple(_update(each, origin) for each in graph.updates),
            results=tuple(_result(each, origin, saved) for each in graph.results),
            outputs=(),
            structure=_structure(program),
        )
        results = self._results(entry, saved, outputs, flat)
        forms = tuple(_form(f"output{number}", value) for number, value in enumerate(results))
        if saved.description.symbols:
            forms = tuple(_of_any_size(*pair, entry, saved) for pair in zip(forms, entry.results, strict=True))
        symbols = _symbols(program, saved, (*inputs_of_call, *forms), inputs_of_call, limits, flat)
        if symbols and (assumed := graph.sizes.assumed):
            raise NotExportableError(
                f"its graph is right only for sizes of which {' and '.join(assumed)}: leave these sizes out of dynamic_shapes"
            )
        self._entries.append(dataclasses.replace(entry, outputs=forms, symbols=symbols, limits=_of_several(limits)))
        # Random numbers differ in the next call.
        expected = results if compiled.assignment.prepared.is_repeatable else [None] * len(results)
        self._samples.append(self._sample(entry, program, flat, expected))

    def finished(self, explanation: Explanation) -> _Variant:
        """The variant of the entries that were added."""
        targets: tuple[LibraryTarget, ...] = ()
        if self._libraries:
            library = self._linked()
            name = self._add_segment("library", LIBRARY, library.code)
            targets = (LibraryTarget(library.system, library.processor, library.features, name),)
        report = self._add_segment("report", "report", explanation.to_json().encode())
        return _Variant(
            self._config.target,
            tuple(self._segments),
            targets,
            tuple(self._kernels.values()),
            tuple(self._entries),
            tuple(self._samples),
            report,
            explanation,
        )

    def _add_segment(self, kind: str, name: str, content: bytes) -> str:
        """Add a segment; return its name."""
        self._segments.append((kind, self._prefix + name, content))
        return self._prefix + name

    def _take_libraries(self, assignment: Assignment) -> None:
        for name, region in assignment.compiled.items():
            calls = (
                [step for step in region.program.steps if isinstance(step, KernelCall)]
                if region.program is not None
                else []
            )
            if calls:
                self._engines.add(assignment.decisions[name].engine)
            self._libraries.update(dict.fromkeys(call.library for call in calls))

    def _take_kernels(self, description: PlanDescription) -> None:
        """Note how a plan calls kernels. One that is called with tensors of several sizes reads no more than the smallest has."""
        for plan in (description, *description.plans):
            for step in (planned.step for planned in plan.steps):
                if isinstance(step, KernelCall):
                    specs = [plan.values[number].spec for number in step.arguments]
                    given = [spec.size_bytes if spec.is_static else 0 for spec in specs]
                    known = self._kernels.get(step.symbol)
                    least = given if known is None else map(min, given, known.bytes)
                    self._kernels[step.symbol] = Kernel(step.symbol, tuple(least), len(step.sizes))

    def _linked(self) -> LinkedLibrary:
        engines = [engine for engine in self._session.engines if engine.name in self._engines]
        linked = engines[0].link(list(self._libraries)) if len(engines) == 1 else None
        if linked is None:
            raise NotExportableError(
                f"the kernels of {' and '.join(sorted(self._engines))} cannot be linked to one library: leave one engine, of those that link "
                "kernels (tvm), by the option `engines`"
            )
        return linked

    def _origins(self, graph: ExportedGraph, saved: SavedPlan) -> Any:
        """Function that gives the origin of a graph's input or output, or of a tensor that stays the same."""

        def of_input(position: int) -> Origin:
            if position >= len(graph.tensors):
                return "input", graph.arguments[position - len(graph.tensors)]
            name, tensor = graph.tensors[position]
            return ("state", self._state(name, tensor)) if _key(tensor) in self._changed else self._constant(tensor)

        def origin(of: object) -> Origin:
            match of:
                case GraphOutput(number):
                    return origin(saved.outputs[number])
                case GraphInput(position) | CallInput(position):
                    return of_input(position)
                case PlanOutput(number):
                    return "output", number
            assert isinstance(of, torch.Tensor), of
            return self._constant(of)

        return origin

    def _constant(self, tensor: torch.Tensor) -> Origin:
        number = self._writer.add_tensor(tensor)
        self._tensors[number] = tensor
        return "constant", number

    def _state(self, name: str, tensor: torch.Tensor) -> int:
        """The number of the state that begins as a tensor."""
        key = _key(tensor)
        if key not in self._states:
            self._states[key] = State(name, self._writer.add_tensor(tensor))
            self._state_tensors.append(tensor)
        return list(self._states).index(key)

    def _results(self, entry: Entry, saved: SavedPlan, outputs: Sequence[Any], flat: Sequence[Any]) -> list[Any]:
        """The results of the call that chose the engines; its arguments and the states stay as they were."""
        pairs = zip(saved.outputs, outputs, strict=True)
        by_plan: dict[int, torch.Tensor] = {of.number: out for of, out in pairs if isinstance(of, PlanOutput)}
        copies: dict[Origin, torch.Tensor] = {}

        def find(origin: Origin) -> torch.Tensor:
            kind, number = origin
            if kind == "output":
                return by_plan[number]
            if kind == "constant":
                return self._tensors[number]
            if origin not in copies:
                copies[origin] = (flat[number] if kind == "input" else self._state_tensors[number]).detach().clone()
            return copies[origin]

        with torch.no_grad():
            return finish(entry, find)

    def _sample(
        self, entry: Entry, program: torch.export.ExportedProgram, flat: Sequence[Any], results: Sequence[Any]
    ) -> Sample:
        def numbers(values: Sequence[Any]) -> tuple[int | None, ...]:
            return tuple(self._writer.add_tensor(v) if isinstance(v, torch.Tensor) else None for v in values)

        dtypes = {_ROUNDS_TO.get(self._config.precision, torch.float32)} | {
            value.dtype
            for node in program.graph.nodes
            for value in tree_flatten(node.meta.get("val"))[0]
            if isinstance(value, torch.Tensor)
        }
        are_floating = any(isinstance(value, torch.Tensor) and value.is_floating_point() for value in results)
        tolerance = max(_TOLERANCES.get(dtype, _TOLERANCE) for dtype in dtypes) if are_floating else 0.0
        return Sample(entry.name, numbers(flat), numbers(results), tolerance)


def _symbols(
    program: torch.export.ExportedProgram,
    saved: SavedPlan,
    forms: Sequence[Form],
    inputs: Sequence[Form],
    limits: Sequence[Limit],
    flat: Sequence[Any],
) -> tuple[SizeSymbol, ...]:
    """The sizes that an entry's forms and its plan depend on, with the ranges that torch.export and kernels allow."""
    sizes = [size for form in forms if isinstance(form, TensorForm) for size in (*form.sizes, *form.strides)]
    known = {symbol.name: symbol for symbol in symbols(sizes)}
    names = list(dict.fromkeys([*known, *saved.description.symbols]))
    ranges = {str(symbol): values for symbol, values in program.range_constraints.items()}
    found: dict[str, SizeSymbol] = {}
    for number, form in enumerate(inputs):
        for dim, size in enumerate(form.sizes if isinstance(form, TensorForm) else ()):
            solved = linear(size)
            if solved is None or solved[0] in found or solved[0] not in names:
                continue
            name, factor, offset = solved
            least, most = _range(ranges.get(name), known[name])
            served = [(low, high) for size, low, high in limits if size == name]
            least, most = max([least, *(low for low, _ in served)]), min([most, *(high for _, high in served)])
            example = (flat[number].shape[dim] - offset) // factor
            found[name] = SizeSymbol(name, number, dim, factor, offset, min(least, example), most, example)
    if missing := [name for name in names if name not in found]:
        raise NotExportableError(f"the sizes {', '.join(missing)} cannot be told from the inputs of a call")
    return tuple(found.values())


def _of_several(limits: Sequence[Limit]) -> tuple[Limit, ...]:
    """The limits that are no range of one symbol."""
    return tuple(limit for limit in limits if not isinstance(limit[0], str))


def _range(values: Any, symbol: Symbol) -> tuple[int, int]:
    """The least and the most value of a size, of what torch.export tells of it."""
    least, most = max(0, symbol.low), min(symbol.high, MAX_SIZE)
    if values is None:
        return least, most
    if values.lower.is_Integer:
        least = max(least, int(values.lower))
    if values.upper.is_Integer:
        most = min(most, int(values.upper))
    return least, most


def _of_any_size(form: Form, result: Result | LiteralResult | ViewResult, entry: Entry, saved: SavedPlan) -> Form:
    """The form of a result at any sizes, where it is not the same at all of them."""
    if not isinstance(form, TensorForm) or not isinstance(result, Result):
        return form
    kind, number = result.origin
    if kind == "output":
        spec = saved.description.values[saved.description.outputs[number]].spec
        return dataclasses.replace(form, sizes=spec.shape, strides=spec.strides)
    given = entry.inputs[number] if kind == "input" else form
    assert isinstance(given, TensorForm)
    return dataclasses.replace(form, sizes=given.sizes, strides=given.strides)


def _structure(program: torch.export.ExportedProgram) -> Structure:
    try:
        return Structure(treespec_dumps(program.call_spec.in_spec), treespec_dumps(program.call_spec.out_spec))
    except failures(NotImplementedError) as error:
        raise NotExportableError(
            f"its arguments or results have a class that PyTorch cannot write by name: {error}; use tuples, lists and dicts, or register the "
            "class with a serialized_type_name (torch.export.register_dataclass)"
        ) from error


def _input_forms(program: torch.export.ExportedProgram, graph: ExportedGraph, flat: Sequence[Any]) -> tuple[Form, ...]:
    kinds = torch.export.graph_signature.InputKind
    names = [spec.arg.name for spec in program.graph_signature.input_specs if spec.kind == kinds.USER_INPUT]
    forms = [_form(name, value) for name, value in zip(names, flat, strict=True)]
    for position, spec in zip(graph.arguments, graph.specs, strict=True):
        form = forms[position]
        if isinstance(form, TensorForm) and not spec.is_static:
            forms[position] = dataclasses.replace(form, sizes=spec.shape, strides=spec.strides)
    return tuple(forms)


def _form(name: str, value: Any) -> Form:
    if isinstance(value, torch.Tensor):
        return TensorForm(name, str(value.dtype).removeprefix("torch."), tuple(value.shape), value.stride())
    if value is not None and not isinstance(value, bool | int | float | str | Size):
        raise NotExportableError(
            f"{name} is {described(value)}; inputs and outputs of a file are tensors, numbers, strings or None"
        )
    return LiteralForm(name, value)


def _update(update: Copied | Rows, origin: Any) -> CopyUpdate | RowsUpdate:
    target = origin(GraphInput(update.position))
    if isinstance(update, Copied):
        _, number = origin(GraphOutput(update.output))
        return CopyUpdate(target, number)
    return RowsUpdate(target, update.dim, origin(update.index), origin(update.source))


def _result(result: object, origin: Any, saved: SavedPlan) -> Result | LiteralResult | ViewResult:
    match result:
        case ViewOf(of, view):
            return ViewResult(origin(of), view.size, view.stride, view.offset, bits_in_words(view.bits))
        case GraphOutput(number) if not isinstance(saved.outputs[number], PlanOutput | CallInput | torch.Tensor):
            return LiteralResult(saved.outputs[number])  # type: ignore[arg-type]
        case GraphOutput() | GraphInput():
            return Result(origin(result))
    return LiteralResult(result)  # type: ignore[arg-type]
