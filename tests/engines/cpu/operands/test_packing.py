"""Packing: the torch functions and the loops values describe the same layout."""

import pytest
import torch

from tests.engines.cpu.schedule_runner import HOST, run_kernel
from torch_hybrid_backend.engines.cpu.operands import packing
from torch_hybrid_backend.engines.cpu.operands.amx_formats import FORMATS
from torch_hybrid_backend.engines.cpu.operands.winograd_transform import packed_winograd_shape
from torch_hybrid_backend.engines.cpu.schedules import elementwise
from torch_hybrid_backend.loops.index import as_index, var
from torch_hybrid_backend.loops.ir import Buffer, Call, Load


@pytest.mark.parametrize(("n", "tile_n"), [(5, 4), (8, 4), (1, 1), (3, 16), (33, 16)])
def test_pack_b_puts_columns_into_panels_and_pads_with_zeros(n: int, tile_n: int) -> None:
    """Element (b, k, n) lies at (b, n // tile, k, n % tile); the rest is zero."""
    b = torch.randn(2, 3, n)
    packed = packing.pack_b(b.transpose(1, 2).contiguous().transpose(1, 2), tile_n)
    assert packed.is_contiguous()
    assert tuple(packed.shape) == packing.packed_b_shape(2, n, 3, tile_n)
    flat = packed.permute(0, 2, 1, 3).reshape(2, 3, -1)
    assert torch.equal(flat[..., :n], b)
    assert not flat[..., n:].any()


def test_packed_b_value_reads_the_same_element_as_pack_b() -> None:
    """The value's element at a packed position loads exactly the source element; where padding is possible, under a guard."""
    source = Buffer((1, 3, 5), "float32")
    value = packing.packed_b_value(source, 4)
    assert value.shape == (1, 2, 3, 4)
    inside = value.at((as_index(0), as_index(0), as_index(2), as_index(1)))
    assert isinstance(inside, Load)
    assert [i.const for i in inside.index] == [0, 2, 1]
    assert isinstance(value.at((as_index(0), as_index(1), as_index(2), var("lane", 4))), Call)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("kernel", [(3,), (2, 3)])
