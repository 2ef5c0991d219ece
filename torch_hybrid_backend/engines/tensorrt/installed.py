"""Facts about the installed TensorRT, found without importing it: its distributions, what is missing, and what to install.

Two distributions provide the module `torch_tensorrt`: torch-tensorrt uses TensorRT, torch-tensorrt-rtx uses TensorRT-RTX. The installed one is
used.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Sequence
from ctypes.util import find_library
from dataclasses import dataclass
from pathlib import Path

from torch_hybrid_backend.core.verdict import Reason, Refused

# Releases of torch-tensorrt that `adapter` supports.
KNOWN = ("2.11", "2.12", "2.13", "2.14")


@dataclass(frozen=True, slots=True)
class Flavour:
    """A distribution of torch_tensorrt. `module`: the module that torch_tensorrt imports. `library`: the shared library that the module loads,
    whose file is `lib<library>.so`, in the folder of the module `<module>_libs` or where the system's loader looks."""

    title: str
    distribution: str
    module: str
    library: str


FLAVOURS = (
    Flavour("TensorRT", "torch-tensorrt", "tensorrt", "nvinfer"),
    Flavour("TensorRT-RTX", "torch-tensorrt-rtx", "tensorrt_rtx", "tensorrt_rtx"),
)
_CUDA_SUFFIXES = ("", "_cu13", "_cu12")  # of the names of TensorRT's distributions

NO_GPU = Refused(Reason.NO_DEVICE, "there is no GPU that this torch can use (torch.cuda.is_available())")


@dataclass(frozen=True, slots=True)
class Installation:
    """The installed TensorRT. `version`: version of torch-tensorrt. `tensorrt`: version of TensorRT itself."""

    flavour: Flavour
    version: str
    tensorrt: str

    @property
    def release(self) -> str:
        """The release in the form of `KNOWN`, such as "2.13"."""
        return _release(self.version)

    def __str__(self) -> str:
        """The versions that engines depend on: "TensorRT-RTX 1.5.0.114, torch-tensorrt-rtx 2.13.0"."""
        return f"{self.flavour.title} {self.tensorrt}, {self.flavour.distribution} {self.version}"


def installation() -> Installation | Refused:
    """The installed TensorRT, or a refusal that says in one sentence what is wrong and what to install. Takes milliseconds."""
    found = [(flavour, version) for flavour in FLAVOURS if (version := _version(flavour.distribution))]
    if not found:
        return _missing(
            "TensorRT is not installed: pip install torch-tensorrt, or torch-tensorrt-rtx, of torch's own version"
        )
    if len(found) > 1:
        names = " and ".join(flavour.distribution for flavour, _ in found)
        return _missing(f"{names} are both installed and overwrite each other: uninstall both, then install one")
    ((flavour, version),) = found
    name = f"{flavour.distribution} {version}"
    if _release(version) not in KNOWN:
        return _missing(f"{name} is not supported: it must be one of {', '.join(KNOWN)}")
    unmet = _unmet(flavour.distribution)
    if unmet:
        return _missing(f"{name} lacks what it needs: pip install {' '.join(unmet)}")
    if importlib.util.find_spec(flavour.module) is None:
        return _missing(f"{name} needs the module {flavour.module}: pip install {flavour.module}")
    if not _has_library(flavour):
        return _missing(
            f"{flavour.title} is installed without its library lib{flavour.library}: pip install {flavour.module}_cu13_libs, "
            "or have the loader find it (LD_LIBRARY_PATH)"
        )
    return Installation(flavour, version, _tensorrt_version(flavour))


def described(gpus: Sequence[str] = ()) -> Sequence[tuple[str, str]]:
    """Names and values that `hybrid doctor` prints about the engine, in addition to faults."""
    found = installation()
    whole = [] if isinstance(found, Refused) else [("tensorrt", str(found))]
    return (*whole, *(("GPU", gpu) for gpu in gpus or ("none",)))


def _missing(why: str) -> Refused:
    return Refused(Reason.MISSING_DEPENDENCY, why)


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _tensorrt_version(flavour: Flavour) -> str:
    return next(filter(None, (_version(flavour.module + suffix) for suffix in _CUDA_SUFFIXES)), "of unknown version")


def _unmet(distribution: str) -> list[str]:
    """Requirements of a distribution that are not met by an installed version, as arguments of pip."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return ["packaging"]
    unmet = []
    for text in importlib.metadata.requires(distribution) or ():
        need = Requirement(text)
        if need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue
        # TensorRT's own distribution only requires the one for a version of CUDA, which may be installed alone.
        suffixes = _CUDA_SUFFIXES if need.name.startswith("tensorrt") else ("",)
        versions = [version for suffix in suffixes if (version := _version(need.name + suffix))]
        if not any(need.specifier.contains(version, prereleases=True) for version in versions):
            unmet.append(f"'{need.name}{need.specifier}'")
    return unmet


def _has_library(flavour: Flavour) -> bool:
    spec = importlib.util.find_spec(f"{flavour.module}_libs")
    folders = spec.submodule_search_locations or () if spec is not None else ()
    if any(any(Path(folder).glob(f"lib{flavour.library}.so*")) for folder in folders):
        return True
    return find_library(flavour.library) is not None


def _release(version: str) -> str:
    found = re.match(r"\d+\.\d+", version)
    return found.group() if found else version
