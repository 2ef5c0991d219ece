"""Factories of models by their names; what else a user may type wrong is tested in test_cli.py."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest

from torch_hybrid_backend.errors import ConfigError
from torch_hybrid_backend.factory import Factory

SCRIPT = """
import beside_script_for_factory
def make(batch=1):
    return (lambda x: x), [batch], {"other": beside_script_for_factory.VALUE}
def wrong():
    return 3
class Hidden:
    def __new__(cls, *args):
        return object.__new__(cls)
    def __init__(self, width):
        pass
def raising():
    return len(3)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "beside_script_for_factory.py").write_text("VALUE = 7\n")
    path = tmp_path / "script_for_factory.py"
    path.write_text(SCRIPT)
    return path


def test_a_script_imports_what_lies_beside_it(script: Path) -> None:
    """While it is importable, and no longer; the parameters of the factory can be seen."""
    factory, before = Factory(f"{script}:make"), list(sys.path)
    with factory.importable():
        make = factory.load()
        assert list(inspect.signature(make).parameters) == ["batch"]
        _, args, kwargs = make(batch=4)
    assert (args, kwargs) == ([4], {"other": 7})
    assert sys.path == before


@pytest.mark.parametrize(
    ("target", "message"),
    [("make", "names no factory"), ("{}:absent", "no callable named 'absent'"), ("no_such.py:make", "no file")],
)
def test_what_names_no_factory(script: Path, target: str, message: str) -> None:
    """A wrong name gets one sentence that says what is wrong."""
    with pytest.raises(ConfigError, match=message):
        Factory(target.format(script)).load()


def test_what_a_factory_must_return(script: Path) -> None:
    """Said with what it did return."""
    factory = Factory(f"{script}:wrong")
    with factory.importable(), pytest.raises(ConfigError, match=r"returned int; it must return \(model, args\)"):
        factory.load()()


def test_a_module_is_told_with_its_place(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the file from which its functions can be named."""
    monkeypatch.chdir(script.parent)
    (script.parent / "module_for_factory.py").write_text("def make(): ...\n")
    script.write_text("import module_for_factory\n")
    factory = Factory(f"{script}:module_for_factory")
    with factory.importable(), pytest.raises(ConfigError, match=r"is a module.* module_for_factory\.py:FUNCTION"):
        factory.load()


def test_arguments_that_only_the_call_shows_to_be_missing(script: Path) -> None:
    """The error is one sentence; a TypeError within a factory is the factory's own."""
    factory, raising = Factory(f"{script}:Hidden"), Factory(f"{script}:raising")
    with factory.importable():
        with pytest.raises(ConfigError, match=r"cannot be called with no arguments .*missing 1 required"):
            factory.load()()
        with pytest.raises(TypeError, match="has no len"):
            raising.load()()
