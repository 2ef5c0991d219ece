"""Random generators of devices: what a plan takes of one, and runs repeated with the same numbers."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.random_numbers_for_tests import PhiloxGenerator, philox
from torch_hybrid_backend.core.device import CPU, Device
from torch_hybrid_backend.errors import HybridError
from torch_hybrid_backend.generators import (
    Replay,
    Taken,
    apart,
    can_draw_apart,
    default_generator,
    draws_apart,
    is_captured,
    own_generator,
)


def test_known_answers() -> None:
    """The reference of these tests is Philox4x32-10: the vectors of Random123 (Salmon et al., 2011)."""
    ones = 0xFFFFFFFF
    for counter, key, expected in (
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ones,) * 4, (ones, ones), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ):
        assert philox(counter, key) == expected  # type: ignore[arg-type]


def test_numbers_are_taken_in_program_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seed of 64 bits as the int64 with these bits; counters in groups of four numbers, on the CPU; the offset moves on by all of them."""
    generator = PhiloxGenerator((1 << 64) - 3, 40).install(monkeypatch)
    taken = Taken(Device("cuda", 0), (1, 5, 2))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for start in (10, 18):
        numbers = taken([])
        assert [number.item() for number in numbers] == [-3, start, start + 1, start + 6]
        assert all(number.dtype == torch.int64 and number.shape == () and number.is_cpu for number in numbers)
    assert generator.offset == 104


def test_nothing_is_taken_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each replay would have the same numbers; the CPU captures nothing."""
    generator = PhiloxGenerator(1).install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    taken = Taken(Device("cuda", 0), (1,))
    with pytest.raises(HybridError, match="while a CUDA graph is captured"):
        taken([])
    assert generator.offset == 0
    assert not is_captured(CPU)
    assert len(dataclasses.replace(taken, device=CPU)([])) == 2


def _of_x(name: str, *arguments: object, **options: object) -> tuple[str, tuple[object, ...], dict[str, object]]:
    return name, arguments, options


@pytest.mark.parametrize(
    ("name", "arguments", "options"),
    [
        _of_x("bernoulli.p", "x", 0.3),
        _of_x("native_dropout", "x", 0.3, True),
        _of_x("native_dropout", "x", 0.3, None),
        _of_x("native_dropout", "x", 0.3, False),
        _of_x("native_dropout", "x", 1.0, True),
        _of_x("rand", [3, 4]),
        _of_x("randn", [3, 4], dtype=torch.float64),
        _of_x("randint", 7, [3, 4]),
        _of_x("randint.low", 2, 7, [3, 4]),
        _of_x("randperm", 9),
        _of_x("normal_functional", "x"),
        _of_x("multinomial", "x", 2),
        _of_x("exponential", "x"),
        _of_x("rand_like", "x"),
        _of_x("randn_like", "x"),
        _of_x("randint_like.low_dtype", "x", 2, 7),
    ],
)
def test_operators_draw_apart(name: str, arguments: tuple[object, ...], options: dict[str, object]) -> None:
    """From the thread's own generator, which begins where it was told to: the very numbers that eager draws from the default one there, in the
    same strides. The default one stays as it is."""
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
    if not can_draw_apart(operator):
        pytest.skip(f"{operator} takes no generator in this version of torch")
    for x in (torch.rand(4, 6).t(), torch.rand(2, 3).expand(4, 2, 3)[0], torch.rand(3, 4)):
        given = [x if argument == "x" else argument for argument in arguments]
        torch.manual_seed(11)
        start = torch.get_rng_state()
        expected = operator(*given, **options)
        torch.manual_seed(12)
        before = torch.get_rng_state()
        with own_generator(start), apart():
            results = operator(*given, **options)
        assert torch.equal(torch.get_rng_state(), before)
        pairs = zip(*((r if isinstance(r, tuple) else (r,)) for r in (results, expected)), strict=True)
        for ours, theirs in pairs:
            assert torch.equal(ours, theirs)
            assert (ours.stride(), ours.dtype) == (theirs.stride(), theirs.dtype)


def test_what_cannot_draw_apart() -> None:
    """Operators of other libraries, those that draw nothing, and those that take no generator."""
    aten = torch.ops.aten
    assert not can_draw_apart(aten.add.Tensor)
    assert not can_draw_apart(aten._scaled_dot_product_flash_attention.default)
    assert not can_draw_apart(torch.sin)


def test_replays_draw_apart() -> None:
    """Runs that draw the same numbers draw them from the thread's own generator, where it has one."""
    torch.manual_seed(3)
    start = torch.get_rng_state()
    expected = torch.rand(5)
    before = torch.get_rng_state()
    assert not draws_apart()
    with own_generator(start), apart():
        assert draws_apart()
        replay = Replay(CPU, draws=True)
        assert torch.equal(replay.run(lambda: torch.rand(5)), expected)
        assert torch.equal(replay.run(lambda: torch.rand(5)), expected)
        assert replay.agrees
        replay.finish()
        assert not torch.equal(torch.rand(5), expected)
    with apart():  # without a generator of its own it is the default one
        after = torch.rand(5)
    torch.set_rng_state(before)
    assert torch.equal(torch.rand(5), after)


def test_runs_that_draw_the_same_numbers() -> None:
    """The generator begins each where it was, and is left as one run leaves it, whatever was drawn besides; a run that raises is none."""
    torch.manual_seed(3)
    expected, following = torch.rand(5), torch.rand(5)
    torch.manual_seed(3)
    replay = Replay(CPU, draws=True)
    for _ in range(2):
        assert torch.equal(replay.run(lambda: torch.rand(5)), expected)
        torch.rand(100)
    with pytest.raises(ZeroDivisionError):
        replay.run(lambda: torch.rand(7) / (1 // 0))
    assert replay.agrees
    replay.rewind()
    assert torch.equal(torch.rand(5), expected)
    replay.run(lambda: torch.rand(8))
    assert not replay.agrees
    replay.finish()
    assert torch.equal(torch.rand(5), following)


def test_what_draws_nothing_leaves_the_generator_alone() -> None:
    """Not even its state is read: a device may have none."""
    replay = Replay(Device("meta", 0), draws=False)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert replay.run(lambda: 5) == 5
    replay.rewind()
    replay.finish()
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(HybridError, match="are drawn on the CPU and on CUDA, not on meta"):
        default_generator(Device("meta", 0))
