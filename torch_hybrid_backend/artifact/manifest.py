"""The manifest of a `.hybrid` file: what its segments hold, and how a call gets from its inputs to its results, as data.

Member by member, docs/hybrid_format.md describes the JSON that `Manifest.to_json` writes. csrc/src/manifest.cc reads and checks it;
`Manifest.from_json` is given what was checked there.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch_hybrid_backend.runtime.native.ops import SizeTable

if TYPE_CHECKING:
    from torch_hybrid_backend.sizes.size import Dim, Size

FORMAT = 1
# Members of the manifest that each variant of a file has for itself.
_OF_VARIANTS = ("targets", "kernels", "entries", "samples", "report")
MAX_VARIANTS = 32  # that a reader takes: csrc/src/manifest.cc

# Origin of a tensor in a call: "input", "constant", "state", or in results also "output" (of the plan), and its number.
Origin = tuple[str, int]
# An expression of sizes (`runtime.native.description.expression`), and the least and the most that it may be.
Limit = tuple[Any, int, int]
Literal = bool | int | float | str | None


@dataclass(frozen=True, slots=True)
class Segment:
    """A range of the file's bytes. `sha256`: of these, hexadecimal digits. `decoded`: its size where it is coded, decoded."""

    name: str
    kind: str
    offset: int
    size: int
    sha256: str
    encoding: str = "none"
    decoded: int | None = None


@dataclass(frozen=True, slots=True)
class LibraryTarget:
    """The machines that a library of kernels is for: those that have all `features`, by the names of /proc/cpuinfo. `library`: a segment."""

    system: str
    processor: str
    features: tuple[str, ...]
    library: str


@dataclass(frozen=True, slots=True)
class Kernel:
    """The arguments of a kernel of the libraries: tensors of at least so many `bytes` each, 0 for those whose sizes differ from call to call,
    then so many `sizes`."""

    name: str
    bytes: tuple[int, ...]
    sizes: int


@dataclass(frozen=True, slots=True)
class Constant:
    """A tensor in a segment, `offset` bytes from its begin on. Sizes and strides are in elements."""

    segment: str
    offset: int
    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class State:
    """A tensor that calls change, such as a KV cache, and the number of the constant that it begins as."""

    name: str
    constant: int


@dataclass(frozen=True, slots=True)
class TensorForm:
    """The form of a tensor that a call takes or returns. `name` is for people."""

    name: str
    dtype: str
    sizes: tuple[Dim, ...]
    strides: tuple[Dim, ...]


@dataclass(frozen=True, slots=True)
class LiteralForm:
    """A value that is no tensor: a call must pass, or returns, exactly this one. A result may be a size."""

    name: str
    value: Literal | Size


Form = TensorForm | LiteralForm


@dataclass(frozen=True, slots=True)
class CopyUpdate:
    """After the plan has run, its output number `output` is copied over `target`."""

    target: Origin
    output: int


@dataclass(frozen=True, slots=True)
class RowsUpdate:
    """After the plan has run, slices of `source` along `dim` are copied to the positions in `target` that `index` has."""

    target: Origin
    dim: int
    index: Origin
    source: Origin


@dataclass(frozen=True, slots=True)
class Result:
    """A result that is a tensor of the call itself; a constant is copied, as the caller may write to it."""

    origin: Origin


@dataclass(frozen=True, slots=True)
class LiteralResult:
    """A result that is no tensor."""

    value: Literal | Size


@dataclass(frozen=True, slots=True)
class ViewResult:
    """A view of another result: `offset` elements behind that one's first. `bits`: how its memory is read: "", "conj", "neg" or "conj neg"."""

    origin: Origin
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    bits: str


@dataclass(frozen=True, slots=True)
class Structure:
    """The pytrees of a call: of its positional and keyword arguments, and of what it returns, as PyTorch writes them."""

    inputs: str
    outputs: str


@dataclass(frozen=True, slots=True)
class SizeSymbol:
    """A size of calls, from `least` to `most`: dimension `dim` of input `input` has `factor` times its value plus `offset` elements.

    `example`: its value in the sample.
    """

    name: str
    input: int
    dim: int
    factor: int
    offset: int
    least: int
    most: int
    example: int

    def value(self, size: int) -> int | None:
        """The value where the dimension has so many elements; None for a size outside of the range."""
        value, rest = divmod(size - self.offset, self.factor)
        return value if rest == 0 and self.least <= value <= self.most else None

    @property
    def range(self) -> str:
        """The sizes of the dimension, in words."""
        least, most = self.factor * self.least + self.offset, self.factor * self.most + self.offset
        return f"{least} to {most}" + (f" in steps of {self.factor}" if self.factor != 1 else "")


