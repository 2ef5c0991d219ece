"""Requests joined and split: rows of each are those that it gets alone, and a bad one spoils no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.artifact.exported_for_tests import FAST
from tests.serve.conftest import small_network
from torch_hybrid_backend.driver.export import export
from torch_hybrid_backend.errors import ArtifactError, RequestError
from torch_hybrid_backend.serve.served_model import ServedModel


def _calls(model: ServedModel) -> list[int]:
    """The numbers of rows that each call of the model has, as it is called."""
    calls: list[int] = []
    for entry in model.entries:
        run = entry.run

        def counted(leaves: Any, run: Any = run) -> Any:
            calls.append(leaves[0].shape[0])
            return run(leaves)

        entry.run = counted  # type: ignore[method-assign]
    return calls


@pytest.mark.parametrize(
    ("name", "rows", "max_rows", "expected"),
    [
        ("dynamic", (1, 2, 1), 8, [4]),
        ("dynamic", (1, 2, 1), 2, [1, 2, 1]),
        ("dynamic", (16, 1, 9, 8), 16, [16, 10, 8]),
        ("sizes", (1, 2, 1), 8, [4]),
        ("sizes", (1,), 8, [1]),
        ("sizes", (2, 3), 8, [4, 4]),
        ("fixed", (1, 1), 8, [4]),
        ("fixed", (4, 1), 8, [4, 4]),
    ],
)
def test_requests_are_joined(
    models: Path, name: str, rows: tuple[int, ...], max_rows: int, expected: list[int]
) -> None:
    """Up to the rows of the file and those allowed; the smallest size that suffices is called, and filled up."""
    model = ServedModel(models / f"{name}.hybrid")
    inputs = [torch.randn(n, 8) for n in rows]
    works = [model.work({"input": x}) for x in inputs]
    calls = _calls(model)
    for x, result in zip(inputs, model.run(works, max_rows), strict=True):
        assert isinstance(result, dict), result
        torch.testing.assert_close(result["output0"], small_network()(x).detach())
    assert calls == expected


def test_rows_that_depend_on_each_other_are_not_joined(models: Path) -> None:
    """Softmax over the batch: one client's rows would change another's. The file's exact size is served, request by request."""
    model = ServedModel(models / "mixed.hybrid")
    assert model.most_rows is None
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    first, second = model.run([model.work({"x": x}), model.work({"x": y})], 8)
    assert isinstance(first, dict)
    assert isinstance(second, dict)
    torch.testing.assert_close(first["output0"], torch.softmax(x, 0))
    torch.testing.assert_close(second["output0"], torch.softmax(y, 0))
    with pytest.raises(RequestError, match=r"is FP32 \[1, 8\]; expected FP32 \[4, 8\]"):
        model.work({"x": x[:1]})


class _Noisy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0) + torch.rand_like(x)


def test_rows_with_random_numbers_are_not_joined(tmp_path: Path) -> None:
    """Its sample has no results to compare, and these rows depend on each other."""
    export(_Noisy(), (torch.randn(4, 8),), tmp_path / "noisy.hybrid", options=FAST)
    assert ServedModel(tmp_path / "noisy.hybrid").most_rows is None


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({}, "'input' is missing; dynamic takes input: FP32"),
        ({"input": torch.zeros(1, 8), "more": torch.zeros(1)}, "no input 'more'"),
        ({"inputs": torch.zeros(1, 8)}, "Did you mean 'input'"),
        ({"input": torch.zeros(1, 8, dtype=torch.float64)}, r"is FP64 \[1, 8\]; expected FP32 \[-1, 8\]"),
        ({"input": torch.zeros(8)}, r"is FP32 \[8\]"),
        ({"input": torch.zeros(17, 8)}, "at most 16 rows"),
        ({"input": torch.zeros(0, 8)}, "at least 1"),
    ],
)
def test_wrong_requests(models: Path, tensors: dict[str, torch.Tensor], said: str) -> None:
    model = ServedModel(models / "dynamic.hybrid")
    with pytest.raises(RequestError, match=said) as caught:
        model.work(tensors)
    assert caught.value.status == 400


class _Looks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)

    def forward(self, ids: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"found": self.table(ids) * scale[:, None, None], "ids": ids * 2}


