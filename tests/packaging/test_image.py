"""Dockerfiles, step by step, where there is no container engine: debootstrap makes the base, chroot runs the steps, unshare the container."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.artifact.exported_for_tests import FAST
from torch_hybrid_backend.driver.export import export

ROOT = Path(__file__).parents[2]
_WHEELS = sorted((ROOT / "dist").glob("*.whl"))
_IMAGE_BYTES = 1_200_000_000
_SERVING_IMAGE_BYTES = 1_300_000_000
_ADDRESS = "172.17.0.2"  # as Docker gives the first container
# Ray gives its own processes 30 seconds to start, which are too few for a machine that is busy.
_PATIENT = {"RAY_agent_register_timeout_ms": "300000", "RAY_raylet_start_wait_time_s": "300"}
_NEEDED = ("debootstrap", "ip", "nsenter", "setpriv", "unshare")
pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not _WHEELS, reason="no wheel in dist/: run `make wheel`"),
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, _NEEDED)), reason=f"needs root and {', '.join(_NEEDED)}"
    ),
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
_INFER = """
import sys, urllib.request
with urllib.request.urlopen(sys.argv[1], sys.argv[2].encode(), timeout=60) as answer:
    print(answer.read().decode())
"""
# In a name space of their own, so that no mount is left, whatever happens.
_STEP = """
mount -t proc proc "$1/proc"
mount --bind "$2" "$1/packages"
shift 2
exec "$@"
"""
# A call of a replica by Ray Serve's own protocol, without Ray's token.
_CALL_REPLICA = """
import sys, grpc
try:
    grpc.insecure_channel(sys.argv[1]).unary_unary("/ray.serve.ASGIService/HandleRequest")(b"", timeout=60)
except grpc.RpcError as error:
    print(error.code().name)
