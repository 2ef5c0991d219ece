"""The manifest's text and back."""

from __future__ import annotations

import dataclasses

from torch_hybrid_backend.artifact.manifest import (
    Constant,
    CopyUpdate,
    Entry,
    Generation,
    LibraryTarget,
    LiteralForm,
    LiteralResult,
    Manifest,
    Result,
    RowsUpdate,
    Sample,
    Segment,
    State,
    Structure,
    TensorForm,
    ViewResult,
)

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


def test_a_later_writer_may_add_members() -> None:
    """Readers ignore members that they do not know."""
    text = _MANIFEST.to_json().replace('{"segment":"weights.0"', '{"new":1,"segment":"weights.0"')
    assert Manifest.from_json(text) == _MANIFEST
