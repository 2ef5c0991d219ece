"""Results of calibration, layer by layer, and the file that keeps them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_hybrid_backend.core.verdict import Reason, Refused
from torch_hybrid_backend.errors import QuantizationError, failures

_FORMAT = "torch_hybrid_backend ranges"
_VERSION = 1
_WHY: Mapping[str, Refused] = {
    code: Refused(Reason(code), why)
    for code, why in (
        ("excluded", "it is excluded from what quantize converts (exclude, exclude_kinds)"),
        ("uncalibrated", "none of the calibration data has reached it"),
        ("unsupported", "quantize does not take its operands"),
        ("slower", "in floating point it goes before the resampling of what it reads, which is less work"),
        ("accuracy", "quantized, the metric drops by more than max_drop"),
    )
}
KEPT_IN_FLOAT = tuple(_WHY)
WEIGHT_BITS = (7, 8)


@dataclass(frozen=True, slots=True)
class Site:
    """Quantization of one call of a layer.

    `ranges`: the lowest and the highest value of its activations: one pair, or two where both operands are activations, three of an attention.
    One of an addition may be None, as the operand stays as it is. None where scales are found in every call. `smoothing`: for each input
    channel the factor by which the activation is divided and the weight multiplied.
    """

    kind: str
    ranges: tuple[tuple[float, float] | None, ...] | None = None
    smoothing: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Ranges:
    """The quantization of a model: all that the model's numbers depend on, whatever machine computes them.

    `model`: the model's `fingerprint`. `sites`: calls of layers by name. `in_float`: why layers stay in floating point, by name; each reason is
    one of `KEPT_IN_FLOAT`. `weight_bits`: one of `WEIGHT_BITS`.
    """

    model: str
    sites: Mapping[str, Site]
    in_float: Mapping[str, str]
    weight_bits: int = 8

    def save(self, path: str | Path) -> None:
        """Writes them as JSON."""
        sites = {
            name: {"kind": site.kind, "ranges": site.ranges, "smoothing": site.smoothing}
            for name, site in self.sites.items()
        }
        content = {
            "model": self.model,
            "sites": sites,
            "in_float": dict(self.in_float),
            "weight_bits": self.weight_bits,
        }
        head = {"format": _FORMAT, "version": _VERSION, "sha256": _checksum(content)}
        Path(path).write_text(json.dumps(head | content, indent=1) + "\n")

    @staticmethod
    def load(path: str | Path, model: nn.Module) -> Ranges:
        """Read the ranges of this model from a file. Weights have 8 bits where an older file does not say.

        Raises QuantizationError for a file that is damaged, no file of ranges, or another model's.
        """
        try:
            content = json.loads(Path(path).read_text())
            if content.pop("format", None) != _FORMAT:
                raise ValueError("it is no file of ranges")
            if (version := content.pop("version")) != _VERSION:
                raise ValueError(f"its version is {version}, this package reads {_VERSION}")
            if content.pop("sha256") != _checksum(content):
                raise ValueError("its contents do not have the checksum that they were saved with")
            found = Ranges(
                content["model"],
                {name: _site(**fields) for name, fields in content["sites"].items()},
                {name: _known(name, why) for name, why in content["in_float"].items()},
                _weight_bits(content.get("weight_bits", 8)),
            )
        except failures(
            OSError, ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError
        ) as error:
            raise QuantizationError(
                f"the ranges of {path} cannot be read: {error}; calibrate again and save them anew"
            ) from error
        if found.model != fingerprint(model):
            raise QuantizationError(
                f"the ranges of {path} are another model's: names, kinds or shapes of its layers differ from this {type(model).__name__}'s. "
                f"Its layers are {_some(found.sites)}; this model's {_some(name for name, _ in model.named_modules() if name)}"
            )
        return found


def left_in_float(model: nn.Module) -> dict[str, Refused]:
    """Reasons why layers of a model's quantized modules stay in floating point, by their sites as seen from the model."""
    found: dict[str, Refused] = {}
    for path, module in model.named_modules():
        ranges = getattr(module, "ranges", None)
        if isinstance(ranges, Ranges):
            base = f"{path}.model" if path else "model"
            whole = {**ranges.in_float, **dict.fromkeys(ranges.sites, "unsupported")}
            found |= {_inside(base, site): _WHY[code] for site, code in whole.items()}
    return found


def _inside(base: str, site: str) -> str:
    """The site of a model as seen from where that is `base`. The model's own forward has the sites "", "#2" and so on."""
    return f"{base}{site}" if not site or site.startswith("#") else f"{base}.{site}"


def _site(kind: str, ranges: Any, smoothing: Any) -> Site:
    pairs = None if ranges is None else tuple(pair and (float(pair[0]), float(pair[1])) for pair in ranges)
    factors = None if smoothing is None else tuple(map(float, smoothing))
    numbers = [*(number for pair in pairs or () for number in pair or ()), *(factors or ())]
    if not all(map(math.isfinite, numbers)):
        raise ValueError("a range is not finite")
    return Site(str(kind), pairs, factors)


def _known(name: str, why: str) -> str:
    if why not in _WHY:
        raise ValueError(f"why {name!r} stays in floating point is none of {', '.join(_WHY)}: {why!r}")
    return why


def _weight_bits(bits: int) -> int:
    if bits not in WEIGHT_BITS:
        raise ValueError(f"weights of {bits!r} bits are none of {', '.join(map(str, WEIGHT_BITS))}")
    return bits


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _some(names: Iterable[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:5]) + (f" and {len(shown) - 5} more" if len(shown) > 5 else "")


def fingerprint(model: nn.Module) -> str:
    """Equal for models of the same modules with parameters and buffers of the same names and shapes, whatever these hold."""
    lines = [f"{name} {type(module).__name__}" for name, module in model.named_modules()]
    tensors: Iterable[tuple[str, torch.Tensor]] = (*model.named_parameters(), *model.named_buffers())
    lines += [f"{name} {tuple(tensor.shape)}" for name, tensor in tensors]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
