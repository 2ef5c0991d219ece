"""Functions of `aot_compile`, saved and loaded: what is computed, and what need not be done again."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.driver import model_for_tests
from tests.driver.model_for_tests import Model
from torch_hybrid_backend.capture import aot
from torch_hybrid_backend.codegen.workers.pool import KernelCompiler
from torch_hybrid_backend.driver.ahead_of_time import AheadOfTimeGraph
from torch_hybrid_backend.errors import ArtifactError, ConfigError, NotExportableError

pytestmark = pytest.mark.skipif(
    not torch._dynamo.config.enable_aot_compile, reason="this torch has aot_compile switched off"
)

_PROGRAM = """
import json, sys
import torch
from tests.driver.model_for_tests import Model
model = Model().eval()
x = torch.randn(16, 64)
told = {}
with torch.no_grad():
    if sys.argv[1] == "save":
        compiled = torch.compile(model, backend="hybrid", fullgraph=True).forward.aot_compile(((x,), {}))
        compiled.save_compiled_function(sys.argv[2])
    else:
        compiled = torch.compiler.load_compiled_function(open(sys.argv[2], "rb"))
        from torch_hybrid_backend.capture import aot
        from torch_hybrid_backend.codegen.workers.pool import KernelCompiler
        compile, trace, made, traced = KernelCompiler.compile, aot.trace, [], []
        KernelCompiler.compile = lambda self, jobs, *rest: (made.extend(jobs), compile(self, jobs, *rest))[1]
        aot.trace = lambda *args, **kwargs: (traced.append(args), trace(*args, **kwargs))[1]
        torch.testing.assert_close(compiled(model, x), model(x), rtol=1e-4, atol=1e-5)
        model.first.weight.mul_(2)
        torch.testing.assert_close(compiled(model, x), model(x), rtol=1e-4, atol=1e-5)
        told = {"compiled": len(made), "traced": len(traced)}
print(json.dumps(told))
"""


def test_another_process_compiles_and_traces_nothing(tmp_path: Path) -> None:
    """The file brings all that was compiled, to a process that did not import the package; weights are live."""
    told: list[dict[str, int]] = []
    for how in ("save", "load"):
        environment = {**os.environ, "HYBRID_CACHE_DIR": str(tmp_path / how)}
        command = [sys.executable, "-c", _PROGRAM, how, str(tmp_path / "model.pt")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        told.append(json.loads(done.stdout.splitlines()[-1]))
    assert told[1] == {"compiled": 0, "traced": 0}


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    """Function that saves what `aot_compile` returned, and loads it with another cache, which is empty."""
    monkeypatch.setenv("HYBRID_CACHE_DIR", str(tmp_path / "one"))

    def load(compiled: Any) -> Any:
        compiled.save_compiled_function(str(tmp_path / "saved"))
        monkeypatch.setenv("HYBRID_CACHE_DIR", str(tmp_path / "other"))
        with (tmp_path / "saved").open("rb") as file:
            return torch.compiler.load_compiled_function(file)

    return load


def _compiled(model: Any, *args: Any, **settings: Any) -> Any:
    compiled = torch.compile(model, backend="hybrid", fullgraph=True, **settings)
    return getattr(compiled, "forward", compiled).aot_compile((args, {}))


def test_sizes_that_vary(loaded: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A dimension that was marked as dynamic may differ from call to call, and nothing is compiled for it."""
    model, x = Model().eval(), torch.randn(16, 64)
    torch._dynamo.mark_dynamic(x, 0)
    with torch.no_grad():
        function = loaded(_compiled(model, x))
        monkeypatch.setattr(KernelCompiler, "compile", None)
        for rows in (16, 3, 40):
            x = torch.randn(rows, 64)
            torch.testing.assert_close(function(model, x), model(x), rtol=1e-4, atol=1e-5)


