"""Models from files compute what the exported models do, with their structures, states and aliases."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional

import torch_hybrid_backend
from tests.artifact.exported_for_tests import exported, forged, manifest_of, with_plan
from tests.runtime.hybrid_files import small_file
from torch_hybrid_backend.errors import ArgumentError, ArtifactError, NotExportableError, RefusedValuesError

ROOT = Path(__file__).parents[2]


def _network() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 6 * 6, 10)
    return nn.Sequential(*layers).eval()


class Structured(nn.Module):
    """Takes and returns nested structures."""

    def forward(
        self, pair: tuple[torch.Tensor, torch.Tensor], *, scale: torch.Tensor, name: str = "a"
    ) -> dict[str, Any]:
        x, y = pair
        return {"sum": x + y * scale, "parts": [x * 2, None, 3], "first": x}


class Views(nn.Module):
    """Returns views of inputs, of results and of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x @ self.weight
        return y, y.t(), y[1:], x.view(-1), x[0], self.weight, self.weight.t() * 2


class Counter(nn.Module):
    """Changes a buffer in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3))
        self.count: torch.Tensor
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(x.sum(0))
        self.count.add_(1)
        return self.total * 2 + self.count


class Cache(nn.Module):
    """Writes one position of a cache, in the two ways in which models do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("keys", torch.zeros(1, 2, 32, 4))
        self.register_buffer("values", torch.zeros(1, 2, 32, 4))

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        new = self.linear(x).view(1, -1, 2, 4).transpose(1, 2)
        self.keys.index_copy_(2, position, new)
        self.values[:, :, position] = new * 2
        return functional.scaled_dot_product_attention(new, self.keys, self.values)


class WritesItsInput(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x + y


class Constants(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.tensor([1.0, 2.0, 3.0]) + torch.arange(3)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.embedding(ids)))


class Sorts(nn.Module):
    """Has operators that no kernel computes."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, indices = torch.sort(functional.gelu(x), dim=-1)
        return values * 2, indices


class Counts(nn.Module):
    """Has an operator with numbers that may be whole or not, which PyTorch's C interface does not take."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.histc(torch.sort(x * 2, dim=-1)[0], bins=4, min=-2, max=2)


class Modes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = x * 2
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return functional.linear(y, y)


class Point(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


class Named(nn.Module):
    def forward(self, point: Point) -> Point:
        return Point(point.y + 1, point.x * 2)


_CASES: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "convolution": (_network, (torch.randn(2, 3, 8, 8),), {}),
    "structures": (Structured, ((torch.randn(3), torch.randn(3)),), {"scale": torch.randn(3), "name": "b"}),
    "views": (Views, (torch.randn(3, 4),), {}),
    "constants": (Constants, (torch.randn(2, 3),), {}),
    "tied weights": (Tied, (torch.tensor([[1, 2, 3]]),), {}),
    "eager operators": (Sorts, (torch.randn(4, 5),), {}),
    "modes": (Modes, (torch.randn(4, 8),), {}),
    "empty": (lambda: nn.Linear(3, 4), (torch.randn(0, 3),), {}),
    "one number": (lambda: nn.Softmax(-1), (torch.randn(()).view(1),), {}),
    "bfloat16": (lambda: nn.Linear(16, 16).bfloat16(), (torch.randn(2, 16, dtype=torch.bfloat16),), {}),
    "complex": (lambda: nn.Identity().eval(), (torch.randn(3, dtype=torch.complex64),), {}),
}


