"""libhybrid_runner.so and hybrid-run (csrc/runner)."""

from __future__ import annotations

import contextlib
import ctypes
import re
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torch_hybrid_backend
from tests.artifact.exported_for_tests import exported
from tests.runner.hybrid_files import HybridFile, doubling_plan, kernel, named, plan, value
from tests.runner.hybrid_files import tensor as form
from tests.runner.runner_in_python import Model, Runner, RunnerError, dlpack, run
from torch_hybrid_backend.machine import most_threads

ROOT = Path(__file__).resolve().parents[2]
F32 = np.float32
MOST_BYTES = 2 << 20

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A library of kernels: double(x, y), plus(x, y, size) and fail(x, y)."""
    path = tmp_path_factory.mktemp("kernels") / "kernels.so"
    source = ROOT / "csrc/tests/host_kernels.cc"
    run("g++", "-std=c++20", "-O1", "-fPIC", "-shared", f"-I{ROOT / 'csrc/include'}", source, "-o", path)
    return path.read_bytes()


@pytest.fixture
def doubling(kernels: bytes, tmp_path: Path) -> Path:
    """The file, written."""
    return _doubling(kernels).write(tmp_path / "doubling.hybrid")


def _doubling(kernels: bytes) -> HybridFile:
    """A file: y = 2 (2 x) + 5 for three elements, with a sample."""
    file = HybridFile(kernels)
    row, doubled = doubling_plan()
    file.entry(
        "forward",
        doubled,
        inputs=[named("x", row), {"name": "scale", "value": 2}],
        sources=[["input", 0]],
        results=[["output", 0], ["literal", True]],
        outputs=[named("y", row), {"name": "is_good", "value": True}],
    )
    sample = {"inputs": [file.constant(np.array([1, 2, 3], F32)), None]}
    sample["outputs"] = [file.constant(np.array([9, 13, 17], F32)), None]
    file.samples.append({"entry": "forward", "tolerance": 1e-6, **sample})
    return file


def test_it_needs_neither_pytorch_nor_tvm_nor_python(library: Path) -> None:
    """Stripped, it is small, and the loader looks for the system's libraries alone."""
    needed = run("ldd", library)
    assert not [name for name in ("torch", "tvm", "python", "c10") if name in needed], needed
    assert library.stat().st_size <= MOST_BYTES
    exported = run("nm", "-D", "--defined-only", library).split()[2::3]
    assert all(name.startswith("hybrid_") for name in exported), exported


def test_a_call(runner: Runner, doubling: Path) -> None:
    """Arrays with any strides; what is no tensor is left out."""
    model = runner.open(doubling)
    for threads in (0, 1, 3):
        model = runner.open(doubling, threads=threads, share=threads != 1)
        np.testing.assert_array_equal(model.run(np.array([1, 2, 3], F32))[0], [9, 13, 17])
    backwards = np.arange(7, dtype=F32)[::-3]
    np.testing.assert_array_equal(model.run(backwards)[0], [29, 17, 5])


@pytest.mark.fault(
    "no variant of a file for several targets is for this processor, in the runner",
    "an error that lists the features that each needs and this one lacks; nothing of the file has run",
)
def test_the_best_kernels_run(runner: Runner, kernels: bytes, tmp_path: Path) -> None:
    """The first variant that fits is taken, and its library named. Code of the others is never looked at."""
    file = _doubling(b"never looked at")
    file.variant(b"no library", "new_feature")
    file.variant(kernels)
    file.variant(b"no library either")
    model = runner.open(file.write(tmp_path / "model.hybrid"))
    np.testing.assert_array_equal(model.run(np.array([1, 2, 3], F32))[0], [9, 13, 17])
    assert runner.c.hybrid_library(model.handle) == b"library.2"
    file = _doubling(kernels)
    file.features = ("newer",)
    file.variant(kernels, "newer", "newest")
    with pytest.raises(
        RunnerError, match=r'; "library\.1" needs "newer", "newest"; "library\.0" needs "newer": export'
    ):
        runner.open(file.write(tmp_path / "model.hybrid"))


