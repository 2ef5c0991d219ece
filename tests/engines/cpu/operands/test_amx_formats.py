"""Formats of AMX's operands: their arithmetic, and what their documented errors follow from."""

import pytest
import torch

from torch_hybrid_backend.engines.cpu.operands.amx_formats import FORMATS, LARGEST, SMALLEST, TileFormat


def parts_of(x: torch.Tensor, count: int) -> list[torch.Tensor]:
    """float32 as bfloat16, each rounded to nearest."""
    found = []
    for _ in range(count):
        found.append(x.bfloat16())
        x = x - found[-1]
    return found


def test_steps_and_sizes() -> None:
    """A step is 64 bytes of k; a packed operand holds whole steps of whole panels, every part, and where it is split a number a panel."""
    assert (FORMATS["bfloat16"].depth, FORMATS["int8"].depth) == (32, 64)
    assert [FORMATS["bfloat16"].steps(k) for k in (1, 32, 33)] == [1, 1, 2]
    assert FORMATS["bfloat16"].packed_shape(2, 33, 33) == (2 * 2 * 2 * 1024,)
    assert FORMATS["float32"].packed_shape(1, 32, 65) == (3 * 3 * 1024 + 3,)
    assert FORMATS["uint8"].packed_shape(1, 64, 32) == (2048,)
    assert [len(form.products) for form in FORMATS.values()] == [6, 3, 3, 1, 1, 1, 1]


def test_few_channels_are_copied_together() -> None:
    """Below float32: a pixel takes a power of two of k, and a row a vector for each line of the kernel, or for each pixel with dilation."""
    bfloat16, int8, float32 = (FORMATS[name] for name in ("bfloat16", "int8", "float32"))
    assert [bfloat16.pixel_depth(channels) for channels in (1, 3, 15, 16, 33)] == [1, 4, 16, 32, 64]
    assert not float32.gathers(3)
    assert (bfloat16.steps(bfloat16.conv_depth(3, (7, 7))), int8.steps(int8.conv_depth(3, (3, 3)))) == (7, 1)
    assert bfloat16.gathered_vectors(3, (7, 7), (1, 1)) == 7
    assert bfloat16.gathered_vectors(3, (11, 11), (1, 1)) == 22
    assert bfloat16.gathered_vectors(3, (7, 7), (2, 2)) == 49


def test_three_parts_are_exact() -> None:
    """Within the limits no digit is lost, and no part is denormal; a part is at most 2^-8, 2^-17 of the number."""
    torch.manual_seed(0)
    mantissas = 1 + torch.randint(0, 1 << 23, (20_000,)) * 2.0**-23
    scales = torch.tensor([SMALLEST, 1.0, -1.0, LARGEST / 2])
    x = (mantissas * scales[torch.arange(20_000) % 4]).float()
    parts = parts_of(x, 3)
    assert torch.equal(sum(part.double() for part in parts), x.double())
    for part, share in zip(parts[1:], (2.0**-8, 2.0**-17), strict=True):
        assert (part.double().abs() <= share * x.double().abs()).all()
        assert ((part == 0) | (part.abs() >= torch.finfo(torch.float32).tiny)).all()


@pytest.mark.parametrize(
    ("name", "bound"), [("float32", 2.0**-23.9), ("float32 high", 2.0**-14.9), ("float16 split", 2.0**-16)]
)
def test_what_is_left_out_of_a_product(name: str, bound: float) -> None:
    """The products of parts that a format sums differ from the product by no more than documented."""
    torch.manual_seed(0)
    form: TileFormat = FORMATS[name]
    x, y = (torch.randn(100_000).to(getattr(torch, form.operand)).float() for _ in range(2))
    of_x, of_y = (parts_of(v, form.parts) for v in (x, y))
    total = sum(of_x[i].double() * of_y[j].double() for i, j in form.products)
    exact = x.double() * y.double()
    assert ((total - exact).abs() <= bound * exact.abs()).all()
