"""The libraries of the catalogue, most of them in a folder apart: `make .venv/ecosystem .venv/torchvision`.

Their dependencies would disturb others (transformers cannot be imported beside a torchvision built for another torch), so that nothing but
the process that needs one looks into these folders.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from benchmarks.torchvision_cpu import import_torchvision

_APART = ("ecosystem", "torchvision")
_WITH_TORCHVISION = ("timm", "ultralytics")
_OURS = ("recommender", "recurrent")  # kinds of models whose cases are written with torch alone


def load(name: str) -> Any:
    """The package or submodule `name` ("diffusers", "torch_geometric.nn"). Raises ModuleNotFoundError where it is not installed.

    The folder apart stays on the path: load what is there only in a process that runs nothing else.
    """
    package = name.partition(".")[0]
    folder = str(Path(sys.prefix) / "ecosystem")
    # What is installed as usual is imported as usual: with the folder, others would find in it what they then cannot import.
    if folder not in sys.path and PathFinder.find_spec(package) is None:
        sys.path.append(folder)
    if package in _WITH_TORCHVISION:
        import_torchvision()
    os.environ.setdefault("YOLO_CONFIG_DIR", tempfile.gettempdir())  # ultralytics writes its settings on import
    os.environ.setdefault("YOLO_OFFLINE", "true")
    return importlib.import_module(name)


def missing(library: str) -> str:
    """The reason why the cases of `library` cannot run, or ""."""
    needed = () if library in _OURS else (library, *(["torchvision"] if library in _WITH_TORCHVISION else []))
    path = [*sys.path, *(str(Path(sys.prefix) / name) for name in _APART)]
    absent = [name for name in needed if PathFinder.find_spec(name, path) is None]
    return f"needs {' and '.join(absent)}: make .venv/ecosystem .venv/torchvision" if absent else ""
