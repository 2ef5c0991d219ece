"""The adapter to torch_tensorrt: settings, lowering, the registry, exact networks, and logs."""

from __future__ import annotations

import dataclasses
import logging
import operator
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tests.engines.tensorrt import no_gpu  # noqa: F401  before torch_tensorrt
from torch_hybrid_backend.core.device import CPU
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.core.verdict import Refused
from torch_hybrid_backend.engines.tensorrt.fakes import Fakes
from torch_hybrid_backend.engines.tensorrt.installed import installation
from torch_hybrid_backend.errors import CompileError
from torch_hybrid_backend.sizes.size import symbol

pytestmark = pytest.mark.tensorrt

if not isinstance(installation(), Refused):
    from torch_tensorrt.dynamo.conversion import _ConverterRegistry
    from torch_tensorrt.logging import TRT_LOGGER

    from torch_hybrid_backend.engines.tensorrt import adapter

F = torch.nn.functional


def lowered(function, *specs: TensorSpec) -> tuple[torch.fx.GraphModule, Fakes]:
    """A function lowered to operators that have converters, on tensors of these specs."""
    fakes = Fakes()
    inputs = [fakes.tensor(spec) for spec in specs]
    graph = make_fx(function, tracing_mode="fake")(*(torch.ones([int(n) for n in map(_hint, s.shape)]) for s in specs))
    return adapter.lowered(graph, fakes, inputs), fakes


def _hint(size: object) -> int:
    return size if isinstance(size, int) else 6


def spec(*shape: object) -> TensorSpec:
    strides, step = [], 1
    for size in reversed(shape):
        strides.insert(0, step)
        step = step * size  # type: ignore[operator]
    return TensorSpec(tuple(shape), "float32", tuple(strides), CPU)  # type: ignore[arg-type]


def test_settings_that_change_results() -> None:
    """Whatever a release's defaults are: dtypes as written, masks as given, no doubles, TF32 as requested. Settings that the release lacks are
    left out."""
    for tf32 in (False, True):
        settings = adapter._settings(tf32)
        assert settings.disable_tf32 is not tf32
        assert settings.truncate_double is False
        assert settings.decompose_attention is True
        assert getattr(settings, "use_explicit_typing", True) is True
        assert getattr(settings, "attn_bias_is_causal", False) is False
        assert not settings.cache_built_engines
        assert not settings.reuse_cached_engines
    names = {field.name for field in dataclasses.fields(adapter.CompilationSettings)}
    assert {"truncate_double", "decompose_attention", "disable_tf32", "min_block_size"} <= names


def test_a_users_settings_stay_and_do_not_count() -> None:
    """The registry's settings are global to the process, and torch_tensorrt may be compiling for the user in another thread."""
    graph, _ = lowered(lambda x: F.gelu(x).split(2, 1)[0], spec(2, 4))
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    assert operator.getitem in {node.target for node in nodes}
    theirs = adapter._settings(False)
    theirs.torch_executed_ops = {node.target for node in nodes}
    registry = _ConverterRegistry.DYNAMO_CONVERTERS
    before = registry.compilation_settings
    registry.set_compilation_settings(theirs)
    try:
        assert all(adapter.converters_of(node).found for node in nodes)
        assert registry.compilation_settings is theirs
    finally:
        registry.set_compilation_settings(before or adapter._settings(False))


def test_converters_of_the_users_do_not_count() -> None:
    """The build process has no converters of the user's, nor may a later process that reads the verdict."""
    graph = make_fx(torch.special.bessel_j0, tracing_mode="fake")(torch.ones(3))
    (node,) = (node for node in graph.graph.nodes if node.op == "call_function")
    adapter.DYNAMO_ATEN_CONVERTERS[node.target] = [adapter.ConverterSupport(lambda *given: None)]
    try:
        assert adapter.converters_of(node).known == 0
    finally:
        del adapter.DYNAMO_ATEN_CONVERTERS[node.target]


