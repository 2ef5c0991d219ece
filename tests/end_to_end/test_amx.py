"""Models on AMX's tiles, on a processor that has them; what such kernels compute is tested on any, by their schedules' tests."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import torch_hybrid_backend
from tests.engines.cpu.amx_for_tests import ODD_NUMBERS
from torch_hybrid_backend.engines.cpu.backend import TvmBackend
from torch_hybrid_backend.engines.cpu.variants import amx, attention

pytestmark = pytest.mark.skipif(
    "amx_bf16" not in TvmBackend().target.features, reason="needs AMX, and permission to use it"
)

_OPTIONS = {"placement": "estimate"}
# What kernels on tiles are called.
_TILES = {"tile", "word"}

_MODEL = """
import math
import torch
import torch_hybrid_backend
from torch_hybrid_backend.engines.cpu.variants import amx
amx._CERTAIN_COST = math.inf  # whatever the estimate says of float32
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256)).eval()
x = torch.randn(64, 256)

def check(*, on_tiles=True):
    with torch.no_grad():
        plan = str(torch_hybrid_backend.explain(model, x, options={"placement": "estimate"}))
        assert ("tile_matmul" in plan) == on_tiles, plan
        got = torch.compile(model, backend="hybrid", options={"placement": "estimate"})(x)
        want = model.double()(x.double())
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
"""


def _run(code: str) -> None:
    subprocess.run([sys.executable, "-c", _MODEL + code], check=True, timeout=300)


@pytest.fixture
def prefer_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products that there are tiles for are on tiles, whatever they are estimated to cost."""
    monkeypatch.setattr(amx, "_CERTAIN_COST", math.inf)
    monkeypatch.setattr(attention, "_CERTAIN_COST", math.inf)


