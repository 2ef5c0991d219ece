"""`export`: what it takes, what it refuses, what it reports."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.artifact.exported_for_tests import FAST, exported, manifest_of
from tests.artifact.live_plans import live_plans
from tests.ecosystem.ranks import needs_gloo
from torch_hybrid_backend import export, load
from torch_hybrid_backend.errors import ArgumentError, ConfigError, NotExportableError


class _Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else x - 1


class _Half(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, float]:
        return x + 1, x.shape[0] / 2


class _Scaled(nn.Module):
    def forward(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return x * n


class _Found(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sort(x.nonzero().flatten())[0] + x.shape[0]


class _Total(nn.Module):
    """Adds to a buffer, or reads it."""

    def __init__(self, is_viewed: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))
        self.register_buffer("total", torch.ones(4, 64))
        self.first = self.total[0] if is_viewed else None

    def forward(self, x: torch.Tensor, *, is_added: bool = False) -> torch.Tensor:
        if is_added:
            self.total.add_(x @ self.weight)
            return self.total * 2
        return x @ self.weight + torch.tanh(self.total if self.first is None else self.first)


def test_several_entries(tmp_path: Path) -> None:
    """The file has the weights once; an entry that only reads a buffer sees what another one wrote to it."""
    model = _Total().eval()
    x = torch.randn(4, 64)
    calls = {"read": ((x,), {}), "add": ((x,), {"is_added": True}), "read two": ((x[:1],), {})}
    report = export(model, calls, tmp_path / "model.hybrid", options=FAST)
    assert report.entries == ("read", "add", "read two")
    assert len(report.explanation.plans) == 3
    loaded, other = load(report.path), load(report.path)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(loaded(x), model(x))
            torch.testing.assert_close(
                loaded.entry("add")(x, is_added=True), model(x, is_added=True), rtol=1e-4, atol=1e-4
            )
            torch.testing.assert_close(loaded.entry("read two")(x[:1]), model(x[:1]))
    assert [state.name for state in loaded._manifest.states] == ["total"]
    loaded.reset()
    assert torch.equal(loaded(x), other(x))
    one = export(model, (x,), tmp_path / "one.hybrid", options=FAST)
    weights = [
        sum(segment.size for segment in load(each.path)._manifest.segments if segment.kind == "weights")
        for each in (report, one)
    ]
    assert weights[0] < weights[1] + 64 * 64 * 4


class _Cache(nn.Module):
    """Writes rows of a cache, in place, and returns its argument, too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("rows", torch.zeros(32, 16))

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.rows.index_copy_(0, positions, self.linear(x))
        scores = torch.softmax(x @ self.rows.t(), -1)
        return scores @ self.rows, x, positions + 1


def test_several_entries_for_many_sizes(tmp_path: Path) -> None:
    """Each entry has its own sizes that may differ; a cache that one entry wrote at any size is what the other one reads."""
    model = _Cache().eval()
    n = torch.export.Dim("n", min=2, max=32)
    calls = {
        "prefill": ((torch.randn(5, 16), torch.arange(5)), {}),
        "decode": ((torch.randn(1, 16), torch.tensor([5])), {}),
    }
    shapes = {"prefill": ({0: n}, {0: n})}
    with live_plans() as live:
        report = export(model, calls, tmp_path / "model.hybrid", dynamic_shapes=shapes, options=FAST)
    assert report.sizes == ("x with 2 to 32 in dimension 0",)
    loaded, expected = load(report.path), _Cache().eval()
    expected.load_state_dict(model.state_dict())
    for length in (5, 3, 17):
        given = torch.randn(length, 16), torch.arange(length)
        one = torch.randn(1, 16), torch.tensor([length])
        for entry, args in (("prefill", given), ("decode", one)):
            found = loaded.entry(entry)(*args)
            with torch.no_grad():
                torch.testing.assert_close(found, expected(*args), rtol=1e-4, atol=1e-4)
            assert found[1] is args[0]
    assert set(live.made) == {"prefill", "decode"}
    for entry, length in (("prefill", 7), ("prefill", 2), ("decode", 1)):
        loaded.reset()
        given = torch.randn(length, 16), torch.arange(length)
        for found, same in zip(loaded.entry(entry)(*given), live.fresh(entry).results(given, entry), strict=True):
            assert torch.equal(found, same)


