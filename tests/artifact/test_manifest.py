"""The manifest's text and back."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace

from torch_hybrid_backend.artifact.manifest import (
    Constant,
    CopyUpdate,
    Entry,
    Generation,
    Kernel,
    LibraryTarget,
    LiteralForm,
    LiteralResult,
    Manifest,
    Result,
    RowsUpdate,
    Sample,
    Segment,
    SizeSymbol,
    State,
    Structure,
    TensorForm,
    ViewResult,
)
from torch_hybrid_backend.sizes.size import symbol

_ENTRY = Entry(
    name="forward",
    plan="plan.forward",
    functions=None,
    python_parts=(),
    needs_torch=False,
    inputs=(TensorForm("x", "float32", (2, 3), (3, 1)), LiteralForm("flag", None)),
    sources=(("input", 0), ("state", 0)),
    slots=(0,),
    updates=(CopyUpdate(("state", 0), 1), RowsUpdate(("input", 0), 1, ("output", 2), ("constant", 0))),
    results=(Result(("output", 0)), LiteralResult(3), ViewResult(("input", 0), (2,), (1,), 1, "conj")),
    outputs=(TensorForm("output0", "float32", (), ()), LiteralForm("output1", 3)),
    structure=Structure("[1, null]", "[1, null]"),
)
_MANIFEST = Manifest(
    package="0.1",
    torch="2.13.0",
    model="Net",
    segments=(Segment("weights.0", "weights", 8192, 64, "0" * 64),),
    targets=(LibraryTarget("linux", "x86_64", ("avx2", "fma"), "library"),),
    kernels=(Kernel("add", (64, 0), 1),),
    constants=(Constant("weights.0", 0, "float32", (4, 4), (4, 1)),),
    states=(State("cache", 0),),
    entries=(_ENTRY,),
    samples=(Sample("forward", (0, None), (0, None, 0), 1e-3),),
    report="report",
)


def test_text_and_back() -> None:
    """Every kind of update, result and form comes back as it was."""
    assert Manifest.from_json(_MANIFEST.to_json()) == _MANIFEST
    assert "generation" not in _MANIFEST.to_json()
    decoder = dataclasses.replace(_MANIFEST, generation=Generation("prefill", "decode", 128, (2, 0)))
    assert Manifest.from_json(decoder.to_json()) == decoder


def test_variants() -> None:
    """Variants keep what differs; all else stands in the file once. A reader of files of one variant sees the last."""
    first = replace(
        _MANIFEST,
        targets=(LibraryTarget("linux", "x86_64", ("avx2", "avx512f", "fma"), "v4/library"),),
        kernels=(),
        entries=(replace(_ENTRY, plan="v4/plan.forward", slots=(1,)),),
        samples=(),
        report="v4/report",
    )
    text = _MANIFEST.to_json([first, first])
    assert Manifest.all_from_json(text) == [first, first, _MANIFEST]
    assert [Manifest.from_json(text, number) for number in (0, 2, -1)] == [first, _MANIFEST, _MANIFEST]
    assert Manifest.all_from_json(_MANIFEST.to_json()) == [_MANIFEST]
    plain = json.loads(text)
    assert set(plain["variants"][0]) == {"targets", "kernels", "entries", "samples", "report"}
    del plain["variants"]
    assert plain == json.loads(_MANIFEST.to_json())


def test_sizes_are_expressions() -> None:
    """An entry for many sizes is read at the examples of its symbols, and has other sizes at other values."""
    n = symbol("n")
    many = replace(
        _ENTRY,
        inputs=(TensorForm("x", "float32", (2 * n + 1, 3), (3, 1)), LiteralForm("flag", None)),
        outputs=(TensorForm("output0", "float32", (n,), (1,)), LiteralForm("output1", 3)),
        results=(ViewResult(("output", 0), (n // 2,), (n,), n, ""), LiteralResult(3)),
        symbols=(SizeSymbol("n", 0, 0, 2, 1, 2, 9, 4),),
        limits=((["max", "n", 7], 0, 8),),
    )
    text = replace(_MANIFEST, entries=(many,)).to_json()
    (plain,) = json.loads(text)["entries"]
    assert plain["inputs"][0]["sizes"] == [{"size": 0}, 3]
    assert plain["sizes"][0] == ["+", ["*", "n", 2], 1]
    assert [(plain["sizes"][size["size"]], least, most) for size, least, most in plain["limits"]] == [
        (["max", "n", 7], 0, 8)
    ]
    (entry,) = Manifest.from_json(text).entries
    for at, value in ((entry, 4), (entry.at([4]), 4), (entry.at([7]), 7)):
        assert at.inputs[0] == TensorForm("x", "float32", (2 * value + 1, 3), (3, 1))
        assert at.outputs[0] == TensorForm("output0", "float32", (value,), (1,))
        assert at.results[0] == ViewResult(("output", 0), (value // 2,), (value,), value, "")
        assert (at.symbols, at.updates, at.structure) == (many.symbols, many.updates, many.structure)


def test_ranges_of_sizes() -> None:
    """Sizes of a dimension, and what symbol they stand for."""
    rows = SizeSymbol("n", 0, 0, 2, 1, 2, 9, 4)
    assert rows.range == "5 to 19 in steps of 2"
    assert [rows.value(size) for size in (3, 5, 6, 19, 21)] == [None, 2, None, 9, None]
    assert SizeSymbol("n", 0, 0, 1, 0, 2, 9, 4).range == "2 to 9"


def test_a_later_writer_may_add_members() -> None:
    """Readers ignore members that they do not know."""
    text = _MANIFEST.to_json().replace('{"segment":"weights.0"', '{"new":1,"segment":"weights.0"')
    assert Manifest.from_json(text) == _MANIFEST
