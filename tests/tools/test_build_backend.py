"""The build backend: what cannot be built is refused in one sentence, before anything is downloaded or compiled."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

_START = f"import sys, sysconfig; sys.path.insert(0, {str(ROOT / 'tools')!r}); "
_ASK = "import build_backend; print(build_backend.get_requires_for_build_wheel())"
# As under pip's build isolation: imports do not find what is installed.
_HIDDEN = "import importlib.util; importlib.util.find_spec = lambda name: None; "


def _asked(before: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _START + before + _ASK], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("before", "said"),
    [
        ("sys.version_info = (3, 10, 13); ", "torch-hybrid-backend needs Python 3.11 or later; this is Python 3."),
        ("sys.platform = 'win32'; ", "torch-hybrid-backend supports Linux on x86-64 and AArch64; this is "),
        ("sys.platform = 'darwin'; ", "torch-hybrid-backend supports Linux on x86-64 and AArch64; this is "),
        (
            _HIDDEN + "sysconfig.get_path = lambda name: '/nowhere'; ",
            "is built against torch, which is not installed here: install torch 2.11 or later first",
        ),
        (
            "import os; os.environ['HYBRID_BUILD_TORCH'] = '/nowhere'; ",
            "HYBRID_BUILD_TORCH is '/nowhere', which has no folder 'include'; it must be the folder 'torch' of an installed torch",
        ),
    ],
)
def test_what_cannot_be_built_is_refused(before: str, said: str) -> None:
    """A refusal is one line on standard error, which installers show, and a status that fails."""
    done = _asked(before)
    assert done.returncode == 1
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("before", ["", _HIDDEN], ids=["visible", "hidden by build isolation"])
def test_torch_is_not_downloaded_for_its_headers(before: str) -> None:
    """The headers are those of the installed torch: nothing but setuptools is asked for."""
    done = _asked(before)
    assert done.returncode == 0, done.stderr
    assert "torch" not in done.stdout.splitlines()[-1]
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]
    assert [requirement.partition(">")[0] for requirement in build["requires"]] == ["setuptools"]
