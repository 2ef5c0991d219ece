"""The command `hybrid tune`: a model's kernels are tuned ahead of calls, here or on a Ray cluster."""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from torch_hybrid_backend.config import Config
from torch_hybrid_backend.driver.serve_command import set_safe_defaults
from torch_hybrid_backend.errors import ArgumentError
from torch_hybrid_backend.factory import Factory
from torch_hybrid_backend.machine import check_threads
from torch_hybrid_backend.progress import Progress


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    tune = commands.add_parser(
        "tune", help="time every variant of a model's kernels and keep the times, here or on a Ray cluster"
    )
    tune.add_argument("target", help="module:factory or script.py:factory; the factory returns (model, args[, kwargs])")
    tune.add_argument(
        "--budget-s",
        type=float,
        metavar="S",
        help="seconds after which no further variant is tried; by default all are",
    )
    tune.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="tune on the Ray cluster that this machine is a node of: its address host:port, or auto; or local for a new one",
    )
    tune.add_argument(
        "--fingerprint",
        metavar="TEXT",
        help="the machines to time on, by their fingerprint or a part of it; by default those that are as this one. Needs --ray",
    )
    tune.add_argument(
        "--threads", type=int, metavar="N", help="kernel threads of the timed calls; PyTorch's number by default"
    )


def tune(parsed: argparse.Namespace, out: TextIO) -> int:
    """Run `hybrid tune`."""
    # heavy, so not imported for --help
    import torch

    from torch_hybrid_backend.tuning.local import Request, tune_here

    if parsed.budget_s is not None and not 0 < parsed.budget_s < math.inf:
        raise ArgumentError(f"--budget-s is {parsed.budget_s:g}; it must be a number of seconds above 0")
    budget_s = math.inf if parsed.budget_s is None else parsed.budget_s
    if parsed.threads is not None:
        check_threads(parsed.threads, "--threads")
    if parsed.fingerprint is not None and parsed.ray is None:
        raise ArgumentError("--fingerprint is for --ray: without a cluster this machine is tuned for")
    config = Config.from_env(os.environ)
    if not config.cache:
        raise ArgumentError("tuning keeps its times in the cache, which HYBRID_CACHE=0 switches off")
    factory = Factory(parsed.target)
    progress = Progress(f"tuning {parsed.target}", shown=config.progress)
    if parsed.ray is None:
        if parsed.threads is not None:
            torch.set_num_threads(parsed.threads)
        with progress:
            summary = tune_here(Request(parsed.target, os.getcwd(), config, budget_s), progress)
    else:
        set_safe_defaults(os.environ, is_new=parsed.ray == "local")
        from torch_hybrid_backend.tuning.cluster import tune_on_cluster

        place, _, name = factory.target.rpartition(":")
        target = f"{Path(place).resolve()}:{name}" if place.endswith(".py") else factory.target
        request = Request(target, os.getcwd(), replace(config, progress=False), budget_s)
        with progress:
            summary = tune_on_cluster(parsed.ray, request, progress, parsed.fingerprint, parsed.threads)
    out.write(f"{summary}\n")
    return 0
