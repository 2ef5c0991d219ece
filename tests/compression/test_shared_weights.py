"""Pruned and shared weights: their values, the form of models; models run, train, save and compile."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.models import ZOO, tensors
from torch_hybrid_backend import compress, explain, load_compressed, save_compressed
from torch_hybrid_backend.compression.clusters import k_means
from torch_hybrid_backend.errors import ArgumentError, HybridError


def _network() -> nn.Sequential:
    """Convolutions and linear layers with rows of odd and even lengths, and layers too small to compress."""
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(3, 13, 5),
        nn.BatchNorm2d(13),
        nn.ReLU(),
        nn.Conv2d(13, 20, 3),
        nn.Flatten(),
        nn.Linear(2000, 12),
    ]
    return nn.Sequential(*layers, nn.Linear(12, 3)).eval()


_IMAGE = (2, 3, 16, 16)


@pytest.mark.parametrize("clusters", [2, 16, 17, 256])
def test_weights_become_the_values_of_their_clusters(clusters: int) -> None:
    """Each element becomes the nearest value of its weight, as k-means chose them. Small parameters and the original model stay."""
    model = _network()
    before = copy.deepcopy(model.state_dict())
    small = compress(model, clusters=clusters)
    weights = {"0": 975, "3": 2340, "5": 24_000}
    for name, size in weights.items():
        original, shared = model.get_submodule(name).weight, small.get_submodule(name).weight
        assert original.numel() == size
        if size < 1024:
            assert torch.equal(original, shared)
            continue
        assert shared.shape == original.shape
        values = original.detach().double().numpy()
        centres = k_means(values.ravel(), clusters)
        assert len(np.unique(shared.detach())) == clusters
        np.testing.assert_allclose(np.unique(shared.detach()), centres, rtol=1e-6)
        error = np.abs(values - shared.detach().numpy())
        assert (error <= np.abs(values[..., None] - centres).min(-1) + 1e-7).all()
    assert isinstance(small, nn.Sequential)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    indices = small[5].parametrizations.weight[0].indices
    assert indices.shape == ((12, 1000) if clusters <= 16 else (12, 2000))


@pytest.mark.parametrize("clusters", [None, 16, 100])
def test_the_least_weights_become_zero(clusters: int | None) -> None:
    """The given share of all elements becomes exactly zero, in each weight the least ones. Other elements are as without pruning."""
    model = _network()
    small = compress(model, sparsity=0.6, clusters=clusters)
    found = [(model[k].weight, small[k].weight) for k in (3, 5)]
    total = sum(weight.numel() for weight, _ in found)
    assert sum(int((pruned == 0).sum()) for _, pruned in found) == round(0.6 * total)
    for weight, pruned in found:
        zero = pruned == 0
        assert weight[zero].abs().max() <= weight[~zero].abs().min()
        if clusters is None:
            assert torch.equal(pruned[~zero], weight[~zero])
        else:
            assert len(pruned.unique()) == clusters
    if clusters is None:  # zeros stay zeros
        assert torch.equal(compress(small, clusters=16)[5].weight == 0, small[5].weight == 0)


def test_layers_of_other_scales_are_pruned_alike() -> None:
    """A layer with a thousand times smaller weights loses as many elements as before."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    before = [int((layer.weight == 0).sum()) for layer in compress(model, sparsity=0.5)]
    with torch.no_grad():
        model[0].weight.mul_(2.0**-10)
    after = [int((layer.weight == 0).sum()) for layer in compress(model, sparsity=0.5)]
    assert before == after
    assert min(before) > 1000


