"""Models opened from `.hybrid` files: `load`, and what a call of such a model does. Neither Dynamo nor a compiler is imported."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torch_hybrid_backend.artifact.calls import finisher
from torch_hybrid_backend.artifact.manifest import (
    CopyUpdate,
    Entry,
    LiteralForm,
    Manifest,
    Origin,
    Sample,
    TensorForm,
)
from torch_hybrid_backend.artifact.structures import structure_from_text
from torch_hybrid_backend.errors import ArgumentError, ArtifactError, failures
from torch_hybrid_backend.runtime.native.ops import Artifact, Binding, Callback, Guard, Plan, SizedPlans
from torch_hybrid_backend.torch_private import TreeSpec, tree_flatten, tree_unflatten

# What few files need, or few callers ask for, is imported where it is used: `load` is to be quick.
if TYPE_CHECKING:
    from torch_hybrid_backend.report import Explanation

# Sets of sizes whose plans an entry for many sizes keeps, those used last.
_MOST_KEPT = 64


def load(path: str | os.PathLike[str], *, keys: Sequence[Any] | None = None, share: bool = True) -> LoadedModel:
    """Open a model that `export` wrote.

    keys: public keys of Ed25519 that are trusted, as objects of the package cryptography, as 32 bytes, or as paths of PEM files; one of them
    must have signed the file (`torch_hybrid_backend.sign`, `hybrid sign`). None: signatures are not looked at. share: map the file, so that
    processes share its weights; the file must then be one that only this user or root may write. False: read it into memory.

    `load` makes the sample call that is in the file, and compares its results with those in the file. A file is code: its checksums find
    damage, but only a signature tells where it comes from. Open files that you trust.

    Raises ArtifactError for a file that is damaged, is not signed by one of the keys, does not suit this machine or PyTorch, or whose sample
    call has other results here.

        model = torch_hybrid_backend.load("resnet50.hybrid")
        logits = model(images)
    """
    return LoadedModel(Path(path), keys=keys, share=share)


class LoadedModel:
    """A model from a file: called as the model that was exported. Threads may call it at once; calls that change a state take turns."""

    def __init__(self, path: Path, *, keys: Sequence[Any] | None, share: bool, checks: bool = True) -> None:
        """See `load`. `checks`: make the sample calls; else the caller does, by `check`."""
        self._path = path
        verify = None
        if keys is not None:
            from torch_hybrid_backend.artifact.signing import check_signed

            verify = functools.partial(check_signed, path, keys)
        self._artifact = Artifact(path, share=share, threads=torch.get_num_threads(), verify=verify)
        self._manifest = Manifest.from_json(self._artifact.manifest, self._artifact.variant)
        self._check_torch()
        memory = _Memory(self._artifact, self._manifest)
        self._states = [memory.constant(state.constant).clone() for state in self._manifest.states]
        self._memory = memory
        self._lock = lock = threading.RLock()
        try:
            self._entries = {
                entry.name: LoadedEntry(entry, number, path, self._artifact, memory, self._states, lock)
                for number, entry in enumerate(self._manifest.entries)
            }
        except ArtifactError:
            raise
        except failures(ValueError, KeyError, TypeError, IndexError, AttributeError, RuntimeError) as error:
            raise ArtifactError(
                f"{path} names something that this installation does not have: {error}; import the library that the model is of, "
                f"and use torch {self._manifest.torch} and torch_hybrid_backend {self._manifest.package}, which wrote it"
            ) from error
        self._default = self._entries[self._manifest.entries[0].name]
        if checks:
            self.check()
        self._generator = None
        if (settings := self._manifest.generation) is not None:
            from torch_hybrid_backend.artifact.generation import TextGenerator

            prefill, decode = self._entries[settings.prefill], self._entries[settings.decode]
            ids, logits = prefill.entry.inputs[0], decode.entry.outputs[0]
            assert isinstance(ids, TensorForm), "the ids of a chunk are a tensor"
            assert isinstance(logits, TensorForm), "an entry of a decoder returns logits"
            chunk, vocabulary = int(ids.sizes[1]), int(logits.sizes[-1])
            self._generator = TextGenerator(settings, chunk, vocabulary, prefill.run, decode.run, lock, self.reset)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the first entry."""
        return self._default(args, kwargs)

    @property
    def entries(self) -> tuple[str, ...]:
        """Names of the functions in the file; a call of the model is one of the first."""
        return tuple(self._entries)

    def entry(self, name: str) -> Callable[..., Any]:
        """The function of that name. Raises ArgumentError for a name that the file does not have."""
        if name not in self._entries:
            raise ArgumentError(f"{self._path} has no entry {name!r}; it has {', '.join(map(repr, self._entries))}")
        found = self._entries[name]
        return lambda *args, **kwargs: found(args, kwargs)

    @property
    def manifest(self) -> Manifest:
        """All that the file says of the variant that runs here."""
        return self._manifest

    @property
    def digest(self) -> str:
        """SHA-256 of the manifest, which has the checksum of every segment, as hexadecimal digits: equal files have equal digests."""
        return hashlib.sha256(self._artifact.manifest.encode()).hexdigest()

    def check(self, entry: str | None = None) -> dict[str, list[Any]]:
        """Make the sample calls of the file, or that of one entry, set the states back, and return the flat results by entry. Raises
        ArtifactError where results are others than in the file."""
        with self._lock:
            return {
                sample.entry: self._check_sample(sample, self._memory)
                for sample in self._manifest.samples
                if entry in (None, sample.entry)
            }

    def flat_entry(self, name: str | None = None) -> LoadedEntry:
        """The entry of that name, or the first, as a function of flat arguments. Raises ArgumentError as `entry` does."""
        if name is not None:
            self.entry(name)
        return self._default if name is None else self._entries[name]

    def reset(self) -> None:
        """Set the states, such as a KV cache, back to what they are in the file."""
        with self._lock, torch.no_grad():
            for state, tensor in zip(self._manifest.states, self._states, strict=True):
                tensor.copy_(self._memory.constant(state.constant))

    def generate(
        self,
        ids: Sequence[int] | torch.Tensor,
        max_new_tokens: int | None = None,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop_tokens: Sequence[int] | None = None,
    ) -> Iterator[int]:
        """Iterate over the tokens that follow a prompt, in a file of `export_generation`.

        ids: the prompt, (n,) or (1, n). max_new_tokens: None fills the file's `max_length`. temperature: 0, or below 1e-5, takes the likeliest
        token each time; above, tokens are drawn from the `top_k` likeliest ones, and from the likeliest ones that together have the
        probability `top_p`.
        seed: None draws from PyTorch's default generator (`torch.manual_seed`). stop_tokens: the first of them is the last token that is
        returned; None for the model's own, () for none. Every generation begins with an empty cache; the model's next generation ends it.

        Raises ArgumentError for arguments that are none, and for a file without generation.

            for token in model.generate(tokenizer.encode("Once upon a time").ids, 100, temperature=0.8, top_p=0.9):
                print(tokenizer.decode([token]), end="", flush=True)
        """
        if self._generator is None:
            raise ArgumentError(
                f"{self._path} is no decoder that generates text: write it by torch_hybrid_backend.export_generation"
            )
        from torch_hybrid_backend.artifact.generation import Sampling

        sampling = Sampling(temperature, top_k, top_p)
        return self._generator.generate(ids, max_new_tokens, sampling, seed, stop_tokens)

    def explain(self) -> Explanation:
        """The plans that the file was written with, as `torch_hybrid_backend.explain` tells them."""
        from torch_hybrid_backend.core.plan import Plan as PlanReport
        from torch_hybrid_backend.report import Explanation

        told = json.loads(self._artifact.content(self._manifest.report))
        plans = tuple(PlanReport.from_json(json.dumps(plan)) for plan in told["plans"])
        about = {
            "model": self._manifest.model,
            "file": str(self._path),
            "versions": f"torch {self._manifest.torch}, hybrid {self._manifest.package}",
        }
        return Explanation(plans, about=about)

    def __repr__(self) -> str:
        return f"LoadedModel({str(self._path)!r}, {self._manifest.model}: {', '.join(self._entries)})"

    def _check_torch(self) -> None:
        bound = [entry.name for entry in self._manifest.entries if entry.needs_torch or entry.functions is not None]
        if bound and torch.__version__.partition("+")[0] != self._manifest.torch.partition("+")[0]:
            raise ArtifactError(
                f"{self._path} holds operators of torch {self._manifest.torch}, and this is torch {torch.__version__}: install that version, "
                "or export the model again with this one"
            )

    def _check_sample(self, sample: Sample, memory: _Memory) -> list[Any]:
        """Make the call that is kept in the file; return its results. Raises ArtifactError where they are others than in the file."""
        entry = self._entries[sample.entry]
        literals = [form.value if isinstance(form, LiteralForm) else None for form in entry.entry.inputs]
        entry.sample_inputs = [
            literal if number is None else memory.constant(number)
            for number, literal in zip(sample.inputs, literals, strict=True)
        ]
        inputs = [value.clone() if isinstance(value, torch.Tensor) else value for value in entry.sample_inputs]
        results = entry.run(inputs)
        for number, result in zip(sample.outputs, results, strict=True):
            if number is not None and not is_close(result, memory.constant(number), sample.tolerance):
                raise ArtifactError(
                    f"{self._path}: the sample call of {sample.entry} has other results on this machine than in the file: "
                    "export the model again on a machine of this kind"
                )
        self.reset()
        return results