def test_wrong_inputs(runner: Runner, doubling: Path) -> None:
    """The error says what was expected and what came; a call that is right succeeds after it."""
    model = runner.open(doubling)
    good = np.array([1, 2, 3], F32)
    for inputs, said in [
        ([np.zeros(4, F32)], r'input 0 \("x"\) is float32\(4\), but the model was exported for float32\(3\)'),
        ([np.zeros(3)], r"is float64\(3\), but the model was exported for float32\(3\)"),
        ([good, good], '"forward" has 1 input, not 2'),
    ]:
        with pytest.raises(RunnerError, match=said):
            model.run(*inputs)
    with pytest.raises(RunnerError, match='"forward" has 1 output, not 2'):
        model.run(good, outputs=2)
    with pytest.raises(RunnerError, match='the model has no entry "decode": it has forward'):
        model.run(good, entry="decode")
    np.testing.assert_array_equal(model.run(good)[0], [9, 13, 17])


def test_wrong_options(runner: Runner, doubling: Path) -> None:
    """Each has a legal value, and structs of callers built against another version are told apart."""
    for threads in (-1, most_threads() + 1, 100_000, 2**31 - 1):
        said = f"threads is {threads}: it must be 0, for all, or their number, at most {most_threads()}$"
        with pytest.raises(RunnerError, match=said):
            runner.open(doubling, threads=threads)
    np.testing.assert_array_equal(
        runner.open(doubling, threads=most_threads()).run(np.array([1, 2, 3], F32))[0], [9, 13, 17]
    )
    with pytest.raises(RunnerError, match="struct_size of the options is 8: it must be sizeof"):
        runner.open(doubling, struct_size=8)


@pytest.mark.fault("a NULL pointer is given to a function of the runner", "an error that names it")
def test_null_pointers(runner: Runner, doubling: Path, kernels: bytes, tmp_path: Path) -> None:
    """Errors name the argument; strides alone may be NULL."""
    c = runner.c
    for call in (
        lambda: c.hybrid_entry_count(None) == 0,
        lambda: c.hybrid_entry_name(None, 0) is None,
        lambda: c.hybrid_describe(None, None, ctypes.create_string_buffer(b"\xff" * 64)) != 0,
        lambda: c.hybrid_manifest(None) is None,
        lambda: c.hybrid_library(None) is None,
        lambda: c.hybrid_run(None, None, None, 0, None, 0) != 0,
        lambda: c.hybrid_reset(None) != 0,
    ):
        with contextlib.suppress(RunnerError):
            runner.open(tmp_path / "none.hybrid")
        assert call()
        assert str(runner.error()) == "the model is NULL"
    c.hybrid_close(None)
    assert c.hybrid_open(None, None) is None
    assert str(runner.error()) == "the path is NULL"
    for arguments in ((None, ctypes.create_string_buffer(32)), (b"key.pem", None)):
        assert c.hybrid_read_key(*arguments) != 0
        assert str(runner.error()) == "the path or the key is NULL"
    with pytest.raises(RunnerError, match="keys is NULL, and key_count is not 0"):
        runner.open(doubling, key_count=1)

    model = runner.open(doubling)
    assert c.hybrid_describe(model.handle, None, None) != 0
    assert str(runner.error()) == "the entry is NULL"
    assert c.hybrid_entry_name(model.handle, 1) is None
    assert str(runner.error()) == "the model has no entry of index 1: their number is 1"
    for counts in ((1, 0), (0, 1)):
        assert c.hybrid_run(model.handle, None, None, counts[0], None, counts[1]) != 0
        assert str(runner.error()) == "the list of inputs or of outputs is NULL"
    x = np.array([1, 2, 3], F32)
    np.testing.assert_array_equal(model.run_tensors(dlpack(x, strides=None))[0], [9, 13, 17])
    for opened in (model, runner.open(_of_any_rows(kernels, tmp_path / "rows.hybrid"))):
        count = 1 if opened is model else 2
        for tensor, said in [
            (None, r'input 0 \("x"\) is NULL'),
            (dlpack(x, shape=None), r'input 0 \("x"\) has no sizes: its ndim is 1, and its shape is NULL'),
            (dlpack(x, ndim=-1), r'input 0 \("x"\) has no sizes: its ndim is -1, and its shape is not NULL'),
            (dlpack(x, data=None), r'input 0 \("x"\) has no memory: its data is NULL'),
        ]:
            with pytest.raises(RunnerError, match=said):
                opened.run_tensors(tensor, outputs=count)