@pytest.mark.parametrize("name", _CASES)
def test_results_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    """Values, dtypes, strides and structures are eager's; opening the file has compared the sample call bit for bit, or nearly so."""
    make, args, kwargs = _CASES[name]
    torch.manual_seed(1)
    model = make().eval()
    _, loaded = exported(model, args, tmp_path, kwargs=kwargs)
    with torch.no_grad():
        expected = model(*args, **kwargs)
    found = loaded(*args, **kwargs)
    leaves, structure = torch.utils._pytree.tree_flatten(found)
    wanted, expected_structure = torch.utils._pytree.tree_flatten(expected)
    assert structure == expected_structure
    for one, other in zip(leaves, wanted, strict=True):
        if isinstance(other, torch.Tensor):
            assert one.stride() == other.stride()
            tolerance = {"rtol": 2e-2, "atol": 2e-2} if other.dtype == torch.bfloat16 else {}
            torch.testing.assert_close(one, other, **tolerance)
        else:
            assert one == other


def test_views_share_memory_as_in_eager(tmp_path: Path) -> None:
    """A write to one result is seen through its views, and through views of the input; parameters of the file stay as they are."""
    _, loaded = exported(Views(), (torch.randn(3, 4),), tmp_path)
    x = torch.randn(3, 4)
    whole, transposed, rest, flat, first, weight, _ = loaded(x)
    whole[1, 2] = 7
    assert transposed[2, 1] == 7
    assert rest[0, 2] == 7
    x[0, 0] = 9
    assert flat[0] == 9
    assert first[0] == 9
    weight.zero_()
    assert not torch.equal(loaded(x)[5], weight)


def test_states_belong_to_each_opened_model(tmp_path: Path) -> None:
    """States go on from call to call, begin as they were exported, and are left so by the sample call of opening."""
    model = Counter()
    model(torch.ones(2, 3))
    report, loaded = exported(model, (torch.ones(2, 3),), tmp_path)
    other = torch_hybrid_backend.load(report.path)
    for _ in range(3):
        expected = model(torch.full((2, 3), 2.0))
        assert torch.equal(loaded(torch.full((2, 3), 2.0)), expected)
    assert torch.equal(other(torch.zeros(2, 3)), torch.full((3,), 2.0 * 2 + 2))


def test_a_cache_is_written_in_place(tmp_path: Path) -> None:
    """Only the new position is written; a negative one counts from the end, and one outside is an error."""
    torch.manual_seed(0)
    model = Cache().eval()
    with torch.no_grad():
        _, loaded = exported(model, (torch.randn(1, 1, 8), torch.tensor([0])), tmp_path)
        assert [type(update).__name__ for update in loaded._manifest.entries[0].updates] == ["RowsUpdate", "RowsUpdate"]
        for position in (0, 1, 5, 31):
            x = torch.randn(1, 1, 8)
            torch.testing.assert_close(loaded(x, torch.tensor([position])), model(x, torch.tensor([position])))
        with pytest.raises(
            (IndexError, RefusedValuesError)
        ):  # the kernel of attention, which reads the position, may notice first
            loaded(torch.randn(1, 1, 8), torch.tensor([32]))


def test_an_input_that_the_model_writes_to_is_written_to(tmp_path: Path) -> None:
    _, loaded = exported(WritesItsInput(), (torch.ones(3), torch.ones(3)), tmp_path)
    x = torch.full((3,), 2.0)
    assert torch.equal(loaded(x, torch.ones(3)), torch.full((3,), 5.0))
    assert torch.equal(x, torch.full((3,), 4.0))


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [
        ((torch.randn(2, 3, 8, 9),), {}, r"input must be float32 \(2, 3, 8, 8\); it got float32 \(2, 3, 8, 9\)"),
        ((torch.randn(2, 3, 8, 8).double(),), {}, "input must be float32 .* it got float64"),
        ((3,), {}, "it got a int"),
        ((), {}, "it got 0 positional"),
        ((torch.randn(2, 3, 8, 8), 1), {}, "it got 2 positional"),
        ((), {"x": torch.randn(2, 3, 8, 8)}, r"keywords \['x'\]"),
    ],
)
def test_wrong_inputs_are_refused(args: tuple[Any, ...], kwargs: dict[str, Any], said: str, tmp_path: Path) -> None:
    """The error says what was expected and what came."""
    _, loaded = exported(_network(), (torch.randn(2, 3, 8, 8),), tmp_path)
    with pytest.raises(ArgumentError, match=said):
        loaded(*args, **kwargs)