class _Memory:
    """Tensors over the memory of a file."""

    def __init__(self, artifact: Artifact, manifest: Manifest) -> None:
        self._artifact = artifact
        self._constants = manifest.constants

    def constant(self, number: int) -> torch.Tensor:
        """The constant of that number."""
        constant = self._constants[number]
        dtype = getattr(torch, constant.dtype)
        span = 1 + sum((n - 1) * s for n, s in zip(constant.sizes, constant.strides, strict=True))
        if 0 in constant.sizes:
            return torch.empty_strided(constant.sizes, constant.strides, dtype=dtype)
        memory = (ctypes.c_byte * (span * dtype.itemsize)).from_address(self._artifact.constant_address(number))
        memory.owner = self._artifact
        return torch.frombuffer(memory, dtype=dtype, count=span).as_strided(constant.sizes, constant.strides)


class _AtSizes:
    """An entry at known sizes, and its plan."""

    def __init__(self, entry: Entry, plan: Plan) -> None:
        self.entry, self.plan = entry, plan
        self.finish = finisher(entry)

    @classmethod
    def maker(
        cls, entry: Entry, plans: SizedPlans, callbacks: Callable[[Sequence[int]], Sequence[Callback]]
    ) -> Callable[[tuple[int, ...]], _AtSizes]:
        """Function that makes it for values of the entry's symbols."""
        return lambda values: cls(entry.at(values), plans.at(values, callbacks(values)))


