"""Faults that random programs brought to light, made small: none may come back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.random_programs.check import check
from tests.random_programs.program import Input, Line, Program

_F32, _I64 = torch.float32, torch.int64


def _line(text: str, *reads: str) -> Line:
    target, _, expression = text.partition(" = ")
    return Line((target,), expression, reads)


# What went wrong -> the program.
FOUND: dict[str, Program] = {
    "a guard on an index that is read from a tensor": Program(
        (Input("x0", (2, 8, 4), _F32), Input("x1", (2, 8, 4), _F32, seed=1), Input("x2", (60,), _I64)),
        (
            _line("t0 = torch.cat((x1, x1, x0), 0)", "x0", "x1"),
            _line("t1 = torch.roll(t0, -2)", "t0"),
            _line("t2 = t1[:, x2.abs() % 8]", "t1", "x2"),
        ),
        ("t2",),
    ),
    "a kernel that read a value before another had filled its memory": Program(
        (
            Input("w9", (2, 9, 7), _F32, weight=True),
            Input("x11", (2,), _I64, seed=3),
            Input("x16", (2, 9, 7), _I64, seed=4),
            Input("w17", (9,), _F32, weight=True),
            Input("w18", (9,), _F32, weight=True),
            Input("x35", (126,), _F32),
            Input("x36", (126,), _F32, seed=1),
        ),
        (
            _line("t12 = torch.index_select(w9, 0, x11.abs() % 2)", "w9", "x11"),
            _line("t14 = t12.flatten()", "t12"),
            _line("t23 = torch.scatter_add(w9, 0, x16.abs() % 2, w9)", "w9", "x16"),
            _line("t25 = F.batch_norm(t23, w17, w18.abs() + 0.5, w17, None, False, 0.1, 0.1)", "t23", "w17", "w18"),
            _line("t32 = t25[..., 2]", "t25"),
            _line("t33 = torch.log2(t14.abs() + 0.5)", "t14"),
            _line("t44 = torch.cat((x36, t33, x35), 0)", "x36", "t33", "x35"),
            _line("t57 = torch.asinh(t44)", "t44"),
            _line("t58 = torch.addcdiv(t32, t32, t32.abs() + 1, value=0.5)", "t32"),
        ),
        ("t58", "t12", "t57"),
    ),
    "a weight that begins in the middle of a parameter": Program(
        (Input("x0", (6, 2), _F32), Input("w1", (2, 2, 2), _F32, seed=1, weight=True)),
        (_line("t0 = x0 @ w1[1]", "x0", "w1"),),
        ("t0",),
    ),
    "a slice to the end of a dimension of unknown size": Program(
        (Input("x0", (4, 3), _F32), Input("x1", (3, 3), _F32, seed=1)),
        (_line("t0 = torch.slice_scatter(x0, x1, 0, 1, 9223372036854775807)", "x0", "x1"),),
        ("t0",),
    ),
    "a view, of unknown sizes, of an input that begins within its memory": Program(
        (Input("x0", (9, 1, 2), _F32), Input("x1", (9, 9, 2), _F32, "offset", seed=3)),
        (_line("t0 = x0 * 2", "x0"), _line("t1 = x1.unflatten(-1, (1, 2))", "x1")),
        ("t0", "t1"),
    ),
    "views of one value, of unknown sizes, are results": Program(
        (Input("x0", (2, 3), torch.int64),),
        (
            _line("t0 = x0.abs() % 8", "x0"),
            _line("t1 = t0[0]", "t0"),
            _line("t2 = t0.chunk(2, 1)[1]", "t0"),
        ),
        ("t1", "t2"),
    ),
    "a piece of an input is a result where gradients flow": Program(
        (Input("x0", (7,), _F32), Input("x1", (1, 2), _F32, seed=1), Input("w2", (2, 2), _F32, weight=True)),
        (_line("t0 = x0.split(3, 0)[0]", "x0"), _line("t1 = t0[:1]", "t0"), _line("t2 = F.linear(x1, w2)", "x1", "w2")),
        ("t1", "t2"),
    ),
    "views of one value are results": Program(
        (Input("x0", (5, 7), _F32),),
        (
            _line("t0 = x0 * 2", "x0"),
            _line("t1 = t0.T", "t0"),
            _line("t2 = t0.narrow(0, 1, 3)", "t0"),
            _line("t3 = t2.flatten()[2:]", "t2"),
        ),
        ("t1", "t2", "t3", "t0"),
    ),
    "attention, with a scale, of heads whose width is unknown": Program(
        (Input("x0", (2, 3, 2, 8), _F32), Input("x1", (2, 3, 5, 8), _F32, seed=1), Input("x2", (2, 5), _F32, seed=2)),
        (
            _line("t0 = F.scaled_dot_product_attention(x0, x1, x1, x2, scale=0.25)", "x0", "x1", "x2"),
            _line("t1 = torch.relu(t0)", "t0"),
        ),
        ("t1",),
    ),
    "a convolution, of unknown padding, of a resampled image": Program(
        (
            Input("x0", (1, 2, 3, 4), _F32),
            Input("x1", (3, 2, 7, 3), _F32, seed=1),
            Input("x2", (5, 6), _F32, seed=2),
            Input("w3", (7, 6), _F32, seed=3, weight=True),
        ),
        (
            _line("t0 = F.interpolate(x0, [9, 6], mode='bilinear', align_corners=True)", "x0"),
            _line("t1 = F.conv2d(t0, x1, None, 1, 'same')", "t0", "x1"),
            _line("t2 = F.linear(x2, w3)", "x2", "w3"),
        ),
        ("t1", "t2"),
    ),
}
# Those that another mode than the static one has found.
MODE_OF = {
    "a slice to the end of a dimension of unknown size": "dynamic",
    "a view, of unknown sizes, of an input that begins within its memory": "dynamic",
    "views of one value, of unknown sizes, are results": "dynamic",
    "attention, with a scale, of heads whose width is unknown": "dynamic",
    "a convolution, of unknown padding, of a resampled image": "dynamic",
    "a piece of an input is a result where gradients flow": "training",
}


@pytest.mark.parametrize("name", FOUND)
def test_stays_mended(name: str, tmp_path: Path) -> None:
    """The engine, forced, gives eager's results, in the first call and in the plan's."""
    report = check(FOUND[name], "tvm", tmp_path, MODE_OF.get(name, "static"))
    assert not report.why
    assert report.taken