def test_wrong_files(runner: Runner, doubling: Path, tmp_path: Path) -> None:
    """A flipped bit, a file that others may write to, no file."""
    data = bytearray(doubling.read_bytes())
    data[-1] ^= 1
    broken = tmp_path / "broken.hybrid"
    broken.write_bytes(data)
    with pytest.raises(RunnerError, match=r"broken\.hybrid: it is damaged"):
        runner.open(broken)
    with pytest.raises(RunnerError, match="none"):
        runner.open(tmp_path / "none.hybrid")
    doubling.chmod(0o666)
    with pytest.raises(RunnerError, match="chmod go-w"):
        runner.open(doubling)
    runner.open(doubling, share=False)


def test_eight_threads_at_once(runner: Runner, doubling: Path) -> None:
    """Each gets the results of its own inputs."""
    model = runner.open(doubling)
    failures: list[Any] = []

    def call(number: int) -> None:
        for i in range(200):
            x = np.array([number, i, 1], F32)
            (y,) = model.run(x)
            if not np.array_equal(y, 4 * x + 5):
                failures.append((number, i, y))

    threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_sample_that_does_not_come_out(runner: Runner, kernels: bytes, tmp_path: Path) -> None:
    """The file is refused, unless it is opened without its samples."""
    file = HybridFile(kernels)
    row = form("float32", 2)
    file.entry(
        "forward",
        plan([value("input", 0, row), value("fresh", 0, row)], [kernel("double", 0, 1)], inputs=1, outputs=[1]),
        inputs=[named("x", row)],
        sources=[["input", 0]],
        results=[["output", 0]],
        outputs=[named("y", row)],
    )
    x, y = (file.constant(np.array(each, F32)) for each in ([1, 2], [2, 4.5]))
    file.samples.append({"entry": "forward", "inputs": [x], "outputs": [y], "tolerance": 0.1})
    path = file.write(tmp_path / "wrong.hybrid")
    with pytest.raises(RunnerError, match=r'output 0 of the sample of "forward" is 0\.5 off, and 0\.45 are allowed'):
        runner.open(path)
    np.testing.assert_array_equal(runner.open(path, skip_sample=True).run(np.array([1, 2], F32))[0], [2, 4])


def _with_state(kernels: bytes, path: Path) -> Path:
    """A cache of 4 x 2: a call writes 2 x to the rows that `at` names, and gives the cache, x, a row of the cache, and x transposed."""
    file = HybridFile(kernels)
    rows, at, cache = form("float32", 2, 2), form("int64", 2), form("float32", 4, 2)
    flat = form("float32", 4)
    file.state("cache", np.arange(8, dtype=F32).reshape(4, 2))
    values = [
        value("input", 0, rows),
        value("input", 1, at),
        value("alias", 0, flat),
        value("fresh", 0, flat),
        value("alias", 3, rows),
    ]
    file.entry(
        "decode",
        plan(values, [kernel("double", 2, 3)], inputs=2, outputs=[4, 1]),
        inputs=[named("x", rows), named("at", at)],
        sources=[["input", 0], ["input", 1]],
        updates=[["rows", ["state", 0], 0, ["output", 1], ["output", 0]]],
        results=[
            ["state", 0],
            ["input", 0],
            ["view", ["state", 0], [2], [1], 2, ""],
            ["view", ["input", 0], [2, 2], [1, 2], 0, "neg"],
        ],
        outputs=[named(name, each) for name, each in zip("abcd", [cache, rows, form("float32", 2), rows], strict=True)],
    )
    file.entry(
        "replace",
        plan(
            [value("input", 0, cache), value("fresh", 0, cache)],
            [{"kind": "copy", "source": 0, "destination": 1}],
            inputs=1,
            outputs=[1],
        ),
        inputs=[named("x", cache)],
        sources=[["input", 0]],
        updates=[["copy", ["state", 0], 0]],
        results=[],
        outputs=[],
    )
    return file.write(path)


