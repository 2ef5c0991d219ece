"""A model from a file as servers run it: what requests may look like, and several of them in one call.

Requests are joined along dimension 0 where the file was exported with several rows or with a dynamic number of them, and where a test when the
file is opened finds that rows do not influence each other. A file may hold one entry for each of several numbers of rows; the smallest that
suffices is called, and is filled up with copies of the last row.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torch_hybrid_backend.artifact.manifest import Entry, Form, LiteralForm, TensorForm
from torch_hybrid_backend.artifact.model import LoadedEntry, LoadedModel, is_close
from torch_hybrid_backend.errors import (
    ArgumentError,
    ArtifactError,
    HybridError,
    RefusedValuesError,
    RequestError,
    did_you_mean,
    failures,
)
from torch_hybrid_backend.serve.protocol import DATATYPES, datatype_of

# Sets of sizes whose forms an entry for many sizes keeps.
_MOST_KEPT = 1024
# Between two sample calls, as a multiple of the time that one takes.
_PAUSE = 100
ANY = -1


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor that requests send, or get. `sizes`: -1 where they may differ."""

    name: str
    datatype: str
    sizes: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.datatype} {list(self.sizes)}"


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """A request that was checked. `rows`: None where it cannot be joined. `entries`: those for rows like its, the smallest first."""

    leaves: Sequence[Any]
    rows: int | None
    entries: tuple[ServedEntry, ...]

    @property
    def key(self) -> object:
        """Equal for requests that can be joined."""
        if self.rows is None:
            return id(self)
        return self.entries, tuple(each.shape[1:] for each in self.leaves if isinstance(each, torch.Tensor))


