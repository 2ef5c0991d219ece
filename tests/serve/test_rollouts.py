"""New files while requests come: good ones are served, bad ones are named, and no request fails."""

from __future__ import annotations

import json
import re
import shutil
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.artifact.exported_for_tests import forged, manifest_of, with_manifest
from tests.serve.conftest import Cluster, small_network
from tests.serve.load_for_tests import Load
from torch_hybrid_backend import load as load_file
from torch_hybrid_backend import sign
from torch_hybrid_backend.serve import deployment

pytestmark = pytest.mark.full

_FORMAT_AT = 8  # of the header


def _private(folder: Path, name: str) -> Path:
    """A new private key, beside its public one in `NAME.pem`."""
    from cryptography.hazmat.primitives import serialization as forms
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key, path = Ed25519PrivateKey.generate(), folder / f"{name}.private.pem"
    path.write_bytes(key.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, forms.NoEncryption()))
    public = key.public_key().public_bytes(forms.Encoding.PEM, forms.PublicFormat.SubjectPublicKeyInfo)
    (folder / f"{name}.pem").write_bytes(public)
    return path


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4096])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _of_newer_format(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[_FORMAT_AT] += 1
    path.write_bytes(content)


def _for_another_processor(path: Path) -> None:
    feature = manifest_of(path).targets[0].features[0]
    with_manifest(path, f'"{feature}"', f'"{"z" * len(feature)}"')


def _with_another_answer(path: Path) -> None:
    (number,) = manifest_of(path).samples[0].outputs
    assert number is not None
    forged(path, number, torch.full((3, 4), 3.0))


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


# Kind of a bad file -> how a good one becomes it, who signs it then (or before), and the words of the error.
BAD: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "missing": (Path.unlink, "", "No such file"),
    "empty": (lambda path: path.write_bytes(b""), "", "no .hybrid file"),
    "text": (lambda path: path.write_text("print('hello')\n" * 1000), "", "no .hybrid file"),
    "truncated": (_truncate, "", "is damaged: it has"),
    "flipped": (_flip, "trusted before", "is damaged: the checksum"),
    "newer": (_of_newer_format, "", "install a newer torch_hybrid_backend"),
    "processor": (_for_another_processor, "trusted", "no library in it is for this processor"),
    "answer": (_with_another_answer, "trusted", "has other results on this machine"),
    "unsigned": (lambda path: None, "", "is signed by nobody"),
    "stranger": (lambda path: None, "other", "none of the 1 keys"),
    "directory": (_directory, "", "is no regular file"),
}


