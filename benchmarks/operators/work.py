"""The least work of an operator: multiply-adds as two operations, and bytes that enter and leave."""

from __future__ import annotations

import math

import torch

from benchmarks.operators.ours import result_shape
from benchmarks.operators.shapes import Case
from torch_hybrid_backend.engines.cpu.target import Target


def work(case: Case) -> tuple[float, float]:
    """(floating-point operations of convolutions and products, 0 for all else; bytes read and written once)."""
    out = result_shape(case)
    made = math.prod(out) * getattr(torch, case.tensors[0].dtype).itemsize
    size_bytes = float(made + sum(tensor.size_bytes for tensor in case.tensors))
    x, *others = case.tensors
    match case.kind:
        case "conv" | "grouped" | "depthwise":
            weight = others[0]
            if case.arguments[6]:  # transposed: every input element meets every weight of its channel
                return 2.0 * math.prod(x.shape) * math.prod(weight.shape[1:]), size_bytes
            return 2.0 * math.prod(out) * math.prod(weight.shape[1:]), size_bytes
        case "linear" | "bmm":
            inner = case.tensors[-1].shape[-2]
            return 2.0 * math.prod(out) * inner, size_bytes
        case "attention":
            k, v = others[:2]
            return 2.0 * math.prod(x.shape[:-1]) * k.shape[-2] * (k.shape[-1] + v.shape[-1]), size_bytes
        case "embedding":  # of the table, only the rows that are asked for
            return 0.0, size_bytes - x.size_bytes + made
    return 0.0, size_bytes


def level(bytes_a_thread: float, target: Target) -> str:
    """The smallest memory that holds so much."""
    if bytes_a_thread <= target.l1_bytes:
        return "L1"
    if bytes_a_thread <= target.l2_bytes:
        return "L2"
    return "L3" if bytes_a_thread <= 8 * target.l2_bytes else "memory"
