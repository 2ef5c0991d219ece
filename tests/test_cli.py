"""The command line."""

from __future__ import annotations

import io
import json
import platform
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import torch_hybrid_backend
from tests.partition.engines_for_tests import FakeEngine
from tests.report.plans_for_tests import PLAN
from torch_hybrid_backend import cli
from torch_hybrid_backend.builds.failures import Failures
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.engine import CompiledRegionBase, Engine, KernelText
from torch_hybrid_backend.core.verdict import Reason, Refused, Verdict
from torch_hybrid_backend.engines.eager import EagerEngine
from torch_hybrid_backend.errors import DeadlineError
from torch_hybrid_backend.report import Explanation
from torch_hybrid_backend.storage.store import Store

SCRIPT = """
import torch
def make():
    return torch.nn.Linear(2, 2), (torch.zeros(1, 2),)
def with_names():
    return torch.nn.Linear(2, 2), (), {"input": torch.zeros(1, 2)}
def wrong():
    return torch.nn.Linear(2, 2)
def no_model():
    return 3, (torch.zeros(1, 2),)
def from_beside():
    import beside_script_for_cli
    return beside_script_for_cli.MODEL, (torch.zeros(1, 2),)
constant = 3
MODULE = torch.nn.Linear(2, 2)
class Demanding(torch.nn.Module):
    def __init__(self, *sizes):
        super().__init__()
        self.inner = torch.nn.Linear(*sizes)
def demanding(width):
    return torch.nn.Linear(2, width), (torch.zeros(1, 2),)
"""


def _explain(model: torch.nn.Module, *args: torch.Tensor, **kwargs: torch.Tensor) -> Explanation:
    assert model(*args, **kwargs).shape == (1, 2)
    return Explanation((PLAN,))


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script_for_cli.py"
    path.write_text(SCRIPT)
    return path


def _run(*arguments: str) -> tuple[int, str]:
    out = io.StringIO()
    status = cli.main(arguments, explain=_explain, out=out)
    return status, out.getvalue()


@pytest.mark.parametrize("factory", ["make", "with_names"])
def test_explain_a_script(script: Path, factory: str) -> None:
    """The factory's model and arguments, positional or named, are explained as text."""
    assert _run("explain", f"{script}:{factory}") == (0, str(Explanation((PLAN,))) + "\n")


