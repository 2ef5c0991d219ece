"""Control flow in the runner, without Python: bit for bit what Python gets of the same file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.artifact.control_flow_models import MODELS, Counted, leaves
from tests.artifact.exported_for_tests import exported
from tests.runner.runner_in_python import Runner


@pytest.mark.parametrize("name", MODELS)
def test_every_way_through_control_flow(name: str, runner: Runner, tmp_path: Path) -> None:
    """Branches and loops take the way that the values tell, and buffers change as in Python."""
    make, calls = MODELS[name]
    report, loaded = exported(make().eval(), calls()[0], tmp_path)
    opened = runner.open(report.path, threads=torch.get_num_threads())
    for args in calls():
        expected = leaves(loaded(*args))
        found = opened.run(*(each.numpy() for each in args), outputs=len(expected))
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other.numpy())


def test_many_sizes(runner: Runner, tmp_path: Path) -> None:
    """Plans of branches and loops are laid out for each set of sizes in C++."""
    shapes = ({0: torch.export.Dim("n", min=2, max=16)}, None)
    args = torch.randn(4, 16), torch.tensor(3)
    report, loaded = exported(Counted().eval(), args, tmp_path, dynamic_shapes=shapes)
    opened = runner.open(report.path)
    for n, count in ((4, 3), (9, 0), (16, 5)):
        x, k = torch.randn(n, 16), torch.tensor(count)
        for one, other in zip(opened.run(x.numpy(), k.numpy(), outputs=2), loaded(x, k), strict=True):
            np.testing.assert_array_equal(one, other.numpy())
