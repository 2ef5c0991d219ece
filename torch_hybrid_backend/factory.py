"""Factories of models, as the command line names them: "module:factory" or "path/script.py:factory".

factory = Factory("my_models.py:make")
with factory.importable():
    model, args, kwargs = factory.load()(batch=8)
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from torch_hybrid_backend.errors import ConfigError, did_you_mean, failures

Made = tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]  # a model, its positional and its named arguments


@dataclass(frozen=True, slots=True)
class Factory:
    """A factory by its name. Raises ConfigError for what names none."""

    target: str

    def __post_init__(self) -> None:
        place, name = self._parts
        if not place or (place.startswith(".") and not self._is_script) or not name:
            raise ConfigError(f"{self.target!r} names no factory; it must be module:factory or script.py:factory")

    @property
    def _parts(self) -> tuple[str, str]:
        place, _, name = self.target.rpartition(":")
        return place, name

    @property
    def _is_script(self) -> bool:
        return self._parts[0].endswith(".py")

    @property
    def folder(self) -> str:
        """Folder in which Python looks first when it runs the script, or `-m module`."""
        return str(Path(self._parts[0]).resolve().parent) if self._is_script else os.getcwd()

    @contextlib.contextmanager
    def importable(self) -> Iterator[None]:
        """Let the factory and its model import what lies beside them."""
        sys.path.insert(0, self.folder)
        try:
            yield
        finally:
            sys.path.pop(0)

    def load(self) -> Callable[..., Made]:
        """The factory as a function, whose result is checked. Raises ConfigError where it cannot be imported."""
        place, name = self._parts
        module = self._module(place)
        factory = getattr(module, name, None)
        if isinstance(factory, torch.nn.Module):
            raise ConfigError(
                f"{self.target} is a model, but its inputs are needed too: write a function that returns both, "
                f"`def make(): return {name}, (example_input,)`, and name that"
            )
        if isinstance(factory, ModuleType):
            raise ConfigError(
                f"{self.target} is a module, no function: name a function in it that makes the model and its inputs, "
                f"{self._place(factory)}:FUNCTION"
            )
        if isinstance(factory, type) and issubclass(factory, torch.nn.Module):
            raise ConfigError(
                f"{self.target} is a class of models; a factory must be callable without arguments and return the model with its inputs: write "
                f"`def make(): return {name}(...), (example_input,)`, and name that"
            )
        if not callable(factory):
            hint = did_you_mean(name, [each for each, value in vars(module).items() if callable(value)])
            raise ConfigError(f"{place} has no callable named {name!r}. {hint}".rstrip(" ."))

        @functools.wraps(factory)
        def make(**given: Any) -> Made:
            try:
                inspect.signature(factory).bind(**given)
            except ValueError:  # what is built in does not tell its arguments
                pass
            except TypeError as error:
                raise self._not_called(given, error) from error
            try:
                made = factory(**given)
            except failures(TypeError) as error:
                if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
                    raise  # the factory's own: no line of it has run where the arguments are at fault
                raise self._not_called(given, error) from error
            return self._checked(made)

        return make

    def _place(self, module: ModuleType) -> str:
        """Name of a module on the command line: its file if that lies beside the script, else its name."""
        file = Path(getattr(module, "__file__", None) or "")
        is_beside = self._is_script and file.suffix == ".py" and file.resolve().parent == Path(self.folder)
        return os.path.relpath(file) if is_beside else module.__name__

    def _not_called(self, given: Mapping[str, Any], error: TypeError) -> ConfigError:
        return ConfigError(
            f"{self.target} cannot be called with {', '.join(given) or 'no arguments'} ({error}); it must be a function or class that can be "
            "called so, makes the model and its inputs and returns (model, args)"
        )

    def _module(self, place: str) -> ModuleType:
        if not self._is_script:
            try:
                return importlib.import_module(place)
            except ModuleNotFoundError as error:
                raise ConfigError(f"cannot import {place}: {error}") from error
        if not Path(place).is_file():
            raise ConfigError(f"there is no file {place}")
        spec = importlib.util.spec_from_file_location(Path(place).stem, place)
        if spec is None or spec.loader is None:
            raise ConfigError(f"{place} cannot be imported")
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(spec.name, module)  # what the script defines must be found by its module's name
        spec.loader.exec_module(module)
        return module

    def _checked(self, made: object) -> Made:
        match made:
            case (model, list() | tuple() as args) if callable(model):
                return model, args, {}
            case (model, list() | tuple() as args, dict() as kwargs) if callable(model):
                return model, args, kwargs
        kinds = ", ".join(type(part).__name__ for part in made) if isinstance(made, tuple) else ""
        found = f"({kinds})" if kinds else type(made).__name__
        raise ConfigError(
            f"{self.target} returned {found}; it must return (model, args) or (model, args, kwargs), args a tuple, kwargs a dict"
        )
