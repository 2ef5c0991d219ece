"""Operators of PyTorch in the runner, by libhybrid_runner_torch.so: bit for bit what `load` gets of the same file."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from tests.artifact.exported_for_tests import exported, with_manifest
from tests.runner.runner_in_python import Model, Runner, RunnerError, run
from torch_hybrid_backend.artifact.model import LoadedModel

pytestmark = pytest.mark.slow
LIBTORCH = Path(torch.__path__[0]) / "lib"


@pytest.fixture(autouse=True)
def _library(torch_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRID_RUNNER_TORCH", str(torch_library))


class Of(nn.Module):
    """A function as a model, with tables."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("table", torch.linspace(-1, 1, 40).view(10, 4))
        self.register_buffer("grid", torch.linspace(-1, 1, 50).view(1, 5, 5, 2))

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(self, *inputs)


def _ranked(_: Of, x: torch.Tensor) -> Any:
    values, indices = torch.topk(functional.relu(x), 3, dim=-1)
    ordered = torch.sort(x * 2, dim=0, descending=True)
    return values * 2, indices, ordered.values, ordered.indices, torch.kthvalue(x, 2).values


def _solved(_: Of, x: torch.Tensor) -> Any:
    square = x.mT @ x + torch.eye(x.shape[1])
    inverse, info = torch.linalg.inv_ex(square)
    return inverse @ x.mT, info, *torch.linalg.cholesky_ex(square), *torch.linalg.svd(x, full_matrices=False)


def _with_texts(_: Of, x: torch.Tensor) -> Any:
    return *torch.linalg.qr(x), torch.linalg.eigvalsh(x.mT @ x)


def _sampled(self: Of, x: torch.Tensor, ids: torch.Tensor, offsets: torch.Tensor) -> Any:
    bags = functional.embedding_bag(ids, self.table, offsets, mode="max")
    sampled = functional.grid_sample(x[None, None], self.grid, align_corners=False)
    return bags + 1, sampled, torch.searchsorted(torch.sort(bags)[0], x[:2])


def _split(_: Of, x: torch.Tensor) -> Any:
    first, _unread, third = torch.ops.aten.unsafe_split_with_sizes(torch.sort(x, dim=0)[0], [1, 2, 3])
    return torch.sort(first, dim=1)[0], torch.sort(third.T[1:], dim=1)[0], torch.sort(x[1:].T, dim=1)[1]


def _half(_: Of, x: torch.Tensor) -> Any:
    return torch.sort(x.half(), dim=1)[0], torch.sort(x.to(torch.float64), dim=1)[1], torch.sort(x > 0, dim=0)[0]


def _empty(_: Of, x: torch.Tensor) -> Any:
    return torch.sort(x[:0], dim=1)[0], torch.sort(x[0, 0])[0]


_X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
_CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "ranked": (_ranked, (_X,)),
    "solved": (_solved, (_X,)),
    "with_texts": (_with_texts, (_X,)),
    "sampled": (_sampled, (_X, torch.tensor([1, 2, 3, 4, 5]), torch.tensor([0, 2]))),
    "split": (_split, (_X,)),
    "half": (_half, (_X,)),
    "empty": (_empty, (_X,)),
}


def _results(loaded: LoadedModel, inputs: tuple[torch.Tensor, ...]) -> list[np.ndarray[Any, Any]]:
    with torch.no_grad():
        return [each.numpy() for each in tree_leaves(loaded(*inputs))]


def _agree(opened: Model, loaded: LoadedModel, inputs: tuple[torch.Tensor, ...]) -> bool:
    expected = _results(loaded, inputs)
    found = opened.run(*(each.numpy() for each in inputs), outputs=len(expected))
    return all(map(np.array_equal, found, expected))


