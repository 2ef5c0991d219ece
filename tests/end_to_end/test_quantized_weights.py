"""`precision="int8-weights"` and `"int4-weights"`, whole: right for any number of rows, live, and small."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torch_hybrid_backend
from tests.passes.cpu.test_quantize_weights import by_hand
from torch_hybrid_backend.core.precision import WeightForm
from torch_hybrid_backend.runtime.executor import BoundConstants

FORMS = ["int8-weights", "int4-weights"]


class Columns(nn.Module):
    """GPT-2's layer: a weight (K, N)."""

    def __init__(self, k: int, n: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(k, n)), nn.Parameter(torch.randn(n))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x, self.weight)


class Block(nn.Module):
    """Two layers, 160 -> 224 -> 131, whose widths are no whole panels; the second has its weight by columns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(160, 224), Columns(224, 131)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(nn.functional.gelu(self.first(x)))
        return result

    def exact(self, x: torch.Tensor, precision: str) -> torch.Tensor:
        """In float64, with the weights that the precision's document describes."""
        first, second = (by_hand(w.detach().contiguous(), precision) for w in (self.first.weight, self.second.weight.T))
        hidden = nn.functional.gelu(x.double() @ first.T + self.first.bias.double())
        return hidden @ second.T + self.second.bias.double()


def compiled_block(precision: str, **options: Any) -> tuple[Block, Callable[..., torch.Tensor]]:
    model = Block().eval()
    dynamic = options.pop("dynamic", False)
    options |= {"precision": precision, "strict": True}
    return model, torch.compile(model, backend="hybrid", dynamic=dynamic, options=options)


@pytest.mark.parametrize("precision", FORMS)
@torch.no_grad()
def test_weights_are_live(precision: str) -> None:
    """Results are those of the dequantized weights to float32's rounding, also after a weight changed."""
    model, compiled = compiled_block(precision, activation_bits=32)
    x = torch.randn(1, 160)
    for _ in range(2):
        for _ in range(2):
            torch.testing.assert_close(compiled(x).double(), model.exact(x, precision), rtol=1e-5, atol=1e-4)
        model.first.weight.mul_(-1.5)


@pytest.mark.parametrize("precision", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [8, 32])
@torch.no_grad()
def test_half_models(dtype: torch.dtype, precision: str, bits: int) -> None:
    """Models of a half type keep their weights in few bits too; one row and many are as near as that type is, or as rows of 8 bits are."""
    model = Block().to(dtype).eval()
    options = {"precision": precision, "strict": True, "placement": "estimate", "activation_bits": bits}
    for rows in (1, 3, 40):
        x = torch.randn(rows, 160, dtype=dtype)
        if rows == 1:
            (plan,) = torch_hybrid_backend.explain(model, x, options=options).plans
            assert plan.conversion is not None
            assert plan.conversion.converted == ((precision.removesuffix("-weights"), 2),)
            assert [region.engine for region in plan.regions] == ["tvm"]
        compiled = torch.compile(model, backend="hybrid", dynamic=False, options=options)
        for _ in range(2):
            got = compiled(x)
        want = model.exact(x, precision)
        assert got.dtype == dtype
        # Of 4 bits, numbers of few digits are often half way between two steps: float32's scale takes them to either side.
        most = 0.03 if precision == "int4-weights" else 0.01 if dtype == torch.bfloat16 else 0.002
        most += 0.01 if bits == 8 else 0
        assert (got.double() - want).norm() < most * want.norm()


@pytest.mark.parametrize("precision", FORMS)
@torch.no_grad()
def test_any_number_of_rows(precision: str) -> None:
    """A compilation serves every number of rows. As `activation_bits` says, rows keep 8 bits of each group, 16, but for one or two rows, or
    all."""
    allowed = {8: 0.02, 16: 1e-4, 32: 1e-6}
    for bits, most in allowed.items():
        model, compiled = compiled_block(precision, dynamic=True, activation_bits=bits)
        for rows in (8, 1, 2, 3, 5, 33, 129, 300):
            x = torch.randn(rows, 160)
            got, want = compiled(x).double(), model.exact(x, precision)
            exact = bits == 32 or (bits == 16 and rows <= 2)
            assert (got - want).norm() < (1e-6 if exact else most) * want.norm()


@torch.no_grad()
def test_groups_and_zero_points() -> None:
    """`weight_group_size` and `weight_zero_points` say how weights are kept; kernels unpack that too, for few rows and for many."""
    torch.manual_seed(0)
    model = nn.Linear(256, 224).eval()
    model.weight.add_(0.03)
    options = {
        "precision": "int4-weights",
        "weight_group_size": 128,
        "weight_zero_points": True,
        "strict": True,
        "activation_bits": 32,
    }
    compiled = torch.compile(model, backend="hybrid", dynamic=True, options=options)
    exact = by_hand(model.weight, "int4-weights", WeightForm(128, True))
    for rows in (3, 1, 40):
        x = torch.randn(rows, 256)
        want = x.double() @ exact.T + model.bias.double()
        torch.testing.assert_close(compiled(x).double(), want, rtol=1e-5, atol=1e-4)
    assert "dequantized_matmul" in str(torch_hybrid_backend.explain(model, x, options=options))


