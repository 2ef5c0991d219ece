"""`.hybrid` files as the C++ runtime reads them: what it gives, and what it refuses with which words."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import itertools
import json
import os
import re
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tests.runtime import hybrid_files
from tests.runtime.hybrid_files import (
    PAGE,
    HybridFile,
    coded_file,
    file_for_many_sizes,
    file_with_control_flow,
    file_with_variants,
    form,
    plan_text,
    small_file,
    target,
    value,
    with_header,
    with_text,
)
from tests.runtime.plans import Draft
from torch_hybrid_backend import sign
from torch_hybrid_backend.artifact.coding import coded
from torch_hybrid_backend.artifact.manifest import Manifest
from torch_hybrid_backend.cli import main
from torch_hybrid_backend.errors import ArtifactError, HybridError
from torch_hybrid_backend.runtime.native.description import ValueKind
from torch_hybrid_backend.runtime.native.ops import Artifact, Binding, Guard, Plan, SizedPlans

N = 4096  # of tensors that kernels compute on, as in conftest.py
Edit = Callable[[dict[str, Any]], object]


def written(path: Path, file: HybridFile | bytes) -> Path:
    path.write_bytes(file if isinstance(file, bytes) else file.to_bytes())
    path.chmod(0o644)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.hybrid"


def refused(path: Path, file: HybridFile | bytes, said: str, **options: Any) -> None:
    """The file is refused both ways, in words that begin with its path."""
    written(path, file)
    for share in (True, False):
        with pytest.raises(ArtifactError, match=f"^{re.escape(str(path))}: .*{said}"):
            Artifact(path, share=share, **options)


@pytest.mark.parametrize("share", [True, False])
def test_a_file_is_read(share: bool, path: Path) -> None:
    """Its manifest, segments, constants and signatures are those that were written."""
    file = small_file()
    file.signatures = [bytes(range(96)), bytes(96)]
    artifact = Artifact(written(path, file), share=share, threads=3)
    assert artifact.manifest == file.text().decode()
    assert artifact.signatures == [(bytes(range(32)), bytes(range(32, 96))), (bytes(32), bytes(64))]
    for name, (_, content) in file.segments.items():
        assert ctypes.string_at(*artifact.segment(name)) == content
    weights, _ = artifact.segment("weights.0")
    assert [artifact.constant_address(number) - weights for number in range(5)] == [0, 64, 0, 0, 0]
    assert weights % PAGE == 0
    with pytest.raises(ArtifactError, match=r"no segment .gone"):
        artifact.segment("gone")
    for number in (-1, 5):
        with pytest.raises(ArtifactError, match=f"no constant {number}"):
            artifact.constant_address(number)


def test_a_coded_file_byte_by_byte(path: Path) -> None:
    """A block is stored, or numbers that stand for values."""
    artifact = Artifact(written(path, coded_file()), threads=2)
    _, whole = small_file().segments["weights.0"]
    content = ctypes.string_at(*artifact.segment("weights.0"))
    assert content == whole[:64] + struct.pack("<8f", *[0, 1] * 4)


@pytest.mark.parametrize("share", [True, False])
def test_coded_weights_are_decoded(share: bool, path: Path) -> None:
    """Constants lie in the decoded segment; its checksum is of the coded bytes."""
    numbers = torch.tensor([1.0, 0.0]).repeat(200_000)
    content = numbers.numpy().tobytes()
    file, short = small_file(), coded(content)
    assert short is not None
    assert len(short) < len(content) / 50
    file.segments["weights.0"] = "weights", short
    file.edit = lambda manifest: manifest["segments"][2].update(encoding="huffman", decoded=len(content))
    artifact = Artifact(written(path, file), share=share, threads=3)
    assert ctypes.string_at(*artifact.segment("weights.0")) == content
    weights, _ = artifact.segment("weights.0")
    assert [artifact.constant_address(number) - weights for number in range(2)] == [0, 64]
    file.segments["weights.0"] = "weights", short[:-1]
    refused(path, file, "coded weights are not as the format demands: a coded block ends too early")


@pytest.mark.parametrize("share", [True, False])
def test_writes_to_constants_stay_in_the_object(share: bool, path: Path) -> None:
    """Neither the file nor another object that opened it sees them."""
    content = small_file().to_bytes()
    one, other = (Artifact(written(path, content), share=share) for _ in range(2))
    ctypes.memset(one.constant_address(0), 255, 4)
    assert ctypes.string_at(other.constant_address(0), 4) == bytes(4)
    assert path.read_bytes() == content


def test_a_plan_runs_after_its_artifact_is_gone(path: Path) -> None:
    """The plan keeps what it needs, and plans and files are freed with their last user."""
    plan = Plan.of_artifact(Artifact(written(path, small_file())), "plan.forward")
    gc.collect()
    path.unlink()
    handle, x, state = plan.handle, torch.randn(8), torch.randn(8)
    binding = Binding(plan, Guard([]), {}, {0: 0})
    outputs = plan.run(binding, [x, state])
    assert outputs is not None
    assert [output.tolist() for output in outputs] == [x.tolist(), state.tolist(), x.tolist()]
    assert str(path) in Path("/proc/self/maps").read_text()
    del plan, binding
    gc.collect()
    assert str(path) not in Path("/proc/self/maps").read_text()
    with pytest.raises(RuntimeError, match="no plan has the handle"):
        torch.ops.torch_hybrid_backend.plan_time(handle, 0, [], False)


def with_kernels(library: bytes, *features: str) -> HybridFile:
    """A file whose plan adds its constant to its input, by a kernel."""
    draft = Draft()
    x = draft.add_value(ValueKind.INPUT, 0, torch.float32, [N], [1])
    weight = draft.add_value(ValueKind.CONSTANT, 0, torch.float32, [N], [1])
    out = draft.add_value(ValueKind.FRESH, 0, torch.float32, [N], [1])
    draft.add_kernel("anything", "add", [x, weight, out])
    plan = draft.describe(1, 1, 0, [out]).text(lambda member, name: member)
    file = small_file()
    entry = file.manifest["entries"][0]
    entry.update(inputs=[form("x", (N,))], sources=[["input", 0]], updates=[], results=[["output", 0]])
    entry.update(outputs=[form("y", (N,))])
    tensor = {"segment": "weights.0", "offset": 0, "dtype": "float32", "sizes": [N], "strides": [1]}
    file.manifest.update(targets=[target("library", *features)], constants=[tensor], states=[], samples=[])
    weights = torch.arange(N, dtype=torch.float32).numpy().tobytes()
    file.segments = {
        "plan.forward": ("plan", plan.encode()),
        "library": ("library", library),
        "report": ("report", b"{}"),
        "weights.0": ("weights", weights),
    }
    return file


def check(plan: Plan, artifact: Artifact) -> None:
    x = torch.randn(N)
    binding = Binding(plan, Guard([]), {}, {0: artifact.constant_address(0)})
    outputs = plan.run(binding, [x])
    assert outputs is not None
    assert torch.equal(outputs[0], x + torch.arange(N))


def _libraries_in_memory() -> int:
    return len(re.findall(r"/memfd:hybrid", Path("/proc/self/maps").read_text()))


@pytest.mark.parametrize("share", [True, False])
def test_kernels_come_from_the_file(share: bool, kernels: str, path: Path) -> None:
    """The library is opened with the first plan, shared by the next, closed with the last, and opened again; no descriptor stays."""
    before = len(os.listdir("/proc/self/fd"))
    artifact = Artifact(written(path, with_kernels(Path(kernels).read_bytes())), share=share)
    path.unlink()
    assert _libraries_in_memory() == 0
    first, second = (Plan.of_artifact(artifact, "plan.forward") for _ in range(2))
    loaded = _libraries_in_memory()
    assert loaded > 0
    del first
    gc.collect()
    assert _libraries_in_memory() == loaded
    check(second, artifact)
    check(Plan.of_artifact(artifact, "plan.forward"), artifact)
    del second
    gc.collect()
    assert _libraries_in_memory() == 0
    check(Plan.of_artifact(artifact, "plan.forward"), artifact)
    del artifact
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_libraries_of_files_are_told_apart(kernels: str, tmp_path: Path) -> None:
    """The loader knows libraries by name: eight files, opened at once, have each its own."""
    library = Path(kernels).read_bytes()
    files = [written(tmp_path / f"{number}.hybrid", with_kernels(library + bytes([number]))) for number in range(8)]
    with ThreadPoolExecutor(4) as pool:
        artifacts = list(pool.map(Artifact, files))
        plans = list(pool.map(lambda artifact: Plan.of_artifact(artifact, "plan.forward"), artifacts))
    for plan, artifact in zip(plans, artifacts, strict=True):
        check(plan, artifact)
    mapped = re.findall(r" (\d+) +/memfd:hybrid", Path("/proc/self/maps").read_text())  # by inode
    assert len(set(mapped)) == 8


def test_a_library_that_is_none_is_named(kernels: str, path: Path) -> None:
    """The loader's message comes with the file's path and the segment's name, unless the header tells."""
    for library, said in [
        (b"no library", "its library is no ELF library"),
        (Path(kernels).read_bytes()[:200], 'cannot open the kernel library "library"'),
    ]:
        artifact = Artifact(written(path, with_kernels(library)))
        with pytest.raises(ArtifactError, match=rf"^{re.escape(str(path))}: {said}"):
            Plan.of_artifact(artifact, "plan.forward")
    with pytest.raises(ArtifactError, match=r"segment .weights.0. is no plan"):
        Plan.of_artifact(artifact, "weights.0")