def test_values_that_the_model_refuses(tmp_path: Path) -> None:
    """An index out of range fails its request, and none that was joined with it. Lengths that differ are not joined."""
    torch.manual_seed(0)
    network = _Looks().eval()
    rows, length = torch.export.Dim("rows", min=1, max=8), torch.export.Dim("length", min=1, max=64)
    shapes = {"ids": {0: rows, 1: length}, "scale": {0: rows}}
    args = torch.randint(0, 10, (2, 5)), torch.randn(2)
    export(network, args, tmp_path / "looks.hybrid", dynamic_shapes=shapes, options=FAST)
    model = ServedModel(tmp_path / "looks.hybrid")
    assert [(each.name, each.sizes) for each in model.inputs] == [("ids", (-1, -1)), ("scale", (-1,))]
    calls = _calls(model)
    asked = [torch.tensor([[1, 2]]), torch.tensor([[3, 99]]), torch.tensor([[4, 5]]), torch.tensor([[6, 7, 8]])]
    works = [model.work({"ids": ids, "scale": torch.ones(1)}) for ids in asked]
    results = model.run(works, 8)
    assert calls == [3, 1, 1, 1, 1]
    for number, result in enumerate(results):
        if number == 1:
            assert isinstance(result, RequestError), result
        else:
            assert isinstance(result, dict), result
            torch.testing.assert_close(
                result[model.outputs[0].name], network(asked[number], torch.ones(1))["found"].detach()
            )
    with pytest.raises(RequestError, match="same number"):
        model.work({"ids": asked[0], "scale": torch.ones(2)})


class _Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return x + self.count


def test_a_model_with_a_state_is_not_served(tmp_path: Path) -> None:
    """A client's calls would change those of others."""
    export(_Counts().eval(), (torch.zeros(2, 2),), tmp_path / "counts.hybrid", options=FAST)
    with pytest.raises(RequestError, match="keeps a state"):
        ServedModel(tmp_path / "counts.hybrid").work({"x": torch.zeros(2, 2)})


class _Turns(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.complex(x, x)


def test_a_dtype_that_the_protocol_lacks(tmp_path: Path) -> None:
    """The model is refused when it is opened, not request by request."""
    export(_Turns(), (torch.zeros(2, 2),), tmp_path / "turns.hybrid", options=FAST)
    with pytest.raises(ArtifactError, match=r"is COMPLEX64, which the Open Inference Protocol does not know"):
        ServedModel(tmp_path / "turns.hybrid")


def test_sample_calls_take_a_small_part_of_the_time(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each entry is checked in its turn, the next when a hundred times as long has passed as a sample call took."""
    model = ServedModel(models / "sizes.hybrid")
    entries = [sample.entry for sample in model.model.manifest.samples]
    assert len(entries) > 1
    checked = []
    now, check = 0.0, model.model.check

    def counted(entry: str | None = None) -> None:
        nonlocal now
        now += 2.0  # seconds that the call takes
        check(entry)
        checked.append(entry)

    monkeypatch.setattr(model.model, "check", counted)
    monkeypatch.setattr("torch_hybrid_backend.serve.served_model.time.monotonic", lambda: now)
    for _ in range(1000):
        model.check()
        now += 1.0
    assert checked == (entries * 5)[:5]


def test_a_sample_call_that_fails_is_repeated(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve replaces a replica after failures in a row: calls of other entries would come between them."""
    model = ServedModel(models / "sizes.hybrid")
    entry = model.model.flat_entry(model.model.manifest.samples[1].entry)
    run = entry.run
    monkeypatch.setattr(entry, "run", lambda leaves: [result + 1 for result in run(leaves)])
    model.check()
    monkeypatch.setattr("torch_hybrid_backend.serve.served_model._PAUSE", 0)
    model._next_check = 0.0
    for _ in range(3):
        with pytest.raises(ArtifactError, match=f"the sample call of {entry.entry.name} has other results"):
            model.check()


def test_versions_tell_files_apart(models: Path) -> None:
    versions = {ServedModel(models / f"{name}.hybrid").version for name in ("dynamic", "other", "sizes")}
    assert len(versions) == 3
    model = ServedModel(models / "dynamic.hybrid")
    model.check()
    assert {name: tuple(x.shape) for name, x in model.sample().items()} == {"input": (1, 8)}