def test_states(runner: Runner, kernels: bytes, tmp_path: Path) -> None:
    """A cache is an opened model's own; it changes by rows or as a whole, and a call that fails leaves it."""
    path = _with_state(kernels, tmp_path / "state.hybrid")
    model, other = runner.open(path), runner.open(path)
    expected = np.arange(8, dtype=F32).reshape(4, 2)
    x = np.array([[1, 2], [3, 4]], F32)

    def decode(model: Model, at: list[int]) -> list[Any]:
        return model.run(x, np.array(at), outputs=4, entry="decode")

    cache, same, row, transposed = decode(model, [1, -1])
    expected[[1, 3]] = 2 * x
    np.testing.assert_array_equal(cache, expected)
    np.testing.assert_array_equal(same, x)
    np.testing.assert_array_equal(row, expected[1])
    np.testing.assert_array_equal(transposed, -x.T)
    with pytest.raises(RunnerError, match="position 4 is not within a tensor of 4 positions"):
        decode(model, [0, 4])
    np.testing.assert_array_equal(decode(model, [1, 3])[0], expected)
    model.run(np.ones((4, 2), F32), outputs=0, entry="replace")
    np.testing.assert_array_equal(decode(model, [3, 3])[0], [[1, 1], [1, 1], [1, 1], [6, 8]])
    np.testing.assert_array_equal(decode(other, [0, 0])[0], [[6, 8], [2, 3], [4, 5], [6, 7]])
    model.reset()
    np.testing.assert_array_equal(decode(model, [0, 0])[0], [[6, 8], [2, 3], [4, 5], [6, 7]])


def test_inputs_that_a_call_changes(runner: Runner, kernels: bytes, tmp_path: Path) -> None:
    """The caller's memory, with the caller's strides."""
    file = HybridFile(kernels)
    row = form("float32", 3)
    file.entry(
        "forward",
        plan([value("input", 0, row), value("fresh", 0, row)], [kernel("double", 0, 1)], inputs=1, outputs=[1]),
        inputs=[named("x", row)],
        sources=[["input", 0]],
        updates=[["copy", ["input", 0], 0]],
        results=[],
        outputs=[],
    )
    memory = np.arange(6, dtype=F32)
    runner.open(file.write(tmp_path / "m.hybrid")).run(memory[::2], outputs=0)
    np.testing.assert_array_equal(memory, [0, 1, 4, 3, 8, 5])


def test_inputs_that_share_memory(runner: Runner, kernels: bytes, tmp_path: Path) -> None:
    """Refused where the call changes one of them; else as two inputs."""
    row = form("float32", 3)
    values = [value("input", 0, row), value("fresh", 0, row), value("input", 1, row)]
    memory = np.arange(4, dtype=F32)
    for updates in ([["copy", ["input", 0], 0]], []):
        file = HybridFile(kernels)
        file.entry(
            "forward",
            plan(values, [kernel("double", 0, 1)], inputs=2, outputs=[1]),
            inputs=[named("x", row), named("y", row)],
            sources=[["input", 0], ["input", 1]],
            updates=updates,
            results=[["output", 0]],
            outputs=[named("out", row)],
        )
        model = runner.open(file.write(tmp_path / f"{len(updates)}.hybrid"))
        if updates:
            with pytest.raises(RunnerError, match='"y" shares memory with "x", which the call changes: pass a copy'):
                model.run(memory[:3], memory[1:])
        else:
            np.testing.assert_array_equal(model.run(memory[:3], memory[1:])[0], [0, 2, 4])


