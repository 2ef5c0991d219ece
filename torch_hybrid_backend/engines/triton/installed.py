"""Facts about Triton and GPUs without importing the engine, which takes time where it cannot serve."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence

from torch_hybrid_backend.core.verdict import Reason, Refused

NO_GPU = Refused(Reason.NO_DEVICE, "there is no GPU that this torch can use (torch.cuda.is_available())")


def version() -> str:
    """The installed Triton's version, asked of the installation; "" where it is not installed."""
    for package in ("triton", "pytorch-triton"):  # as it comes with releases of torch, and with nightly builds
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def described(gpus: Sequence[str] = ()) -> Sequence[tuple[str, str]]:
    """Names and values that `hybrid doctor` prints of the engine."""
    return (("triton", version() or "not installed"), *(("GPU", gpu) for gpu in gpus or ("none",)))