def test_a_kernel_that_is_missing_is_named(kernels: str, path: Path) -> None:
    """The error has the file, the segment and the kernel."""
    file = with_kernels(Path(kernels).read_bytes())
    kind, plan = file.segments["plan.forward"]
    file.segments["plan.forward"] = kind, plan.replace(b'"symbol":"add"', b'"symbol":"sub"')
    artifact = Artifact(written(path, file))
    with pytest.raises(ArtifactError, match=rf'^{re.escape(str(path))}: .*"library" has no kernel "sub"'):
        Plan.of_artifact(artifact, "plan.forward")


@pytest.mark.parametrize(
    ("kernels", "said"),
    [
        ([], "calls a kernel .add., which is not among the kernels"),
        ([{"name": "add", "bytes": [0, 0, 0, 0], "sizes": 0}], "with 3 tensors and 0 sizes; it takes 4 and 0"),
        ([{"name": "add", "bytes": [0, 0, 0], "sizes": 1}], "with 3 tensors and 0 sizes; it takes 3 and 1"),
        (
            [{"name": "add", "bytes": [0, 0, 4 * N + 1], "sizes": 0}],
            f"with {4 * N} bytes as tensor 2, of which it uses {4 * N + 1}",
        ),
        ([{"name": "add", "bytes": [0, 0, 0], "sizes": 0}] * 2, "two kernels are called .add"),
        ([{"name": "add", "bytes": [0, 0, 0], "sizes": -1}], "kernel 0: the number of sizes is -1"),
    ],
)
def test_calls_of_kernels_are_checked(kernels: list[Any], said: str, path: Path) -> None:
    """A kernel checks nothing of what it is given: a plan that calls one otherwise than the file says is refused when it is opened."""
    file = with_kernels(b"no library")
    file.manifest["kernels"] = [{"name": "add", "bytes": [4 * N] * 3, "sizes": 0}]
    Artifact(written(path, file))
    file.manifest["kernels"] = kernels
    refused(path, file, f"not as the format demands: .*{said}")


def test_signatures_come_first(path: Path) -> None:
    """Nothing is read of a file that `verify` refuses: here its coded weights are damaged, or its manifest is none."""

    def verify(manifest: bytes, signatures: Sequence[tuple[bytes, bytes]]) -> None:
        assert signatures == [(bytes(range(32)), bytes(range(32, 96)))]
        raise PermissionError(manifest.decode()[:9])

    file = coded_file()
    file.signatures = [bytes(range(96))]
    kind, weights = file.segments["weights.0"]
    file.segments["weights.0"] = kind, b"\xff" * len(weights)
    contents = [content for _, content in file.segments.values()]
    for content in (file.to_bytes(), with_text(b'{"format"', contents, file.signatures)):
        with pytest.raises(PermissionError, match='"format"'):
            Artifact(written(path, content), verify=verify)
        with pytest.raises(ArtifactError, match="not as the format demands"):
            Artifact(path)