@pytest.mark.parametrize("dtype", ["uint8", "int16", "float32", "float64", "complex128"])
def test_copies_of_any_strides(runner: Runner, kernels: bytes, tmp_path: Path, dtype: str) -> None:
    """Inputs in other orders of dimensions than the plan was built for, and copies to others."""
    file = HybridFile(kernels)
    sizes = (2, 5, 3, 1, 40)
    there, back = form(dtype, *sizes), form(dtype, *sizes, strides=[1, 80, 400, 400, 2])
    file.entry(
        "forward",
        plan(
            [value("input", 0, there), value("fresh", 0, back)],
            [{"kind": "copy", "source": 0, "destination": 1}],
            inputs=1,
            outputs=[1],
        ),
        inputs=[named("x", there)],
        sources=[["input", 0]],
        results=[["output", 0]],
        outputs=[named("y", back)],
    )
    model = runner.open(file.write(tmp_path / "m.hybrid"))
    random = np.random.default_rng(0)
    x = random.integers(0, 100, sizes).astype(dtype)
    for order in [(0, 1, 2, 3, 4), (4, 3, 2, 1, 0), (1, 4, 0, 2, 3)]:
        (y,) = model.run(np.ascontiguousarray(x.transpose(order)).transpose(np.argsort(order)))
        np.testing.assert_array_equal(y, x)
        assert [y.strides[d] // x.itemsize for d in (0, 1, 2, 4)] == [1, 80, 400, 2]


def test_what_it_refuses(runner: Runner, kernels: bytes, tmp_path: Path) -> None:
    """Refuses what only Python can run, and kinds of steps that no file has."""
    row = form("float32", 2)
    for step, members, said in [
        ({"kind": "launch"}, {}, 'no step in a file is called "launch"'),
        (
            {"kind": "callback", "function": 0, "inputs": [0], "outputs": [1]},
            {"functions": "functions", "python_parts": ["aten.nonzero, at model.py:7: x[x > 0]"]},
            r"only Python can run \(not_exportable\).*\n  aten.nonzero, at model.py:7: x\[x > 0\]",
        ),
    ]:
        file = HybridFile(kernels)
        file.entry(
            "forward",
            plan([value("input", 0, row), value("returned", 0, row)], [step], inputs=1, outputs=[1]),
            inputs=[named("x", row)],
            sources=[["input", 0]],
            results=[["output", 0]],
            outputs=[named("y", row)],
            **members,
        )
        with pytest.raises(RunnerError, match=said):
            runner.open(file.write(tmp_path / "refused.hybrid"))


def test_the_program(installed: Path, doubling: Path, tmp_path: Path) -> None:
    """hybrid-run reads and writes .npy files, tells what a model takes, and times it."""
    program = installed / "bin/hybrid-run"
    for x in (np.array([1, 2, 3], F32), np.asfortranarray(np.array([0, -1, 5], F32))):
        np.save(tmp_path / "x.npy", x)
        run(program, doubling, "--input", tmp_path / "x.npy", "--output", tmp_path / "y.npy", "--threads", 2)
        np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), 4 * x + 5)
    assert (
        run(program, doubling, "--inspect")
        == "kernels: library.0\nforward\n  takes x: float32(3)\n  gives y: float32(3)\n"
    )
    assert "median" in run(program, doubling, "--bench", "0.01")
    np.save(tmp_path / "x.npy", np.zeros(3))
    wrong = [program, doubling, "--input", tmp_path / "x.npy"]
    result = subprocess.run([str(word) for word in wrong], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "its elements are '<f8', and the input takes '<f4'" in result.stderr


@pytest.mark.fault("far more threads than processors are asked of the runner", "an error that names the bound")
def test_wrong_options_of_the_program(installed: Path, doubling: Path) -> None:
    """Errors are one line that says what is legal; a larger OMP_NUM_THREADS counts as the bound."""
    program = installed / "bin/hybrid-run"
    for options, said in [
        (
            ["--threads", "100000"],
            f"threads is 100000: it must be 0, for all, or their number, at most {most_threads()}\n",
        ),
        (["--threads", "99999999999"], 'a whole number, at most 256 or 4 times the processors, not "99999999999"'),
        (["--threads", "1.5"], 'not "1.5"'),
        (["--threads", "-1"], 'not "-1"'),
        (["--input", "a.npy", "--input", "b.npy"], '--input is given 2 times, and "forward" has 1 input: x;'),
        (["--output", "a.npy", "--output", "b.npy"], '--output is given 2 times, and "forward" has 1 output: y;'),
    ]:
        result = subprocess.run([program, doubling, *options], capture_output=True, text=True, check=False)
        assert result.returncode == 1
        assert said in result.stderr
        assert result.stderr.count("\n") == 1
    for threads in (32768, 999999):
        assert run("env", f"OMP_NUM_THREADS={threads}", program, doubling) == "y: float32(3)\n"


def test_the_examples(installed: Path, doubling: Path, tmp_path: Path) -> None:
    """A C program and a C++ program, built against what is installed."""
    run("cmake", "-S", ROOT / "examples/runner", "-B", tmp_path, f"-DCMAKE_PREFIX_PATH={installed}")
    run("cmake", "--build", tmp_path)
    assert run(tmp_path / "run_c", doubling) == "y: float32(3)\n"
    assert [float(line) for line in run(tmp_path / "run_cpp", doubling, 3).split()] == pytest.approx([5, 5.4, 5.8])


@pytest.mark.full
def test_under_the_thread_sanitiser(kernels: bytes, doubling: Path, tmp_path: Path) -> None:
    """No data race where eight threads open, call and close models, and call one that they share: of one set of sizes, of many, with states.

    Each call is on one thread: the sanitiser does not see how threads of OpenMP's library wait for each other.
    """
    if not shutil.which("setarch"):
        pytest.skip("needs setarch: older sanitisers do not find their memory among randomised addresses")
    flags = "-fsanitize=thread -g1 -O1"
    run("cmake", "-S", ROOT / "csrc/runner", "-B", tmp_path / "build", f"-DCMAKE_CXX_FLAGS={flags}")
    run("cmake", "--build", tmp_path / "build", "--parallel", "2", "--target", "hybrid_runner")
    program, source = tmp_path / "runner_threads", ROOT / "csrc/tests/runner_threads.cc"
    library = tmp_path / "build/libhybrid_runner.so"
    include = f"-I{ROOT / 'csrc/runner'}"
    run("g++", "-std=c++20", *flags.split(), include, source, library, f"-Wl,-rpath,{library.parent}", "-o", program)
    with_state = _with_state(kernels, tmp_path / "state.hybrid")
    for file in (doubling, with_state, _of_any_rows(kernels, tmp_path / "rows.hybrid")):
        run("env", "OMP_NUM_THREADS=1", "TSAN_OPTIONS=halt_on_error=1", "setarch", "-R", program, file)


def test_the_page_in_cpp(installed: Path, tmp_path: Path) -> None:
    """The C++ block of docs/guides/runner.md is compiled."""
    (block,) = re.findall(r"```cpp\n(.*?)```", (ROOT / "docs/guides/runner.md").read_text(), re.S)
    include, body = block.split("\n", 1)
    (tmp_path / "page.cpp").write_text(f"{include}\nint main() {{{body}return logits == nullptr; }}\n")
    run("g++", "-std=c++17", "-fsyntax-only", f"-I{installed}/include", tmp_path / "page.cpp")


class Network(nn.Module):
    """Convolutions, attention and products: two results of a call, of which one is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.head = nn.Linear(16, 10)

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        words = self.layer(self.convolutions(images).flatten(2).mT)
        return self.head(words.mean(1)), words.mT


class Cached(nn.Module):
    """Writes rows to a cache, and returns the sums of its rows and the cache."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(2, 8, 4))

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert isinstance(self.cache, torch.Tensor)
        self.cache.index_copy_(1, at, x * 2)
        return self.cache.sum(-1), self.cache


def test_the_answers_are_those_of_python(runner: Runner, tmp_path: Path) -> None:
    """Bit for bit, also from eight threads at once."""
    torch.manual_seed(0)
    images = torch.rand(2, 3, 18, 18)
    _, model = exported(Network().eval(), (images,), tmp_path)
    with torch.no_grad():
        expected = [result.numpy() for result in model(images)]
    opened = runner.open(tmp_path / "model.hybrid", threads=torch.get_num_threads())
    wrong: list[int] = []

    def call(number: int) -> None:
        for _ in range(20):
            results = opened.run(images.numpy(), outputs=2)
            if not all(map(np.array_equal, results, expected)):
                wrong.append(number)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    channels_last = images.to(memory_format=torch.channels_last)
    assert all(map(np.array_equal, opened.run(channels_last.numpy(), outputs=2), expected))


def test_a_cache_changes_as_in_python(runner: Runner, tmp_path: Path) -> None:
    """Rows of a state, by positions that are an input."""
    x = torch.rand(2, 3, 4)
    _, model = exported(Cached().eval(), (x, torch.tensor([0, 1, 2])), tmp_path)
    opened = runner.open(tmp_path / "model.hybrid")
    for positions in ([1, 2, 3], [7, 0, 4]):
        at = torch.tensor(positions)
        with torch.no_grad():
            expected = [result.clone().numpy() for result in model(x, at)]
        assert all(map(np.array_equal, opened.run(x.numpy(), at.numpy(), outputs=2), expected))


def _of_any_rows(kernels: bytes, path: Path, **symbol: Any) -> Path:
    """y = 2 x + n and a view of its second half, for n elements from 2 to 9."""
    file = HybridFile(kernels)
    n = {"size": 0}
    row = {"dtype": "float32", "sizes": [n], "strides": [1]}
    half = {"dtype": "float32", "sizes": [{"size": 1}], "strides": [1]}
    values = [value("input", 0, row), value("arena", 0, row), value("fresh", 0, row)]
    described = plan(values, [kernel("double", 0, 1), kernel("plus", 1, 2, sizes=[n])], inputs=1, outputs=[2])
    described |= {"arenas": [["cpu", 0]], "lives": [[[1, 0, 1]]], "symbols": ["n"], "sizes": ["n"]}
    read = {"name": "n", "input": 1, "dim": 0, "factor": 1, "offset": 0, "least": 2, "most": 9, "example": 3}
    file.entry(
        "forward",
        described,
        inputs=[{"name": "scale", "value": 2}, named("x", row)],
        sources=[["input", 1]],
        results=[["output", 0], ["view", ["output", 0], [{"size": 1}], [1], {"size": 2}, ""]],
        outputs=[named("y", row), named("half", half)],
        symbols=[read | symbol],
        sizes=["n", ["+", "n", ["*", -1, ["//", "n", 2]]], ["//", "n", 2]],
        limits=[[n, 0, 8]],
    )
    sample = {"inputs": [None, file.constant(np.array([1, 2, 3], F32))]}
    sample["outputs"] = [file.constant(np.array(each, F32)) for each in ([5, 7, 9], [7, 9])]
    file.samples.append({"entry": "forward", "tolerance": 1e-6, **sample})
    return file.write(path)


def test_one_file_for_many_sizes(runner: Runner, kernels: bytes, tmp_path: Path) -> None:
    """Each set of sizes has its plan; others are refused with the range."""
    model = runner.open(_of_any_rows(kernels, tmp_path / "rows.hybrid"))
    for n in (3, 2, 8, 5, 3):
        x = np.arange(n, dtype=F32)
        y, half = model.run(x, outputs=2)
        np.testing.assert_array_equal(y, 2 * x + n)
        np.testing.assert_array_equal(half, y[n // 2 :])
    for wrong, said in [
        (np.zeros(1, F32), r'dimension 0 of input 1 \("x"\) is 1; the model was exported for 2 to 9'),
        (np.zeros(10, F32), "is 10; the model was exported for 2 to 9"),
        (np.zeros(9, F32), r"rows\.hybrid: its kernels do not serve these sizes: they count 9, and may count 0 to 8"),
        (np.zeros((3, 1), F32), r'input 1 \("x"\) has 2 dimensions; it must have 1'),
        (np.zeros(3), r"is float64\(3\), but the model was exported for float32\(3\)"),
    ]:
        with pytest.raises(RunnerError, match=said):
            model.run(wrong, outputs=2)


@pytest.mark.parametrize(
    ("symbol", "said"),
    [
        ({"dim": 1}, 'the size "n" is read of a dimension that is not there'),
        ({"input": 0}, "is read of a dimension that is not there"),
        ({"input": 7}, "is read of a dimension that is not there"),
        ({"factor": 0}, "its factor is 0"),
        ({"example": 10}, "its example outside of its range"),
        ({"most": 1 << 40}, "most is 1099511627776; it must be from 0 to 2147483647"),
        ({"name": "m"}, 'a size depends on "n", which is no symbol'),
    ],
)
def test_wrong_symbols(symbol: dict[str, Any], said: str, runner: Runner, kernels: bytes, tmp_path: Path) -> None:
    """A file whose sizes contradict one another is refused when it is opened."""
    with pytest.raises(RunnerError, match=said):
        runner.open(_of_any_rows(kernels, tmp_path / "rows.hybrid", **symbol))


def test_exported_for_many_sizes(runner: Runner, tmp_path: Path) -> None:
    """The same results as in Python, bit for bit, at every size."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10), nn.Softmax(-1)
    ).eval()
    shapes = ({0: torch.export.Dim("n", min=2, max=20)},)
    _, loaded = exported(model, (torch.randn(4, 3, 8, 8),), tmp_path, dynamic_shapes=shapes)
    opened = runner.open(tmp_path / "model.hybrid", threads=torch.get_num_threads())
    for n in (4, 2, 20, 7, 4):
        x = torch.randn(n, 3, 8, 8)
        np.testing.assert_array_equal(opened.run(x.numpy())[0], loaded(x).numpy())
    with pytest.raises(RunnerError, match="is 21; the model was exported for 2 to 20"):
        opened.run(np.zeros((21, 3, 8, 8), F32))


def test_text_is_generated_as_in_python(runner: Runner, tmp_path: Path) -> None:
    """Two entries over one cache: a chunk of a prompt, then token by token."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=2, n_positions=32, eos_token_id=1)
    model = transformers.GPT2LMHeadModel(config).eval()
    options = {"placement": "estimate", "strict": True}
    path = tmp_path / "model.hybrid"
    torch_hybrid_backend.export_generation(model, path, max_length=32, prefill_length=4, options=options)
    expected = list(torch_hybrid_backend.load(path).generate([5, 6, 7], 20, stop_tokens=()))
    opened = runner.open(path)
    ids, positions = np.array([[5, 6, 7, 0]]), np.arange(4)
    (logits,) = opened.run(ids, positions, np.array([2]), entry="prefill")
    found = [int(logits.argmax())]
    for position in range(3, 22):
        (logits,) = opened.run(np.array([found[-1:]]), np.array([position]), entry="decode")
        found.append(int(logits.argmax()))
    assert found == expected