@pytest.mark.parametrize("clusters", [None, 2])
def test_each_weight_keeps_its_largest_element(clusters: int | None) -> None:
    """Each weight keeps its largest element at any sparsity, unless all its elements are zero."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32))
    nn.init.zeros_(model[2].weight)
    small = compress(model, sparsity=0.99999, clusters=clusters)
    for k in (0, 1):
        weight, kept = model[k].weight.flatten(), small[k].weight.flatten()
        assert kept.nonzero().tolist() == [[int(weight.abs().argmax())]]
        assert torch.equal(kept[kept != 0], weight[kept != 0])
    assert not small[2].weight.any()


@pytest.mark.parametrize("name", ["resnet50", "gpt2", "lstm"])
def test_models_of_the_zoo_keep_their_form(name: str, tmp_path: Path) -> None:
    """A compressed model equals the model with those weights bit for bit, and returns the same structure; ties stay. A file gives a fresh model
    the same outputs, with an eighth of the weights' size."""
    model = ZOO[name].build("small")
    inputs = ZOO[name].inputs("small", batch=2)
    small = compress(model, clusters=16)
    if name == "gpt2":
        assert small.lm_head.parametrizations.weight.original is small.transformer.wte.parametrizations.weight.original
    save_compressed(small, tmp_path / "file")
    fresh = ZOO[name].build("small", seed=1)
    load_compressed(tmp_path / "file", into=fresh)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            shared = operator.attrgetter(path)(small)
            assert torch.equal(parameter, shared) == (parameter.dim() < 2 or parameter.numel() < 1024)
            parameter.copy_(shared)
        wanted, found, loaded = (m(*inputs) for m in (model, small, fresh.eval()))
    assert type(found) is type(wanted)
    for a, b, c in zip(tensors(wanted), tensors(found), tensors(loaded), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    weights = sum(p.nbytes for p in model.parameters() if p.dim() >= 2 and p.numel() >= 1024)
    rest = sum(t.nbytes for t in model.state_dict().values()) - weights
    assert (tmp_path / "file").stat().st_size < 0.14 * weights + 1.3 * rest + 300 * len(model.state_dict())


def test_states_load_into_models_of_the_same_form(tmp_path: Path) -> None:
    """`load_state_dict` and `load_compressed` load the state of a compressed model into another compressed model."""
    one, other = compress(_network(), clusters=16), compress(_network(), sparsity=0.3, clusters=16)
    x = torch.randn(_IMAGE)
    save_compressed(other, tmp_path / "file")
    wanted = other(x)
    one.load_state_dict(other.state_dict())
    assert torch.equal(one(x), wanted)
    again = compress(_network(), clusters=16)
    load_compressed(tmp_path / "file", into=again)
    assert torch.equal(again(x), wanted)


def test_gradients_are_summed_by_cluster() -> None:
    """The table's gradient is the sum of the gradients of its elements: training moves the shared values, and a zero can be kept by hand."""
    layer = compress(nn.Linear(64, 64), clusters=16)
    x = torch.randn(5, 64)
    layer(x).square().sum().backward()
    weight = layer.weight.detach().requires_grad_()
    torch.nn.functional.linear(x, weight, layer.bias).square().sum().backward()
    table = layer.parametrizations.weight.original
    wanted = torch.stack([weight.grad[weight == value].sum() for value in table])
    torch.testing.assert_close(table.grad, wanted)
    assert not compress(
        nn.Linear(64, 64).requires_grad_(False), clusters=16
    ).parametrizations.weight.original.requires_grad


def test_compiled_models_compute_the_same_and_see_their_tables_change() -> None:
    """A kernel looks up weights as it multiplies. Weights whose rows are no whole words are looked up once. The next call sees changes of
    tables and indices."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2000, 301), nn.ReLU(), nn.Linear(301, 100)).eval()
    model = compress(network.double(), sparsity=0.5, clusters=16)
    single = copy.deepcopy(model).float()
    x = torch.randn(8, 2000)
    with torch.no_grad():
        explanation = explain(single, x, options={"engines": "tvm"})
        operators = [node.operator for node in explanation.plans[0].nodes]
        assert [operators.count(f"aten.{name}.default") for name in ("addmm", "index_select")] == [2, 1]
        kernels = [kernel for region in explanation.plans[0].regions for kernel in region.kernels]
        assert sum("dequantized_matmul" in kernel for kernel in kernels) == 1
        compiled = torch.compile(single, backend="hybrid", options={"engines": "tvm", "strict": True})
        torch.testing.assert_close(compiled(x).double(), model(x.double()), rtol=1e-4, atol=1e-5)
        for m in (model, single):
            m[0].parametrizations.weight.original.mul_(-2)
            m[2].parametrizations.weight[0].indices.bitwise_xor_(0x11)
        torch.testing.assert_close(compiled(x).double(), model(x.double()), rtol=1e-4, atol=1e-5)


def test_what_is_excluded_stays() -> None:
    """Parameters are excluded by name, by pattern or by module; a tied weight by any of its names."""
    model = ZOO["gpt2"].build("small")
    for exclude in ("*.h.0.*", "transformer.h.0", "transformer.h.0.*.weight"):
        small = compress(model, clusters=16, exclude=[exclude])
        assert torch.equal(small.transformer.h[0].mlp.c_fc.weight, model.transformer.h[0].mlp.c_fc.weight)
        assert not torch.equal(small.transformer.h[1].mlp.c_fc.weight, model.transformer.h[1].mlp.c_fc.weight)
    small = compress(model, clusters=16, exclude=["lm_head.weight"])
    assert small.transformer.wte.weight is small.lm_head.weight
    layer = nn.Linear(64, 64)
    twice = nn.ModuleDict({"a": layer, "b": layer, "c": nn.Linear(64, 64)})
    assert torch.equal(compress(twice, clusters=16, exclude=["b"])["a"].weight, layer.weight)
    small = compress(twice, clusters=16)
    assert small["a"] is small["b"]
    assert len(small["b"].weight.unique()) == 16


def _poisoned() -> nn.Module:
    model = _network()
    with torch.no_grad():
        model[3].weight[0, 0, 0, 0] = float("nan")
    return model


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: compress(_network()), "nothing to do: give sparsity"),
        (lambda: compress(_network(), sparsity=1.0), "sparsity=1.0: must be"),
        (lambda: compress(_network(), sparsity=float("nan")), "sparsity=nan: must be"),
        (lambda: compress(_network(), clusters=1), "clusters=1: must be a whole number of 2 to 256"),
        (lambda: compress(_network(), clusters=16.0), "clusters=16.0: must be a whole number"),  # type: ignore[arg-type]
        (lambda: compress(_poisoned(), clusters=4), r"3\.weight has NaN"),
        (lambda: compress(nn.Linear(3, 3), clusters=4), "no weight to compress"),
        (lambda: compress(_network(), clusters=4, exclude=["5.weigh"]), r"'5\.weigh'.*near names: 5\.weight"),
        (lambda: compress(_network(), clusters=4, exclude="5.weight"), "must be a list or tuple"),
    ],
)
def test_bad_input_gets_one_error(call: Callable[[], object], said: str) -> None:
    """Bad input gets one error that says what is wrong and what is legal."""
    with pytest.raises((ValueError, HybridError), match=said):
        call()


def test_files_of_other_models_are_refused(tmp_path: Path) -> None:
    """Files of models with other sizes or names are refused, and files with indices beyond their table."""
    path = tmp_path / "file"
    save_compressed(compress(_network(), clusters=16), path)
    wider = _network()
    wider[3] = nn.Conv2d(12, 20, 3)
    with pytest.raises(
        HybridError, match=r"3\.weight: the tensors under .* are no shared weight of the shape \(20, 12, 3, 3\)"
    ):
        load_compressed(path, into=wider)
    with pytest.raises(ArgumentError, match="holds the weights of another model than this Linear"):
        load_compressed(path, into=nn.Linear(12, 12))
    state = compress(_network(), clusters=5).state_dict()
    state["5.parametrizations.weight.0.indices"][7, 7] = 0x60
    save_compressed(state, path)
    with pytest.raises(HybridError, match=r"5\.weight: the tensors under"):
        load_compressed(path, into=_network())