@pytest.mark.parametrize("case", _CASES)
def test_the_answers_are_those_of_python(case: str, runner: Runner, tmp_path: Path) -> None:
    """Tuples and lists of results, views of results and of inputs; nothing of the file needs Python."""
    function, inputs = _CASES[case]
    model = Of(function).eval()
    report, loaded = exported(model, inputs, tmp_path)
    assert report.needs_torch
    assert report.python_parts == ()
    opened = runner.open(report.path, threads=torch.get_num_threads())
    others = tuple(each if each.dtype == torch.int64 else torch.randn_like(each) for each in inputs)
    for each in (inputs, others):
        assert _agree(opened, loaded, each)
        for found, expected in zip(_results(loaded, each), tree_leaves(model(*each)), strict=True):
            torch.testing.assert_close(torch.from_numpy(found), expected)


def test_many_sizes(runner: Runner, tmp_path: Path) -> None:
    """Sizes are among the arguments of operators."""

    def function(_: Of, x: torch.Tensor) -> Any:
        values, indices = torch.sort(x * 2, dim=0)
        parts = torch.ops.aten.unsafe_split_with_sizes(values, [2, x.shape[0] - 2])
        return torch.sort(parts[1], dim=1)[0], indices, torch.topk(x, x.shape[0] - 1, dim=0)[0]

    shapes = ({0: torch.export.Dim("n", min=4, max=40)},)
    report, loaded = exported(Of(function).eval(), (_X,), tmp_path, dynamic_shapes=(shapes,))
    assert report.needs_torch
    opened = runner.open(report.path, threads=torch.get_num_threads())
    for n in (6, 4, 40, 17, 6):
        assert _agree(opened, loaded, (torch.randn(n, 4),))
    with pytest.raises(RunnerError, match="is 41; the model was exported for 4 to 40"):
        opened.run(np.zeros((41, 4), np.float32), outputs=3)


def test_a_view_of_an_input_is_a_result_of_its_own(runner: Runner, tmp_path: Path) -> None:
    """Memory of its own: no operator returns the caller's."""

    def function(_: Of, x: torch.Tensor) -> Any:
        return torch.sort(x, dim=0)[0], torch.ops.aten.unsafe_chunk.default(x, 2)[1]

    report, loaded = exported(Of(function).eval(), (_X,), tmp_path)
    assert _agree(runner.open(report.path), loaded, (_X,))


def test_threads_of_operators(runner: Runner, tmp_path: Path) -> None:
    """Eight threads at once, some on one thread and some on two; PyTorch's own number stays as it was."""
    x = torch.randn(300, 200)
    report, loaded = exported(Of(_ranked).eval(), (x,), tmp_path)
    models = [runner.open(report.path, threads=threads) for threads in (1, 2)]
    inputs = [torch.randn(300, 200) for _ in range(8)]
    expected = [_results(loaded, (each,)) for each in inputs]
    wrong: list[int] = []

    def call(number: int) -> None:
        for i in range(20):
            found = models[(number + i) % 2].run(inputs[number].numpy(), outputs=5)
            if not all(map(np.array_equal, found, expected[number])):
                wrong.append(number)

    before = torch.get_num_threads()
    threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert torch.get_num_threads() == before