class ServedEntry:
    """An entry without states. `rows`: the least and the most that a call takes, None if requests must not be joined."""

    def __init__(self, call: LoadedEntry, results: Sequence[Any]) -> None:
        """`results`: those of the sample call, made here; none if the file has none."""
        self.call = call
        entry = call.entry
        self.inputs, self.outputs = _named(entry.inputs), _named(entry.outputs)
        self._at = functools.lru_cache(_MOST_KEPT)(functools.partial(_sizes_at, entry))
        self._batch_symbol = _batch_symbol(entry)
        self.rows = self._row_range()
        if self.rows is not None and not (results and self._rows_are_independent(self._named(results))):
            self.rows = None

    def info(self, forms: Mapping[str, Form], of_results: bool = False) -> Iterator[TensorInfo]:
        """The tensors that requests send, or get, of these forms."""
        entry = self.call.entry
        for name, form in forms.items():
            if isinstance(form, TensorForm):
                sizes = _varying(entry, form, list(forms.values()).index(form), of_results)
                if self.rows not in (None, (1, 1)):
                    sizes = (ANY, *sizes[1:])
                yield TensorInfo(name, DATATYPES.get(form.dtype, form.dtype.upper()), sizes)

    def takes(self, leaves: Sequence[Any]) -> bool:
        """True if the entry can be called with tensors of these sizes, or with more or fewer rows of them."""
        values = []
        for number, symbol in enumerate(self.call.entry.symbols):
            shape = leaves[symbol.input].shape
            is_batch = self.rows is not None and number == self._batch_symbol
            if symbol.dim >= len(shape):
                return False
            value = symbol.example if is_batch else symbol.value(shape[symbol.dim])
            if value is None:
                return False
            values.append(value)
        skipped = 0 if self.rows is None else 1
        expected = self._at(tuple(values))
        return all(
            len(leaf.shape) == len(sizes) and tuple(leaf.shape[skipped:]) == sizes[skipped:]
            for leaf, sizes in zip(leaves, expected, strict=True)
            if sizes is not None
        )

    def run(self, leaves: Sequence[Any]) -> dict[str, torch.Tensor]:
        """The results that are tensors, by name."""
        with torch.no_grad():
            return self._named(self.call.run(leaves))

    def _named(self, results: Sequence[Any]) -> dict[str, torch.Tensor]:
        return {
            name: result for name, result in zip(self.outputs, results, strict=True) if isinstance(result, torch.Tensor)
        }

    def _row_range(self) -> tuple[int, int] | None:
        entry = self.call.entry
        if self._batch_symbol is not None:
            symbol = entry.symbols[self._batch_symbol]
            return symbol.least, symbol.most
        forms = [form for form in (*entry.inputs, *entry.outputs) if isinstance(form, TensorForm)]
        counts = {form.sizes[0] if form.sizes else None for form in forms}
        count = next(iter(counts)) if len(counts) == 1 else None
        return (count, count) if isinstance(count, int) and count > 0 and not entry.symbols else None

    def _rows_are_independent(self, before: Mapping[str, torch.Tensor]) -> bool:
        """True if each row of the sample's results is the same in another place, beside another row. `before`: results of the sample call."""
        assert self.rows is not None
        if self.rows == (1, 1):
            return True
        leaves = list(self.call.sample_inputs)
        if not leaves:
            return False
        if self._batch_symbol is not None and all(
            leaf.shape[0] == 1 for leaf in leaves if isinstance(leaf, torch.Tensor)
        ):
            if self.rows[1] < 2:
                return False
            leaves = [leaf.repeat_interleave(2, 0) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            before = self.run([_copy(leaf) for leaf in leaves])
        after = self.run([_moved(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])
        return all(is_close(after[name][1:], result[:-1], _rounding(result)) for name, result in before.items())


class ServedModel:
    """A model of one file. `name`: what requests call it, that of the file for None. `version`: the first digits of the file's digest.
    Threads may run it one at a time.

    Raises ArtifactError for a file that cannot be used.
    """

    def __init__(self, path: Path, keys: Sequence[Any] | None = None, name: str | None = None) -> None:
        self.path = path
        self.name = path.stem if name is None else name
        self.model = LoadedModel(path, keys=keys, share=True, checks=False)
        results = self.model.check()
        self.version = self.model.digest[:12]
        self.generates = self.model.manifest.generation is not None
        self._checks = itertools.cycle(sample.entry for sample in self.model.manifest.samples)
        self._next_entry = next(self._checks, None)
        self._next_check = 0.0
        served = [
            ServedEntry(self.model.flat_entry(entry.name), results.get(entry.name, ()))
            for entry in self.model.manifest.entries
            if not _has_states(entry)
        ]
        first = served[0] if served else None
        # Entries of the same inputs and outputs, for other sizes.
        self.entries = sorted(
            (each for each in served if first is not None and _signature(each) == _signature(first)),
            key=lambda each: each.rows or (0, 0),
        )
        if any(each.rows is None for each in self.entries):
            for each in self.entries:
                each.rows = None
        self.inputs = list(_merged([list(each.info(each.inputs)) for each in self.entries]))
        self.outputs = list(_merged([list(each.info(each.outputs, True)) for each in self.entries]))
        for tensor in (*self.inputs, *self.outputs):
            if tensor.datatype not in DATATYPES.values():
                raise ArtifactError(
                    f"{path}: {tensor.name} is {tensor.datatype}, which the Open Inference Protocol does not know: export a model that takes "
                    f"and returns {', '.join(DATATYPES)}"
                )

    @property
    def most_rows(self) -> int | None:
        """The most rows of a call; None where requests are not joined."""
        return max((each.rows[1] for each in self.entries if each.rows is not None), default=None)

    @property
    def vocabulary(self) -> int:
        """The number of tokens that a model knows which generates text."""
        settings = self.model.manifest.generation
        assert settings is not None, "the model generates text"
        logits = self.model.flat_entry(settings.decode).entry.outputs[0]
        assert isinstance(logits, TensorForm), "an entry of a decoder returns logits"
        return int(logits.sizes[-1])

    @property
    def fallback_parts(self) -> int:
        """The number of parts of the model that only Python can run."""
        return sum(len(entry.python_parts) for entry in self.model.manifest.entries)

    @property
    def plan_cache(self) -> tuple[int, int]:
        """Calls whose sizes had a plan, and calls that made one."""
        counts = [each.call.plan_cache for each in self.entries]
        return sum(hits for hits, _ in counts), sum(misses for _, misses in counts)

    @functools.cached_property
    def picture(self) -> str:
        """The picture of the plan, as HTML."""
        return self.model.explain().to_html()

    def check(self) -> None:
        """Make a sample call that is in the file, of the next entry each time. Raises ArtifactError where its results are others than there,
        and repeats that call the next time: Serve replaces a replica after several failures in a row.

        Requests wait meanwhile: nothing is done until a hundred times as long has passed as the last sample call took.
        """
        start = time.monotonic()
        if start < self._next_check:
            return
        self.model.check(self._next_entry)
        self._next_entry = next(self._checks, None)
        now = time.monotonic()
        self._next_check = now + _PAUSE * (now - start)

    def sample(self) -> dict[str, torch.Tensor]:
        """The tensors of the sample call, by input; of several rows the first."""
        if not self.entries:
            return {}
        first = self.entries[0]
        tensors = {
            name: leaf
            for name, leaf in zip(first.inputs, first.call.sample_inputs, strict=False)
            if isinstance(leaf, torch.Tensor)
        }
        return {name: leaf[:1] if first.rows is not None else leaf for name, leaf in tensors.items()}

    def work(self, tensors: Mapping[str, torch.Tensor]) -> Work:
        """The work of a request. Raises RequestError (400) for other names, dtypes or sizes than the model takes."""
        if not self.entries:
            if self.generates:
                raise RequestError(f"{self.name} generates text: send requests to /v1/completions")
            raise RequestError(
                f"{self.name} keeps a state from call to call, which requests would share: it cannot be served"
            )
        for name in tensors:
            if name not in {each.name for each in self.inputs}:
                hint = did_you_mean(name, [each.name for each in self.inputs])
                raise RequestError(f"{self.name} has no input {name!r}. {hint}It takes {self._takes()}")
        for info in self.inputs:
            if info.name not in tensors:
                raise RequestError(f"the input {info.name!r} is missing; {self.name} takes {self._takes()}")
            given = tensors[info.name]
            if datatype_of(given) != info.datatype or not _fits(given.shape, info.sizes):
                self._refuse(info, given)
        leaves = [
            form.value if isinstance(form, LiteralForm) else tensors[name]
            for name, form in self.entries[0].inputs.items()
        ]
        joins = self.most_rows is not None
        counts = {leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor)} if joins else set()
        if len(counts) > 1 or 0 in counts:
            raise RequestError(
                f"the inputs have {sorted(counts)} rows in dimension 0; all must have the same number, at least 1"
            )
        rows = next(iter(counts), None)
        entries = tuple(entry for entry in self.entries if entry.takes(leaves))
        if not any(rows is None or (entry.rows is not None and rows <= entry.rows[1]) for entry in entries):
            self._refuse(self.inputs[0], tensors[self.inputs[0].name])
        return Work(leaves, rows, entries)

    def run(self, works: Sequence[Work], max_rows: int) -> list[dict[str, torch.Tensor] | HybridError]:
        """The results of requests, or the error of each that failed. Calls of joined requests have at most `max_rows` rows, or one request."""
        groups: dict[object, list[int]] = {}
        for number, work in enumerate(works):
            groups.setdefault(work.key, []).append(number)
        results: list[dict[str, torch.Tensor] | HybridError] = [HybridError("not run")] * len(works)
        for numbers in groups.values():
            for call in _calls([(number, works[number]) for number in numbers], max_rows):
                for number, result in zip(call, _joined([works[number] for number in call]), strict=True):
                    results[number] = result
        return results

    def _takes(self) -> str:
        return ", ".join(f"{each.name}: {each}" for each in self.inputs) or "none"

    def _refuse(self, info: TensorInfo, given: torch.Tensor) -> None:
        served = "; ".join(sorted({text for entry in self.entries for text in entry.call.entry.served}))
        most = f"; at most {self.most_rows} rows" if self.most_rows is not None else ""
        raise RequestError(
            f"the input {info.name!r} is {datatype_of(given)} {list(given.shape)}; expected {info}{most}"
            + (f"; the model was exported for {served}" if served else "")
        )


def _calls(works: Sequence[tuple[int, Work]], max_rows: int) -> Iterator[list[int]]:
    """The numbers of requests that are joined, call by call."""
    call: list[int] = []
    rows = 0
    for number, work in works:
        most = min(max_rows, max(entry.rows[1] if entry.rows is not None else 1 for entry in work.entries))
        added = work.rows or 1
        if call and rows + added > most:
            yield call
            call, rows = [], 0
        call.append(number)
        rows += added
    yield call


def _joined(works: Sequence[Work]) -> Sequence[dict[str, torch.Tensor] | HybridError]:
    """The results of requests that are run by one call; where that call fails, by one each."""
    try:
        return list(_split(works))
    except failures(Exception) as error:  # a row may be at fault, whatever its operators raise
        if len(works) > 1:
            return [result for work in works for result in _joined([work])]
        if isinstance(error, RefusedValuesError | ArgumentError | IndexError):
            return [RequestError(f"the model refuses these values: {error}")]
        return [error if isinstance(error, HybridError) else HybridError(f"{type(error).__name__}: {error}")]


def _split(works: Sequence[Work]) -> Iterator[dict[str, torch.Tensor]]:
    counts = [work.rows or 1 for work in works]
    total = sum(counts)
    entry = next(each for each in works[0].entries if each.rows is None or total <= each.rows[1])
    if entry.rows is None:
        yield entry.run([_copy(leaf) for leaf in works[0].leaves])
        return
    missing = max(entry.rows[0] - total, 0)
    leaves: list[Any] = []
    for column in zip(*(work.leaves for work in works), strict=True):
        if not isinstance(column[0], torch.Tensor):
            leaves.append(column[0])
            continue
        filling = [column[-1][-1:].expand(missing, *column[-1].shape[1:])] if missing else []
        parts = [*column, *filling]
        leaves.append(torch.cat(parts) if len(parts) > 1 else parts[0])
    results = entry.run(leaves)
    start = 0
    for count in counts:
        yield {name: result[start : start + count] for name, result in results.items()}
        start += count


def _named(forms: Sequence[Form]) -> dict[str, Form]:
    """The forms by names that differ."""
    named: dict[str, Form] = {}
    for number, form in enumerate(forms):
        named[form.name if form.name not in named else f"{form.name}.{number}"] = form
    return named


def _signature(entry: ServedEntry) -> object:
    def kinds(forms: Mapping[str, Form]) -> list[object]:
        return [(n, (f.dtype, len(f.sizes)) if isinstance(f, TensorForm) else f.value) for n, f in forms.items()]

    return kinds(entry.inputs), kinds(entry.outputs)


def _merged(infos: Sequence[Sequence[TensorInfo]]) -> Iterator[TensorInfo]:
    """The tensors of several entries in one: -1 where their sizes differ."""
    for each in zip(*infos, strict=True):
        sizes = tuple(n[0] if len(set(n)) == 1 else ANY for n in zip(*(info.sizes for info in each), strict=True))
        yield TensorInfo(each[0].name, each[0].datatype, sizes)


def _fits(shape: Sequence[int], sizes: Sequence[int]) -> bool:
    return len(shape) == len(sizes) and all(size in (ANY, n) for n, size in zip(shape, sizes, strict=True))


def _has_states(entry: Entry) -> bool:
    """True if calls read or change tensors that one request would leave to the next."""
    updated = [update.target for update in entry.updates]
    return any(kind == "state" for kind, _ in (*entry.sources, *updated))


def _sizes_at(entry: Entry, values: tuple[int, ...]) -> list[tuple[int, ...] | None]:
    """The sizes of each input at values of the symbols; None for what is no tensor."""
    at = entry.at(values) if values else entry
    return [tuple(map(int, f.sizes)) if isinstance(f, TensorForm) else None for f in at.inputs]


def _probes(entry: Entry, number: int) -> Iterator[Entry]:
    """The entry with other values of a symbol, and what it is for them."""
    values = [symbol.example for symbol in entry.symbols]
    symbol = entry.symbols[number]
    for value in {symbol.least, symbol.example, min(symbol.example + 1, symbol.most)}:
        yield entry.at([*values[:number], value, *values[number + 1 :]])


def _batch_symbol(entry: Entry) -> int | None:
    """The number of the symbol that is the size of dimension 0 of every input and output, and of nothing else; None if there is none."""
    for number, symbol in enumerate(entry.symbols):
        if (symbol.factor, symbol.offset, symbol.dim) != (1, 0, 0):
            continue
        is_batch = True
        rests = set()
        for at in _probes(entry, number):
            tensors = [form for form in (*at.inputs, *at.outputs) if isinstance(form, TensorForm)]
            first = at.inputs[symbol.input]
            assert isinstance(first, TensorForm)
            is_batch = is_batch and all(form.sizes and form.sizes[0] == first.sizes[0] for form in tensors)
            rests.add(tuple(form.sizes[1:] for form in tensors))
        if is_batch and len(rests) == 1:
            return number
    return None


def _varying(entry: Entry, form: TensorForm, number: int, of_results: bool) -> tuple[int, ...]:
    """The sizes of a form, -1 where some symbol changes one."""
    forms = [
        (at.outputs if of_results else at.inputs)[number]
        for each in range(len(entry.symbols))
        for at in _probes(entry, each)
    ]
    columns: Any = zip(*(each.sizes for each in (form, *forms) if isinstance(each, TensorForm)), strict=True)
    return tuple(sizes[0] if len(set(sizes)) == 1 else ANY for sizes in columns)


def _copy(leaf: Any) -> Any:
    """A leaf that a call may write to."""
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _rounding(result: torch.Tensor) -> float:
    """The share of the largest value by which two right results of one row may differ on one machine."""
    return max(1e-3, 2 * torch.finfo(result.dtype).eps) if result.is_floating_point() else 0.0


def _moved(rows: torch.Tensor) -> torch.Tensor:
    """The rows one place on; before them stands another row, made of the last one's values."""
    other = rows[-1:].flip(list(range(rows.dim())))
    if rows.is_floating_point() or rows.is_complex():
        other = other * 0.5 + 0.25
    return torch.cat([other, rows[:-1]])