@pytest.mark.parametrize(("precision", "share"), [("int8-weights", 0.27), ("int4-weights", 0.15)])
@torch.no_grad()
def test_what_is_kept_of_weights(precision: str, share: float) -> None:
    """Beside the parameter itself, what calls read of it has at most this share of its bytes."""
    before = {id(found) for found in gc.get_objects() if type(found) is BoundConstants}
    model = nn.Linear(1024, 512, bias=False).eval()
    compiled = torch.compile(model, backend="hybrid", options={"precision": precision, "strict": True})
    compiled(torch.randn(1, 1024))
    gc.collect()
    made = [o for o in gc.get_objects() if type(o) is BoundConstants and id(o) not in before]
    assert made
    for bound in made:
        assert 0 < sum(tensor.nbytes for tensor in bound.owned.values()) <= share * model.weight.nbytes
        assert not bound.extra


@torch.no_grad()
def test_sixteen_clusters_are_looked_up() -> None:
    """Weights that `compress` shared are read as 4 bits and a table of 16 values: no float32 weight is made of them, the table is live, and
    `int4-weights` leaves them as they are."""
    before = {id(found) for found in gc.get_objects() if type(found) is BoundConstants}
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(264, 512), nn.ReLU(), nn.Linear(512, 131)).eval()
    shared = torch_hybrid_backend.compress(model, clusters=16)
    options = {"precision": "int4-weights", "strict": True}
    compiled = torch.compile(shared, backend="hybrid", dynamic=True, options=options)
    exact = copy.deepcopy(shared).double()
    for rows in (3, 1, 40, 1):
        x = torch.randn(rows, 264)
        torch.testing.assert_close(compiled(x).double(), exact(x.double()), rtol=1e-5, atol=1e-5)
    assert str(torch_hybrid_backend.explain(shared, x)).count("dequantized_matmul") >= 1
    gc.collect()
    made = [o for o in gc.get_objects() if type(o) is BoundConstants and id(o) not in before]
    float32 = sum(layer.weight.nbytes for layer in (model[0], model[2]))
    assert made
    for bound in made:
        assert 0 < sum(tensor.nbytes for tensor in bound.owned.values()) <= 0.17 * float32
    table = shared[0].parametrizations.weight.original
    table.mul_(-1.5)
    exact[0].parametrizations.weight.original.mul_(-1.5)
    for _ in range(2):
        torch.testing.assert_close(compiled(x).double(), exact(x.double()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("gpt2", "int4-weights"),
        pytest.param("gpt2", "int8-weights", marks=pytest.mark.full),
        pytest.param("llama", "int8-weights", marks=pytest.mark.full),
        pytest.param("llama", "int4-weights", marks=pytest.mark.full),
    ],
)
@torch.no_grad()
def test_language_models(name: str, precision: str) -> None:
    """Every layer with a weight worth it runs as a kernel that unpacks it; logits are about those of the model as written."""
    pytest.importorskip("transformers")
    model, tokens = language_model(name)
    explained = torch_hybrid_backend.explain(model, tokens, options={"precision": precision})
    kernels = [kernel for plan in explained.plans for region in plan.regions for kernel in region.kernels]
    assert sum("dequantized_matmul" in kernel for kernel in kernels) >= 9
    compiled = torch.compile(model, backend="hybrid", options={"precision": precision})
    got, want = compiled(tokens).logits, model(tokens).logits
    error = float((got - want).square().mean().sqrt() / want.square().mean().sqrt())
    assert error < (0.02 if precision == "int8-weights" else 0.25)


def language_model(name: str) -> tuple[nn.Module, torch.Tensor]:
    """A small one of random weights, of two layers, and tokens for it."""
    import transformers

    torch.manual_seed(0)
    common = {"vocab_size": 256, "use_cache": False}
    if name == "gpt2":
        config = transformers.GPT2Config(n_embd=128, n_layer=2, n_head=4, n_positions=64, **common)
        return transformers.GPT2LMHeadModel(config).eval(), torch.randint(0, 256, (1, 24))
    config = transformers.LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        **common,
    )
    return transformers.LlamaForCausalLM(config).eval(), torch.randint(0, 256, (1, 24))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_torchs_own_operator(dtype: torch.dtype) -> None:
    """`_weight_int8pack_mm` is a kernel of ours, for any number of rows of float32 or bfloat16."""

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("q", torch.randint(-128, 128, (96, 160), dtype=torch.int8))
            self.register_buffer("scales", torch.rand(96, dtype=dtype))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.aten._weight_int8pack_mm(x, self.q, self.scales)

    torch.manual_seed(0)
    model = Packed()
    compiled = torch.compile(model, backend="hybrid", dynamic=True, options={"strict": True})
    for rows in (3, 1, 40):
        x = torch.randn(rows, 160).to(dtype)
        want = x.double() @ (model.q.double() * model.scales.double()[:, None]).T
        got = compiled(x)
        assert got.dtype == dtype
        tolerance = 1e-5 if dtype == torch.float32 else 8e-3
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance * float(want.abs().max()))
    explained = torch_hybrid_backend.explain(model, x)
    assert "dequantized_matmul" in str(explained)
