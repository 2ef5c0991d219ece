"""Files of tensors: exact round trips, the format of docs/compressed_format.md, and refusal of all other files."""

from __future__ import annotations

import hashlib
import random
import struct
import tracemalloc
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from torch_hybrid_backend import compress, load_compressed, save_compressed
from torch_hybrid_backend.compression.container import _DTYPES
from torch_hybrid_backend.errors import CompressedFileError, HybridError


def _bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).tolist())


def _tensors() -> dict[str, torch.Tensor]:
    """Small tensors of every kind: each dtype with random bits, dense and mostly zero; odd shapes and strides; repeated values."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for dtype in _DTYPES:
        top = 2 if dtype == torch.bool else 256
        octets = torch.randint(0, top, (37 * 8 * dtype.itemsize,), dtype=torch.uint8, generator=generator)
        tensors[f"{dtype}"] = octets.view(dtype).view(37, 8)
        kept = torch.rand(37 * 8, generator=generator) < 0.1
        tensors[f"{dtype}.sparse"] = (octets.view(-1, dtype.itemsize) * kept[:, None]).view(-1).view(dtype)
    x = torch.randn(60, 50, generator=generator)
    return tensors | {
        "no dimensions": torch.tensor(-0.0),
        "no elements": torch.empty(3, 0, 2),
        "of one value": torch.full((1000,), 2.5),
        "zeros": torch.zeros(999, dtype=torch.int64),
        "negative zeros": torch.zeros(999).neg(),
        "transposed": x.t(),
        "every second": x[:, ::2],
        "conjugated": torch.complex(x, x).conj(),
        "x": x,
        "x again": x,
        "a part of x": x[:30],
        "ümlaut.名": x[:1],
        "": x[:2],
    }


def test_tensors_come_back_bit_for_bit(tmp_path: Path) -> None:
    """Any dtype, shape, strides and values return. Tensors that share memory are written once, and are one tensor again."""
    tensors = _tensors()
    path = tmp_path / "all"
    save_compressed(tensors, path)
    loaded = load_compressed(path)
    assert list(loaded) == list(tensors)
    for name, tensor in tensors.items():
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape), name
        assert _bits(loaded[name]) == _bits(tensor), name
    for tensor in loaded.values():
        tensor.zero_()  # its memory is its own and writable
    assert loaded["x again"] is loaded["x"]
    assert not load_compressed(path)["zeros"].any()
    assert [entry.name for entry in tmp_path.iterdir()] == ["all"]


def test_memory_that_is_read_otherwise_is_no_alias(tmp_path: Path) -> None:
    """A conjugate or negative view has the same memory as its base, and differs by a bit of the tensor only."""
    x = torch.randn(5, 3, dtype=torch.complex64)
    tensors = {
        "x": x,
        "conjugate": x.conj(),
        "again": x.conj(),
        "imaginary": x.imag,
        "negative": x.conj().imag,
        "real": x.real,
    }
    save_compressed(tensors, tmp_path / "file")
    loaded = load_compressed(tmp_path / "file")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert loaded["again"] is loaded["conjugate"]


def test_files_are_as_small_as_the_weights_allow(tmp_path: Path) -> None:
    """With 90% zeros, files are within 6% of the entropy of the indices. Random bits grow only by the headers."""
    rng = np.random.default_rng(0)
    index = rng.choice(16, size=400_000, p=[0.9, *np.full(15, 0.1 / 15)]).astype(np.uint8)
    save_compressed({"w": torch.from_numpy(index[::2] | index[1::2] << 4)}, tmp_path / "indices")
    entropy = -0.9 * np.log2(0.9) - 0.1 * np.log2(0.1 / 15)
    assert (tmp_path / "indices").stat().st_size * 8 < 1.06 * entropy * len(index)
    noise = torch.from_numpy(rng.integers(0, 256, 100_000).astype(np.uint8))
    save_compressed({"w": noise}, tmp_path / "noise")
    assert (tmp_path / "noise").stat().st_size < len(noise) + 100


def _file(records: bytes, count: int = 1, magic: bytes = b"hybridw\n", version: int = 1) -> bytes:
    """A file written by hand, with a right checksum."""
    body = magic + struct.pack("<II", version, count) + records
    return body + hashlib.sha256(body).digest()


def _record(streams: bytes, sizes: tuple[int, ...], dtype: int = 4, form: int = 0, name: bytes = b"w") -> bytes:
    """The record of a tensor, of bytes (dtype 4) by default."""
    head = struct.pack("<H", len(name)) + name + bytes([form, dtype, len(sizes)])
    return head + struct.pack(f"<{len(sizes)}Q", *sizes) + streams


def _stored(octets: bytes, size: int | None = None) -> bytes:
    return struct.pack("<BQ", 0, len(octets) if size is None else size) + octets


def _coded(lengths: dict[int, int], coded: bytes, size: int | None = None) -> bytes:
    packed = bytes(lengths.get(2 * k, 0) | lengths.get(2 * k + 1, 0) << 4 for k in range(128))
    return struct.pack("<BQ", 1, len(coded) if size is None else size) + packed + coded


def test_a_file_written_by_the_format_is_read(tmp_path: Path) -> None:
    """Every form and method of docs/compressed_format.md is read."""
    words = {ord("a"): 2, ord("b"): 1, ord("c"): 3, ord("d"): 3}  # b 0, a 10, c 110, d 111
    records = [
        _record(_stored(b"\1\2\3\4\5\6"), (2, 3)),
        _record(_coded(words, b"\xda\x01"), (4,), name=b"coded"),
        # The low bytes of int16, then the high ones: 0x0102, 0x0304.
        _record(_stored(b"\x02\x04") + _stored(b"\x01\x03"), (2,), dtype=6, name=b"planes"),
        # Elements 1 and 8 of 9 are not zero.
        _record(_stored(b"\x02\x01") + _stored(b"\x07\x09"), (9,), form=1, name=b"sparse"),
        struct.pack("<H", 4) + b"same" + struct.pack("<BI", 2, 1),
    ]
    path = tmp_path / "file"
    path.write_bytes(_file(b"".join(records), len(records)))
    loaded = load_compressed(path)
    assert loaded["w"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert bytes(loaded["coded"].tolist()) == b"bacd"
    assert loaded["planes"].tolist() == [0x0102, 0x0304]
    assert loaded["sparse"].tolist() == [0, 7, 0, 0, 0, 0, 0, 0, 9]
    assert loaded["same"] is loaded["coded"]


_HALVES = {0: 1, 1: 1}
_HOSTILE = {
    "not written by": [b"", b"hybridw\n", b"PK\3\4" + bytes(100), _file(b"", 0, magic=b"hybridx\n")],
    "version 2": [_file(b"", 0, version=2)],
    "checksum": [_file(_record(_stored(b"ab"), (2,)))[:-1] + b"?", _file(b"", 0)[:-5] + bytes(5)],
    "ends too early": [
        _file(b"", 1),
        _file(_record(_stored(b"ab"), (2,)), 2**32 - 1),
        _file(struct.pack("<H", 65535) + b"name"),
        _file(_record(b"", (2,))),
        _file(_record(_stored(b"ab", 2**57), (2**57,))),
        _file(_record(_coded(_HALVES, b"a", 2**63), (8,))),
    ],
    "bytes behind": [_file(_record(_stored(b"ab"), (2,)) + b"?")],
    "two tensors of the name 'w'": [_file(_record(_stored(b""), (0,)) * 2, 2)],
    "not UTF-8": [_file(_record(_stored(b"ab"), (2,), name=b"\xff\xfe"))],
    "the form 3": [_file(_record(_stored(b"ab"), (2,), form=3))],
    "no dtype 250": [_file(_record(_stored(b"ab"), (2,), dtype=250))],
    "65 dimensions": [_file(_record(b"", (1,) * 65))],
    "larger than any memory": [
        _file(_record(_stored(b""), sizes)) for sizes in ((2**63,), (0, 2**62), (2**32, 2**32), (2**64 - 1,) * 64)
    ],
    "by method": [_file(_record(_stored(b"abc"), (2,))), _file(_record(struct.pack("<BQ", 7, 2) + b"ab", (2,)))],
    "cannot stand for": [_file(_record(_coded(_HALVES, b"ab"), sizes)) for sizes in ((17,), (2**40,))],
    "too few words": [_file(_record(_coded(lengths, b"a"), (1,))) for lengths in ({}, {5: 1}, {5: 1, 6: 3})],
    "too many words": [_file(_record(_coded(dict.fromkeys(range(n), 1), b"a"), (1,))) for n in (3, 256)],
    "at most 12": [_file(_record(_coded({0: 1, 1: 13}, b"a"), (1,)))],
    "behind the last word": [_file(_record(_coded(_HALVES, octets), (3,))) for octets in (b"\0\0", b"\x08")],
    "same as one": [_file(struct.pack("<H", 1) + b"w" + struct.pack("<BI", 2, number)) for number in (0, 2**32 - 1)],
    "do not exist": [_file(_record(_stored(b"\x10") + _stored(b"a"), (4,), form=1))],
    "neither true nor false": [_file(_record(_stored(b"\x02"), (1,), dtype=9))],
}


@pytest.mark.parametrize("said", _HOSTILE)
def test_hostile_files_are_refused(said: str, tmp_path: Path) -> None:
    """A hostile file raises one error that says what is wrong, however large the sizes in the file are."""
    for content in _HOSTILE[said]:
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(CompressedFileError, match=said):
            load_compressed(tmp_path / "file")


def test_damage_is_noticed_and_survived(tmp_path: Path) -> None:
    """The checksum detects every change of a file. With a corrected checksum, a changed file is refused or read as other tensors, without
    another error, and within 1,024 times its size of memory."""
    rng = random.Random(15)
    path = tmp_path / "file"
    model = nn.Sequential(nn.Linear(33, 40), nn.Linear(40, 33, dtype=torch.float64))
    save_compressed(
        {**compress(model, sparsity=0.5, clusters=16).state_dict(), **compress(model, sparsity=0.8).state_dict()}, path
    )
    whole = path.read_bytes()
    refused = 0
    rounds = 300
    tracemalloc.start()
    try:
        for _ in range(rounds):
            damaged = bytearray(whole[:-32])
            at = rng.randrange(8, len(damaged))
            kind = rng.randrange(5)
            if kind == 0:
                damaged[at] ^= 1 << rng.randrange(8)
            elif kind == 1:
                del damaged[at:]
            elif kind == 2:
                damaged[at : at + 8] = struct.pack("<Q", rng.choice([0, 1, 2**31, 2**40, 2**63, 2**64 - 1]))
            elif kind == 3:
                damaged[at:at] = rng.randbytes(rng.randrange(1, 20))
            else:
                damaged[at : at + 128] = rng.randbytes(128)
            if damaged == whole[:-32]:
                continue
            path.write_bytes(bytes(damaged) + whole[-32:])
            with pytest.raises(CompressedFileError):
                load_compressed(path)
            path.write_bytes(bytes(damaged) + hashlib.sha256(damaged).digest())
            tracemalloc.reset_peak()
            try:
                found = load_compressed(path)
            except CompressedFileError:
                refused += 1
            else:
                assert sum(tensor.nbytes for tensor in found.values()) <= 512 * len(damaged)
            assert tracemalloc.get_traced_memory()[1] < 1024 * len(whole)
    finally:
        tracemalloc.stop()
    assert rounds // 2 < refused < rounds


def test_what_is_no_tensor_with_data_is_refused(tmp_path: Path) -> None:
    """Values that are no tensors with data are refused by name, before anything is written."""
    sparse = torch.eye(3).to_sparse()
    for value in (
        {"a": 1},
        sparse,
        torch.empty(3, device="meta"),
    ):
        with pytest.raises(HybridError, match="'extra' cannot be saved: it is"):
            save_compressed({"x": torch.ones(2), "extra": value}, tmp_path / "file")  # type: ignore[dict-item]
    assert not list(tmp_path.iterdir())


def test_tensors_made_while_they_are_saved_are_kept_apart(tmp_path: Path) -> None:
    """Tensors of a lazy mapping are kept apart, although each could get the memory of the one before."""

    class Lazy(Mapping[str, torch.Tensor]):
        def __getitem__(self, name: str) -> torch.Tensor:
            return torch.full((1000,), float(name))

        def __iter__(self) -> Iterator[str]:
            return map(str, range(20))

        def __len__(self) -> int:
            return 20

    save_compressed(Lazy(), tmp_path / "file")
    assert [int(tensor[0]) for tensor in load_compressed(tmp_path / "file").values()] == list(range(20))


def test_a_failing_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed write leaves the old file, and no other file beside it."""
    path = tmp_path / "file"
    save_compressed({"x": torch.ones(3)}, path)

    def fail(*_: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", fail)
        with pytest.raises(OSError, match="no space"):
            save_compressed({"x": torch.zeros(3)}, path)
    assert load_compressed(path)["x"].tolist() == [1, 1, 1]
    assert list(tmp_path.iterdir()) == [path]
