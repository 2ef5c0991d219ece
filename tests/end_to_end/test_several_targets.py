"""Files for several targets: each machine runs the best that it supports. Machines with fewer features are this one, by forged names of
features; `tests/runner/test_emulated_processors.py` has emulated ones."""

from __future__ import annotations

import io
import itertools
import json
import platform
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import nn

import torch_hybrid_backend
from tests.artifact.exported_for_tests import FAST, manifest_of, with_manifest
from torch_hybrid_backend import export, load, sign
from torch_hybrid_backend.artifact.manifest import Manifest
from torch_hybrid_backend.artifact.writer import HEADER, PAGE_BYTES
from torch_hybrid_backend.cli import main
from torch_hybrid_backend.codegen.workers.pool import KernelCompiler
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.errors import ArtifactError, ConfigError

V2, V3, V4 = "x86-64-v2", "x86-64-v3", "x86-64-v4"

pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the levels are those of x86-64"),
    pytest.mark.skipif(
        not set(Target.named(V4).features) <= set(Target.host().features), reason=f"this processor is below {V4}"
    ),
]


class _Rows(nn.Module):
    """Writes rows of a cache, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(48, 64)
        self.register_buffer("rows", torch.zeros(32, 64))

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self.rows.index_copy_(0, positions, self.linear(x))
        return torch.softmax(self.linear(x) @ self.rows.t(), -1) @ self.rows


def _exported(path: Path, *targets: str, **options: Any) -> tuple[_Rows, torch_hybrid_backend.ExportReport]:
    """A model whose file has two entries, of many sizes and of one, over one cache."""
    torch.manual_seed(0)
    model = _Rows().eval()
    calls: Mapping[str, Any] = {
        "many": ((torch.randn(5, 48), torch.arange(5)), {}),
        "one": ((torch.randn(1, 48), torch.tensor([5])), {}),
    }
    n = torch.export.Dim("n", min=2, max=32)
    shapes = {"many": ({0: n}, {0: n})}
    return model, export(
        model, calls, path, dynamic_shapes=shapes, options={**FAST, "target": list(targets), **options}
    )


def _variants(path: Path) -> list[Manifest]:
    content = path.read_bytes()
    size = HEADER.unpack_from(content)[3]
    return Manifest.all_from_json(content[PAGE_BYTES : PAGE_BYTES + size].decode())


def _without(path: Path, *features: str) -> None:
    """Rename features in a file, so that no processor has them."""
    for feature in features:
        with_manifest(path, f'"{feature}"', f'"{"z" * len(feature)}"')


@pytest.mark.fault(
    "a `.hybrid` file for several targets is opened on a processor that supports some of them",
    "nothing: it runs the kernels of the best of those; on one that supports none, ArtifactError lists what each needs",
)
def test_each_machine_runs_its_own(tmp_path: Path) -> None:
    """Whatever order the targets were named in, the one with most features comes first; states, ranges and results are the same for all."""
    path = tmp_path / "model.hybrid"
    model, report = _exported(path, V3, V2, V4)
    assert report.targets == (V4, V3, V2)
    assert "for x86-64-v4, x86-64-v3, x86-64-v2: a processor runs the first of them that it supports" in str(report)
    assert report.sizes == ("x with 2 to 32 in dimension 0",)
    assert [manifest.targets[0].library for manifest in _variants(path)] == [f"{each}/library" for each in (V4, V3, V2)]
    expected = {length: (torch.randn(length, 48), torch.arange(length)) for length in (3, 17)}
    for level, lacking in ((V4, ()), (V3, ("avx512f",)), (V2, ("avx2",))):
        _without(path, *lacking)
        loaded = load(path)
        assert loaded.manifest.targets[0].library == f"{level}/library"
        assert loaded.explain().plans[0].regions
        for given in expected.values():
            own = _Rows().eval()
            own.load_state_dict(model.state_dict())
            loaded.reset()
            one = torch.randn(1, 48), torch.tensor([20])
            with torch.no_grad():
                torch.testing.assert_close(loaded(*given), own(*given), rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(loaded.entry("one")(*one), own(*one), rtol=1e-4, atol=1e-4)
    _without(path, "popcnt")
    with pytest.raises(
        ArtifactError,
        match=r'"x86-64-v4/library" needs "z+", "z.*"; "x86-64-v3/library" needs "z+", "z+"; "x86-64-v2/library" needs "zzzzzz": export',
    ):
        load(path)


def test_weights_are_shared_and_bytes_reproducible(tmp_path: Path) -> None:
    """Tensors of equal bytes lie in the file once: inputs of samples, states, and weights that kernels of two targets read packed alike. The
    same export gives the same segments, but for the time in its reports."""
    paths = {"fat": (V3, V4), "again": (V3, V4), "v3": (V3,), "v4": (V4,)}
    for name, targets in paths.items():
        _exported(tmp_path / name, *targets)
    segments = {
        name: [each for each in manifest_of(tmp_path / name).segments if each.kind != "report"] for name in paths
    }
    digests = {name: {each.name: each.sha256 for each in of} for name, of in segments.items()}
    assert digests["fat"] == digests["again"]
    weights = {name: sum(each.size for each in of if each.kind == "weights") for name, of in segments.items()}
    assert max(weights["v3"], weights["v4"]) <= weights["fat"] < weights["v3"] + weights["v4"]
    first, second = _variants(tmp_path / "fat")
    assert [each.inputs for each in first.samples] == [each.inputs for each in second.samples]
    assert first.states == second.states
    assert {each.name for each in segments["v3"]} >= {"library", "plan.many", "plan.one"}


def test_a_signature_is_of_all_variants(tmp_path: Path) -> None:
    """A change to the variant of another processor breaks it."""
    path = tmp_path / "model.hybrid"
    _exported(path, V3, V4)
    public = sign(path, Ed25519PrivateKey.generate())
    assert load(path, keys=[public]).manifest.targets[0].library == f"{V4}/library"
    with_manifest(path, '"x86-64-v3/plan.many"', '"x86-64-v4/plan.many"')
    with pytest.raises(ArtifactError, match="wrong signature"):
        load(path, keys=[public])


def test_commands(tmp_path: Path) -> None:
    """`--target` lists targets, or is repeated; `inspect` shows each with its sizes, and `run` takes the best."""
    script, path = tmp_path / "script_for_targets.py", tmp_path / "model.hybrid"
    script.write_text("import torch\ndef make():\n    return torch.nn.Linear(32, 16).eval(), (torch.ones(3, 32),)\n")
    out = io.StringIO()
    command = ["export", f"{script}:make", "-o", str(path), "--target", f"{V3},+sha", "--target", V4]
    assert main(command, out=out) == 1  # no kernel uses +sha
    command[command.index(f"{V3},+sha")] = f"{V2},{V3}"
    assert main(command, out=out) == 0
    assert main(["inspect", str(path)], out=out) == 0
    sizes = re.findall(r"  (x86-64-v\d)/library: ([\d,]+) bytes, over ([\d,]+) of weights", out.getvalue())
    assert [level for level, _, _ in sizes] == [V4, V3, V2]
    assert all(int(weights.replace(",", "")) >= 32 * 16 * 4 for _, _, weights in sizes)
    assert main(["run", str(path)], out=out) == 0
    assert main(["inspect", str(path), "--json"], out=out) == 0
    assert len(json.loads(out.getvalue()[out.getvalue().rindex("\n{") :])["variants"]) == 2


def _with_subsets_of_features() -> Iterator[str]:
    """32 targets."""
    features = ("+adx", "+gfni", "+vaes", "+vpclmulqdq", "+avx512f")
    for count in range(len(features) + 1):
        for chosen in itertools.combinations(features, count):
            yield ",".join((V2, *chosen))


def test_one_bad_target_is_refused_before_anything_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So is a call that is compiled for several."""
    monkeypatch.setenv("HYBRID_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(KernelCompiler, "compile", None)
    linear, x = nn.Linear(8, 8).eval(), torch.randn(2, 8)
    for targets, said in (
        ([V3, "x86-64-v5"], "no target is called 'x86-64-v5'"),
        ([V3, f"{V4},+amx-fp16"], "it lacks"),
    ):
        with pytest.raises(ConfigError, match=said):
            export(linear, (x,), tmp_path / "model.hybrid", options={"target": targets})
    assert not (tmp_path / "model.hybrid").exists()
    with pytest.raises(ConfigError, match="a file holds kernels for at most 32"):
        export(linear, (x,), tmp_path / "model.hybrid", options={"target": [V3, *_with_subsets_of_features()]})
    with pytest.raises(ConfigError, match="only files are for several targets"):
        torch.compile(linear, backend="hybrid", options={"target": [V3, V4]})(x)


def test_a_model_without_kernels_has_one_variant(tmp_path: Path) -> None:
    """Operators of PyTorch run alike everywhere."""

    class Sorted(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sort(x)[0]

    path = tmp_path / "model.hybrid"
    report = export(Sorted(), (torch.randn(8),), path, options={**FAST, "target": [V3, V4]})
    assert len(report.targets) == len(_variants(path)) == 1
    x = torch.randn(8)
    assert torch.equal(load(path)(x), x.sort()[0])