def test_lowering_keeps_sizes_open_or_says_what_it_took_for_granted() -> None:
    """Sizes are read from inputs in the graph. A graph for which lowering decided something by the example of a size is refused."""
    n = symbol("n", 6)
    graph, fakes = lowered(lambda x: F.gelu(x).sum(1), spec(n, 4))
    assert not fakes.assumptions()
    values = [node.meta["val"] for node in graph.graph.nodes if node.op == "call_function"]
    assert all(not isinstance(value.shape[0], int) for value in values)
    with pytest.raises(CompileError, match="holds only for sizes with"):
        lowered(lambda x: x.reshape(6, 4), spec(n, 4))


def test_whole_numbers_that_would_be_cut_are_found_in_the_network() -> None:
    """A network that cuts int64 to int32 for anything but an index has no engine, whatever the table of operators says."""
    builder = adapter.trt.Builder(TRT_LOGGER)
    network = builder.create_network(0)
    numbers = network.add_input("numbers", adapter.trt.int64, (4,))
    table = network.add_input("table", adapter.trt.float32, (9, 3))
    cut = network.add_cast(numbers, adapter.trt.int32).get_output(0)
    network.add_gather(table, cut, 0)
    adapter._check_exact(network)
    network.add_elementwise(cut, cut, adapter.trt.ElementWiseOperation.SUM)
    with pytest.raises(CompileError, match="cuts int64 to int32"):
        adapter._check_exact(network)


_CHANGES_NOTHING = """
import logging, warnings
from tests.engines.tensorrt import no_gpu
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch_hybrid_backend.engines.tensorrt import capability
from torch_hybrid_backend.engines.tensorrt.verdicts import Verdicts
from torch_hybrid_backend.storage.store import Store
logging.captureWarnings({captures})
before = warnings.showwarning, list(logging.getLogger().handlers)
graph = make_fx(lambda x: torch.nn.functional.silu(x), tracing_mode="fake")(torch.ones(3))
(node,) = (node for node in graph.graph.nodes if node.op == "call_function")
assert capability.supports(node, Verdicts(Store.temporary(), ""))
assert before == (warnings.showwarning, logging.getLogger().handlers), (before, logging.getLogger().handlers)
"""


@pytest.mark.parametrize("captures", [False, True])
def test_nothing_of_the_users_logging_or_warnings_is_changed(captures: bool) -> None:
    """torch_tensorrt logs through the root logger, which adds a handler, and redirects warnings to logging. Both are undone."""
    program = _CHANGES_NOTHING.format(captures=captures)
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300, cwd=Path(__file__).parents[3])


def test_tensorrts_log_is_ours(caplog: pytest.LogCaptureFixture) -> None:
    """At most INFO: the refusal says what an error means for the user."""
    with caplog.at_level(logging.DEBUG), adapter.tensorrt_log.collect(fully=True) as messages:
        builder = adapter.trt.Builder(TRT_LOGGER)
        network = builder.create_network(0)
        assert builder.build_serialized_network(network, builder.create_builder_config()) is None
    assert messages.errors
    assert {record.name for record in caplog.records} == {"torch_hybrid_backend.engines.tensorrt.log"}
    assert all(record.levelno <= logging.INFO for record in caplog.records)
    assert adapter.versions().count(".") >= 4


def test_threads_that_lower_beside_each_other_change_nothing() -> None:
    """The thread that enters first leaves first. Warnings, handlers and torch_tensorrt's folding are then as before."""
    folder = adapter.constant_folding._TorchTensorRTConstantFolder
    before = folder.is_impure, list(warnings.filters), list(logging.getLogger().handlers)
    for change in (adapter._silent, adapter._quantizers_kept):
        with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
            for thread, step in (
                (first, "__enter__"),
                (second, "__enter__"),
                (first, "__exit__"),
                (second, "__exit__"),
            ):
                thread.submit(getattr(change, step), *([None] * 3 if step == "__exit__" else [])).result(10)
    assert (folder.is_impure, list(warnings.filters), list(logging.getLogger().handlers)) == before