def test_other_strides_are_copied(tmp_path: Path) -> None:
    model = _network()
    _, loaded = exported(model, (torch.randn(2, 3, 8, 8),), tmp_path)
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    torch.testing.assert_close(loaded(x), model(x))


def test_keywords_come_in_any_order(tmp_path: Path) -> None:
    scale = torch.randn(3)
    pair = (torch.randn(3), torch.randn(3))
    _, loaded = exported(Structured(), (pair,), tmp_path, kwargs={"scale": scale, "name": "b"})
    assert torch.equal(loaded(pair, name="b", scale=scale)["sum"], Structured()(pair, scale=scale)["sum"])
    with pytest.raises(ArgumentError, match="name was 'b' when the model was exported"):
        loaded(pair, name="c", scale=scale)


def test_what_only_python_can_run_is_told(tmp_path: Path) -> None:
    """By the operator that is to blame, and its line."""
    x = torch.randn(4, 5)
    report, loaded = exported(Counts(), (x,), tmp_path)
    assert len(report.python_parts) == 1
    assert "cannot call aten.histc.default" in report.python_parts[0]
    assert "test_model.py" in report.python_parts[0]
    assert "not_exportable" in str(report)
    assert torch.equal(loaded(x), Counts()(x))


def test_a_class_that_has_no_name_in_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotExportableError, match=r"Point.*serialized_type_name"):
        exported(Named(), (Point(torch.randn(2), torch.randn(2)),), tmp_path)


def test_the_plan_is_told(tmp_path: Path) -> None:
    """The same plan as in the report of the export."""
    report, loaded = exported(_network(), (torch.randn(2, 3, 8, 8),), tmp_path)
    assert loaded.explain().plans == report.explanation.plans
    assert "tvm runs" in str(loaded.explain())


def test_threads_call_at_once(tmp_path: Path) -> None:
    """Eight threads, also of a model with a state: no call of it is lost."""
    _, network = exported(_network(), (torch.randn(2, 3, 8, 8),), tmp_path)
    (tmp_path / "counter").mkdir()
    _, counter = exported(Counter(), (torch.ones(2, 3),), tmp_path / "counter")
    x = torch.randn(2, 3, 8, 8)
    expected, wrong = network(x), []

    def call() -> None:
        for _ in range(20):
            if not torch.equal(network(x), expected):
                wrong.append(1)
            counter(torch.ones(2, 3))

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert torch.equal(counter(torch.zeros(2, 3)), torch.full((3,), 160 * 2.0 * 2 + 161))


def test_threads_open_and_drop_while_others_call(tmp_path: Path) -> None:
    """Eight threads on one file, each with models that come and go, and one that all share."""
    report, shared = exported(_network(), (torch.randn(2, 3, 8, 8),), tmp_path)
    x = torch.randn(2, 3, 8, 8)
    expected, wrong = shared(x), []

    def work() -> None:
        for _ in range(10):
            own = torch_hybrid_backend.load(report.path)
            wrong.extend(each for each in (own(x), shared(x)) if not torch.equal(each, expected))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.fault(
    "a machine computes the sample call of a `.hybrid` file otherwise",
    "ArtifactError when the file is opened",
)
def test_a_sample_with_other_results_is_an_error(tmp_path: Path) -> None:
    """A machine that computes otherwise is found when the file is opened, whatever its checksums say."""
    report, loaded = exported(_network(), (torch.randn(2, 3, 8, 8),), tmp_path)
    del loaded
    (number,) = manifest_of(report.path).samples[0].outputs
    assert number is not None
    forged(report.path, number, torch.full((2, 10), 3.0))
    with pytest.raises(ArtifactError, match="the sample call of forward has other results on this machine"):
        torch_hybrid_backend.load(report.path)


