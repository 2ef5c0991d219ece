"""Serving of `.hybrid` files on Ray Serve (`pip install 'torch-hybrid-backend[serve]'`), which is imported on first use.

from ray import serve
from torch_hybrid_backend.serve import deployment

serve.run(deployment("model.hybrid", replicas=2), route_prefix="/")
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch_hybrid_backend.errors import ArgumentError
from torch_hybrid_backend.serve.settings import Settings, check_count


def deployment(
    path: str | os.PathLike[str],
    *,
    replicas: int | Mapping[str, Any] = 1,
    threads: int = 1,
    max_batch: int = 8,
    batch_wait_ms: float = 2.0,
    max_queue: int = 100,
    max_body_mib: float = 64.0,
    keys: Sequence[str | Path] | None = None,
    tokenizer: str | Path | None = None,
    model: str | None = None,
    name: str = "model",
    **options: Any,
) -> Any:
    """Application of Ray Serve that answers requests of the Open Inference Protocol by a model from a file, for `serve.run`.

    path: on every node where a replica may run; other files of its folder can be rolled out by `user_config={"artifact": NAME}`. replicas:
    their number, or fields of Serve's `AutoscalingConfig`, such as {"min_replicas": 1, "max_replicas": 4}. threads: kernel threads of a
    replica, and the CPUs that Ray reserves for it. max_batch: the most rows of joined requests. batch_wait_ms: how many milliseconds a
    request waits for others. max_queue: how many requests may wait before others get 503. max_body_mib: size of the largest body, in MiB.
    keys: PEM files of public keys, one of which must have signed the file. tokenizer: the tokenizer.json of a model that generates text.
    model: the name that requests call the model by; None for that of the file. name: of the deployment. options: others of
    `serve.deployment`, such as `health_check_period_s`.

    Raises ArgumentError for values that are none. A file that cannot be served shows in Serve's status, as it is opened by the replicas.
    """
    check_installed()
    from torch_hybrid_backend.serve.replica import deployment as deploy

    given = {"threads": threads, "max_batch": max_batch, "batch_wait_ms": batch_wait_ms, "max_body_mib": max_body_mib}
    settings = Settings.of(Path(path), model=model, keys=keys, tokenizer=tokenizer, **given)
    check_count(max_queue, "max_queue")
    if not isinstance(replicas, Mapping):
        check_count(replicas, "replicas")
    return deploy(settings, replicas=replicas, max_queue=max_queue, given={**options, "name": name})


def application(arguments: Mapping[str, Any]) -> Any:
    """Application of a Serve configuration file: `import_path: torch_hybrid_backend.serve:application`; `args` are those of `deployment`."""
    return deployment(**arguments)


def check_installed() -> None:
    """Raise ArgumentError where Ray Serve is not installed."""
    if find_spec("ray") is None or find_spec("starlette") is None:
        raise ArgumentError(
            "serving needs Ray Serve, which is not installed: pip install 'torch-hybrid-backend[serve]'"
        )
