"""AMX's tile registers: the instructions, as statements.

    builder.seq(builder.alloc(configuration), configure(builder, configuration), zero(0), load(builder, 4, a, 0, 64), ..., release())

The registers are named by their numbers, 0 to 7, so what is in one stays there until a statement says otherwise: LLVM allocates none of them.
A thread that runs any of these has configured them before, and releases them after: a thread that holds tiles is switched more slowly, runs at
a lower clock on some processors, and leaves other libraries a configuration that is not theirs. The process needs the operating system's
permission (`machine.may_use_tiles`): without it the first of these ends it.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18.
"""

from __future__ import annotations

from torch_hybrid_backend.engines.cpu.operands.amx_formats import ROW_BYTES
from torch_hybrid_backend.engines.cpu.tir import expressions as tir
from torch_hybrid_backend.engines.cpu.tir import x86
from torch_hybrid_backend.engines.cpu.tir.builder import Builder, Stmt, TirBuffer, TirExpr
from torch_hybrid_backend.loops.index import Index

# Palette 1; every register has 16 rows of 64 bytes. In words of 32 bits: 16 reserved bytes but for the palette, 16 widths, 16 heights.
_CONFIGURATION = (1, 0, 0, 0, *[ROW_BYTES << 16 | ROW_BYTES] * 4, 0, 0, 0, 0, *[0x10101010] * 2, 0, 0)


def configuration(builder: Builder) -> TirBuffer:
    """The local array that `configure` fills; to be declared by `Builder.alloc`."""
    return builder.local(len(_CONFIGURATION), "int32", "configuration")


def configure(builder: Builder, array: TirBuffer) -> Stmt:
    """All registers as 16 rows of 64 bytes, zero."""
    words = [builder.store(array, i, tir.const(word, "int32")) for i, word in enumerate(_CONFIGURATION)]
    return builder.seq(*words, x86.amx("ldtilecfg", builder.pointer(array, 0)))


def release() -> Stmt:
    """Back to the state before `configure`."""
    return x86.amx("tilerelease")


def zero(tile: int) -> Stmt:
    return x86.amx("tilezero", _number(tile))


def load(
    builder: Builder, tile: int, array: TirBuffer, offset: Index | int, row_bytes: int, *, passing: bool = False
) -> Stmt:
    """The register's rows, which begin `row_bytes` apart, the first at element `offset`.

    passing: the first-level cache need not keep them; what is there stays.
    """
    name = "tileloaddt164" if passing else "tileloadd64"
    return x86.amx(name, _number(tile), builder.pointer(array, offset), tir.const(row_bytes, "int64"))


def store(builder: Builder, tile: int, array: TirBuffer, offset: Index | int, row_bytes: int) -> Stmt:
    """The inverse of `load`."""
    return x86.amx("tilestored64", _number(tile), builder.pointer(array, offset), tir.const(row_bytes, "int64"))


def multiply(name: str, sums: int, a: int, b: int) -> Stmt:
    """sums += a * b, by the instruction of that name (`amx_formats.TileFormat.instruction`)."""
    return x86.amx(name, _number(sums), _number(a), _number(b))


def _number(tile: int) -> TirExpr:
    return tir.const(tile, "int8")
