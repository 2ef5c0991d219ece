"""Plan: every decision about one graph, frozen, comparable, printable and JSON-serialisable.

The report reads plans and recomputes nothing. Costs are microseconds per call; flops are floating-point operations per call
(a multiply-add counts two).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch_hybrid_backend.core.device import Device
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.core.verdict import Reason, Refused
from torch_hybrid_backend.sizes.forms import parse
from torch_hybrid_backend.sizes.size import Dim, Size


@dataclass(frozen=True, slots=True)
class Refusal:
    """Engine `engine` did not take a node or a region, and why."""

    engine: str
    code: Reason
    why: str

    @staticmethod
    def of(engine: str, refused: Refused) -> Refusal:
        return Refusal(engine, refused.code, refused.why)


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one call of a region on one engine. `kind` is "measured", "cached" (measured earlier), "disturbed" (either, while other load
    held the cores) or "estimated"."""

    engine: str
    microseconds: float
    kind: str


@dataclass(frozen=True, slots=True)
class Attempt:
    """A way in which an engine computes a region, where it has several, the fastest first: "fp32 accumulation". `why`: why it did not do;
    "" for the last one, which did."""

    how: str
    why: str = ""


def attempts_in_words(attempts: Sequence[Attempt]) -> str:
    """Text for the way to compute a region, and those tried before: "fp32 accumulation, after a relative error of 0.03 as written"."""
    *before, last = attempts
    after = "; ".join(f"{each.why} {each.how}" for each in before)
    return last.how + (f", after {after}" if after else "")