@pytest.fixture(scope="module")
def folder(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of signed files: `dynamic`, `other`, and one of each bad kind. `trusted.pem` is the key."""
    folder = tmp_path_factory.mktemp("rolled")
    keys = {name: _private(folder, name) for name in ("trusted", "other")}
    for name in ("dynamic", "other"):
        shutil.copy(models / f"{name}.hybrid", folder)
        sign(folder / f"{name}.hybrid", keys["trusted"])
    for kind, (spoil, key, _) in BAD.items():
        path = folder / f"{kind}.hybrid"
        shutil.copy(models / "dynamic.hybrid", path)
        if key == "trusted before":
            sign(path, keys["trusted"])
        spoil(path)
        if key in keys:
            sign(path, keys[key])
    return folder


def _run(cluster: Cluster, folder: Path, name: str) -> str:
    bound = deployment(folder / f"{name}.hybrid", model="network", keys=[folder / "trusted.pem"])
    return cluster.run(bound, "rolled")


def _message(application: str) -> tuple[str, str]:
    from ray import serve

    told = serve.status().applications[application].deployments["model"]
    return told.status, told.message


@pytest.mark.fault(
    "a `.hybrid` file that cannot be served is rolled out: none, damaged, newer, for other processors, unsigned, with another answer",
    "Serve's status is DEPLOY_FAILED with the cause; the old file is served, and no request fails",
)
def test_bad_files_fail_the_rollout(cluster: Cluster, folder: Path) -> None:
    """A new version of the application begins a replica, which fails and is named, while the old one answers; a good file follows."""
    networks = [small_network(0), small_network(1)]
    address = _run(cluster, folder, "dynamic")
    with Load(address, networks[:1], clients=2).running() as load:
        for kind, (_, _, said) in BAD.items():
            with pytest.raises(RuntimeError, match="failed"):
                _run(cluster, folder, kind)
            status, message = _message("rolled")
            assert (status, said in message) == ("DEPLOY_FAILED", True), (kind, message)
            load.wait_for(20)
    assert set(load.answers) == {"right"}, load.answers
    with Load(address, networks, clients=2).running() as load:
        load.wait_for(20)
        _run(cluster, folder, "other")
        load.wait_for(20)
    assert set(load.answers) == {"right"}, load.answers
    with Load(address, networks[1:], clients=2).running() as load:
        load.wait_for(20)
    assert set(load.answers) == {"right"}, load.answers
    assert _message("rolled")[0] == "HEALTHY"
    cluster.delete("rolled")


@pytest.mark.fault(
    "a `.hybrid` file that cannot be served is named by `user_config`",
    "a running replica serves the old file, no request fails, the log and a metric tell; a new replica does not start, as Serve's status tells",
)
def test_bad_files_in_user_config(cluster: Cluster, folder: Path) -> None:
    """Replicas swap in place, and keep the old file for a bad one, also one that lies outside of the folder. Of several in a row the last is
    served; without `user_config`, the first file again."""
    networks = [small_network(0), small_network(1)]
    (folder / "outside.hybrid").symlink_to("/dev/null")
    bad = [*(f"{kind}.hybrid" for kind in BAD), "outside.hybrid", "../dynamic.hybrid"]

    def configure(artifact: str | None, file: str = "dynamic", status: str = "RUNNING") -> str:
        user_config = None if artifact is None else {"artifact": artifact}
        keys = [str(folder / "trusted.pem")]
        return cluster.configure(folder / f"{file}.hybrid", user_config, "swapped", status=status, keys=keys)

    def swapped(name: str) -> None:
        deadline, expected = time.monotonic() + 60, load_file(folder / f"{name}.hybrid").digest[:12]
        while _version(address) != expected:
            assert time.monotonic() < deadline, expected
            time.sleep(0.1)

    def served(networks: list[torch.nn.Module]) -> None:
        with Load(address, networks, clients=1).running() as load:
            load.wait_for(20)
        assert set(load.answers) == {"right"}, load.answers

    address = configure("dynamic.hybrid")
    with Load(address, networks[:1], clients=2).running() as load:
        for number, artifact in enumerate(bad, 1):
            configure(artifact)
            _wait_for_failed_swaps(cluster, number)
            load.wait_for(20)
    assert set(load.answers) == {"right"}, load.answers
    with Load(address, networks, clients=2).running() as load:
        for artifact in ("other.hybrid", "dynamic.hybrid", "other.hybrid"):
            configure(artifact)
            load.wait_for(20)
        swapped("other")
        configure("text.hybrid")
        configure("dynamic.hybrid")
        swapped("dynamic")
        configure("other.hybrid")
        swapped("other")
    assert set(load.answers) == {"right"}, load.answers
    served(networks[1:])
    configure(None)
    swapped("dynamic")
    served(networks[:1])

    configure(None, "flipped", status="DEPLOY_FAILED")
    assert "flipped.hybrid: it is damaged" in _message("swapped")[1]
    served(networks[:1])
    configure("text.hybrid", "other", status="DEPLOY_FAILED")
    assert "text.hybrid: it is no .hybrid file" in _message("swapped")[1]
    served(networks[:1])
    cluster.delete("swapped")


def _version(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/v2/models/network", timeout=10) as answer:
        (version,) = json.load(answer)["versions"]
    assert isinstance(version, str)
    return version


def _wait_for_failed_swaps(cluster: Cluster, count: int) -> None:
    deadline = time.monotonic() + 60
    found: list[str] = []
    while found != [f"{count}.0"]:
        assert time.monotonic() < deadline, found
        time.sleep(0.5)
        with urllib.request.urlopen(f"http://127.0.0.1:{cluster.metrics_port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        found = re.findall(r'ray_hybrid_failed_swaps_total\{.*application="swapped".*\} (\S+)', text)