@pytest.mark.fault(
    "a forged `.hybrid` file whose plan gives a kernel other tensors than it takes",
    "ArtifactError, and in the runner an error, when it is opened",
)
@pytest.mark.parametrize("sizes", [None, ({0: torch.export.Dim("n", min=2, max=9)},)])
def test_a_forged_call_of_a_kernel(sizes: Any, tmp_path: Path) -> None:
    """Each kernel is called with as many tensors as in the file that was exported, and with none that is smaller."""
    report, loaded = exported(_network(), (torch.randn(2, 3, 8, 8),), tmp_path, dynamic_shapes=sizes)
    assert loaded.manifest.kernels
    del loaded
    with_plan(report.path, lambda plan: plan["steps"][0]["arguments"].pop())
    with pytest.raises(ArtifactError, match=r"calls the kernel .* with \d tensors and \d sizes; it takes"):
        torch_hybrid_backend.load(report.path)


@pytest.mark.fault(
    "a `.hybrid` file with operators of another version of PyTorch",
    "ArtifactError that names the version",
)
def test_operators_are_bound_to_a_version_of_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of kernels alone is not."""
    sorts, _ = exported(Sorts(), (torch.randn(4, 5),), tmp_path)
    (tmp_path / "network").mkdir()
    network, _ = exported(_network(), (torch.randn(2, 3, 8, 8),), tmp_path / "network")
    written_by = torch.__version__
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    torch_hybrid_backend.load(network.path)
    with pytest.raises(
        ArtifactError, match=rf"holds operators of torch {re.escape(written_by)}, and this is torch 2\.99\.0"
    ):
        torch_hybrid_backend.load(sorts.path)


@pytest.mark.parametrize(
    ("functions", "said"),
    [
        ("[" * 100_000, "recursion"),
        ('{"functions": {"0": {"random": ["no device", []]}}, "sizes": []}', "no device"),
        ('{"functions": {"0": {"random": ["cpu", [3]]}}, "sizes": []}', "out of (range|bounds)"),
    ],
)
def test_functions_that_are_none_are_an_error_with_the_files_name(functions: str, said: str, tmp_path: Path) -> None:
    """Whatever the segment of functions holds, under right checksums."""
    file, path = small_file(), tmp_path / "small.hybrid"
    file.segments["functions.forward"] = "functions", functions.encode()
    file.manifest["torch"] = torch.__version__
    file.manifest["entries"][0].update(functions="functions.forward", python_parts=["a part"])
    path.write_bytes(file.to_bytes())
    with pytest.raises(ArtifactError, match=rf"^{re.escape(str(path))} names something that .*{said}"):
        torch_hybrid_backend.load(path)


def test_a_plan_that_could_never_run_is_told_as_such(tmp_path: Path) -> None:
    """Not as something that this installation lacks."""
    file, path = small_file(), tmp_path / "small.hybrid"
    kind, content = file.segments["plan.forward"]
    plan = json.loads(content)
    plan["steps"][0]["destination"] = 1
    file.segments["plan.forward"] = kind, json.dumps(plan).encode()
    path.write_bytes(file.to_bytes())
    with pytest.raises(ArtifactError) as caught:
        torch_hybrid_backend.load(path)
    assert "this installation" not in str(caught.value)
    assert str(caught.value).count(str(path)) == 1


def test_memory_is_free_when_the_model_is_gone(tmp_path: Path) -> None:
    """A mapping of the file lives as long as tensors of it do."""
    report, loaded = exported(_network(), (torch.randn(2, 3, 8, 8),), tmp_path)

    def maps() -> int:
        gc.collect()
        return Path("/proc/self/maps").read_text().count(str(report.path))

    assert maps() == 1
    second = torch_hybrid_backend.load(report.path)
    result = second(torch.randn(2, 3, 8, 8))
    del loaded, second
    assert maps() == 0
    assert result.shape == (2, 10)


@pytest.mark.parametrize("cycles", [500, pytest.param(10_000, marks=pytest.mark.full)])
def test_models_come_and_go(cycles: int, tmp_path: Path) -> None:
    """Memory, mappings and descriptors stay as they are, however often a file is opened, called and dropped."""
    report, _ = exported(_network(), (torch.randn(2, 3, 8, 8),), tmp_path)
    x = torch.randn(2, 3, 8, 8)

    def cycle(times: int) -> tuple[float, int, int]:
        for _ in range(times):
            torch_hybrid_backend.load(report.path)(x)
        gc.collect()
        kib = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1024
        return kib, Path("/proc/self/maps").read_text().count("\n"), len(os.listdir("/proc/self/fd"))

    cycle(300 + cycles // 3)  # the heap has found its size
    before = cycle(100)
    after = cycle(cycles)
    assert after[0] < before[0] + 1024 + 0.1 * cycles
    assert after[1] < before[1] + 20
    assert after[2] == before[2]


_ELSEWHERE = """
import sys
sys.modules["tvm"] = None
import torch
import torch_hybrid_backend
model = torch_hybrid_backend.load(sys.argv[1])
x = torch.load(sys.argv[2])
torch.save(model(x), sys.argv[3])
loaded = [name for name in sys.modules if name.startswith(("torch._dynamo", "torch._inductor", "torch._functorch.aot", "tvm"))]
assert loaded == ["tvm"], loaded
"""


@pytest.mark.fault(
    "no TVM, no linker, no cache and no home where a `.hybrid` file is opened",
    "nothing",
)
def test_another_process_needs_no_compiler(tmp_path: Path) -> None:
    """Without a home, a cache, a linker on the PATH and TVM, the answer is the same bit for bit; no Dynamo is imported."""
    report, loaded = exported(_network(), (torch.randn(2, 3, 8, 8),), tmp_path)
    x = torch.randn(2, 3, 8, 8)
    torch.save(x, tmp_path / "x.pt")
    environment = {
        "PATH": "",
        "HOME": "/nonexistent",
        "HYBRID_CACHE_DIR": "/nonexistent/cache",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-c", _ELSEWHERE, str(report.path), str(tmp_path / "x.pt"), str(tmp_path / "y.pt")]
    done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.load(tmp_path / "y.pt"), loaded(x))


def test_equal_exports_give_equal_bytes(tmp_path: Path) -> None:
    first, _ = exported(_network(), (torch.ones(2, 3, 8, 8),), tmp_path)
    before = first.path.read_bytes()
    second, _ = exported(_network(), (torch.ones(2, 3, 8, 8),), tmp_path)
    assert second.path.read_bytes() == before


def test_a_file_that_others_may_write_is_copied_only(tmp_path: Path) -> None:
    report, _ = exported(_network(), (torch.randn(2, 3, 8, 8),), tmp_path)
    report.path.chmod(0o666)
    with pytest.raises(ArtifactError, match="share=False"):
        torch_hybrid_backend.load(report.path)
    loaded = torch_hybrid_backend.load(report.path, share=False)
    os.truncate(report.path, 0)
    assert loaded(torch.randn(2, 3, 8, 8)).shape == (2, 10)


@pytest.mark.parametrize("precision", ["bf16", "int8", "int8-weights", "int4-weights"])
def test_precisions(precision: str, tmp_path: Path) -> None:
    """The weights are stored as kernels read them: in 8 or 4 bits, a fraction of the parameters' bytes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512)).eval()
    x = torch.randn(4, 512)
    report, loaded = exported(
        model, (x,), tmp_path, options={"precision": precision, "placement": "measure", "strict": False}
    )
    parameters = sum(each.numel() for each in model.parameters()) * 4
    most = {"bf16": 1.2, "int8": 1.2, "int8-weights": 0.4, "int4-weights": 0.25}[precision]
    assert report.size_bytes < most * parameters
    assert (loaded(x) - model(x)).norm() < 0.3 * model(x).norm()


