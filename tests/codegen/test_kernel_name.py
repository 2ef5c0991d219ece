"""Names of kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from tests.interpreter.backend import InterpreterBackend
from tests.partition.engines_for_tests import LoopsEngine, trace
from torch_hybrid_backend.codegen.assemble import assemble
from torch_hybrid_backend.codegen.kernel_name import kernel_name, symbol_of
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.loops.kernels import Kernel
from torch_hybrid_backend.partition.regions import partition_graph

_X = torch.ones(4, 8)


def _kernel(function: Callable[..., torch.Tensor]) -> Kernel:
    (segment,) = partition_graph(trace(function, _X), [LoopsEngine()], Config()).graph.segments
    (kernel,) = assemble(segment.region, InterpreterBackend()).kernels
    return kernel


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("row_softmax", lambda x: torch.softmax(x, -1)),
        ("row_softmax_gelu", lambda x: functional.gelu(torch.softmax(x, -1))),
        ("row_norm", lambda x: functional.layer_norm(x, (8,))),
        ("row_sum", lambda x: x.sum(-1)),
        ("row_argmax", lambda x: x.argmax(-1)),
        ("map_gelu", functional.gelu),
        ("map_add", lambda x: x + 1),
        ("map", lambda x: x.t().contiguous()),
        ("matmul", lambda x: x @ x.t()),
        ("matmul_tanh", lambda x: torch.tanh(x @ x.t())),
        ("attention", lambda x: functional.scaled_dot_product_attention(*[x.view(1, 1, 4, 8)] * 3)),
    ],
)
def test_names_tell_what_a_kernel_computes(name: str, function: Callable[..., torch.Tensor]) -> None:
    """Its kind and its telling operations; what every kernel has is said where there is nothing else."""
    assert kernel_name(_kernel(function)) == name


def test_equal_kernels_have_equal_names() -> None:
    """A kernel that is found on disk is looked for by its name; the key tells kernels of one name apart."""
    first, second = _kernel(functional.gelu), _kernel(functional.gelu)
    assert first is not second
    assert (
        symbol_of(first, "0123456789abcdef0") == symbol_of(second, "0123456789abcdef1") == "map_gelu_0123456789abcdef"
    )