@dataclass(frozen=True, slots=True)
class Entry:
    """A function of the model. `functions`: the segment of what only Python can run, None where there is nothing such; `python_parts` tells
    people what each is, and the user's line. `needs_torch`: the plan calls operators of PyTorch.

    `symbols`: of an entry for many sizes; sizes, strides and offsets are then written as `Size`s, and read as what they are at the examples.
    `any_sizes`: such an entry as it stands in the file.
    """

    name: str
    plan: str
    functions: str | None
    python_parts: tuple[str, ...]
    needs_torch: bool
    inputs: tuple[Form, ...]
    sources: tuple[Origin, ...]
    slots: tuple[int, ...]
    updates: tuple[CopyUpdate | RowsUpdate, ...]
    results: tuple[Result | LiteralResult | ViewResult, ...]
    outputs: tuple[Form, ...]
    structure: Structure
    symbols: tuple[SizeSymbol, ...] = ()
    limits: tuple[Limit, ...] = ()
    any_sizes: Mapping[str, Any] | None = field(default=None, compare=False)

    @property
    def served(self) -> tuple[str, ...]:
        """The sizes that may differ from call to call, in words."""
        return tuple(f"{self.inputs[s.input].name} with {s.range} in dimension {s.dim}" for s in self.symbols)

    def at(self, values: Sequence[int]) -> Entry:
        """The entry at these values of its symbols, as read. Raises HybridError where a size does not fit in 64 bits."""
        assert self.any_sizes is not None, "it has one set of sizes"
        sizes = SizeTable([symbol.name for symbol in self.symbols], self.any_sizes["sizes"]).at(values)
        made = _parts_from_plain(_filled(self.any_sizes, sizes))
        return dataclasses.replace(made, symbols=self.symbols, any_sizes=self.any_sizes)


@dataclass(frozen=True, slots=True)
class Sample:
    """Inputs of a call of an entry and what it then returned, as numbers of constants; None for what is no tensor.

    `tolerance`: how far an output may be off, as a share of the largest absolute value in it.
    """

    entry: str
    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]
    tolerance: float


@dataclass(frozen=True, slots=True)
class Generation:
    """The parts of a decoder that generates text. `prefill`, `decode`: entries that take several tokens, or one, and return the logits of one.
    `max_length`: the positions of the cache. `stop_tokens`: tokens that end a text."""

    prefill: str
    decode: str
    max_length: int
    stop_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """All that a file says of one of its variants. `package`, `torch`: the versions that wrote it. `report`: the segment with the plans as
    JSON. `generation`: None for what is no decoder.

    A file has one variant or several, each for other targets. The manifests of two differ in `targets`, `kernels`, `entries`, `samples` and
    `report`.
    """

    package: str
    torch: str
    model: str
    segments: tuple[Segment, ...]
    targets: tuple[LibraryTarget, ...]
    kernels: tuple[Kernel, ...]
    constants: tuple[Constant, ...]
    states: tuple[State, ...]
    entries: tuple[Entry, ...]
    samples: tuple[Sample, ...]
    report: str
    generation: Generation | None = None
    format: int = FORMAT

    def to_json(self, before: Sequence[Manifest] = ()) -> str:
        """The manifest as it stands in a file: equal manifests give equal text. `before`: the file's other variants, which a reader looks at
        first."""
        plain = self._to_plain()
        if self.generation is None:
            del plain["generation"]
        if before:
            others = [each._to_plain() for each in before]
            plain["variants"] = [{member: other[member] for member in _OF_VARIANTS} for other in others]
        return json.dumps(plain, separators=(",", ":"), ensure_ascii=False)

    def _to_plain(self) -> dict[str, Any]:
        segments = [{k: v for k, v in _plain(each).items() if v is not None} for each in self.segments]
        return {**_plain(self), "segments": segments, "entries": [_entry_to_plain(entry) for entry in self.entries]}

    @staticmethod
    def all_from_json(text: str) -> list[Manifest]:
        """The manifests of a file's variants, in the order in which a reader looks at them."""
        return [Manifest.from_json(text, number) for number in range(len(json.loads(text).get("variants", ())) + 1)]

    @staticmethod
    def from_json(text: str, variant: int = -1) -> Manifest:
        """The manifest of the variant of that number, the last one by default, for text of which that was checked."""
        plain = json.loads(text)
        chosen = [*plain.get("variants", ()), plain][variant]
        # Other members of a variant were not checked.
        own = {member: chosen[member] for member in _OF_VARIANTS if member in chosen}
        plain = {member: value for member, value in plain.items() if member not in _OF_VARIANTS} | own
        return Manifest(
            package=plain["package"],
            torch=plain["torch"],
            model=plain["model"],
            segments=tuple(_made(Segment, each) for each in plain["segments"]),
            targets=tuple(_made(LibraryTarget, each) for each in plain["targets"]),
            kernels=tuple(_made(Kernel, each) for each in plain.get("kernels", ())),
            constants=tuple(_made(Constant, each) for each in plain["constants"]),
            states=tuple(_made(State, each) for each in plain["states"]),
            entries=tuple(map(_entry_from_plain, plain["entries"])),
            samples=tuple(_made(Sample, each) for each in plain["samples"]),
            report=plain["report"],
            generation=_made(Generation, plain["generation"]) if plain.get("generation") is not None else None,
        )