class Attends(nn.Module):
    """Sizes of batches and sequences, together and apart; a state of known size."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(16, 48), nn.Linear(16, 8)
        self.total: torch.Tensor
        self.register_buffer("total", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        batch, length, _ = x.shape
        heads = self.project(x).view(batch, length, 3, 2, 8).permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2])
        result = self.out(found.transpose(1, 2).reshape(batch * length, 16))
        self.total.add_(result.sum(0))
        return result, self.total * 2, x, result.view(batch, length, 8).mean(1)


class Halves(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.relu(x.view(-1, 2, 3).sum(1) + y)


class Sorted(nn.Module):
    """Has parts that only Python runs, with sizes among their inputs, arguments and results."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values, indices = torch.sort(torch.relu(x) * 2, dim=0)
        largest = torch.topk(torch.cat([values, values]), x.shape[0] + 1, dim=0).values
        sums = torch.cumsum(largest.flatten(), 0).view(x.shape[0] + 1, x.shape[1])
        return sums + 1, indices, torch.sort(x.flatten())[0][: x.shape[0]]


class SizesOf(nn.Module):
    """Returns sizes, and numbers that follow from them."""

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        n = x.shape[0]
        return {
            "tensor": torch.relu(x),
            "n": n,
            "more": [n * 3 + 1, n // 2, x.numel(), 7],
            "shape": torch.sort(x)[0].shape,
        }


_N = torch.export.Dim("n", min=2, max=40)
_BATCH, _LENGTH = torch.export.Dim("batch", min=2, max=9), torch.export.Dim("length", min=4)
_MANY: dict[str, tuple[Any, Any, list[tuple[Any, ...]]]] = {
    "network": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5)).eval(),
        ({0: _N},),
        [(torch.randn(n, 3, 8, 8),) for n in (4, 2, 3, 40, 17, 4)],
    ),
    "batch and length": (
        Attends,
        ({0: _BATCH, 1: _LENGTH},),
        [(torch.randn(*sizes, 16),) for sizes in ((3, 5), (2, 4), (9, 64), (3, 200), (4, 5), (3, 5))],
    ),
    "twice as many": (
        Halves,
        ({0: 2 * _N}, {0: _N}),
        [(torch.randn(2 * n, 3), torch.randn(n, 3)) for n in (4, 2, 3, 40, 4)],
    ),
    "parts in Python": (Sorted, ({0: _N},), [(torch.randn(n, 3),) for n in (4, 2, 3, 40, 7, 4)]),
    "results that are sizes": (SizesOf, ({0: _N},), [(torch.randn(n, 3),) for n in (4, 2, 40, 4)]),
}


