"""Settings of deployments: legal values, and files of one folder alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from torch_hybrid_backend.errors import ArgumentError
from torch_hybrid_backend.serve.settings import Settings


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"threads": 0}, "threads is 0"),
        ({"threads": True}, "threads is True"),
        ({"threads": 1_000_000}, "threads is 1000000; it must be a whole number from 1 to "),
        ({"max_batch": 1.5}, "max_batch is 1.5"),
        ({"batch_wait_ms": -1}, "batch_wait_ms is -1"),
        ({"batch_wait_ms": float("nan")}, "batch_wait_ms is nan"),
        ({"max_body_mib": 0}, "max_body_mib is 0"),
        ({"model": "a/b"}, "name of the model is 'a/b'"),
        ({"artifact": ""}, "the artifact is ''"),
        ({"artifact": "../model.hybrid"}, "only files of that folder"),
        ({"artifact": "/etc/model.hybrid"}, "only files of that folder"),
    ],
)
def test_wrong_settings(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        Settings(**{"folder": str(tmp_path), "artifact": "model.hybrid", "model": "model", **given})


def test_links_are_followed(tmp_path: Path) -> None:
    """A link that leads out of the folder is refused, one within is not."""
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "in.hybrid").symlink_to("model.hybrid")
    (tmp_path / "served" / "out.hybrid").symlink_to(tmp_path / "model.hybrid")
    settings = Settings.of(
        tmp_path / "served" / "model.hybrid", model=None, keys=[tmp_path / "key.pem"], tokenizer=None, threads=2
    )
    assert (settings.artifact, settings.model, settings.keys) == ("model.hybrid", "model", (str(tmp_path / "key.pem"),))
    assert settings.path_of("in.hybrid") == tmp_path / "served" / "model.hybrid"
    for name in ("out.hybrid", None, 3):
        with pytest.raises(ArgumentError, match="the artifact"):
            settings.path_of(name)