@pytest.mark.parametrize(
    ("model", "args", "given", "error", "said"),
    [
        (
            nn.ReLU(),
            {"a": ((torch.ones(2),), {})},
            {"dynamic_shapes": {"b": ({0: torch.export.Dim("n")},)}},
            ArgumentError,
            r"dict from names of entries \('a'\)",
        ),
        (nn.ReLU(), {"a": ((torch.ones(2),), {})}, {"dynamic_shapes": (None,)}, ArgumentError, "of several entries"),
        (nn.ReLU(), {"a": (torch.ones(2),)}, {}, ArgumentError, "a tuple for the entry 'a'.*pairs"),
        (nn.ReLU(), {1: ((torch.ones(2),), {})}, {}, ArgumentError, "for the entry 1"),
        (nn.ReLU(), {}, {}, ArgumentError, "at least one name"),
        (nn.ReLU(), {"a": ((torch.ones(2),), {})}, {"kwargs": {}}, ArgumentError, "leave out kwargs"),
        ("model.pt2", {"a": ((torch.ones(2),), {})}, {}, ArgumentError, "traced from a module"),
        (
            _Total(is_viewed=True),
            {"read": ((torch.ones(1, 64),), {}), "add": ((torch.ones(4, 64),), {"is_added": True})},
            {},
            NotExportableError,
            "another tensor of the model is a view",
        ),
    ],
)
def test_entries_that_are_none(
    model: Any, args: Any, given: dict[str, Any], error: type[Exception], said: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=said):
        export(model, args, tmp_path / "model.hybrid", **given)


def test_programs_and_their_files(tmp_path: Path) -> None:
    """An ExportedProgram and a .pt2 file, on the inputs that they were exported with."""
    model, x = nn.Linear(4, 3).eval(), torch.randn(2, 4)
    with torch.no_grad():
        program = torch.export.export(model, (x,))
    torch.export.save(program, tmp_path / "program.pt2")
    for given in (program, tmp_path / "program.pt2"):
        report = export(given, None, tmp_path / "model.hybrid", options=FAST)
        torch.testing.assert_close(load(report.path)(x), model(x))