class LoadedEntry:
    """An entry that is ready to run. `sample_inputs`: the flat arguments of the call that is kept in the file."""

    sample_inputs: Sequence[Any] = ()

    def __init__(
        self,
        entry: Entry,
        number: int,
        path: Path,
        artifact: Artifact,
        memory: _Memory,
        states: Sequence[torch.Tensor],
        lock: threading.RLock,
    ) -> None:
        self.entry = entry
        self._path = path
        callbacks = _callbacks(artifact, entry)
        self._at: functools._lru_cache_wrapper[_AtSizes] | None = None
        if entry.symbols:
            self._at = functools.lru_cache(_MOST_KEPT)(_AtSizes.maker(entry, SizedPlans(artifact, number), callbacks))
            self._example = self._at(tuple(symbol.example for symbol in entry.symbols))
        else:
            self._example = _AtSizes(entry, Plan.of_artifact(artifact, entry.plan, callbacks(())))
        addresses = {slot: artifact.constant_address(number) for slot, number in enumerate(entry.slots)}
        self._binding = Binding(self._example.plan, Guard([]), {}, addresses)
        self._in_spec = structure_from_text(entry.structure.inputs)
        self._out_spec = structure_from_text(entry.structure.outputs, of_results=True)
        origins = {*entry.sources, *(origin for origin in _origins(entry) if origin[0] in ("constant", "state"))}
        self._fixed: dict[Origin, torch.Tensor] = {
            origin: states[origin[1]] if origin[0] == "state" else memory.constant(origin[1])
            for origin in origins
            if origin[0] in ("constant", "state")
        }
        self._sources = [
            (number, None) if kind == "input" else (0, self._fixed[kind, number]) for kind, number in entry.sources
        ]
        targets = dict.fromkeys(update.target for update in entry.updates)
        self._changed_inputs = [number for kind, number in targets if kind == "input"]
        self._changed_states = [_span(self._fixed[origin]) for origin in targets if origin[0] == "state"]
        self._lock: Any = lock if any(kind == "state" for kind, _ in origins) else nullcontext()
        self._needs_no_grad = entry.functions is not None or bool(entry.updates)

    @property
    def sample_call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """`sample_inputs` as positional and keyword arguments."""
        args, kwargs = tree_unflatten(list(self.sample_inputs), self._in_spec)
        return args, kwargs

    @property
    def plan_cache(self) -> tuple[int, int]:
        """Calls whose sizes had a plan, and calls that made one; zeros for an entry of one set of sizes."""
        if self._at is None:
            return 0, 0
        told = self._at.cache_info()
        return told.hits, told.misses

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        if spec != self._in_spec:
            leaves = self._in_order(args, kwargs)
        return tree_unflatten(self.run(leaves), self._out_spec)

    def run(self, leaves: Sequence[Any]) -> list[Any]:
        """The flat results of a call with flat arguments."""
        at_sizes = self._example if self._at is None else self._at(self._sizes(leaves))
        for form, value in zip(at_sizes.entry.inputs, leaves, strict=True):
            if isinstance(form, TensorForm):
                if (
                    not isinstance(value, torch.Tensor)
                    or value.shape != form.sizes
                    or value.dtype is not _DTYPES[form.dtype]
                ):
                    self._refuse(form, value)
            elif type(value) is not type(form.value) or value != form.value:
                self._refuse(form, value)
        if self._changed_inputs or self._changed_states:
            self._check_apart(leaves)
        inputs = [leaves[number] if tensor is None else tensor for number, tensor in self._sources]
        with self._lock:
            if torch.is_grad_enabled() and self._needs_no_grad:
                with torch.no_grad():
                    return self._results(at_sizes, leaves, inputs)
            return self._results(at_sizes, leaves, inputs)

    def _sizes(self, leaves: Sequence[Any]) -> tuple[int, ...]:
        """The values of the entry's symbols in a call. Raises ArgumentError for sizes outside of their ranges."""
        values = []
        for symbol in self.entry.symbols:
            form, given = self.entry.inputs[symbol.input], leaves[symbol.input]
            assert isinstance(form, TensorForm)
            if not isinstance(given, torch.Tensor) or given.dim() != len(form.sizes):
                self._refuse(form, given)
            value = symbol.value(given.shape[symbol.dim])
            if value is None:
                where = f"{self._path}: dimension {symbol.dim} of {form.name}"
                raise ArgumentError(f"{where} is {given.shape[symbol.dim]}; the model was exported for {symbol.range}")
            values.append(value)
        return tuple(values)

    def _check_apart(self, leaves: Sequence[Any]) -> None:
        """Raises ArgumentError where an argument shares memory with another one, or with a state, that the call changes: a plan reads all
        inputs as they were before the call."""
        spans = [(number, _span(leaf)) for number, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        changed = [(number, _span(leaves[number])) for number in self._changed_inputs]
        for source, (start, end) in [*changed, *((None, span) for span in self._changed_states)]:
            for number, (first, last) in spans:
                if first < end and start < last and number != source:
                    what = "a state" if source is None else self.entry.inputs[source].name
                    raise ArgumentError(
                        f"{self._path}: {self.entry.inputs[number].name} shares memory with {what}, which the call changes: pass a copy of it"
                    )

    def _results(self, at_sizes: _AtSizes, leaves: Sequence[Any], inputs: list[torch.Tensor]) -> list[Any]:
        outputs = at_sizes.plan.run(self._binding, inputs)
        assert outputs is not None, "a binding without a guard is never stale"
        if at_sizes.finish is None:
            return outputs
        values = {"input": leaves, "output": outputs}

        def find(origin: Origin) -> torch.Tensor:
            kind, number = origin
            return values[kind][number] if kind in values else self._fixed[origin]

        return at_sizes.finish(find)

    def _in_order(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """The flat arguments of a call whose keyword arguments come in another order. Raises ArgumentError where that is not all."""
        positional, keywords = _children(self._in_spec)
        if set(keywords.context) == set(kwargs):
            leaves, spec = tree_flatten((args, {name: kwargs[name] for name in keywords.context}))
            if spec == self._in_spec:
                return leaves
        names = ", ".join(form.name for form in self.entry.inputs)
        raise ArgumentError(
            f"{self._path}: {self.entry.name} takes its arguments nested as it was exported ({names}): {len(_children(positional))} positional"
            f", keywords {list(keywords.context)}; it got {len(args)} positional, keywords {list(kwargs)}"
        )

    def _refuse(self, form: TensorForm | LiteralForm, value: Any) -> None:
        if isinstance(form, LiteralForm):
            raise ArgumentError(
                f"{self._path}: {form.name} was {form.value!r} when the model was exported, and is part of it; it got {value!r}"
            )
        if isinstance(value, torch.Tensor):
            got = f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
        else:
            got = f"a {type(value).__name__}"
        raise ArgumentError(f"{self._path}: {form.name} must be {form.dtype} {form.sizes}; it got {got}")


_DTYPES = {str(each).removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.dtype)}


def _children(structure: TreeSpec) -> list[TreeSpec]:
    """The structures within a structure; torch 2.13 renamed their attribute."""
    children = getattr(structure, "children", None)
    return list(children()) if children is not None else structure.children_specs


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses that a tensor lies between; of none, where it is empty."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    elements = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + elements * tensor.itemsize


def _origins(entry: Entry) -> list[Origin]:
    """The origins that an entry's updates and results name."""
    found = [result.origin for result in entry.results if hasattr(result, "origin")]
    for update in entry.updates:
        found.append(update.target)
        if not isinstance(update, CopyUpdate):
            found += [update.index, update.source]
    return found


def _callbacks(artifact: Artifact, entry: Entry) -> Callable[[Sequence[int]], list[Callback]]:
    """Function that makes what the entry's plan calls back, for values of its symbols."""
    if entry.functions is None:
        return lambda _: []
    from torch_hybrid_backend.artifact.functions import functions_from_text

    functions_at = functions_from_text(artifact.content(entry.functions), [symbol.name for symbol in entry.symbols])

    def at(values: Sequence[int]) -> list[Callback]:
        functions = functions_at(values)
        return [functions.get(called, _never) for called in range(max(functions, default=-1) + 1)]

    return at


def _never(_: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    raise AssertionError("the plan calls no such function")


def is_close(result: object, expected: torch.Tensor, tolerance: float) -> bool:
    """True if a result equals a tensor up to `tolerance`, a share of the largest absolute value in that."""
    if not isinstance(result, torch.Tensor) or (result.shape, result.dtype) != (expected.shape, expected.dtype):
        return False
    if torch.equal(result, expected) or result.numel() == 0:
        return True
    if not result.is_floating_point() and not result.is_complex():
        return False
    off = (result - expected).abs().nan_to_num(0.0 if torch.equal(result.isnan(), expected.isnan()) else torch.inf)
    return bool(off.max() <= tolerance * expected.nan_to_num(0.0).abs().max())