@dataclass(frozen=True, slots=True)
class NodeDecision:
    """Decision where an operator of the graph runs.

    `inputs`: the values that it reads, by the name of the operator or of the graph's input that each is of. `outputs`: the tensors that it
    returns. `module`: the innermost module that calls it, as `ModuleCall.path`; "" for the outermost, and where that is not known.
    `is_view`: it computes nothing; it is another view of its input's memory, or an item of a tuple.
    """

    name: str
    operator: str  # "aten.relu.default"
    engine: str
    region: str  # "" where the node runs in eager outside any region
    source: str  # the user's line: "model.py:12 in forward"
    flops: int
    refusals: tuple[Refusal, ...]
    device: Device | None  # None: it has tensors on several, as a copy between devices has
    inputs: tuple[str, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    module: str = ""
    is_view: bool = False


@dataclass(frozen=True, slots=True)
class GraphInput:
    """A value that calls of the graph are given; `spec` is None where it is no tensor. Constants are parameters, buffers, and what is computed
    of these once. `called`: what the user's code calls it, "input_ids"; "" where that is not known."""

    name: str
    spec: TensorSpec | None
    is_constant: bool
    called: str = ""


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """A module in whose forward operators are called. `path`: from what was compiled, "encoder.layers.0", with "@1" behind it for that module's
    second call and so on. `parent`: the path of the module that calls it; "" for the outermost, which has no entry of its own."""

    path: str
    class_name: str
    parent: str


@dataclass(frozen=True, slots=True)
class RegionDecision:
    """Decision where a region runs: the candidates' costs, and the refusals of those that lost or failed.

    `kernels`: what it calls, step by step: the names of kernels and operators.
    `operators`: its layers that an operator of PyTorch's computes in place of a kernel, as "mkldnn::_linear_pointwise: linear layer of ...".
    `precision`: what its operators compute in, the most frequent first: ("bfloat16", "float32").
    `precision_error`: how far its outputs are off those of the graph as written, of which `Conversion` tells; None where that is not known.
    `attempts`: the ways in which its engine computed it, up to the one that was near enough to eager; empty where the first was.
    `note`: what else its engine has to say of it; "" of most.
    """

    name: str
    engine: str
    key: str
    node_names: tuple[str, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    costs: tuple[Cost, ...]
    refusals: tuple[Refusal, ...]
    max_error: float | None  # against eager on the first call; None where it was not verified
    flops: int
    kernels: tuple[str, ...]
    source: str
    device: Device
    operators: tuple[str, ...] = ()
    precision: tuple[str, ...] = ()
    precision_error: float | None = None
    attempts: tuple[Attempt, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True)
class CallDecision:
    """Decision who runs whole calls: "plan", or "eager" where that was faster with the whole graph; a refusal of "plan" then says so."""

    engine: str
    costs: tuple[Cost, ...]
    refusals: tuple[Refusal, ...]


@dataclass(frozen=True, slots=True)
class KernelTime:
    """Time of one kernel in a call, or of one segment that runs in eager.

    `region`: as in `RegionDecision.name`; segments of eager have names too. `kernel`: as in `RegionDecision.kernels`, "a + b" where several
    compute the same operators one after the other; "namespace::operator" for an operator of PyTorch's that the plan calls, "eager" for a
    segment that runs from Python. `nodes`: names of the operators that it computes.
    `modules`: paths of the modules that call these, each once, that of the heaviest operator first. `source`: that
    one's line of the user's.
    `microseconds`: of all its runs in one call of the model, the median over the calls that were timed.
    `flops`, `bytes`: what its operators need at least in that time: floating-point operations (a multiply-add counts two), and bytes of
    memory, each value that is read or written once. `precision`: what it computes in: "float32".
    """

    region: str
    kernel: str
    nodes: tuple[str, ...]
    modules: tuple[str, ...]
    source: str
    microseconds: float
    flops: int
    bytes: int
    precision: str = ""

    @property
    def gflops(self) -> float:
        """Billions of floating-point operations a second."""
        return self.flops / self.microseconds / 1e3 if self.microseconds else 0.0

    @property
    def gbytes(self) -> float:
        """Billions of bytes a second."""
        return self.bytes / self.microseconds / 1e3 if self.microseconds else 0.0


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The most that the machine can do with `threads` threads, as measured on it. `gflops`: billions of operations a second, by precision;
    `gbytes`: billions of bytes a second that are read from memory."""

    threads: int
    gflops: tuple[tuple[str, float], ...]
    gbytes: float


@dataclass(frozen=True, slots=True)
class Profile:
    """Times of a graph's kernels, in the order of a call.

    `call_us`: what one call of the model spends in this graph if nothing is timed inside, the median of `calls` calls. `overhead_us`: what is
    left of it outside kernels: a call reads inputs, starts threads, allocates outputs. `kernels` and `overhead_us` add up to `call_us`, or to
    more where other load disturbed the calls whose kernels were timed. `ceilings`: None where they were not measured. `is_nested`: an operator
    of another graph calls this one, as a loop does its body, and that operator's row includes it. `is_disturbed`: other load held the cores.
    """

    call_us: float
    calls: int
    kernels: tuple[KernelTime, ...]
    overhead_us: float
    ceilings: Ceilings | None = None
    is_nested: bool = False
    is_disturbed: bool = False


@dataclass(frozen=True, slots=True)
class Unconverted:
    """A layer that is computed as written under another precision, or in floating point beside layers that the model quantizes, and why.

    `site`: the module in whose forward it is called, by its path, with "#2" behind it for that forward's second layer and so on; "" where that
    is not known.
    """

    name: str
    operator: str
    code: Reason
    why: str
    source: str
    site: str = ""


@dataclass(frozen=True, slots=True)
class Conversion:
    """Outcome for a graph that is not computed as written, or that quantizes layers itself; its `precision` is then "as-written", and
    `tolerance` 0, as nothing is compared.

    `operators`: how many compute floating-point tensors in a call; `converted`: how many of them to which precision. `casts`: conversions
    of values of the call; `weight_casts`: of parameters, made once. `error`: the largest of how far outputs were off those of the graph as
    written in the calls that were compared, as root mean square of the difference over root mean square; None where that is not known, and
    `unchecked` says why. `tolerance`: how large it may be. `unseen`: converted layers whose inputs were alike or nearly all zero in those
    calls, which shows nothing of their error.
    """

    precision: str
    tolerance: float
    operators: int
    converted: tuple[tuple[str, int], ...]
    casts: int
    weight_casts: int
    left: tuple[Unconverted, ...] = ()
    error: float | None = None
    unchecked: str = ""
    unseen: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GraphBreak:
    """A line of the user's that Dynamo leaves to Python: one graph ends before it, another begins after it.

    `source`: "model.py:12: print(x)". `reason`, `explanation`, `hints`: Dynamo's. `is_last`: the rest of the function, or all of it, runs in
    Python.
    """

    source: str
    reason: str
    explanation: str
    hints: tuple[str, ...]
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """All decisions for one graph. `kind` is "inference", "forward" or "backward".

    `partitionings`: what a call costs with each of the partitions that were priced, by the order in which they asked the engines; empty where
    there was one. A cost of the kind "more than" was given up.

    `cuda_graphs`: the names of the kernels that each CUDA graph launches together, across regions; of sizes known only at run time those of the
    first call. Empty where the setting `cuda_graphs` does not ask for any.

    `unrepeatable`: an operator for which a call cannot be run twice unnoticed, as it draws random numbers or has other effects: the first
    call's answer may then differ from later ones by rounding. "" if there is none: the first call returns what every later call returns.

    `call` is None where whole calls were not priced: the plan runs them. Where eager runs them, every node is eager's, and `regions` tell
    what the plan would have done.
    """

    graph: str
    kind: str
    nodes: tuple[NodeDecision, ...]
    regions: tuple[RegionDecision, ...]
    call: CallDecision | None = None
    partitionings: tuple[Cost, ...] = ()
    cuda_graphs: tuple[tuple[str, ...], ...] = ()
    conversion: Conversion | None = None
    unrepeatable: str = ""
    profile: Profile | None = None  # where it was asked for: `explain(..., profile=True)`
    inputs: tuple[GraphInput, ...] = ()
    outputs: tuple[str, ...] = ()  # the values that calls return, as in `NodeDecision.inputs`
    modules: tuple[ModuleCall, ...] = ()

    def to_json(self) -> str:
        """Stable JSON (sorted keys, two spaces)."""
        return json.dumps(_plain(self), indent=2, sort_keys=True)

    @staticmethod
    def from_json(text: str) -> Plan:
        """The inverse of `to_json`."""
        raw: dict[str, Any] = json.loads(text)

        def spec(d: dict[str, Any]) -> TensorSpec:
            shape, strides = (tuple(map(_read, d[name])) for name in ("shape", "strides"))
            return TensorSpec(shape, d["dtype"], strides, Device.parse(d["device"]))

        def refusals(items: list[dict[str, Any]]) -> tuple[Refusal, ...]:
            return tuple(Refusal(r["engine"], Reason(r["code"]), r["why"]) for r in items)

        def costs(items: list[dict[str, Any]]) -> tuple[Cost, ...]:
            return tuple(Cost(**c) for c in items)

        def node(n: dict[str, Any]) -> NodeDecision:
            device = n["device"] and Device.parse(n["device"])
            read = {"inputs": tuple(n["inputs"]), "outputs": tuple(map(spec, n["outputs"]))}
            return NodeDecision(**{**n, **read, "device": device, "refusals": refusals(n["refusals"])})

        nodes = tuple(map(node, raw["nodes"]))
        regions = tuple(
            RegionDecision(
                **{
                    **r,
                    "device": Device.parse(r["device"]),
                    "node_names": tuple(r["node_names"]),
                    "kernels": tuple(r["kernels"]),
                    "operators": tuple(r["operators"]),
                    "precision": tuple(r["precision"]),
                    "attempts": tuple(Attempt(**each) for each in r["attempts"]),
                    "inputs": tuple(map(spec, r["inputs"])),
                    "outputs": tuple(map(spec, r["outputs"])),
                    "costs": costs(r["costs"]),
                    "refusals": refusals(r["refusals"]),
                }
            )
            for r in raw["regions"]
        )
        decided = raw["call"]
        call = decided and CallDecision(decided["engine"], costs(decided["costs"]), refusals(decided["refusals"]))
        graphs = tuple(map(tuple, raw["cuda_graphs"]))
        conversion = raw["conversion"] and _conversion(raw["conversion"])
        profile = raw["profile"] and _profile(raw["profile"])
        inputs = tuple(GraphInput(**{**i, "spec": i["spec"] and spec(i["spec"])}) for i in raw["inputs"])
        modules = tuple(ModuleCall(**module) for module in raw["modules"])
        return Plan(
            graph=raw["graph"],
            kind=raw["kind"],
            nodes=nodes,
            regions=regions,
            call=call,
            partitionings=costs(raw["partitionings"]),
            cuda_graphs=graphs,
            conversion=conversion,
            unrepeatable=raw["unrepeatable"],
            profile=profile,
            inputs=inputs,
            outputs=tuple(raw["outputs"]),
            modules=modules,
        )


def _conversion(raw: dict[str, Any]) -> Conversion:
    left = tuple(Unconverted(**{**layer, "code": Reason(layer["code"])}) for layer in raw["left"])
    converted = tuple((name, count) for name, count in raw["converted"])
    return Conversion(**{**raw, "left": left, "converted": converted, "unseen": tuple(raw["unseen"])})


def _profile(raw: dict[str, Any]) -> Profile:
    kernels = (KernelTime(**{**k, "nodes": tuple(k["nodes"]), "modules": tuple(k["modules"])}) for k in raw["kernels"])
    found = raw["ceilings"]
    ceilings = found and Ceilings(**{**found, "gflops": tuple((name, rate) for name, rate in found["gflops"])})
    return Profile(**{**raw, "kernels": tuple(kernels), "ceilings": ceilings})


def _plain(value: Any) -> Any:
    """A value that JSON can hold: sizes and devices as their texts, the other values of a plan field by field."""
    if isinstance(value, Size | Device):
        return str(value)
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _read(size: int | str) -> Dim:
    return parse(size) if isinstance(size, str) else size
