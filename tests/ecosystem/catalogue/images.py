"""timm: forty models, drawn by a seed, each from another file of the library.

python -m tests.ecosystem.catalogue.images 7          what another seed draws (minutes)
python -m tests.ecosystem.run --models timm/NAME      tries any model of the library
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from torch import nn

from tests.ecosystem.case import Case, Inputs
from tests.ecosystem.libraries import load

SEED, COUNT = 0, 40
# What `draw(SEED)` gives with the pinned version; a test makes sure of it. Written down, for drawing takes minutes.
DRAWN = tuple(
    """
    efficientvim_m2 cpubone_b0_bfrobust sedarknet21 convnextv2_tiny caformer_s36 davit_tiny lambda_resnet26t
    vit_relpos_medium_patch16_cls_224 volo_d1_224 densenet161 rdnet_tiny mobilevit_xxs swinv2_tiny_window16_256 resnet32ts
    coatnet_rmlp_0_rw_224 skresnext50_32x4d repvit_m1_0 edgenext_small convmixer_768_32 efficientvit_b1 pit_ti_224 gcvit_tiny
    fbnetc_100 focalnet_tiny_srf tiny_vit_21m_224 hrnet_w18_small vitamin_small_224 swiftformer_s lcnetv2_large
    xcit_tiny_12_p8_224 twins_svt_small fastvit_mci1 hgnetv2_b2 legacy_seresnext26_32x4d levit_128s tnt_s_patch16_224
    resnetv2_34 coat_mini efficientformer_l3 deit_tiny_distilled_patch16_224
    """.split()
)
_MAX_PARAMETERS = 40e6
_MAX_SIDE = 256


def draw(seed: int) -> tuple[str, ...]:
    """The files of the library in random order, of each the first model in random order that is small enough.

    Small is what takes at most 256x256 pixels and has at most 40 million parameters.
    """
    timm = load("timm")
    generator = random.Random(seed)
    files = sorted(timm.list_modules())
    generator.shuffle(files)
    found: list[str] = []
    for file in files:
        names = sorted(timm.list_models(module=file))
        generator.shuffle(names)
        found += next(([name] for name in names if _is_small(timm, name)), [])
        if len(found) == COUNT:
            break
    return tuple(found)


def _is_small(timm: Any, name: str) -> bool:
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        try:
            model = timm.create_model(name)
        except (RuntimeError, NotImplementedError):  # made from numbers, which a tensor without storage does not have
            return False
    side = max(model.default_cfg["input_size"][1:])
    return side <= _MAX_SIDE and sum(parameter.numel() for parameter in model.parameters()) <= _MAX_PARAMETERS


_REASONS = {
    "levit_128s": "Ill-conditioned with these random weights: eager itself is up to 13 % from float64, and PyTorch's check allows no more than"
    " a few times its mean error",
}


def case(name: str) -> Case:
    """The case of any model of the library."""

    def make() -> nn.Module:
        model: nn.Module = load("timm").create_model(name)
        return model

    def example() -> Inputs:
        channels, height, width = load("timm").get_pretrained_cfg(name, allow_unregistered=True).input_size
        # Two: of one, batch norms behind a pooling have no variance to measure.
        return (torch.randn(2, channels, height, width),)

    return Case(f"timm/{name}", make, example, reason=_REASONS.get(name, ""), ill_conditioned=name in _REASONS)


CASES = tuple(map(case, DRAWN))

if __name__ == "__main__":
    print(*draw(int(sys.argv[1])), sep="\n")