@pytest.mark.parametrize(
    ("model", "args", "given", "error", "said"),
    [
        (nn.Linear, (torch.ones(1, 2),), {}, ArgumentError, "must be a model"),
        (lambda x: x, (torch.ones(1),), {}, ArgumentError, "must be a model"),
        ("missing.pt2", None, {}, ArgumentError, r"missing\.pt2 is no program that torch\.export\.save wrote"),
        (nn.ReLU(), torch.ones(2), {}, ArgumentError, "must be a tuple"),
        (torch.compile(nn.ReLU(), backend="hybrid"), (torch.ones(2),), {}, ArgumentError, "compiled model"),
        (_Branches(), (torch.ones(2),), {}, NotExportableError, "torch.export cannot trace _Branches"),
        (nn.ReLU(), (torch.ones(2),), {"options": {"precisio": "bf16"}}, ConfigError, "Did you mean 'precision'"),
        (
            _Half(),
            (torch.ones(4, 2),),
            {"dynamic_shapes": ({0: torch.export.Dim("n")},)},
            NotExportableError,
            "many sizes: the graph runs in eager, because truediv is no tensor; export it without dynamic_shapes",
        ),
        (
            _Scaled(),
            (torch.ones(4, 2), 3),
            {"dynamic_shapes": (None, torch.export.Dim.DYNAMIC)},
            NotExportableError,
            "its argument n is a number that may differ from call to call",
        ),
        (
            _Found(),
            (torch.ones(4, 2),),
            {"dynamic_shapes": ({0: torch.export.Dim("n")},)},
            NotExportableError,
            "run from Python, segment by segment, as graphs are whose sizes depend on data",
        ),
    ],
)
def test_refusals(
    model: Any, args: Any, given: dict[str, Any], error: type[Exception], said: str, tmp_path: Path
) -> None:
    """Each gives an error that says what was wrong, and no file."""
    with pytest.raises(error, match=said):
        export(model, args, tmp_path / "model.hybrid", **given)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def job() -> Iterator[None]:
    """A job of one process."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, 1, is_master=True)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class _Reduced(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x)
        torch.distributed.all_reduce(y)
        return y + 1


@needs_gloo
@pytest.mark.usefixtures("job")
def test_collectives_are_refused(tmp_path: Path) -> None:
    """The error names the operator and the line that calls it."""
    said = r"it calls _c10d_functional\.all_reduce.* Called at test_export\.py:\d+ in forward: torch\.distributed\.all_reduce"
    with pytest.raises(NotExportableError, match=said):
        export(_Reduced(), (torch.ones(2),), tmp_path / "model.hybrid")
    assert not list(tmp_path.iterdir())


def test_where_no_file_can_be_written(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing" / "model.hybrid"):
        with pytest.raises(ArgumentError, match="cannot write"):
            export(nn.ReLU(), (torch.ones(2),), path)


def test_kernels_are_preferred(tmp_path: Path) -> None:
    """However slow a kernel is beside PyTorch's operator, it stays: the file needs no PyTorch."""
    report, _ = exported(
        nn.Linear(64, 64).eval(), (torch.randn(512, 64),), tmp_path, options={"placement": "measure", "strict": False}
    )
    assert not report.needs_torch
    assert not report.python_parts
    assert "runner" in str(report)
    assert all(region.engine == "tvm" for plan in report.explanation.plans for region in plan.regions)


def test_threads_export_at_once(tmp_path: Path) -> None:
    """Exports wait for each other: what traces graphs is global in PyTorch."""
    models = [nn.Linear(8, 8) for _ in range(4)]

    def export_one(number: int) -> torch.Tensor:
        report = export(models[number], (torch.ones(2, 8),), tmp_path / f"{number}.hybrid", options=FAST)
        found: torch.Tensor = load(report.path)(torch.ones(2, 8))
        return found

    with ThreadPoolExecutor(4) as pool:
        for model, found in zip(models, pool.map(export_one, range(4)), strict=True):
            torch.testing.assert_close(found, model(torch.ones(2, 8)).detach())


def test_what_is_no_regular_file_stays(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ArgumentError, match="it is no regular file"):
        export(nn.ReLU(), (torch.ones(2),), pipe)
    assert pipe.is_fifo()


@pytest.mark.parametrize(("precision", "tolerance"), [("as-written", 1e-3), ("int8", 1e-2), ("int8-weights", 1e-2)])
def test_samples_are_as_tolerant_as_the_precision(precision: str, tolerance: float, tmp_path: Path) -> None:
    """Outputs of float32 tell nothing of what is rounded inside."""
    model, x = nn.Linear(64, 64).eval(), torch.randn(16, 64)
    report, _ = exported(model, (x,), tmp_path, options={"precision": precision, "precision_tolerance": 1.0})
    assert [sample.tolerance for sample in manifest_of(report.path).samples] == [tolerance]


def test_samples_are_as_tolerant_as_what_a_model_rounds_to(tmp_path: Path) -> None:
    """A model that is written in bfloat16, and returns float32."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64).to(torch.bfloat16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.linear(x.to(torch.bfloat16)).float()
            return result

    report, _ = exported(Model().eval(), (torch.randn(16, 64),), tmp_path)
    assert [sample.tolerance for sample in manifest_of(report.path).samples] == [5e-2]