@pytest.mark.fault(
    "a `.hybrid` file is for other processors",
    "ArtifactError that lists the features that this one lacks; nothing of the file has run",
)
def test_the_first_library_for_this_machine_is_taken(kernels: str, path: Path) -> None:
    """Targets are tried in order; where none fits, the error lists what each lacks."""
    library = Path(kernels).read_bytes()
    file = with_kernels(library)
    other = {**target("other"), "processor": "riscv64"}
    file.segments["other"] = "library", b"for another machine"
    file.manifest["targets"] = [target("other", "new_feature"), other, target("library")]
    artifact = Artifact(written(path, file))
    check(Plan.of_artifact(artifact, "plan.forward"), artifact)
    file.manifest["targets"] = [target("other", "one", "fpu", "two"), other]
    refused(path, file, r'no library in it is for this processor.*needs "one", .*"two".*"riscv64".*: export the model')


def fat(library: bytes, *features: Sequence[str]) -> HybridFile:
    """A file with a variant for each list of features, the last of them its own. Their plans add other constants: n times the number."""
    file = with_kernels(library)
    kind, plan = file.segments.pop("plan.forward")
    (constant,) = file.manifest["constants"]
    of = []
    for number, needed in enumerate(features):
        file.segments[f"{number}/plan.forward"] = kind, plan
        file.segments[f"{number}/library"] = "library", library + bytes([number])
        weights = torch.arange(N, dtype=torch.float32) * number
        file.segments[f"{number}/weights"] = "weights", weights.numpy().tobytes()
        file.manifest["constants"].append({**constant, "segment": f"{number}/weights"})
        of.append(
            {
                "targets": [target(f"{number}/library", *needed)],
                "kernels": [{"name": "add", "bytes": [4 * N] * 3, "sizes": 0}],
                "entries": [{**entry(file.manifest), "plan": f"{number}/plan.forward", "slots": [number + 1]}],
                "samples": [],
                "report": "report",
            }
        )
    file.manifest.update({"variants": of[:-1], **of[-1]})
    return file


@pytest.mark.parametrize("share", [True, False])
def test_the_first_variant_for_this_machine_is_taken(share: bool, kernels: str, path: Path) -> None:
    """Variants are tried in order, the manifest's own members last. Only parts of the one that is taken are read, and can be asked for."""
    needs = (("new_feature",), ("fpu",), ("fpu",), ())
    file = fat(Path(kernels).read_bytes(), *needs)
    artifact = Artifact(written(path, file), share=share, threads=2)
    assert artifact.variant == 1
    x = torch.randn(N)
    plan = Plan.of_artifact(artifact, "1/plan.forward")
    outputs = plan.run(Binding(plan, Guard([]), {}, {0: artifact.constant_address(2)}), [x])
    assert outputs is not None
    assert torch.equal(outputs[0], x + torch.arange(N))
    for ask in (
        lambda: artifact.segment("0/library"),
        lambda: artifact.constant_address(1),
        lambda: Plan.of_artifact(artifact, "2/plan.forward"),
    ):
        with pytest.raises(ArtifactError, match=rf"^{re.escape(str(path))}: segment .* is none of the variant"):
            ask()
    assert Artifact(path, runs=False).variant == 3
    file = fat(Path(kernels).read_bytes(), ("new_feature",), ())
    assert Artifact(written(path, file)).variant == 1


@pytest.mark.fault(
    "a part of a `.hybrid` file for several targets is damaged that only other processors run",
    "nothing; `hybrid inspect` and `hybrid sign` raise ArtifactError",
)
@pytest.mark.parametrize("part", ["library", "weights", "plan.forward"])
def test_damage_in_another_variant(part: str, path: Path) -> None:
    """Whoever looks at the whole file finds it; the variant that runs here is checked as ever."""
    file = fat(b"no library", ("new_feature",), ())
    content = bytearray(file.to_bytes())
    segments = {each["name"]: each for each in json.loads(file.text())["segments"]}
    content[segments[f"0/{part}"]["offset"]] ^= 1
    Artifact(written(path, bytes(content)))
    refused(path, bytes(content), f"checksum of its segment .0/{part}", runs=False)
    with pytest.raises(ArtifactError, match="checksum"):
        sign(path, Ed25519PrivateKey.generate())
    assert main(["inspect", str(path)]) != 0
    content[segments[f"1/{part}"]["offset"]] ^= 1
    refused(path, bytes(content), f"checksum of its segment .1/{part}")


@pytest.mark.fault(
    "no variant of a `.hybrid` file for several targets is for this processor",
    "ArtifactError that lists the features that each needs and this one lacks; nothing of the file has run",
)
def test_no_variant_fits(path: Path) -> None:
    """The features are listed target by target."""
    file = fat(b"no library", ("one", "fpu", "two"), ("one",))
    refused(path, file, r'for this processor.*; "0/library" needs "one", "two"; "1/library" needs "one": export the')
    Artifact(path, runs=False)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda variant: variant.pop("entries"), 'no member "entries"'),
        (lambda variant: variant.pop("targets"), 'no member "targets"'),
        (lambda variant: variant.update(targets={}), "a list"),
        (lambda variant: variant.update(targets=[target("1/weights")]), "segment .1/weights. is of another kind"),
        (lambda variant: variant.update(targets=[target("gone")]), "no segment .gone"),
        (lambda variant: variant.update(report="0/library"), "segment .0/library. is of another kind"),
        (lambda variant: variant["entries"][0].update(name="backward"), "variant 0 has other entries than the file"),
        (lambda variant: variant.update(entries=[]), "there is no entry"),
        (lambda variant: variant["entries"][0].update(slots=[99]), "no constant 99"),
        (lambda variant: variant.update(kernels=[]), "which is not among the kernels"),
    ],
)
def test_a_forged_variant(edit: Edit, said: str, path: Path) -> None:
    """Each rule for the members of a manifest holds for those of a variant."""
    file = fat(b"no library", (), ())
    Artifact(written(path, file))
    edit(file.manifest["variants"][0])
    for options in ({}, {"runs": False}):
        refused(path, file, f"not as the format demands: .*{said}", **options)


