"""The Dockerfile, step by step, where there is no container engine: debootstrap makes the base, chroot runs the steps."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_WHEELS = sorted((ROOT / "dist").glob("*.whl"))
_IMAGE_BYTES = 1_200_000_000
pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not _WHEELS, reason="no wheel in dist/: run `make wheel`"),
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("debootstrap"), reason="needs debootstrap and root"),
]

_PROGRAM = """
import os, shutil, torch, torch_hybrid_backend
assert os.getuid() != 0
assert not any(map(shutil.which, ("cc", "gcc", "c++", "g++", "clang"))), "there is a compiler"
model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 36, 4)).eval()
x = torch.randn(2, 3, 8, 8)
with torch.no_grad():
    torch.testing.assert_close(torch.compile(model, backend="hybrid")(x), model(x), rtol=1e-4, atol=1e-5)
    (plan,) = torch_hybrid_backend.explain(model, x).plans
print({node.engine for node in plan.nodes})
"""


class Image:
    """A root file system made by the instructions of a Dockerfile, as far as ours has them."""

    def __init__(self, root: Path, build: dict[str, str], mounts: dict[str, Path]) -> None:
        """build: variables that the steps see and the image does not, in the place of the Dockerfile's ARGs. mounts: folders of this machine
        that are seen meanwhile, by their names there."""
        self.root = root
        self.build = build
        self._mounts = mounts
        self.environment = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"}
        self.user, self.folder = "root", "/"
        self.command: list[str] = []

    def make(self, dockerfile: Path) -> None:
        """Run every instruction."""
        text = re.sub(r"^#.*\n", "", dockerfile.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
        for line in filter(None, map(str.strip, text.splitlines())):
            instruction, _, rest = line.partition(" ")
            self._follow(instruction, rest.strip())

    def _follow(self, instruction: str, rest: str) -> None:
        name, _, value = rest.partition("=")
        match instruction:
            case "FROM":
                self._bootstrap(rest.removeprefix("debian:").removesuffix("-slim"))
            case "RUN":
                self.run(["/bin/sh", "-c", rest])
            case "ENV":
                self.environment[name] = value
            case "ARG":
                self.build.setdefault(name, *shlex.split(value))
            case "COPY":
                *patterns, target = rest.split()
                (self.root / target.strip("/")).mkdir(parents=True)
                for path in (path for pattern in patterns for path in ROOT.glob(pattern)):
                    shutil.copy(path, self.root / target.strip("/"))
            case "USER":
                self.user = rest
            case "WORKDIR":
                self.folder = rest
            case "CMD":
                self.command = json.loads(rest)
            case _:
                raise NotImplementedError(instruction)

    def _bootstrap(self, suite: str) -> None:
        """A Debian as slim as the image's, that reaches the network as this machine does."""
        subprocess.run(["debootstrap", "--variant=minbase", suite, self.root], check=True, stdout=subprocess.DEVNULL)
        for folder in ("usr/share/doc", "usr/share/man", "usr/share/locale", "var/cache/apt", "var/lib/apt/lists"):
            shutil.rmtree(self.root / folder)
            (self.root / folder).mkdir()
        shutil.copy("/etc/resolv.conf", self.root / "etc")
        for path in Path("/etc/apt/apt.conf.d").iterdir():
            if "Acquire" in path.read_text():
                shutil.copy(path, self.root / "etc/apt/apt.conf.d")
        for name, source in self._mounts.items():
            (self.root / name).mkdir(exist_ok=True)
            subprocess.run(["mount", "--bind", source, self.root / name], check=True)

    def unmount(self) -> None:
        """Take the mounted folders away."""
        for name in self._mounts:
            if (self.root / name).is_dir() and any((self.root / name).iterdir()):
                subprocess.run(["umount", self.root / name], check=True)

    def run(self, command: list[str]) -> str:
        """Run a command as the image's user; returns what it prints."""
        home = "/root" if self.user == "root" else f"/home/{self.user}"
        variables = {"HOME": home, **self.environment, **self.build}
        inside = ["/usr/bin/env", "-i", "-C", self.folder, *(f"{name}={value}" for name, value in variables.items())]
        done = subprocess.run(
            ["chroot", f"--userspec={self.user}:{self.user}", self.root, *inside, *command],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    def size_bytes(self) -> int:
        """The bytes of the image's files."""
        self.unmount()
        told = subprocess.run(["du", "-sxB1", self.root], capture_output=True, text=True, check=True).stdout
        return int(told.split()[0])


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    """The image; packages for pip come from this machine's own indexes, by a folder that goes before it is measured."""
    root = tmp_path_factory.mktemp("image")
    root.chmod(0o755)
    packages = tmp_path_factory.mktemp("packages")
    download = [sys.executable, "-m", "pip", "download", "-q", "-c", ROOT / "constraints.txt", "-d", packages]
    subprocess.run([*download, "--only-binary=:all:", "--python-version=3.11", "torch", "uv", *_WHEELS], check=True)
    build = {
        "INSTALL_TORCH": "pip install --no-cache-dir",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": "/packages",
        "DEBIAN_FRONTEND": "noninteractive",
    }
    made = Image(root, build, {"packages": packages, "proc": Path("/proc")})
    try:
        made.make(ROOT / "Dockerfile")
        yield made
    finally:
        made.unmount()
        shutil.rmtree(root)


def test_a_model_runs_in_the_image(image: Image) -> None:
    """A model runs in the image as a user who is not root, without a compiler: TVM takes it; the command of the image says that the engine can
    run."""
    assert image.user != "root"
    assert image.run(["python", "-c", _PROGRAM]).splitlines() == ["{'tvm'}"]
    doctor = image.run(image.command)
    assert re.search(r"tvm +can run", doctor)
    assert re.search(r"linker +/usr/bin/ld", doctor)


def test_the_image_is_small(image: Image) -> None:
    """1.2 GB at most, with torch."""
    assert image.size_bytes() < _IMAGE_BYTES