@pytest.mark.parametrize("name", _MANY)
def test_one_file_serves_many_sizes(name: str, tmp_path: Path) -> None:
    """Results and their strides are eager's at all sizes of the ranges; states go on from one size to another."""
    make, dynamic_shapes, calls = _MANY[name]
    torch.manual_seed(1)
    model = make()
    _, loaded = exported(model, calls[0], tmp_path, dynamic_shapes=dynamic_shapes)
    with torch.no_grad():
        for inputs in calls:
            found, expected = (torch.utils._pytree.tree_leaves(each(*inputs)) for each in (loaded, model))
            torch.testing.assert_close(found, expected, check_stride=True, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "sizes", "said"),
    [
        ("network", ((41, 3, 8, 8),), "dimension 0 of input is 41; the model was exported for 2 to 40"),
        ("network", ((1, 3, 8, 8),), "dimension 0 of input is 1; the model was exported for 2 to 40"),
        ("network", ((3, 3, 8, 9),), r"input must be float32 \(3, 3, 8, 8\); it got float32 \(3, 3, 8, 9\)"),
        ("network", ((3, 3, 8),), "input must be float32 .* it got float32"),
        ("batch and length", ((3, 3, 16),), "dimension 1 of x is 3; the model was exported for 4 to "),
        ("twice as many", ((7, 3), (4, 3)), "x is 7; the model was exported for 4 to 80 in steps of 2"),
        ("twice as many", ((8, 3), (5, 3)), r"y must be float32 \(4, 3\)"),
    ],
)
def test_other_sizes_are_refused(name: str, sizes: tuple[Any, ...], said: str, tmp_path: Path) -> None:
    """The error says the range."""
    make, dynamic_shapes, calls = _MANY[name]
    _, loaded = exported(make(), calls[0], tmp_path, dynamic_shapes=dynamic_shapes)
    with pytest.raises(ArgumentError, match=said):
        loaded(*map(torch.randn, sizes))