"""
# Mounts as Docker's for --read-only, --tmpfs /tmp and --shm-size, and an address that is not the loopback's.
_CONTAINER = """
set -e
root=$1 models=$2 shm=$3
shift 3
mount --bind "$root" "$root"
mount --bind "$models" "$root/models"
mount -o remount,bind,ro "$root/models"
mount -o remount,bind,ro "$root"
mount -t proc proc "$root/proc"
mount -t tmpfs -o nosuid,nodev,noexec,mode=1777 tmpfs "$root/tmp"
mount -t tmpfs -o nosuid,nodev,noexec,mode=1777,size=$shm shm "$root/dev/shm"
ip link set lo up
ip addr add ADDRESS/16 dev lo
ip route add default dev lo src ADDRESS
exec setpriv --no-new-privs "$@"
""".replace("ADDRESS", _ADDRESS)


class Image:
    """Root file systems made by the instructions of a Dockerfile, as far as ours have them: a folder for each stage, the last of which is the
    image's."""

    def __init__(self, folder: Path, base: Path, packages: Path) -> None:
        """base: the root file system that every stage begins with. packages: wheels for pip, which the steps see and the image does not."""
        self._folder, self._base = folder, base
        self._packages = packages
        self._stages: dict[str, Path] = {}
        # Variables that the steps see and the image does not, in the place of the Dockerfile's ARGs.
        self._build = {
            "INSTALL_TORCH": "pip install --no-cache-dir",
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": "/packages",
            "DEBIAN_FRONTEND": "noninteractive",
        }

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
                assert rest.startswith("debian:bookworm-slim")
                self._begin_stage(rest.rpartition(" ")[2])
            case "RUN":
                self.run(["/bin/sh", "-c", rest])
            case "ENV":
                self.environment[name] = value
            case "ARG":
                self._build.setdefault(name, *shlex.split(value))
            case "COPY":
                self._copy(shlex.split(rest))
            case "USER":
                self.user = f"{rest}:{rest}"
            case "WORKDIR":
                self.folder = rest
            case "EXPOSE":
                self.port = int(rest)
            case "HEALTHCHECK":
                self.health = json.loads(rest.partition(" CMD ")[2])
            case "ENTRYPOINT":
                self.entrypoint = json.loads(rest)
            case "CMD":
                self.command = json.loads(rest)
            case _:
                raise NotImplementedError(instruction)

    def _begin_stage(self, name: str) -> None:
        self.root = self._stages[name] = self._folder / str(len(self._stages))
        subprocess.run(["cp", "-a", self._base, self.root], check=True)
        self.environment = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"}
        self.user, self.folder, self.port = "root:root", "/", 0
        self.health: list[str] = []
        self.entrypoint: list[str] = []
        self.command: list[str] = []
        (self.root / "packages").mkdir()

    def _copy(self, words: list[str]) -> None:
        *sources, target = words
        there = self.root / target.strip("/")
        if sources[0].startswith("--from="):
            stage, source = self._stages[sources[0].removeprefix("--from=")], sources[1]
            subprocess.run(["cp", "-a", f"{stage / source.strip('/')}/.", there], check=True)
        else:
            there.mkdir(parents=True)
            for path in (path for pattern in sources for path in ROOT.glob(pattern)):
                shutil.copy(path, there)

    def inside(
        self, command: Sequence[str], user: str | None = None, variables: Mapping[str, str] | None = None
    ) -> list[str | Path]:
        """The command that runs `command` in the image, as `user`, USER:GROUP (the image's by default)."""
        user = user or self.user
        home = "/root" if user == "root:root" else f"/home/{user.partition(':')[0]}"
        given = {"HOME": home, **self.environment, **(variables or {})}
        settings = [f"{name}={value}" for name, value in given.items()]
        return ["chroot", f"--userspec={user}", self.root, "/usr/bin/env", "-i", "-C", self.folder, *settings, *command]

    def run(self, command: Sequence[str]) -> str:
        """Run a command as the image's user; returns what the command prints."""
        step = ["unshare", "--mount", "sh", "-ec", _STEP, "sh", self.root, self._packages]
        inside = self.inside(command, variables=self._build)
        done = subprocess.run([*step, *inside], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    def size_bytes(self) -> int:
        """The bytes of the image's files."""
        told = subprocess.run(["du", "-sxB1", self.root], capture_output=True, text=True, check=True).stdout
        return int(told.split()[0])


class Container:
    """A running image."""

    def __init__(self, image: Image, user: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self._image, self._user, self.process, self._log = image, user, process, log
        deadline = time.monotonic() + 30
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while not (found := children.read_text().split()):
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.01)
        self.pid = int(found[0])  # the container's process 1, as this machine numbers it

    def said(self) -> str:
        """Output so far, both streams."""
        return self._log.read_text()

    def execute(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a command in the container, as `docker exec` does and as health checks are run."""
        inside = ["nsenter", f"--target={self.pid}", "--all", *self._image.inside(command, self._user)]
        return subprocess.run(inside, capture_output=True, text=True, check=False)

    def ask(self, program: str, *arguments: str) -> str:
        """Run a program in Python of this machine in the container's network; returns what the program prints."""
        inside = ["nsenter", f"--target={self.pid}", "--net", sys.executable, "-c", program, *arguments]
        done = subprocess.run(inside, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def open_ports(self) -> set[int]:
        """Ports of TCP that are reached by other addresses than the loopback's."""
        lines = [
            line.split()
            for name in ("tcp", "tcp6")
            for line in Path(f"/proc/{self.pid}/net/{name}").read_text().splitlines()[1:]
        ]
        listening = [fields[1].split(":") for fields in lines if fields[3] == "0A"]
        loopback = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")
        return {int(port, 16) for address, port in listening if address not in loopback}

    def wait_until_healthy(self) -> None:
        """Run the health check until it succeeds."""
        deadline = time.monotonic() + 600
        while (done := self.execute(self._image.health)).returncode:
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline, done.stderr + self.said()
            time.sleep(1)


@contextmanager
def started(
    image: Image, models: Path, log: Path, user: str | None = None, command: Sequence[str] = ()
) -> Iterator[Container]:
    """The container of an image, with `models` at /models, until the block ends. command: in the place of the image's."""
    user = user or image.user
    (image.root / "models").mkdir(exist_ok=True)
    inside = image.inside(
        [*image.entrypoint, *(command or image.command)], user, {"RAY_raylet_start_wait_time_s": "300"}
    )
    spaces = ["unshare", "--mount", "--pid", "--net", "--ipc", "--uts", "--fork", "--kill-child"]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*spaces, "sh", "-c", _CONTAINER, "sh", image.root, models, "256m", *inside],
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        yield Container(image, user, process, log)
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A Debian as slim as the images', that reaches the network as this machine does."""
    root = tmp_path_factory.mktemp("base")
    root.chmod(0o755)
    subprocess.run(["debootstrap", "--variant=minbase", "bookworm", root], check=True, stdout=subprocess.DEVNULL)
    for folder in ("usr/share/doc", "usr/share/man", "usr/share/locale", "var/cache/apt", "var/lib/apt/lists"):
        shutil.rmtree(root / folder)
        (root / folder).mkdir()
    shutil.copy("/etc/resolv.conf", root / "etc")
    for path in Path("/etc/apt/apt.conf.d").iterdir():
        if "Acquire" in path.read_text():
            shutil.copy(path, root / "etc/apt/apt.conf.d")
    yield root
    shutil.rmtree(root)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packages for pip, from this machine's own indexes."""
    packages = tmp_path_factory.mktemp("packages")
    download = [sys.executable, "-m", "pip", "download", "-q", "-c", ROOT / "constraints.txt", "-d", packages]
    wheels = [f"{wheel}[serve,sign]" for wheel in _WHEELS]
    subprocess.run([*download, "--only-binary=:all:", "--python-version=3.11", "torch", "uv", *wheels], check=True)
    return packages


@contextmanager
def _made(dockerfile: str, folder: Path, base: Path, packages: Path) -> Iterator[Image]:
    folder.chmod(0o755)
    made = Image(folder, base, packages)
    try:
        made.make(ROOT / dockerfile)
        yield made
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory, base: Path, packages: Path) -> Iterator[Image]:
    """The image of the Dockerfile."""
    with _made("Dockerfile", tmp_path_factory.mktemp("image"), base, packages) as made:
        yield made


@pytest.fixture(scope="module")
def serving_image(tmp_path_factory: pytest.TempPathFactory, base: Path, packages: Path) -> Iterator[Image]:
    """The image of Dockerfile.serve."""
    with _made("Dockerfile.serve", tmp_path_factory.mktemp("serving"), base, packages) as made:
        yield made


def test_a_model_runs_in_the_image(image: Image) -> None:
    """A model runs in the image as a user who is not root, without a compiler: TVM takes it; the command of the image says that the engine can
    run."""
    assert image.user != "root:root"
    assert image.run(["python", "-c", _PROGRAM]).splitlines() == ["{'tvm'}"]
    doctor = image.run(image.command)
    assert re.search(r"tvm +can run", doctor)
    assert re.search(r"linker +/usr/bin/ld", doctor)


def test_the_image_is_small(image: Image) -> None:
    """1.2 GB at most, with torch."""
    assert image.size_bytes() < _IMAGE_BYTES


@pytest.mark.parametrize("user", [None, "1234:0"], ids=["its own user", "a user that it does not know"])
def test_a_container_serves_a_model(serving_image: Image, tmp_path: Path, user: str | None) -> None:
    """A container with a read-only root becomes healthy, answers as the model does, shows nothing of Ray that works without its token,
    and ends on SIGTERM."""
    models = tmp_path / "models"
    models.mkdir()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)).eval()
    x = torch.randn(2, 3, 8, 8)
    export(model, (x,), models / "model.hybrid", options=FAST)
    assert serving_image.user != "root:root"
    with started(serving_image, models, tmp_path / "log", user) as container:
        container.wait_until_healthy()
        body = {"inputs": [{"name": "input", "datatype": "FP32", "shape": [*x.shape], "data": x.flatten().tolist()}]}
        url = f"http://{_ADDRESS}:{serving_image.port}/v2/models/model/infer"
        (output,) = json.loads(container.ask(_INFER, url, json.dumps(body)))["outputs"]
        expected = model(x).detach()
        torch.testing.assert_close(torch.tensor(output["data"]).view(output["shape"]), expected, rtol=1e-4, atol=1e-5)
        (replica,) = container.open_ports() - {serving_image.port}
        assert container.ask(_CALL_REPLICA, f"{_ADDRESS}:{replica}") == "UNAUTHENTICATED\n"
        for folder in ("/", "/models", "/opt/venv", "/home/app", "/var/tmp"):
            assert "Read-only file system" in container.execute(["touch", f"{folder}/written"]).stderr
        os.kill(container.pid, signal.SIGTERM)
        assert container.process.wait(300) == 0, container.said()
        assert "WARNING" not in container.said()


def test_the_serving_image_has_what_runs_alone(serving_image: Image) -> None:
    """Neither a compiler nor a linker nor pip, and 1.3 GB at most, with torch and Ray."""
    names = ("cc", "gcc", "c++", "g++", "clang", "ld", "as", "pip", "uv")
    found = serving_image.run(["python3", "-c", f"import shutil; print(*filter(shutil.which, {names}))"])
    assert found == "\n"
    assert serving_image.size_bytes() < _SERVING_IMAGE_BYTES