class _MallocInfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [
        (name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks")
    ]
    _fields_ += [(name, ctypes.c_size_t) for name in ("uordblks", "fordblks", "keepcost")]


def _allocated_bytes() -> int:
    """Bytes that malloc has given out, and got back of nobody."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _MallocInfo
    gc.collect()  # ctypes leaves cycles behind
    found = libc.mallinfo2()
    return int(found.uordblks + found.hblkhd)


@pytest.mark.parametrize(("case", "texts"), [("ranked", 0), ("split", 0), ("sampled", 0), ("with_texts", 2)])
def test_memory_stays(case: str, texts: int, runner: Runner, tmp_path: Path) -> None:
    """Only texts among arguments cost: LibTorch copies each and keeps the copy (torch 2.10 to 2.13), 48 bytes."""
    function, inputs = _CASES[case]
    report, loaded = exported(Of(function).eval(), inputs, tmp_path)
    opened = runner.open(report.path, threads=1)
    given, count = [each.numpy() for each in inputs], len(_results(loaded, inputs))
    for _ in range(100):
        opened.run(*given, outputs=count)
    before = _allocated_bytes()
    for _ in range(1000):
        opened.run(*given, outputs=count)
    assert _allocated_bytes() - before <= 1000 * 48 * texts + 16_000  # 16 bytes a call are less than malloc gives


def test_what_an_operator_refuses(runner: Runner, tmp_path: Path) -> None:
    """The error names it; a call that is right succeeds after it."""

    def function(self: Of, x: torch.Tensor) -> Any:
        return functional.embedding_bag(x, self.table, mode="max")

    ids = torch.tensor([[1, 2], [3, 9]])
    report, loaded = exported(Of(function).eval(), (ids,), tmp_path)
    opened = runner.open(report.path)
    with pytest.raises(RunnerError, match="aten::_embedding_bag"):
        opened.run(ids.numpy() + 1)
    assert _agree(opened, loaded, (ids,))


@pytest.mark.fault(
    "a `.hybrid` file with operators of another version of PyTorch, in the runner", "an error that has both versions"
)
def test_another_version(runner: Runner, tmp_path: Path) -> None:
    """Operators are bound to the version that they were exported with."""
    report, _ = exported(Of(_ranked).eval(), (_X,), tmp_path)
    runner.open(report.path)
    version = torch.__version__.partition("+")[0]
    other = version[:-1] + chr(ord(version[-1]) ^ 1)
    with_manifest(report.path, f'"torch":"{version}', f'"torch":"{other}')
    with pytest.raises(
        RunnerError,
        match=rf"model\.hybrid: it holds operators of torch {other} \(aten::topk, .*\), and this is LibTorch {version}: ",
    ):
        runner.open(report.path)


@pytest.mark.fault(
    "a `.hybrid` file with operators of PyTorch, in the runner without LibTorch",
    "an error that names the operators and the cure",
)
def test_without_libtorch(installed: Path, library: Path, torch_library: Path, tmp_path: Path) -> None:
    """`--torch` or LD_LIBRARY_PATH tells where it is; files of kernels alone need none."""
    report, loaded = exported(Of(_ranked).eval(), (_X,), tmp_path)
    np.save(tmp_path / "x.npy", _X.numpy())
    words = [installed / "bin/hybrid-run", report.path, "--input", tmp_path / "x.npy", "--output", tmp_path / "y.npy"]
    bare = {name: value for name, value in os.environ.items() if name not in ("LD_LIBRARY_PATH", "HYBRID_RUNNER_TORCH")}

    def refused(**environment: str) -> str:
        result = subprocess.run(words, env=bare | environment, capture_output=True, text=True, check=False)
        assert result.returncode == 1
        assert (
            "model.hybrid: it calls operators of PyTorch (aten::topk, aten::sort, aten::kthvalue), and "
            in result.stderr
        )
        assert result.stderr.endswith(", or open the file by torch_hybrid_backend.load\n")
        return result.stderr

    assert f"there is no {library.parent}/libhybrid_runner_torch.so: install it" in refused()
    named = {"HYBRID_RUNNER_TORCH": str(torch_library)}
    missing = refused(**named)
    assert "libtorch_cpu.so: cannot open shared object file" in missing
    assert f"install torch {torch.__version__.partition('+')[0]} and name the folder of its libtorch_cpu.so" in missing
    for told in (["--torch", str(LIBTORCH)], []):
        environment = bare | named | ({} if told else {"LD_LIBRARY_PATH": str(LIBTORCH)})
        subprocess.run([*words, *told], env=environment, check=True)
        np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), _results(loaded, (_X,))[0])


def test_it_lies_beside_the_runner(installed: Path, torch_library: Path, runner: Runner) -> None:
    """The runner itself is linked to nothing of PyTorch's."""
    assert "libtorch_cpu.so" in run("readelf", "-d", torch_library)
    exported_names = run("nm", "-D", "--defined-only", torch_library).split()[2::3]
    assert "hybrid_torch_functions" in exported_names