def test_members_that_a_variant_does_not_have(path: Path) -> None:
    """Members that a variant should not have are read by nobody: nothing checks them."""
    file = fat(b"no library", (), ())
    file.manifest["variants"][0]["constants"] = [{"segment": "0/weights", "offset": 1 << 40}]
    artifact = Artifact(written(path, file))
    found, expected = (Manifest.from_json(artifact.manifest, number) for number in (0, -1))
    assert found.constants == expected.constants


def test_at_most_32_variants(path: Path) -> None:
    file = file_with_variants()
    file.manifest["variants"] *= 31
    assert Artifact(written(path, file)).variant == 31
    file.manifest["variants"].append(file.manifest["variants"][0])
    refused(path, file, "it has 33 variants; at most 32 are allowed")
    file.manifest["variants"] = {}
    refused(path, file, "a list")


HEADERS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda file: b"", "no .hybrid file.*name one that export wrote"),
    "short": (lambda file: file[:7], "no .hybrid file"),
    "magic": (lambda file: b"PK\3\4" + file[4:], "no .hybrid file"),
    "text mode": (lambda file: file.replace(b"\n", b"\r\n", 1), "no .hybrid file"),
    "cut in the header": (lambda file: file[:100], "damaged.*100 bytes end within the header.*copy it again"),
    "cut": (lambda file: file[:-1], r"damaged.*it has \d+ bytes instead of \d+"),
    "longer": (lambda file: file + b"\0", r"damaged.*it has \d+ bytes instead of \d+"),
    "newer": (lambda file: file[:8] + b"\2" + file[9:], "of format 2, .* reads format 1: install a newer"),
    "older": (lambda file: file[:8] + b"\0" + file[9:], "checksum of its header"),
    "checksum": (lambda file: file[: PAGE - 1] + b"?" + file[PAGE:], "checksum of its header"),
    "manifest": (lambda file: file.replace(b'"small"', b'"smell"'), "checksum of its manifest"),
    "padding": (lambda file: file[: 2 * PAGE - 1] + b"\1" + file[2 * PAGE :], "bytes between its parts are not zero"),
    "segment": (lambda file: file[:-1] + b"\1", r"checksum of its segment .weights.0"),
    "many signatures": (
        lambda file: with_header(file[:12] + struct.pack("<I", 42) + file[16:64]) + file[PAGE:],
        "42 signatures of at most 41",
    ),
    "unused signature": (
        lambda file: with_header(file[:64] + b"\1") + file[PAGE:],
        "what no signature uses must be zero",
    ),
    "large manifest": (
        lambda file: with_header(file[:16] + struct.pack("<Q", 1 << 63) + file[24:64]) + file[PAGE:],
        "a manifest of 9223372036854775808 bytes",
    ),
}


@pytest.mark.fault(
    "a `.hybrid` file is none, was cut off or changed, or is of a newer format",
    "ArtifactError that names the file and the cure",
)
@pytest.mark.parametrize("case", HEADERS)
def test_damage_is_named(case: str, path: Path) -> None:
    """Files that are none of ours, were cut off or changed, or are of a newer format: each error says what to do."""
    change, said = HEADERS[case]
    refused(path, change(small_file().to_bytes()), said)


@pytest.mark.fault(
    "a flipped bit anywhere in a `.hybrid` file",
    "ArtifactError",
)
def test_every_byte_is_checked(path: Path) -> None:
    """A flipped bit anywhere is an error."""
    content = small_file().to_bytes()
    written(path, content)
    with path.open("r+b", buffering=0) as file:
        for at, byte in enumerate(content):
            os.pwrite(file.fileno(), bytes([byte ^ 1 << at % 8]), at)
            with pytest.raises(ArtifactError):
                Artifact(path)
            os.pwrite(file.fileno(), bytes([byte]), at)
    Artifact(path)


def test_every_length_is_checked(path: Path) -> None:
    """A file that is cut off anywhere is an error."""
    content = small_file().to_bytes()
    for length in (*range(0, 200, 7), *range(200, len(content), 97), len(content) - 1):
        written(path, content[:length])
        with pytest.raises(ArtifactError):
            Artifact(path)


@pytest.mark.fault(
    "others may write to a `.hybrid` file that is to be shared",
    "ArtifactError that names share=False and chmod",
)
def test_files_that_others_may_write_to_are_copied_or_refused(path: Path) -> None:
    """Memory that is shared with a file must not change behind the process."""
    written(path, small_file())
    for mode in (0o664, 0o646):
        path.chmod(mode)
        with pytest.raises(ArtifactError, match=r"others may write to it.*share=False.*chmod go-w"):
            Artifact(path)
        Artifact(path, share=False)
    path.chmod(0o644)
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
        with pytest.raises(ArtifactError, match=r"belongs to another user.*share=False.*chown"):
            Artifact(path)
        Artifact(path, share=False)


def test_what_is_no_file_is_refused(path: Path, tmp_path: Path) -> None:
    """A missing file, a folder, a pipe and a path with a zero character are errors, and nothing is waited for."""
    with pytest.raises(ArtifactError, match="cannot be opened: No such file"):
        Artifact(path)
    os.mkfifo(path)
    for odd in (path, tmp_path, Path("/dev/zero")):
        with pytest.raises(ArtifactError, match="no regular file"):
            Artifact(odd)
    with pytest.raises(ArtifactError, match="character 0"):
        Artifact(f"{path}\0")


def entry(manifest: dict[str, Any]) -> Any:
    return manifest["entries"][0]


def of_entry(**members: Any) -> Edit:
    return lambda manifest: entry(manifest).update(members)


def of_constant(**members: Any) -> Edit:
    return lambda manifest: manifest["constants"][0].update(members)


def of_segment(number: int = 0, **members: Any) -> Edit:
    return lambda manifest: manifest["segments"][number].update(members)


def of_sample(**members: Any) -> Edit:
    return lambda manifest: manifest["samples"][0].update(members)