def test_threads_call_at_many_sizes(tmp_path: Path) -> None:
    """Each gets the results of its own sizes."""
    make, dynamic_shapes, calls = _MANY["twice as many"]
    model = make()
    _, loaded = exported(model, calls[0], tmp_path, dynamic_shapes=dynamic_shapes)
    wrong = []

    def call() -> None:
        for number in range(40):
            inputs = calls[number % len(calls)]
            if not torch.allclose(loaded(*inputs), model(*inputs)):
                wrong.append(number)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


class _Difference(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x - 2 * y


def test_arguments_that_share_memory_are_several_inputs(tmp_path: Path) -> None:
    """The example call may pass one tensor twice, as self-attention does, a view of it, or a parameter of the model."""
    x, y = torch.randn(3), torch.randn(3)
    linear = nn.Linear(3, 3, bias=False)
    for args in ((x, x), (x, x.view(3)), (x.expand(2, 3), x)):
        loaded = exported(_Difference(), args, tmp_path)[1]
        given = y.expand_as(args[0]), x + 1
        assert torch.equal(loaded(*given), given[0] - 2 * given[1])
    loaded = exported(linear, (linear.weight,), tmp_path)[1]
    torch.testing.assert_close(loaded(torch.eye(3)), linear.weight.detach().t())


class _Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        self.total.add_(1)
        return x + y


class _Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cache.add_(x)


def test_what_shares_memory_with_what_a_call_changes_is_refused(tmp_path: Path) -> None:
    """Eager reads the changed values there, a plan those from before the call."""
    loaded = exported(_Adds(), (torch.zeros(3), torch.zeros(3)), tmp_path)[1]
    memory = torch.zeros(6)
    with pytest.raises(ArgumentError, match="y shares memory with x, which the call changes: pass a copy of it"):
        loaded(memory[:3], memory[2:5])
    assert torch.equal(loaded(memory[:3], memory[3:]), torch.ones(3))
    assert torch.equal(memory, torch.tensor([1.0, 1, 1, 0, 0, 0]))
    _, cached = exported(_Sums(), (torch.ones(2, 4),), tmp_path)
    cache = cached(torch.ones(2, 4))
    with pytest.raises(ArgumentError, match="x shares memory with a state, which the call changes"):
        cached(cache)


class _Draws(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.dropout(x, 0.5, train=True), torch.randint(100, (8,))


def test_random_numbers_differ_from_the_sample(tmp_path: Path) -> None:
    loaded = exported(_Draws(), (torch.ones(4, 256),), tmp_path)[1]
    torch.manual_seed(0)
    dropped, numbers = loaded(torch.ones(4, 256))
    assert set(dropped.unique().tolist()) == {0.0, 2.0}
    assert 0.4 < dropped.count_nonzero() / 1024 < 0.6
    assert not torch.equal(loaded(torch.ones(4, 256))[1], numbers)


class _Tells(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, object]:
        return {"y": x * 2, "task": "classify", "n": 3, "scale": 0.5, "is_right": True, "none": None}


def test_results_that_are_no_tensors(tmp_path: Path) -> None:
    loaded = exported(_Tells(), (torch.ones(3),), tmp_path)[1]
    found = loaded(torch.ones(3))
    assert torch.equal(found.pop("y"), torch.full((3,), 2.0))
    assert found == {"task": "classify", "n": 3, "scale": 0.5, "is_right": True, "none": None}
