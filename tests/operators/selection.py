"""A selection of PyTorch's operators and modules, a few of each kind of kernel, for whichever engine."""

from __future__ import annotations

import dataclasses

from tests.operators import moduleinfos, opinfos
from tests.operators.execution import DEFAULT, Bench
from tests.operators.expected import surprises
from tests.operators.rows import Row
from tests.operators.tasks import Task, spread

# Of each kind of kernel, layout and index arithmetic a few. Names are op_db's and module_db's.
SELECTION = {
    "float32": """
        abs addmm amax argmax baddbmm bmm cat clamp cos cumsum div.floor_rounding einsum erf expand gather index_select
        linalg.vector_norm log_softmax logaddexp mean nn.functional.adaptive_avg_pool2d nn.functional.batch_norm
        nn.functional.conv1d nn.functional.conv2d nn.functional.cross_entropy nn.functional.embedding nn.functional.gelu
        nn.functional.group_norm nn.functional.layer_norm nn.functional.linear nn.functional.max_pool2d nn.functional.pad.constant
        nn.functional.scaled_dot_product_attention nn.functional.upsample_bilinear pow remainder softmax split tanh tril var where
    """,
    "float64": "add cat div.no_rounding_mode exp matmul mean nn.functional.layer_norm softmax sum",
    "bfloat16": "add cat matmul mean mul nn.functional.gelu nn.functional.linear nn.functional.rms_norm softmax sum",
    "float16": "add exp matmul nn.functional.layer_norm nn.functional.silu softmax var",
    "int64": "add any argmin bitwise_and clamp cumsum div.trunc_rounding eq floor_divide gather max.reduction_with_dim prod remainder sum",
    "bool": "all any bitwise_xor cat eq logical_not masked_fill sum where",
    "float32 strided": "add bmm cat gather nn.functional.conv2d nn.functional.layer_norm softmax sum",
    "float32 backward": """
        add cat matmul mul nn.functional.conv2d nn.functional.cross_entropy nn.functional.embedding nn.functional.gelu nn.functional.layer_norm
        nn.functional.linear nn.functional.max_pool2d softmax sum tanh var
    """,
    "float32 eval": "nn.BatchNorm2d nn.Conv2d nn.Embedding nn.GroupNorm nn.Linear nn.MaxPool2d nn.MultiheadAttention nn.LSTMCell",
    "float32 train": "nn.BatchNorm2d nn.Conv2d nn.Embedding nn.LayerNorm nn.MaxPool2d nn.MultiheadAttention",
    "complex64 backward": "abs fft.fft linalg.cholesky linalg.eigvals lu_solve matmul mul sqrt",
    "complex64 lazy": "add cat fft.ifft imag linalg.inv matmul mul real sum",
    "float32 lazy": "add cat fft.rfft matmul mul softmax sum where",
}
SAMPLES = 2


def check(kind: str, bench: Bench) -> None:
    """A few samples, spread over all of an operator's or module's, give eager's results; what the table of expected failures lists may fail."""
    tasks = [Task(subject, kind) for subject in SELECTION[kind].split()]
    samples = [(moduleinfos if task.is_module else opinfos).samples(task) for task in tasks]
    samples = [[some[number] for number in spread(len(some), SAMPLES)] for some in samples]
    if kind == "float32":
        for some in samples[::4]:  # Dynamo takes longer than all the rest
            some[0] = dataclasses.replace(some[0], direct=False)
    outcomes = bench.run([sample for some in samples for sample in some])
    rows = []
    for task, some in zip(tasks, samples, strict=True):
        found = [next(outcomes) for _ in some]
        rows += [
            Row.of(task, mode, len(some), dict(enumerate(o[mode] for o in found if mode in o))) for mode in bench.modes
        ]
    assert not surprises(rows, complete=False)
    assert not [row.name for row in rows if not row.statuses.get("passed")]
    if not (tasks[0].dtype.is_complex or tasks[0].variant == "lazy"):  # kernels read memory as it is, and real numbers
        assert not [row.name for row in rows if row.mode != DEFAULT and row.verdict not in ("taken", "partly")]
