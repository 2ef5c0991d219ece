"""PyTorch's operator table (`op_db`) as calls on samples."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from tests.operators.execution import Sample, Subject
from tests.operators.tasks import Task
from tests.operators.values import lazy, seed

# Operators whose numbers are not eager's: they draw them by another operator or leave memory as it was. Only form counts.
RANDOM = frozenset(
    "empty empty_like empty_permuted empty_strided new_empty new_empty_strided bernoulli cauchy exponential geometric log_normal multinomial "
    "normal normal.number_mean normal.in_place rand_like randint randint_like randn randn_like rand randperm uniform "
    "nn.functional.dropout nn.functional.dropout2d nn.functional.dropout3d nn.functional.alpha_dropout "
    "nn.functional.feature_alpha_dropout.with_train nn.functional.feature_alpha_dropout.without_train "
    "nn.functional.fractional_max_pool2d nn.functional.fractional_max_pool3d nn.functional.rrelu pca_lowrank svd_lowrank "
    "torch.ops.aten._flash_attention_forward torch.ops.aten._efficient_attention_forward".split()
)


@functools.cache
def table() -> dict[str, Any]:
    """Every OpInfo of op_db by its full name; the import takes seconds."""
    from torch.testing._internal.common_methods_invocations import op_db

    named = {}
    for info in op_db:
        variant = info.variant_test_name
        named[f"{info.name}.{variant}" if variant else info.name] = info
    return named


def supported(task: Task) -> bool:
    """True if the operator takes the task's dtype, and can be differentiated where it asks for that."""
    info = table()[task.subject]
    if task.backward:
        return bool(info.supports_autograd and task.dtype in info.supported_backward_dtypes("cpu"))
    return task.dtype in info.supported_dtypes("cpu")


def samples(task: Task) -> list[Sample]:
    """The samples of a task. The first in plain float32 goes through Dynamo."""
    info = table()[task.subject]
    operator = info.op
    seed()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = list(info.sample_inputs("cpu", task.dtype, requires_grad=task.backward))
        if task.variant == "strided":
            found = [sample.transform(_strided) for sample in found]
        if task.variant == "lazy":
            found = [sample.transform(_lazy) for sample in found]

    def call(first: Any, rest: Any, named: Any) -> Any:
        return operator(first, *rest, **named)

    is_seen_through = task.dtype.is_complex and task.backward
    subject = Subject.of_function((lambda *given: _with_views(call(*given))) if is_seen_through else call)
    through_dynamo = 1 if task.kind == "float32" else 0
    return [
        Sample(
            subject,
            (s.input, s.args, s.kwargs),
            task.backward,
            task.subject in RANDOM or _drops(task.subject, s.kwargs),
            direct=position >= through_dynamo,
        )
        for position, s in enumerate(found)
    ]


def _strided(value: Any) -> Any:
    """A tensor's copy whose elements do not lie side by side; sparse ones have no strides to change."""
    from torch.testing._internal.common_utils import noncontiguous_like

    dense = isinstance(value, torch.Tensor) and value.layout == torch.strided
    return noncontiguous_like(value) if dense else value


def _lazy(value: Any) -> Any:
    """The same numbers as a conjugated or negated view; what cannot be negated, and sparse tensors, as they are."""
    is_taken = isinstance(value, torch.Tensor) and value.layout is torch.strided and value.dtype is not torch.bool
    return lazy(value) if is_taken else value


def _with_views(result: Any) -> list[Any]:
    """An operator's real results, and what is made of complex ones by way of conjugated and negated views, which are saved for backward."""
    tensors = [t for t in tree_flatten(result)[0] if isinstance(t, torch.Tensor)]
    is_seen = [t.is_complex() and t.layout is torch.strided for t in tensors]
    return [
        (t * t.conj(), t.abs(), t.conj().imag * t.real) if seen else t for t, seen in zip(tensors, is_seen, strict=True)
    ]


def _drops(operator: str, named: dict[str, Any]) -> bool:
    """True if a sample of attention drops elements at random."""
    if operator == "nn.functional.multi_head_attention_forward":
        return bool(named["training"])
    return bool(named.get("dropout_p", 0))