def generation(**members: Any) -> Edit:
    whole = {"prefill": "forward", "decode": "forward", "max_length": 8, "stop_tokens": []}
    return lambda manifest: manifest.update(generation=whole | members)


def rows(dim: int, index: Any, source: Any) -> Edit:
    return of_entry(updates=[["rows", ["state", 0], dim, index, source]])


def state_of_one_row(manifest: dict[str, Any]) -> None:
    """The state has a leading size of 1, and what is written to it lacks it."""
    row = {"segment": "weights.0", "offset": 0, "dtype": "float32", "sizes": [1, 4], "strides": [4, 1]}
    manifest["constants"].append(row)
    manifest["states"].append({"name": "row", "constant": 5})
    entry(manifest)["updates"].append(["rows", ["state", 1], 1, ["constant", 3], ["constant", 4]])


def without_samples(edit: Edit) -> Edit:
    return lambda manifest: (edit(manifest), manifest.update(samples=[]))


BIG = 1 << 62
MANIFESTS: dict[str, tuple[Edit, str]] = {
    "format": (lambda m: m.update(format=2), "of format 2"),
    "no member": (lambda m: m.pop("states"), 'no member "states"'),
    "another type": (lambda m: m.update(model=3), "another type than a text"),
    "no entry": (lambda m: m.update(entries=[]), "no entry"),
    "two entries": (lambda m: m["entries"].append(entry(m)), "two entries are called .forward"),
    "two segments": (of_segment(2, name="plan.forward"), "two segments are called .plan.forward"),
    "kind": (of_segment(kind="sources"), r"segment 0: no kind of segment is called .sources.: a newer version"),
    "encoding": (of_segment(encoding="zstd"), r"encoded as .zstd., which only a newer version"),
    "coded plan": (of_segment(encoding="huffman", decoded=10), "it is coded, and only weights may be"),
    "no decoded size": (of_segment(2, encoding="huffman"), 'no member "decoded"'),
    "large decoded size": (of_segment(2, encoding="huffman", decoded=1 << 14), "cannot be 16384 decoded ones"),
    "huge decoded size": (
        of_segment(2, encoding="huffman", decoded=1 << 62),
        "the decoded size is 4611686018427387904",
    ),
    "constant behind the decoded": (of_segment(2, encoding="huffman", decoded=64), "not within the segment's 64"),
    "not coded so": (
        of_segment(2, encoding="huffman", decoded=256),
        "it has bytes behind its last coded block",
    ),
    "digest": (of_segment(sha256="A" * 64), "64 lower-case hexadecimal digits"),
    "short digest": (of_segment(sha256="a" * 62), "64 lower-case hexadecimal digits"),
    "overlap": (of_segment(2, offset=PAGE), r"must begin at \d+"),
    "gap": (of_segment(2, offset=6 * PAGE), r"must begin at \d+"),
    "large segment": (of_segment(2, size=(1 << 63) - 1), "has 9223372036854775807 bytes from"),
    "negative size": (of_segment(2, size=-1), "the size is -1"),
    "short segment": (of_segment(2, size=64), "its last segment ends at"),
    "no segments": (lambda m: m.update(segments=[]), "its last segment ends at|no segment"),
    "report": (lambda m: m.update(report="weights.0"), "segment .weights.0. is of another kind"),
    "structure": (of_entry(structure={"in": ""}), 'no member "out"'),
    "library": (lambda m: m.update(targets=[target("gone")]), r"target 0: there is no segment .gone"),
    "library of another kind": (lambda m: m.update(targets=[target("plan.forward")]), "is of another kind"),
    "constant's segment": (of_constant(segment="plan.forward"), "constant 0: segment .plan.forward. is of another"),
    "constant's offset": (of_constant(offset=4), "multiple of 64"),
    "constant behind the end": (of_constant(offset=64, sizes=[9]), "36 bytes from 64 on are not within"),
    "constant's offset is large": (of_constant(offset=BIG), f"the offset is {BIG}"),
    "constant's offset is negative": (of_constant(offset=-64), "the offset is -64"),
    "dtype": (of_constant(dtype="float31"), r"no dtype is called .float31"),
    "sizes overflow": (of_constant(sizes=[1 << 32] * 2, strides=[0, 0]), "more than 2\\^58 elements"),
    "sizes of zero overflow": (of_constant(sizes=[0, BIG, BIG], strides=[1, 1, 1]), "more than 2\\^58 elements"),
    "strides overflow": (of_constant(sizes=[3, 3], strides=[BIG, BIG]), "over 2\\^58"),
    "span overflows": (of_constant(sizes=[9, 9], strides=[1 << 57, 1 << 57]), "more than 2\\^58 elements"),
    "negative size of a tensor": (of_constant(sizes=[-1]), "negative"),
    "negative stride": (of_constant(strides=[-1]), "negative"),
    "strides are missing": (of_constant(strides=[]), "1 sizes and 0 strides"),
    "dimensions": (of_constant(sizes=[1] * 65, strides=[1] * 65), "at most 64"),
    "state": (lambda m: m["states"][0].update(constant=5), "state 0: there is no constant 5: there are 5"),
    "two states": (lambda m: m["states"].append(m["states"][0]), "two states are called .cache"),
    "plan": (of_entry(plan="weights.0"), "entry 0: segment .weights.0. is of another kind"),
    "functions": (of_entry(functions="gone"), "no segment .gone"),
    "value": (lambda m: entry(m)["inputs"][1].update(value=[1]), "input 1: a value must be a number"),
    "source": (of_entry(sources=[["input", 2], ["state", 0]]), "source 0: there is no input 2: there are 2"),
    "source is no tensor": (of_entry(sources=[["input", 1], ["state", 0]]), "input 1 is no tensor"),
    "source's state": (of_entry(sources=[["input", 0], ["state", -1]]), "no state -1"),
    "source is an output": (of_entry(sources=[["output", 0], ["state", 0]]), "no tensor comes from .output. there"),
    "source's form": (of_entry(sources=[["input"], ["state", 0]]), "an origin is a kind and a number"),
    "few sources": (of_entry(sources=[]), "plan takes 2 inputs and 1 constants, and it gives 0 and 1"),
    "few slots": (of_entry(slots=[]), "it gives 2 and 0"),
    "slot": (of_entry(slots=[5]), "slot 0: there is no constant 5"),
    "slot is too small": (of_entry(slots=[2]), "slot 0: its plan reads 32 bytes of a constant of 16"),
    "update": (of_entry(updates=[["add", ["state", 0], 1]]), "no update is called .add"),
    "update of nothing": (of_entry(updates=[[]]), "an update has a kind"),
    "update's target": (of_entry(updates=[["copy", ["constant", 0], 1]]), "changes a constant"),
    "update's output": (of_entry(updates=[["copy", ["state", 0], 3]]), "update 0: its plan has no output 3"),
    "update's dimension": (rows(1, ["constant", 3], ["constant", 4]), "no dimension 1"),
    "update's index": (rows(0, ["output", 0], ["constant", 4]), "update 0: its index must be int64"),
    "update's index is missing": (rows(0, ["output", 3], ["constant", 4]), "update 0: its plan has no output 3"),
    "update's source": (rows(0, ["constant", 3], ["output", 0]), "update 0: its source has another dtype or other"),
    "update's origin": (rows(0, 3, ["output", 0]), "another type than a list"),
    "parts of Python's": (of_entry(python_parts=["f"]), "no functions"),
    "few results": (of_entry(results=[]), "0 results and describes 6"),
    "result": (lambda m: entry(m).update(results=[["output", 3], *entry(m)["results"][1:]]), "no output 3"),
    "result of nothing": (lambda m: entry(m)["results"].__setitem__(0, []), "result 0: a result has a kind"),
    "literal": (lambda m: entry(m)["results"].__setitem__(4, ["literal", {}]), "a value must be a number"),
    "no literal": (lambda m: entry(m)["results"].__setitem__(4, ["output", 0]), "described as the other"),
    "result's sizes": (
        without_samples(lambda m: entry(m)["outputs"][0].update(sizes=[7])),
        "result 0: it has another dtype or other",
    ),
    "result's dtype": (
        without_samples(lambda m: entry(m)["outputs"][1].update(dtype="int32")),
        "result 1: it has another dtype",
    ),
    "view": (lambda m: entry(m)["results"][5].__setitem__(4, 3), "result 5: the view ends behind what it views"),
    "view's offset": (lambda m: entry(m)["results"][5].__setitem__(4, -1), "the offset is -1"),
    "view's strides": (lambda m: entry(m)["results"][5].__setitem__(3, [4]), "2 sizes and 1 strides"),
    "view's bits": (lambda m: entry(m)["results"][5].__setitem__(5, "odd"), "no bits of a view are called .odd"),
    "view of a view": (lambda m: entry(m)["results"][5].__setitem__(1, ["view", 0]), "no tensor comes from .view"),
    "sample's entry": (of_sample(entry="backward"), "sample 0: there is no entry .backward"),
    "sample's inputs": (of_sample(inputs=[0]), "1 tensors instead of 2"),
    "sample without a tensor": (of_sample(inputs=[None, None]), "must be null, and only"),
    "sample of a value": (of_sample(inputs=[0, 0]), "must be null, and only"),
    "sample's sizes": (of_sample(inputs=[2, None]), "constant 2 has another dtype or other sizes"),
    "tolerance": (of_sample(tolerance=-1), "tolerance is no"),
    "generation": (generation(stop_tokens="2"), "another type than a list"),
    "generation's length": (generation(max_length=-1), "the max_length of generation is -1"),
    "generation's entry": (generation(decode="gone"), "there is no entry .gone."),
    "generation's entries": (generation(), "something else than a decoder's"),
    "no tolerance": (of_sample(tolerance=float("nan")), "tolerance is no"),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_manifests_are_checked(case: str, path: Path) -> None:
    """Each number, name and form in a manifest, though every checksum is right."""
    edit, said = MANIFESTS[case]
    file = small_file()
    file.edit = edit
    refused(path, file, f"not as the format demands: .*({said})")


def test_texts_that_are_no_manifest_are_refused(path: Path) -> None:
    """Bounds on bytes, depth and values, and JSON with one reading."""
    contents = [content for _, content in small_file().segments.values()]
    good = small_file().text()
    for text, said in (
        (b"", "no JSON"),
        (good[:-1], "no JSON"),
        (good + b"{}", "no JSON"),
        (b"[" * 100_000, "nested"),
        (b"[" + b"0," * (1 << 20) + b"0]", "2\\^20 values"),
        (good.replace(b'"model"', b'"torch"'), 'two members "torch"'),
        (good.replace(b"small", b"sm\xffll"), "not UTF-8"),
        (good.replace(b'"format":1', b'"format":9223372036854775808'), "64 bits"),
        (good.replace(b'"format":1', b'"format":01'), "no JSON"),
    ):
        refused(path, with_text(text, contents), f"not as the format demands: .*{said}")


def test_leading_sizes_of_what_an_update_writes_may_be_missing(path: Path) -> None:
    """Sizes of 1 alone, as for index_put."""
    file = small_file()
    file.edit = state_of_one_row
    Artifact(written(path, file))
    file.edit = lambda manifest: (state_of_one_row(manifest), manifest["constants"][5].update(sizes=[2, 4]))
    refused(path, file, "update 2: its source has another dtype or other sizes")


def test_unknown_members_are_ignored(path: Path) -> None:
    """A later writer may say more."""
    file = small_file()
    file.edit = lambda manifest: (manifest.update(new=[1]), entry(manifest).update(new={"a": 1}))
    Artifact(written(path, file))


INPUT, FRESH = value("input"), value("fresh")
PLANS: dict[str, tuple[bytes, str]] = {
    "no JSON": (b"plan", "no JSON"),
    "kernel": (
        plan_text(
            [INPUT, FRESH],
            [{"kind": "kernel", "library": "library", "symbol": "k", "arguments": [0, 1], "sizes": []}],
            2,
            1,
            [1] * 3,
        ),
        "has kernels, and the file has no library",
    ),
    "another library": (
        plan_text([INPUT, FRESH], [{"kind": "kernel", "library": "/lib/libc.so.6"}], 2, 1, [1] * 3),
        r"step 0: its library must be called .library., not ./lib/libc.so.6",
    ),
    "address": (plan_text([INPUT], [{"kind": "external"}], 2, 1, [0] * 3), r"no step in a file is called .external"),
    "operator": (plan_text([INPUT], [{"kind": "operator"}], 2, 1, [0] * 3), "has operators of PyTorch"),
    "callback": (plan_text([INPUT], [{"kind": "callback"}], 2, 1, [0] * 3), "calls functions"),
    "inputs": (plan_text([INPUT], [], -1, 1, [0] * 3), "inputs is -1"),
    "outputs": (plan_text([INPUT], [], 2, 1, [1]), "output 0: there is no value 1"),
    "slot": (plan_text([value("constant", 1)], [], 2, 1, [0]), "value 0: there is no slot 1"),
    "large constant": (plan_text([value("constant", 0, (9,))], [], 2, 1, [0]), "reads 36 bytes of a constant of 32"),
    "offset": (plan_text([[*value("constant"), 1]], [], 2, 1, [0]), "reads 36 bytes of a constant of 32"),
    "payload": (plan_text([value("arena", BIG)], [], 2, 1, [0]), "the payload is"),
    "fields": (plan_text([["input", 0]], [], 2, 1, [0]), "six fields, or seven"),
    "sizes": (plan_text([value("fresh", 0, (1 << 30, 1 << 30))], [], 2, 1, [0]), "more than 2\\^58 elements"),
}


@pytest.mark.parametrize("case", PLANS)
def test_plans_are_checked(case: str, path: Path) -> None:
    """A plan's steps, the bytes that it reads of constants, and its entry are checked before it is built."""
    plan, said = PLANS[case]
    file = small_file()
    file.segments["plan.forward"] = "plan", plan
    refused(path, file, f"not as the format demands: .*{said}")


def test_control_flow_in_a_file(path: Path) -> None:
    """Loops run as long as their condition is true, and a branch in them takes the way that its predicate tells. A result is no operand."""
    artifact = Artifact(written(path, file_with_control_flow()))
    plan = Plan.of_artifact(artifact, "plan.forward")
    binding = Binding(plan, Guard([]), {}, {0: artifact.constant_address(0)})
    x, y = torch.randn(2, 8)
    for flag, which in itertools.product([True, False], repeat=2):
        (result,) = plan.run(binding, [torch.tensor(flag), x, torch.tensor(False), torch.tensor(which), y]) or ()
        assert torch.equal(result, x if not (flag and which) else y), (flag, which)
        assert result.data_ptr() not in (x.data_ptr(), y.data_ptr())


FLOWS: dict[str, tuple[Edit, str]] = {
    "plans": (lambda plan: plan.update(plans=plan["plans"][:3]), "step 0: there is no plan before it 3: there are 3"),
    "itself": (
        lambda plan: plan["plans"][3]["steps"][0].update(plans=[0, 3]),
        "plan 3: step 0: there is no plan before it 3",
    ),
    "negative": (lambda plan: plan["steps"][0].update(plans=[2, -1]), "there is no plan before it -1"),
    "three": (lambda plan: plan["steps"][0].update(plans=[2, 3, 3]), "step 0: it runs two plans"),
    "no list": (lambda plan: plan.update(plans={}), "a list"),
    "inner plans": (lambda plan: plan["plans"][1].update(values=[]), "plan 1: output 0: there is no value 1"),
    "a step of a plan": (
        lambda plan: plan["plans"][1]["steps"][0].update(kind="external"),
        "plan 1: step 0: no step in a file is called .external",
    ),
    "constants": (lambda plan: plan["plans"][0].update(constants=2), "plan 0: it has other constants"),
    "constant": (
        lambda plan: plan["plans"][0]["values"].append(value("constant", 0, (9,))),
        "reads 36 bytes of a constant of 32",
    ),
    "inputs": (lambda plan: plan["steps"][0].update(inputs=[0, 3, 1, 2]), "plan 2 has other inputs or outputs"),
    "an input that is not there": (
        lambda plan: plan["plans"][0]["values"][0].__setitem__(1, 2),
        "plan 0: value 0: there is no input 2",
    ),
    "outputs": (lambda plan: plan["steps"][0].update(outputs=[6]), "plan 3 has other inputs or outputs"),
    "carried": (lambda plan: plan["steps"][0].update(outputs=[-1] * 6), "it carries more than it is given"),
    "values": (lambda plan: plan["steps"][0].update(inputs=[0, 3, 1, 2, 7]), "there is no value 7"),
    "unread inputs": (lambda plan: plan["steps"][0].update(inputs=[0, 3, 1, 2, -1]), "there is no value -1"),
    "dtype": (lambda plan: plan["steps"][0].update(inputs=[0, 3, 1, 2, 0]), "input 4 of a plan has another dtype"),
    "carried dtype": (lambda plan: plan["plans"][3].update(outputs=[0, 0]), "output 1 of a plan has another dtype"),
    "result": (lambda plan: plan["steps"][0].update(outputs=[6, -1]), "output 0 of a plan has another dtype"),
    "condition": (
        lambda plan: plan["steps"][0].update(plans=[0, 3], inputs=[0, 3]),
        "not one truth value|has another dtype|other inputs",
    ),
    "what a loop asks": (
        lambda plan: plan["plans"][2].update(values=[value("raw_input", 1)]),
        "step 0: what it asks is not one truth value",
    ),
    "what a branch asks": (
        lambda plan: plan["plans"][3]["steps"][0].update(predicate=2),
        "plan 3: step 0: what it asks is not one truth value",
    ),
    "forms of one input": (
        lambda plan: plan["plans"][0]["values"].append(value("input", 0, (4,))),
        "plan 0: value 2: input 0 of a plan has another dtype or other sizes",
    ),
}


@pytest.mark.parametrize("case", FLOWS)
def test_control_flow_is_checked(case: str, path: Path) -> None:
    """The tensors that steps give to plans, and the plans that they name, are checked before anything is built."""
    edit, said = FLOWS[case]
    file = file_with_control_flow()
    kind, content = file.segments["plan.forward"]
    plan = json.loads(content)
    edit(plan)
    file.segments["plan.forward"] = kind, json.dumps(plan).encode()
    refused(path, file, f"not as the format demands: .*({said})")


def test_plans_in_plans_are_not_too_deep(path: Path) -> None:
    """Plans within plans run on one stack: 32 are the most, the outermost included."""
    for depth, is_legal in ((32, True), (33, False)):
        file = file_with_control_flow()
        kind, content = file.segments["plan.forward"]
        plan = json.loads(content)
        branch = {"kind": "branch", "predicate": 0, "inputs": [0, 1], "outputs": [2]}
        values = [value("raw_input", 0, (), "bool"), value("raw_input", 1), value("returned")]
        whole = {**plan["plans"][0], "values": values, "outputs": [2]}
        plans = [{**whole, "values": values[1:2], "steps": [], "outputs": [0]}]
        plans += [{**whole, "steps": [{**branch, "plans": [n, n]}]} for n in range(depth - 2)]
        plan |= {"plans": plans, "steps": [{**branch, "inputs": [0, 3], "outputs": [6], "plans": [depth - 2] * 2}]}
        file.segments["plan.forward"] = kind, json.dumps(plan).encode()
        artifact = Artifact(written(path, file))
        if not is_legal:
            with pytest.raises(ArtifactError, match="nested more than 32 deep"):
                Plan.of_artifact(artifact, "plan.forward")
            continue
        deep = Plan.of_artifact(artifact, "plan.forward")
        x = torch.randn(8)
        given = [torch.tensor(True), x, torch.tensor(True), torch.tensor(True), x]
        (result,) = deep.run(Binding(deep, Guard([]), {}, {0: artifact.constant_address(0)}), given) or ()
        assert torch.equal(result, x)


def test_messages_obey_no_file(path: Path) -> None:
    """Names in a file cannot move a terminal's cursor, nor fill it."""
    file = small_file()
    file.manifest["samples"][0]["entry"] = "\x1b[2J" + "x" * 10_000
    with pytest.raises(ArtifactError) as caught:
        Artifact(written(path, file))
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_digests_are_those_of_hashlib(path: Path) -> None:
    """Segments of every length around the ends of SHA-256's blocks are accepted with the digests that Python finds."""
    file = small_file()
    for size in (*range(130), 1 << 20):
        content = hashlib.shake_128(bytes([size % 251])).digest(size)
        file.segments[f"report.{size}"] = "report", content
    artifact = Artifact(written(path, file), threads=4)
    assert len(json.loads(artifact.manifest)["segments"]) == 134


def test_a_file_for_many_sizes(path: Path) -> None:
    """Each set of sizes has its plan, which lives on without the file's objects; limits hold, and other numbers of entries are refused."""
    artifact = Artifact(written(path, file_for_many_sizes()))
    plans = SizedPlans(artifact, 0)
    made = {n: plans.at((n,)) for n in (2, 1, 9)}
    for n, said in (
        (10, "its kernels do not serve these sizes: they count 20, and may count 0 to 18"),
        (0, "count -1"),
    ):
        with pytest.raises(ArtifactError, match=f"^{re.escape(str(path))}: .*{said}"):
            plans.at((n,))
    with pytest.raises(ArtifactError, match="1 symbols, but 2 values"):
        plans.at((2, 3))
    with pytest.raises(ArtifactError, match="there is no entry 1"):
        SizedPlans(artifact, 1)
    with pytest.raises(ArtifactError, match="is for one set of sizes"):
        SizedPlans(Artifact(written(path, small_file())), 0)
    del artifact, plans
    gc.collect()
    for n, plan in made.items():
        x = torch.randn(n, 2)
        out, half = plan.run(Binding(plan, Guard([]), {}, {}), [x]) or ()
        torch.testing.assert_close(out, x)
        torch.testing.assert_close(half, x.flatten()[n // 2 :: 2][: n // 2])


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda plan: plan.update(symbols=["n", "m"]), "its plan depends on .m., which is no symbol"),
        (lambda plan: plan.update(sizes=["n"]), "there is no size 1: there are 1"),
        (lambda plan: plan.update(sizes=["n", ["*", "n", -1], 0, 0, 0]), "negative"),
        (lambda plan: plan.update(sizes=["n", ["*", "n", 1 << 62], 0, 0, 0]), "does not fit in 64 bits"),
        (lambda plan: plan.update(arenas=[["cpu", 0]]), "tells of each arena what is alive in it"),
        (lambda plan: plan.update(arenas=[["cpu", 0]], lives=[[[7, 0, 1]]]), "its number, its first and its last step"),
        (lambda plan: plan.update(arenas=[["cpu", 0]], lives=[[[0, 2, 1]]]), "its number, its first and its last step"),
        (lambda plan: plan["values"][2].__setitem__(6, {"size": 2}), "must have the dtype and device .* and fit in it"),
        (lambda plan: plan["steps"][0].update(kind="launch"), "no step in a file is called .launch."),
        (lambda plan: plan.update(inputs={"size": 0}), "its plan takes 2 inputs"),
    ],
)
def test_plans_of_many_sizes_that_contradict_themselves(edit: Edit, said: str, path: Path) -> None:
    """The error comes when the plan of a set of sizes is made."""
    file = file_for_many_sizes()
    kind, content = file.segments["plan.forward"]
    plan = json.loads(content)
    edit(plan)
    file.segments["plan.forward"] = kind, json.dumps(plan).encode()
    artifact = Artifact(written(path, file))
    with pytest.raises(ArtifactError, match=f"^{re.escape(str(path))}: .*{said}"):
        SizedPlans(artifact, 0).at((2,))


def test_the_seeds_of_the_fuzzer_are_files_of_today(tmp_path: Path) -> None:
    """The inputs that csrc/tests/fuzz_artifact.cc begins with are those that `tests.runtime.hybrid_files` writes."""
    hybrid_files.main(tmp_path)
    corpus = Path(__file__).parents[3] / "csrc/tests/corpus"
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        path.name: path.read_bytes() for path in corpus.iterdir()
    }


def test_errors_are_hybrid_errors() -> None:
    """Whoever catches errors of this package catches those of files."""
    assert issubclass(ArtifactError, HybridError)