def test_conv_weight_position(groups: int, kernel: tuple[int, ...]) -> None:
    """Element (o, i, kh, kw) lies at (group, block, kh, i, kw, lane) and padding lanes are zero."""
    o, inputs, block = 6 * groups, 2, 4
    w = torch.randn(o, inputs, *kernel)
    packed = packing.pack_conv_weight(w, groups, block)
    assert tuple(packed.shape) == packing.packed_conv_shape(tuple(w.shape), groups, block)
    assert packed.is_contiguous()
    spatial = w.reshape(o, inputs, -1, kernel[-1])
    for channel in range(o):
        group, inner = divmod(channel, 6)
        got = packed[group, inner // block, :, :, :, inner % block]
        assert torch.equal(got, spatial[channel].transpose(0, 1))
    assert not packed[:, 1, ..., 2:].any()


def test_depthwise_weight_has_channels_innermost() -> None:
    """A group has one input and one output channel: (block, kh, kw, lane)."""
    w = torch.randn(10, 1, 3, 2)
    packed = packing.pack_conv_weight(w, 10, 4)
    assert tuple(packed.shape) == (3, 3, 2, 4)
    assert torch.equal(packed[2, :, :, 1], w[9, 0])
    assert not packed[2, ..., 2:].any()


@pytest.mark.parametrize("n", [5, 32, 45])
def test_nibbles_are_eight_to_a_word_along_k(n: int) -> None:
    """In two's complement, the first four in the lower halves of bytes, the others in the upper; columns beyond the last are zero."""
    q = torch.randint(-8, 8, (1, 24, n), dtype=torch.int8)
    packed = packing.pack_nibbles(q, 16)
    assert (packed.dtype, tuple(packed.shape)) == (torch.int32, (1, -(-n // 16), 3, 16))
    words = packed[0].permute(1, 0, 2).reshape(3, -1).to(torch.int64)
    back = torch.stack([((words >> 4 * place & 15) + 8) % 16 - 8 for place in (0, 2, 4, 6, 1, 3, 5, 7)], 1).reshape(
        24, -1
    )
    assert torch.equal(back[:, :n], q[0].to(torch.int64))
    assert not back[:, n:].any()


@pytest.mark.parametrize("name", FORMATS)
def test_tiles_hold_words_of_k(name: str) -> None:
    """Element (b, k, n) of part p lies in its panel, step, part, tile, row, column and byte of a word; the rest is zero."""
    form = FORMATS[name]
    batch, k, n, in_word = 2, form.depth + 5, 40, 4 // form.itemsize
    if form.dtype == "int8":
        b = torch.randint(-128, 128, (batch, k, n)).to(torch.int8)
    else:
        b = torch.randn(batch, k, n).to(getattr(torch, form.operand))
    packed = packing.pack_tiles(b, form)
    assert tuple(packed.shape) == form.packed_shape(batch, k, n)
    panels = 2 * batch
    count = panels * form.steps(k) * form.parts * form.panel_elements
    tiles = packed[:count].reshape(batch, 2, form.steps(k), form.parts, 2, 16, 16, in_word)
    rest = b.float()
    for part in range(form.parts):
        at = tiles[:, :, :, part].permute(0, 2, 4, 6, 1, 3, 5).reshape(batch, form.steps(k) * form.depth, 64)
        assert torch.equal(at[:, :k, :n].float(), rest.to(packed.dtype).float())
        assert not at[:, k:].any()
        assert not at[..., n:].any()
        rest = rest - rest.bfloat16().float()
    assert not packed[count:].any()


@pytest.mark.parametrize("number", [float("inf"), float("nan"), 1e-40, -3e38])
def test_a_panel_that_cannot_be_split_keeps_its_bits(number: float) -> None:
    """Its first two parts are the halves of each number, and it is marked; the other panels are not concerned."""
    form = FORMATS["float32"]
    b = torch.randn(1, 32, 96)
    b[0, 7, 40] = number
    packed = packing.pack_tiles(b, form)
    assert packed[-3:].view(torch.int16).tolist() == [0, 1, 0]
    panel = (
        packed[3 * 1024 : 6 * 1024].view(torch.int16).reshape(3, 2, 16, 16, 2).permute(0, 2, 4, 1, 3).reshape(3, 32, 32)
    )
    bits = (panel[0].int() << 16) | (panel[1].int() & 0xFFFF)
    assert torch.equal(bits, b[0, :, 32:64].contiguous().view(torch.int32))
    plain = torch.randn(1, 32, 96)
    plain[..., :32], plain[..., 64:] = b[..., :32], b[..., 64:]
    other = packing.pack_tiles(plain, form)
    assert torch.equal(packed[: 3 * 1024], other[: 3 * 1024])
    assert torch.equal(packed[6 * 1024 : -3], other[6 * 1024 : -3])


@pytest.mark.parametrize("m", [2, 4])
@pytest.mark.parametrize("outputs", [16, 64, 84])
def test_winograd_weights_are_transformed_by_a_kernel(m, outputs):
    """Equal to what is packed ahead of calls, signs of taps included; output channels beyond the last are zero."""
    w = torch.randn(outputs, 16, 3, 3)
    w[3, 2, 1] = torch.tensor([0.0, -0.0, -2.0])
    packed = packing.pack_conv_weight(w, groups=1, block=16)
    panels = Buffer(tuple(packed.shape), "float32", "packed")
    transformed = Buffer(packed_winograd_shape(tuple(w.shape), m, 16), "float32", "transformed")
    kernel = packing.winograd_weight_kernel(panels, transformed, m)
    (result,) = run_kernel(kernel, elementwise.emit, {panels: packed}, HOST)
    expected = packing.pack_winograd_weight(w, m, lanes=16)
    torch.testing.assert_close(result[:, :-1], expected[:, :-1], atol=1e-6, rtol=1e-5)
    real = torch.arange(result.shape[0] * result.shape[3]).view(-1, 1, result.shape[3]) < outputs
    signs = torch.where(real, expected[:, -1], result[:, -1])  # of channels that do not exist: any
    assert torch.equal(result[:, -1], signs)
