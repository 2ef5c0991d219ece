"""PyTorch's operators and modules on the TVM engine, forced: the fast part of what `python -m tests.operators.run` runs in full."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tests.operators import moduleinfos, opinfos
from tests.operators.expected import surprises
from tests.operators.report import Row

# Of each kind of kernel, layout and index arithmetic a few. Names are op_db's.
FLOATS = """
abs add addcdiv addcmul addmm amax argmax atan2 baddbmm bmm broadcast_to cat chunk clamp clone copysign cos cumsum diagonal div.floor_rounding
einsum erf exp expand flip floor gather gt hypot index_select isnan lerp linalg.vector_norm log1p log_softmax logaddexp masked_fill matmul
maximum mean mm movedim mul mv nan_to_num narrow nn.functional.adaptive_avg_pool2d nn.functional.avg_pool2d nn.functional.batch_norm
nn.functional.conv1d nn.functional.conv2d nn.functional.cross_entropy nn.functional.elu nn.functional.embedding nn.functional.gelu
nn.functional.glu nn.functional.group_norm nn.functional.instance_norm nn.functional.upsample_bilinear nn.functional.layer_norm
nn.functional.linear nn.functional.max_pool2d nn.functional.mse_loss nn.functional.normalize nn.functional.pad.constant
nn.functional.pixel_shuffle nn.functional.rms_norm nn.functional.scaled_dot_product_attention nn.functional.silu nn.functional.softplus
nn.functional.unfold permute pow prod remainder repeat reshape roll round sigmoid sign sin slice softmax split sqrt squeeze stack std sub
sum take_along_dim tanh transpose tril unbind unsqueeze var where
""".split()
INTEGERS = """
add any argmin bitwise_and bitwise_left_shift clamp cumsum div.trunc_rounding eq floor_divide gather max.reduction_with_dim mul neg
prod remainder sum tril where
""".split()
BOOLS = "all any bitwise_xor cat eq logical_not masked_fill sum where".split()
MODULES = """
nn.BatchNorm2d nn.Conv2d nn.Embedding nn.GELU nn.GroupNorm nn.LayerNorm nn.Linear nn.MaxPool2d nn.MultiheadAttention nn.LSTMCell
nn.TransformerEncoderLayer
""".split()
BACKWARD = "add cat mul nn.functional.gelu nn.functional.layer_norm nn.functional.linear softmax sum tanh var".split()


def _tasks() -> list[opinfos.Task | moduleinfos.Task]:
    named = [(FLOATS, "float32"), (INTEGERS, "int64"), (BOOLS, "bool")]
    tasks: list[opinfos.Task | moduleinfos.Task] = [opinfos.Task(op, dtype) for ops, dtype in named for op in ops]
    tasks += [opinfos.Task(op, "float32", backward=True) for op in BACKWARD]
    return tasks + [moduleinfos.Task(m, "float32", training) for m in MODULES for training in (False, True)]


@pytest.fixture(scope="module")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kernels that several samples need are compiled once."""
    return tmp_path_factory.mktemp("kernels")


@pytest.mark.parametrize("task", _tasks(), ids=lambda task: task.name)
def test_agrees_with_eager(task: opinfos.Task | moduleinfos.Task, kernel_cache: Path) -> None:
    """A few samples, spread over all of an operator's or module's, give eager's results; what the table of expected failures lists may fail."""
    run = (
        functools.partial(opinfos.run, task)
        if isinstance(task, opinfos.Task)
        else functools.partial(moduleinfos.run, task)
    )
    outcomes = tuple(run("tvm", limit=2, cache_dir=kernel_cache, threads=2))
    subject, _, kind = task.name.partition(" ")
    assert not surprises([Row(subject, kind, outcomes)], "tvm", complete=False)
    assert any(outcome.status == "passed" for outcome in outcomes)
