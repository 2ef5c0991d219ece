"""Settings of a deployment, checked where it is made and plain data in every replica."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch_hybrid_backend.errors import ArgumentError
from torch_hybrid_backend.machine import check_threads


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a deployment.

    folder: the only folder that files are opened from, `user_config` included. artifact: the name of a file in it. model: the name that
    requests call the model by, whichever file it is of. threads: of the kernels of one replica. max_batch: the most rows of a joined call.
    batch_wait_ms: how long a request waits for others. max_body_mib: the largest body of a request. keys: PEM files of public keys, one of
    which must have signed each file; empty for files without signatures. tokenizer: the tokenizer.json of a model that generates text, or
    None for token ids. Raises ArgumentError for values that are none.
    """

    folder: str
    artifact: str
    model: str
    threads: int = 1
    max_batch: int = 8
    batch_wait_ms: float = 2.0
    max_body_mib: float = 64.0
    keys: tuple[str, ...] = ()
    tokenizer: str | None = None

    def __post_init__(self) -> None:
        check_threads(self.threads, "threads")
        check_count(self.max_batch, "max_batch")
        for name, least in (("batch_wait_ms", 0.0), ("max_body_mib", 0.001)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < float("inf"):
                raise ArgumentError(f"{name} is {value!r}; it must be a number, at least {least:g}")
        if not isinstance(self.model, str) or not re.fullmatch(r"[^/\s]+", self.model):
            raise ArgumentError(
                f"the name of the model is {self.model!r}; it must have at least one letter, and neither slashes nor spaces"
            )
        self.path_of(self.artifact)

    @classmethod
    def of(
        cls,
        path: Path,
        *,
        model: str | None,
        keys: Sequence[str | Path] | None,
        tokenizer: str | Path | None,
        **given: object,
    ) -> Settings:
        """The settings for a file, whose folder becomes the folder. `model`: None for the name of the file without its ending."""
        folder = str(path.parent.resolve())
        pems = tuple(str(Path(key).resolve()) for key in keys or ())
        text = None if tokenizer is None else str(Path(tokenizer).resolve())
        return cls(folder, path.name, path.stem if model is None else model, keys=pems, tokenizer=text, **given)  # type: ignore[arg-type]

    def path_of(self, artifact: object) -> Path:
        """The path of a file by its name. Raises ArgumentError for what lies outside of the folder, links followed."""
        if not isinstance(artifact, str) or not artifact:
            raise ArgumentError(f"the artifact is {artifact!r}; it must be the name of a .hybrid file in {self.folder}")
        folder = Path(self.folder).resolve()
        path = (folder / artifact).resolve()
        if not path.is_relative_to(folder):
            raise ArgumentError(
                f"the artifact {artifact!r} is not in {self.folder}: only files of that folder are served"
            )
        return path


def check_count(value: object, name: str) -> None:
    """Raise ArgumentError unless `value` is a whole number, at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ArgumentError(f"{name} is {value!r}; it must be a whole number, at least 1")