def _plain(value: Any) -> dict[str, Any]:
    return dataclasses.asdict(value)


def _made(kind: Any, plain: Mapping[str, Any]) -> Any:
    names = [field.name for field in dataclasses.fields(kind)]
    return kind(**{name: _frozen(plain[name]) for name in names if name in plain})


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _entry_to_plain(entry: Entry) -> dict[str, Any]:
    def update(each: CopyUpdate | RowsUpdate) -> list[Any]:
        if isinstance(each, CopyUpdate):
            return ["copy", each.target, each.output]
        return ["rows", each.target, each.dim, each.index, each.source]

    def result(each: Result | LiteralResult | ViewResult) -> list[Any]:
        match each:
            case Result():
                return list(each.origin)
            case LiteralResult():
                return ["literal", each.value]
        return ["view", each.origin, each.sizes, each.strides, each.offset, each.bits]

    plain = {
        **_plain(dataclasses.replace(entry, any_sizes=None)),
        "updates": [update(each) for each in entry.updates],
        "results": [result(each) for each in entry.results],
        "structure": {"in": entry.structure.inputs, "out": entry.structure.outputs},
    }
    for member in ("any_sizes", "limits", *(() if entry.symbols else ("symbols",))):
        del plain[member]
    if not entry.symbols:
        return plain
    # `load` only reads manifests, and imports no more than it takes.
    from torch_hybrid_backend.runtime.native.description import expression

    sizes: dict[Dim, int] = {}

    def number(size: Dim) -> dict[str, int]:
        return {"size": sizes.setdefault(size, len(sizes))}

    plain = json.loads(json.dumps(plain, default=number))
    limits = [[{"size": len(sizes) + i}, least, most] for i, (_, least, most) in enumerate(entry.limits)]
    return {**plain, "limits": limits, "sizes": [*map(expression, sizes), *(limit for limit, _, _ in entry.limits)]}


def _filled(plain: Any, sizes: Sequence[int]) -> Any:
    """The same with these sizes in their places."""
    if isinstance(plain, list):
        return [_filled(each, sizes) for each in plain]
    if not isinstance(plain, dict):
        return plain
    return sizes[plain["size"]] if "size" in plain else {name: _filled(each, sizes) for name, each in plain.items()}


def _entry_from_plain(plain: Mapping[str, Any]) -> Entry:
    if "symbols" not in plain:
        return _parts_from_plain(plain)
    symbols = tuple(_made(SizeSymbol, each) for each in plain["symbols"])
    # Of the parts only names are needed.
    empty = dict.fromkeys(("inputs", "sources", "slots", "updates", "results", "outputs", "python_parts"), ())
    named = dataclasses.replace(_parts_from_plain({**plain, **empty}), symbols=symbols, any_sizes=plain)
    return named.at([symbol.example for symbol in symbols])


def _parts_from_plain(plain: Mapping[str, Any]) -> Entry:
    def form(each: Mapping[str, Any]) -> Form:
        return _made(LiteralForm if "value" in each else TensorForm, each)  # type: ignore[no-any-return]

    def update(each: list[Any]) -> CopyUpdate | RowsUpdate:
        kind, target, *rest = _frozen(each)
        return CopyUpdate(target, *rest) if kind == "copy" else RowsUpdate(target, *rest)

    def result(each: list[Any]) -> Result | LiteralResult | ViewResult:
        kind, *rest = _frozen(each)
        match kind:
            case "literal":
                return LiteralResult(*rest)
            case "view":
                return ViewResult(*rest)
        return Result((kind, *rest))

    return Entry(
        name=plain["name"],
        plan=plain["plan"],
        functions=plain["functions"],
        python_parts=tuple(plain["python_parts"]),
        needs_torch=plain["needs_torch"],
        inputs=tuple(map(form, plain["inputs"])),
        sources=_frozen(plain["sources"]),
        slots=tuple(plain["slots"]),
        updates=tuple(map(update, plain["updates"])),
        results=tuple(map(result, plain["results"])),
        outputs=tuple(map(form, plain["outputs"])),
        structure=Structure(plain["structure"]["in"], plain["structure"]["out"]),
    )