def _kernels(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> list[str]:
    """The names of a plan's kernels, without what they are fused with."""
    plans = torch_hybrid_backend.explain(function, *inputs, options=_OPTIONS).plans
    return [name.split("_")[0] for plan in plans for region in plan.regions for name in region.kernels]


def test_threads_and_onednn_in_between(prefer_tiles: None) -> None:
    """Several threads call a model while PyTorch's own products run on tiles, configured otherwise, on the same cores."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 96)).eval()
    x, a, b = torch.randn(100, 256), torch.randn(64, 128).bfloat16(), torch.randn(128, 48).bfloat16()
    with torch.no_grad():
        want, product = copy.deepcopy(model).double()(x.double()), a.double() @ b.double()
        assert _kernels(model, x) == ["tile", "tile"]
        compiled = torch.compile(model, backend="hybrid", options=_OPTIONS)
        compiled(x)

        def call(_: int) -> None:
            with torch.no_grad():
                torch.testing.assert_close(compiled(x).double(), want, rtol=1e-5, atol=1e-6)
                torch.testing.assert_close((a @ b).double(), product, rtol=1e-2, atol=0.2)

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(call, range(40)))


def test_a_forked_process_has_the_permission() -> None:
    """A forked process runs the same kernels as its parent, which has asked."""
    _run("""
import os
from torch_hybrid_backend.machine import may_use_tiles
assert may_use_tiles()
child = os.fork()
if child == 0:
    try:
        check()
    except BaseException:
        os._exit(1)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
""")


def test_permission_refused() -> None:
    """A thread's signal stack that is too small for the tiles: Linux refuses, and kernels do without."""
    _run("""
import ctypes
from torch_hybrid_backend.engines.cpu.backend import TvmBackend
from torch_hybrid_backend.machine import may_use_tiles

class Stack(ctypes.Structure):
    _fields_ = [("sp", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

room = ctypes.create_string_buffer(8192)
stack = Stack(ctypes.addressof(room), 0, 8192)
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None) == 0
assert not may_use_tiles()
assert not [name for name in TvmBackend().target.features if name.startswith("amx")]
check(on_tiles=False)
""")


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize("kind", ["linear", "convolution", "attention"])
def test_float32_with_numbers_that_cannot_be_split(prefer_tiles: None, kind: str) -> None:
    """float32 on bfloat16 tiles: as float64 eager, rounded, with an ordinary number and with each that no three bfloat16 are."""
    torch.manual_seed(0)
    function: Callable[..., torch.Tensor]
    if kind == "linear":
        function, inputs = torch.nn.Linear(256, 512), [torch.randn(64, 256)]
    elif kind == "convolution":
        function, inputs = torch.nn.Conv2d(64, 96, 3, stride=2, padding=1), [torch.randn(2, 64, 20, 20)]
    else:
        function, inputs = _attention, [torch.randn(1, 4, 256, 64) for _ in range(3)]
    where = {"linear": (7, 5), "convolution": (1, 3, 6, 5), "attention": (0, 3, 40, 5)}[kind]
    exact = copy.deepcopy(function).double() if isinstance(function, torch.nn.Module) else function
    with torch.no_grad():
        assert _TILES & set(_kernels(function, *inputs))
        compiled = torch.compile(function, backend="hybrid", options=_OPTIONS)
        compiled(*inputs)
        for number in (1.0, *ODD_NUMBERS):
            for place in range(len(inputs)):
                odd = [x.clone() for x in inputs]
                odd[place][where] = number
                want = exact(*(x.double() for x in odd)).float()
                torch.testing.assert_close(compiled(*odd), want, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(("dtype", "zero"), [(torch.uint8, 0), (torch.uint8, 5), (torch.int8, 0)])
def test_groups_of_integers_with_a_zero_point(dtype: torch.dtype, zero: int) -> None:
    """Exact; what moves the image is taken off each group's sums, whose columns are padded apart from the others'."""
    import torch.ao.quantization.fx._decomposed  # defines the operators

    torch.manual_seed(0)
    limits = torch.iinfo(dtype)
    x = torch.randint(limits.min, limits.max + 1, (2, 128, 12, 13), dtype=dtype)
    w = torch.randint(-127, 128, (80, 64, 3, 3), dtype=torch.int8)
    dequantize = torch.ops.quantized_decomposed.dequantize_per_tensor

    class Convolution(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", w)  # known ahead, as the weights of models are

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            image = dequantize(x, 1.0, zero, limits.min, limits.max, dtype)
            weight = dequantize(self.weight, 1.0, 0, -128, 127, torch.int8)
            return torch.nn.functional.conv2d(image, weight, padding=1, groups=2)

    with torch.no_grad():
        convolution = Convolution()
        assert "tile" in _kernels(convolution, x)
        compiled = torch.compile(convolution, backend="hybrid", options=_OPTIONS)
        compiled(x)
        got = compiled(x)
    want = torch.nn.functional.conv2d(x.double() - zero, w.double(), padding=1, groups=2)
    assert torch.equal(got.double(), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_not_finite_stays_in_its_group(prefer_tiles: None, dtype: torch.dtype) -> None:
    """A NaN or an infinity reaches the outputs that read its channel, and no others."""
    torch.manual_seed(0)
    layer = torch.nn.Conv2d(128, 96, 3, padding=1, groups=4).to(dtype)
    x = torch.randn(1, 128, 14, 14).to(dtype)
    x[0, 3, 5, 5], x[0, 40, 2, 2] = float("nan"), float("inf")
    with torch.no_grad():
        assert "tile" in _kernels(layer, x)
        compiled = torch.compile(layer, backend="hybrid", options=_OPTIONS)
        compiled(x)
        got, want = compiled(x).double(), layer.double()(x.double())
    assert torch.equal(got.isfinite(), want.isfinite())
    finite = want.isfinite()
    torch.testing.assert_close(got[finite], want[finite], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sizes_known_at_run_time(prefer_tiles: None, dtype: torch.dtype) -> None:
    """A compilation of linear layers serves any number of rows, and one of convolutions any number of images, both on tiles."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 96)).to(dtype)
    pixels = torch.nn.Sequential(torch.nn.Conv2d(32, 64, 3, 2, 1), torch.nn.ReLU(), torch.nn.Conv2d(64, 64, 1))
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    for model, first, *others in (
        (layers, (3, 40, 256), (1, 1, 256), (5, 33, 256), (1, 700, 256)),
        (pixels.to(dtype), (2, 32, 14, 14), (1, 32, 14, 14), (9, 32, 14, 14)),
    ):
        torch._dynamo.reset()
        exact = copy.deepcopy(model).double()
        compiled = torch.compile(model, backend="hybrid", dynamic=None, options=_OPTIONS)
        with torch.no_grad():
            for shape in (first, *others):
                x = torch.randn(shape).to(dtype)
                for dim in (0, 1) if len(shape) == 3 else (0,):
                    torch._dynamo.maybe_mark_dynamic(x, dim)
                torch.testing.assert_close(compiled(x).double(), exact(x.double()), rtol=tolerance, atol=tolerance)
            x = torch.randn(first).to(dtype)
            torch._dynamo.maybe_mark_dynamic(x, 0)
            assert _kernels(model, x).count("tile") == 2
