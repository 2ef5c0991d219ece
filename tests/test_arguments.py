"""Arguments that users hand to the functions of this package and cannot mean: one sentence with the fault, what is legal, and what to do."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import torch_hybrid_backend
from torch_hybrid_backend.arguments import (
    check_metric,
    check_model,
    check_module,
    check_seconds,
    described,
    is_compiled,
    uncompiled,
)
from torch_hybrid_backend.errors import ArgumentError, HybridError
from torch_hybrid_backend.machine import unsupported


def _model() -> nn.Module:
    return nn.Linear(8, 64).eval()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda t: t.explain("resnet50", torch.zeros(1)),
            "explain got the str 'resnet50'; its first argument must be a model",
        ),
        (
            lambda t: t.explain(nn.Linear, torch.zeros(1)),
            "explain got the class Linear; pass an instance of it: Linear(...)",
        ),
        (lambda t: t.bisect(3), "bisect got the int 3; its first argument must be a model"),
        (lambda t: t.wait_for_builds("60"), "timeout_s is '60'; it must be a number of seconds"),
        (lambda t: t.wait_for_builds(-1), "timeout_s is -1; it must be a number of seconds"),
        (
            lambda t: t.quantize(_model(), torch.zeros(4, 8)),
            r"got a tensor of shape (4, 8) as its loader.* a list of them, such as [x]",
        ),
        (lambda t: t.quantize(_model(), np.zeros((4, 8))), "got a ndarray as its loader"),
        (lambda t: t.quantize(_model(), {"input": torch.zeros(4, 8)}), "got a dict as its loader"),
        (lambda t: t.quantize(_model(), 3), "got the int 3 as its loader"),
        (
            lambda t: t.quantize(_model(), [torch.zeros(4, 8)], metric=3),
            "quantize got the int 3 as its metric; it must be a function that takes a module",
        ),
        (
            lambda t: t.quantize(torch.compile(_model())),
            "quantize got a compiled model; pass the model that was given to torch.compile",
        ),
        (lambda t: t.quantize(lambda x: x), "quantize got a function; its first argument must be a model"),
        (lambda t: t.compress(torch.compile(_model()), clusters=4), "compress got a compiled model"),
        (lambda t: t.compress("resnet50", clusters=4), "compress got the str 'resnet50'"),
        (lambda t: t.compress(_model()), "nothing to do: give sparsity"),
        (lambda t: t.compress(_model(), sparsity=2), "sparsity=2: must be a share between 0 and 1"),
        (lambda t: t.compress(_model(), clusters=4, exclude=["wght"]), "near names: weight"),
        (
            lambda t: t.save_compressed(_model(), "/nowhere/at/all/model"),
            "there is no folder /nowhere/at/all; make the folder first",
        ),
        (lambda t: t.save_compressed(_model(), "/"), "cannot write /: it is a folder"),
        (
            lambda t: t.save_compressed(3, "model"),
            "save_compressed got the int 3; it must be a model or a dict of tensors",
        ),
        (lambda t: t.load_compressed("model", into="resnet50"), "load_compressed got the str 'resnet50'"),
    ],
)
def test_a_wrong_argument_is_one_sentence(call: Callable[[object], object], said: str) -> None:
    """ArgumentError, a HybridError and a ValueError, before anything is done."""
    with pytest.raises(ArgumentError) as raised:
        call(torch_hybrid_backend)
    message = str(raised.value)
    assert all(part in message for part in said.split(".* ")), message
    assert "\n" not in message
    assert isinstance(raised.value, HybridError)
    assert isinstance(raised.value, ValueError)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("other", "said"),
    [
        (nn.Linear(128, 32), "'bias' is (64,) in the file and (32,) in the model"),
        (
            nn.Sequential(nn.Linear(128, 64)),
            "the file lacks '0.bias', '0.weight', and the model lacks 'bias', 'weight'",
        ),
        (nn.Linear(128, 64, bias=False), "the model lacks 'bias'"),
    ],
)
def test_a_file_of_another_model(other: nn.Module, said: str, shared: bool, tmp_path: Path) -> None:
    """The error says what the file has and the model has not, and the model is left as it is."""
    model: nn.Module = nn.Linear(128, 64)
    if shared:
        model = torch_hybrid_backend.compress(model, clusters=4)
    torch_hybrid_backend.save_compressed(model, tmp_path / "model")
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(ArgumentError, match=re.escape(said)) as raised:
        torch_hybrid_backend.load_compressed(tmp_path / "model", into=other)
    assert "\n" not in str(raised.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())


def test_right_arguments_pass() -> None:
    """Modules, functions, seconds of any number type, none."""
    check_model(nn.Linear(1, 1), "f")
    check_model(torch.compile(_model()), "f")
    check_module(nn.Linear(1, 1), "f")
    check_metric(None, "f")
    check_metric(len, "f")
    for seconds in (None, 0, 1.5, math.inf):
        check_seconds(seconds, "timeout_s")
    for wrong in (True, math.nan):
        with pytest.raises(ArgumentError):
            check_seconds(wrong, "timeout_s")


def test_what_torch_compile_returns_is_recognised() -> None:
    """Modules and functions that `torch.compile` returns are recognised; nothing else."""
    assert is_compiled(torch.compile(_model()))
    assert is_compiled(torch.compile(lambda x: x))
    assert not is_compiled(_model())
    assert not is_compiled(len)


def test_values_in_words() -> None:
    """Short ones as they are, others by their type."""
    assert [described(value) for value in ("x", 3, None, [1], torch.zeros(2, 3))] == [
        "the str 'x'",
        "the int 3",
        "None",
        "a list",
        "a tensor of shape (2, 3)",
    ]


@pytest.mark.parametrize(("name", "nearest"), [("explainn", "explain"), ("quantise", "quantize"), ("Confi", "Config")])
def test_a_wrong_attribute_of_the_package_suggests_the_nearest(name: str, nearest: str) -> None:
    """And `dir` shows what there is, before it is imported."""
    with pytest.raises(AttributeError, match=re.escape(f"has no attribute '{name}'. Did you mean '{nearest}'?")):
        getattr(torch_hybrid_backend, name)
    assert nearest in dir(torch_hybrid_backend)


def test_other_systems_are_told_what_is_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message names both systems; a supported one gets nothing."""
    assert unsupported() == ""
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert unsupported() == ""
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    assert unsupported() == "torch_hybrid_backend supports Linux on x86-64 and AArch64; this is Darwin on arm64"


def test_a_compiled_model_is_explained_as_what_it_was_made_of() -> None:
    """A module or a function; other values are what they are."""
    model = _model()
    assert uncompiled(torch.compile(model)) is model
    assert uncompiled(torch.compile(_model)) is _model
    assert uncompiled(model) is model
    with torch.no_grad():
        assert str(torch_hybrid_backend.explain(torch.compile(model, backend="hybrid"), torch.zeros(2, 8))).startswith(
            "Linear ("
        )