def test_explain_a_module_of_the_current_folder(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of the current folder is found as `python -m` finds it."""
    monkeypatch.chdir(script.parent)
    assert _run("explain", f"{script.stem}:make")[0] == 0


def test_explain_a_script_that_imports_what_lies_beside_it(script: Path) -> None:
    """A script runs as when Python runs it, wherever that is done; and nothing of it stays on the path."""
    (script.parent / "beside_script_for_cli.py").write_text("import torch\nMODEL = torch.nn.Linear(2, 2)\n")
    before = list(sys.path)
    assert _run("explain", f"{script}:from_beside")[0] == 0
    assert sys.path == before


def test_explain_as_json_and_html(script: Path, tmp_path: Path) -> None:
    """--json prints the plans; --html writes the page to a file, --model-explorer graphs for Model Explorer."""
    status, text = _run("explain", f"{script}:make", "--json")
    assert status == 0
    assert json.loads(text)["plans"][0]["graph"] == "graph"
    assert _run("explain", f"{script}:make", "--html", str(tmp_path / "plan.html")) == (0, "")
    assert (tmp_path / "plan.html").read_text().startswith("<!doctype html>")
    assert _run("explain", f"{script}:make", "--model-explorer", str(tmp_path / "plan.json")) == (0, "")
    assert json.loads((tmp_path / "plan.json").read_text())[0]["nodes"]


def test_a_picture_that_cannot_be_written(script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A picture that cannot be written is one clear line."""
    assert _run("explain", f"{script}:make", "--html", str(tmp_path / "missing" / "plan.html"))[0] == 1
    assert "cannot write the picture" in capsys.readouterr().err


class _Region(CompiledRegionBase):
    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return []

    def texts(self) -> Sequence[KernelText]:
        return [KernelText("row_softmax", "the program", ".py")]


def test_explain_writes_kernels(script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside whatever else it prints; a folder that cannot be made is one clear line."""

    def explain(model: torch.nn.Module, *args: torch.Tensor) -> Explanation:
        return Explanation((PLAN,), ({"r0": _Region()},))

    out, folder = io.StringIO(), tmp_path / "kernels"
    assert cli.main(["explain", f"{script}:make", "--json", "--kernels", str(folder)], explain=explain, out=out) == 0
    assert json.loads(out.getvalue())["plans"]
    assert (folder / "000_r0_row_softmax.py").read_text() == "the program"
    assert f"1 kernel written to {folder}" in capsys.readouterr().err
    assert cli.main(["explain", f"{script}:make", "--kernels", str(script)], explain=explain, out=out) == 1
    assert "cannot write the kernels" in capsys.readouterr().err


def test_explain_times_kernels_on_request(script: Path) -> None:
    """`--profile` asks for it; without it the model is called once."""
    asked: list[object] = []

    def explain(model: torch.nn.Module, *args: torch.Tensor, **settings: object) -> Explanation:
        asked.append(settings)
        return Explanation((PLAN,))

    for flags in ([], ["--profile"], ["--profile", "--json"]):
        assert cli.main(["explain", f"{script}:make", *flags], explain=explain, out=io.StringIO()) == 0
    assert asked == [{}, {"profile": True}, {"profile": True}]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("script_for_cli.py", "must be module:factory"),
        ("absent.py:make", "no file absent.py"),
        ("no_such_module_anywhere:make", "cannot import"),
        ("script_for_cli.py:missing", "no callable named 'missing'"),
        ("script_for_cli.py:mak", "no callable named 'mak'. Did you mean 'make'?"),
        (
            "script_for_cli.py:MODULE",
            "is a model, but its inputs are needed too: write a function that returns both",
        ),
        (
            "script_for_cli.py:demanding",
            "cannot be called with no arguments (missing a required argument: 'width')",
        ),
        ("script_for_cli.py:constant", "no callable named 'constant'"),
        (
            "script_for_cli.py:torch",
            "is a module, no function: name a function in it that makes the model and its inputs, torch:FUNCTION",
        ),
        ("script_for_cli.py:Demanding", "is a class of models; a factory must be callable without arguments"),
        ("script_for_cli.py:wrong", r"returned Linear; it must return (model, args)"),
        ("script_for_cli.py:no_model", r"returned (int, tuple); it must return (model, args)"),
        (".script_for_cli:make", "must be module:factory"),
    ],
)
def test_a_wrong_target_is_one_clear_line(
    script: Path, target: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 1, one line that says what is legal, no traceback."""
    monkeypatch.chdir(script.parent)
    assert _run("explain", target) == (1, "")
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


class _Absent(FakeEngine):
    def available(self) -> Verdict:
        return Refused(Reason.MISSING_DEPENDENCY, "apache-absent is not installed: pip install apache-absent")


def _engines(config: Config) -> Sequence[Engine]:
    return [_Absent("absent"), FakeEngine("present"), EagerEngine()]


def _doctor() -> str:
    out = io.StringIO()
    assert cli.main(["doctor"], engines=_engines, out=out) == 0
    return out.getvalue()


def test_a_wrong_command_suggests_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    """With all that there are, and the status of a wrong usage."""
    with pytest.raises(SystemExit) as ended:
        _run("explainn", "x.py:make")
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "invalid choice: 'explainn'" in said
    assert "Did you mean 'explain'?" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["explain", "x:y", "--jsn"], "unrecognized arguments: --jsn. Did you mean '--json'?"),
        (["explain", "x:y", "--htm", "file"], "unrecognized arguments: --htm file. Did you mean '--html'?"),
        (["bench", "x:y", "--agianst=eager"], "unrecognized arguments: --agianst=eager. Did you mean '--against'?"),
        (["doctor", "now"], "unrecognized arguments: now\n"),
    ],
)
def test_a_wrong_option_suggests_the_nearest(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the usage of its subcommand; the beginning of a name is not taken for it."""
    with pytest.raises(SystemExit) as ended:
        _run(*arguments)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.startswith(f"usage: hybrid {arguments[0]} ")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """`hybrid --version`, as other programs have it."""
    with pytest.raises(SystemExit) as ended:
        _run("--version")
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"hybrid {torch_hybrid_backend.__version__}\n"


def test_doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines with what to install for those that cannot run, versions, threads, the cache's state."""
    monkeypatch.setenv("HYBRID_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HYBRID_DISABLE_ENGINES", "present,absent")
    text = _doctor()
    assert "cannot run: apache-absent is not installed: pip install apache-absent, and is switched off" in text
    assert "can run, but is switched off" in text
    assert torch.__version__ in text
    assert f"Linux on {platform.machine()}, which is supported" in text
    assert f"{torch.get_num_threads()} for kernels" in text
    assert f"{tmp_path / 'cache'}: 0 entries" in text


class _WithoutLinker(FakeEngine):
    def compiles(self) -> Verdict:
        return Refused(Reason.MISSING_DEPENDENCY, "no linker is on the PATH: install binutils")


@pytest.mark.parametrize(
    ("engines", "disabled", "status", "said"),
    [
        ([_WithoutLinker("ours")], "", 1, "not ready: ours cannot compile, so eager runs what is not in the cache"),
        ([_WithoutLinker("ours")], "ours", 0, "binutils, and is switched off"),
        ([_Absent("ours")], "", 1, "not ready: no engine but eager can run, so nothing is compiled"),
        ([_Absent("ours"), FakeEngine("other")], "", 0, "cannot run: apache-absent"),
    ],
)
def test_doctor_fails_where_something_needed_is_missing(
    engines: list[Engine], disabled: str, status: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that cannot compile, or that none can run; what is switched off, or has another in its place, is not needed."""
    monkeypatch.setenv("HYBRID_DISABLE_ENGINES", disabled)
    out = io.StringIO()
    assert cli.main(["doctor"], engines=lambda config: [*engines, EagerEngine()], out=out) == status
    assert said in out.getvalue()
    assert ("not ready" in out.getvalue()) == bool(status)
    if isinstance(engines[0], _WithoutLinker):
        assert "runs what is in the cache, but cannot compile: no linker is on the PATH: install" in out.getvalue()


def test_doctor_tells_why_a_cache_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor diagnoses, so a bad cache directory is a finding and no failure."""
    tmp_path.chmod(0o777)
    monkeypatch.setenv("HYBRID_CACHE_DIR", str(tmp_path))
    assert "writable for others" in _doctor()
    monkeypatch.setenv("HYBRID_CACHE", "0")
    assert "off (HYBRID_CACHE=0)" in _doctor()


def test_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`hybrid cache` shows what is kept, where and how much may be; --clear removes it; doctor says so too."""
    monkeypatch.setenv("HYBRID_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("HYBRID_CACHE_LIMIT_MIB", "7")
    Store(tmp_path).put("kernels", "key", bytes(1 << 20), ".so")
    status, text = _run("cache")
    assert status == 0
    assert "kernels: 1 entries, 1.0 MiB" in text
    assert f"1.0 MiB in {tmp_path}" in text
    assert "limit: 7 MiB (HYBRID_CACHE_LIMIT_MIB)" in text
    assert "1 entries, 1.0 MiB of at most 7 MiB; `hybrid cache --clear`" in _doctor()
    assert _run("cache", "--clear") == (0, f"kernels: 1 entries, 1.0 MiB\n1.0 MiB removed from {tmp_path}\n")
    assert Store(tmp_path).usage() == []


def test_sharing_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`hybrid cache push`, `sign` and `pull`; what is missing is named."""
    key = Ed25519PrivateKey.generate()
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (tmp_path / "key.pem").write_bytes(key.private_bytes(*form))
    place, private = str(tmp_path / "place"), str(tmp_path / "key.pem")
    monkeypatch.setenv("HYBRID_CACHE_DIR", str(tmp_path / "one"))
    Store(tmp_path / "one").put("kernels", "key", b"kernel", ".so")
    assert _run("cache", "push", place) == (0, f"new entries of {tmp_path / 'one'} in {place}: 1\n")
    assert _run("cache", "sign", place, "--key", private) == (0, f"entries signed in {place}: 1\n")
    assert _run("cache", "push", place, "--key", private)[1].endswith(": 0\n")
    (tmp_path / "place").chmod(0o777)
    monkeypatch.setenv("HYBRID_CACHE_DIR", str(tmp_path / "two"))
    monkeypatch.setenv("HYBRID_CACHE_SHARED", place)
    assert _run("cache", "pull")[1].endswith(": 0\n")
    monkeypatch.setenv("HYBRID_CACHE_KEYS", key.public_key().public_bytes_raw().hex())
    assert _run("cache", "pull") == (0, f"new entries from {place} in {tmp_path / 'two'}: 1\n")
    assert Store(tmp_path / "two").get("kernels", "key") == b"kernel"
    capsys.readouterr()
    monkeypatch.delenv("HYBRID_CACHE_SHARED")
    monkeypatch.setenv("HYBRID_CACHE_KEYS", str(tmp_path / "nowhere.pem"))
    for arguments, told in (
        (["push"], "push takes a location"),
        (["sign", place], "sign takes a location and --key"),
        (["pull"], "pull takes a location, unless HYBRID_CACHE_SHARED"),
        (["pull", place], "HYBRID_CACHE_KEYS .*nowhere.pem holds no public key"),
        (["--key", private], "--key is for"),
        (["push", place, "--key", place], "holds no private key"),
        (["sign", str(tmp_path / "absent"), "--key", private], "there is no such folder"),
        (["--clear", "push", place], "push takes no --clear"),
        (["pull", place, "--forget-failures"], "pull takes no --forget-failures"),
    ):
        assert _run("cache", *arguments) == (1, "")
        assert re.search(told, capsys.readouterr().err), arguments


def test_failed_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`hybrid cache` shows what failed and is not tried again; --forget-failures forgets that and removes nothing else."""
    monkeypatch.setenv("HYBRID_CACHE_DIR", str(tmp_path))
    store = Store(tmp_path)
    store.put("kernels", "key", b"kernel")
    Failures(store).put("engines", "key", DeadlineError("the layer was not built within 600 s"))
    status, text = _run("cache")
    assert status == 0
    assert "failed: the layer was not built within 600 s (at " in text
    assert _run("cache", "--forget-failures") == (0, "1 failed build forgotten\n")
    assert "failed:" not in _run("cache")[1]
    assert [usage.kind for usage in store.usage()] == ["kernels"]


def test_cache_that_cannot_be_used_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A directory that is not private is no cache."""
    tmp_path.chmod(0o777)
    monkeypatch.setenv("HYBRID_CACHE_DIR", str(tmp_path))
    assert _run("cache", "--clear") == (1, "")
    assert "writable for others" in capsys.readouterr().err


def test_a_wrong_setting_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Settings are checked here as everywhere."""
    monkeypatch.setenv("HYBRID_VERIFY", "never")
    assert cli.main(["doctor"], engines=_engines, out=io.StringIO()) == 1
    assert "HYBRID_VERIFY" in capsys.readouterr().err
