"""The user's line: the backend's name, its options, its modes, and what bad ones get."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch

from tests.end_to_end import models
from torch_hybrid_backend.engines.cpu.engine import TvmEngine
from torch_hybrid_backend.errors import ConfigError

_ONE_LINE = """
import sys, torch
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU()).eval()
x = torch.randn(4, 8)
assert "torch_hybrid_backend" not in sys.modules
with torch.no_grad():
    torch.testing.assert_close(torch.compile(model, backend="hybrid")(x), model(x))
assert "torch_hybrid_backend" in sys.modules
print("tvm" in sys.modules)
"""


def test_one_line_needs_no_import() -> None:
    """torch.compile(model, backend="hybrid") works in a process that never imported the package, nor ever imports TVM."""
    done = subprocess.run(
        [sys.executable, "-c", _ONE_LINE],
        capture_output=True,
        text=True,
        timeout=300,
        env=dict(os.environ),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "False"


def test_import_is_cheap() -> None:
    """Importing the package imports neither Dynamo nor TVM: it costs next to nothing over `import torch`."""
    code = (
        "import sys, torch; before = set(sys.modules); import torch_hybrid_backend; print(*set(sys.modules) - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    imported = done.stdout.split()
    assert len(imported) <= 12  # the registration of the mega-cache
    assert all(module.startswith("torch_hybrid_backend") for module in imported)


@pytest.mark.parametrize(
    "order", ["{torch}; import torch_hybrid_backend", "import torch_hybrid_backend; {torch}; torch_hybrid_backend.load"]
)
def test_an_old_pytorch_is_named(order: str) -> None:
    """The error says which versions will do, not what an old one lacks."""
    code = order.format(torch="import torch; torch.__version__ = '2.10.1+cpu'")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    told = "ImportError: torch_hybrid_backend needs PyTorch 2.11 or later, and this is 2.10.1+cpu: pip install --upgrade torch"
    assert done.stderr.splitlines()[-1] == told


def test_backend_is_listed() -> None:
    """Dynamo lists the backend by its entry point."""
    assert "hybrid" in torch._dynamo.list_backends()


@pytest.mark.parametrize("mode", [None, "default", "reduce-overhead", "max-autotune"])
def test_modes(mode: str | None) -> None:
    """The modes torch users know are accepted and give right answers."""
    model, x = models.perceptron(), models.rows()
    with torch.no_grad():
        compiled = torch.compile(model, backend="hybrid", mode=mode)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)


def test_options_are_used() -> None:
    """options= overrides the environment: with every engine but eager disabled, all regions are gone."""
    import torch_hybrid_backend

    with torch.no_grad():
        explanation = torch_hybrid_backend.explain(
            models.perceptron(), models.rows(), options={"disable_engines": "tvm"}
        )
    assert {node.engine for plan in explanation.plans for node in plan.nodes} == {"eager"}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"colour": 1}, "placement"),
        ({"placement": "guess"}, "estimate"),
        ({"verify": 3}, "always"),
        ({"engines": "gpu9000"}, "tvm"),
        ({"min_region_nodes": "many"}, "whole number"),
        ({"verifyy": "off"}, "Did you mean 'verify'?"),
        ({"engines": "tvn"}, "Did you mean 'tvm'?"),
        ({"max_autotune": True}, "inductor"),
        ({"triton.cudagraphs": True}, "inductor"),
    ],
)
def test_bad_options(options: dict[str, object], named: str) -> None:
    """An unknown option, a wrong type or an unknown engine is one error that says what is legal, without a report of Dynamo's around it."""
    with pytest.raises(ConfigError) as error:
        torch.compile(models.perceptron(), backend="hybrid", options=options)(models.rows())
    message = str(error.value)
    assert named in message
    assert "\n" not in message
    shown = "".join(traceback.format_exception(error.value))
    assert "output_graph.py" not in shown
    assert "torch_hybrid_backend/" not in shown
    assert shown.count('File "') <= 5  # this file, and the calls of the compiled module


def test_bad_environment(settings: pytest.MonkeyPatch) -> None:
    """An illegal value of a HYBRID_* variable is an error that lists the legal ones."""
    settings.setenv("HYBRID_PLACEMENT", "somewhere")
    with pytest.raises(ConfigError, match="'estimate', 'measure', 'tune'"):
        torch.compile(models.perceptron(), backend="hybrid")(models.rows())


def test_only_a_new_graph_starts_the_kernel_compiler_early(settings: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Engines get ready while the graph is traced, unless its kernels are in the cache."""
    settings.setenv("HYBRID_CACHE_DIR", str(tmp_path))
    asked: list[int] = []
    real = TvmEngine.prepare
    settings.setattr(TvmEngine, "prepare", lambda self, operators: (asked.append(operators), real(self, operators)))
    x = torch.randn(3, 5)
    for _ in range(2):
        torch._dynamo.reset()
        assert torch.equal(torch.compile(torch.relu, backend="hybrid")(x), x.relu())
    assert len(asked) == 1