def test_training(loaded: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients and statistics are eager's. Compiling changes neither, and compiles the backward graph as well."""
    model, x = Model().train(), torch.randn(16, 64)
    before = copy.deepcopy(model.state_dict())
    compiled = _compiled(model, x)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    function, eager = loaded(compiled), copy.deepcopy(model)
    monkeypatch.setattr(KernelCompiler, "compile", None)
    for _ in range(2):
        function(model, x).square().sum().backward()
        eager(x).square().sum().backward()
    for (name, value), expected in zip(model.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(value.grad, expected.grad, rtol=1e-3, atol=1e-3, msg=name)
    for (name, value), expected in zip(model.named_buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5, msg=name)


def test_modes_are_guarded(loaded: Callable[[Any], Any]) -> None:
    """PyTorch refuses a call in another grad mode or autocast than that of `aot_compile`, which decide how the first call traces the graph."""
    model, x = Model().eval(), torch.randn(16, 64)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        function = loaded(_compiled(model, x))
        result = function(model, x)
        assert result.dtype == torch.bfloat16
        torch.testing.assert_close(result, model(x), rtol=3e-2, atol=3e-2)
    for mode in (torch.no_grad(), torch.autocast("cpu", torch.bfloat16)):
        with mode, pytest.raises(RuntimeError, match="GLOBAL_STATE changed"):
            function(model, x)


def test_options_are_those_of_the_compilation(loaded: Callable[[Any], Any]) -> None:
    """A graph that was compiled in bfloat16 is so when it is loaded; a wrong setting is an error of `aot_compile`."""
    model, x = Model().eval(), torch.randn(16, 64)
    with torch.no_grad():
        with pytest.raises(ConfigError, match="unknown"):
            _compiled(model, x, options={"nothing": 1})
        compiled = _compiled(model, x, options={"disable_engines": ("tvm",)})
        function = loaded(compiled)
        assert torch.equal(function(model, x), compiled(model, x))
    saved = AheadOfTimeGraph.serialize_compile_artifacts(function._artifacts.compiled_fn)
    assert b'"disable_engines": ["tvm"]' in saved
    assert b"kernels" not in saved.partition(b"\x80")[0]


def test_a_loaded_function_can_be_saved_again(loaded: Callable[[Any], Any]) -> None:
    model, x = Model().eval(), torch.randn(16, 64)
    with torch.no_grad():
        first = loaded(_compiled(model, x))
        first(model, x)
        torch.testing.assert_close(loaded(first)(model, x), model(x), rtol=1e-4, atol=1e-5)


def test_threads_may_make_the_first_call_at_once(loaded: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph is compiled once, and all get its answer."""
    model, x = Model().eval(), torch.randn(16, 64)
    with torch.no_grad():
        function, expected = loaded(_compiled(model, x)), model(x)
    results: list[torch.Tensor] = []
    captures: list[object] = []
    capture = aot.capture_key
    monkeypatch.setattr(aot, "capture_key", lambda *args: (captures.append(args), capture(*args))[1])

    def call() -> None:
        with torch.no_grad():
            results.append(function(model, x))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert len(captures) == 1
    for result in results:
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


def test_what_must_not_run_twice_is_not_tried() -> None:
    """An operator of the user's may do more than compute: it runs when it is called."""
    x = torch.randn(8)
    with torch.no_grad():
        compiled = _compiled(model_for_tests.with_counted, x)
        assert model_for_tests.calls == []
        torch.testing.assert_close(compiled(x), (x + 1) * 2)
    assert len(model_for_tests.calls) == 1


def test_a_graph_that_cannot_be_pickled_is_named(tmp_path: Path) -> None:
    """Functions without a name that can be imported are no part of a file; the compiled function works."""
    x = torch.randn(8)
    with torch.no_grad():
        compiled = _compiled(model_for_tests.with_unnamed, x)
        torch.testing.assert_close(compiled(x), (x + 1) * 2)
        with pytest.raises(NotExportableError, match=r"cannot pickle.*torch_hybrid_backend\.export"):
            compiled.save_compiled_function(str(tmp_path / "saved"))


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: b"other" + data,
        lambda data: data[:20],
        lambda data: data[:-1],
        lambda data: data + b"0",
    ],
)
def test_other_bytes_are_an_error(damage: Callable[[bytes], bytes]) -> None:
    with torch.no_grad():
        x = torch.randn(8)
        compiled = _compiled(model_for_tests.with_counted, x)
    data = AheadOfTimeGraph.serialize_compile_artifacts(compiled._artifacts.compiled_fn)
    with pytest.raises(ArtifactError, match="compile and save the function again"):
        AheadOfTimeGraph.deserialize_compile_artifacts(damage(data))
