"""Tuning on a Ray cluster: one process times on each physical host of the asked fingerprint, tasks on other nodes compile for it.

The driver probes the nodes, starts an actor that shares variants out (`Claims`) and one that times for each host, writes what they find into
its store, and starts another where one ends. Whoever reaches the ports of a Ray cluster runs code on it: see docs/guides/tuning.md.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from torch_hybrid_backend._version import __version__
from torch_hybrid_backend.codegen.engine import TIMINGS
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.device import CPU
from torch_hybrid_backend.driver.session import open_services
from torch_hybrid_backend.errors import ArgumentError, CacheError, HybridError, failures, ignored, unreachable
from torch_hybrid_backend.factory import Factory
from torch_hybrid_backend.machine import fingerprint
from torch_hybrid_backend.progress import Progress
from torch_hybrid_backend.services import Services
from torch_hybrid_backend.storage.sources import sources_version
from torch_hybrid_backend.storage.store import Content
from torch_hybrid_backend.tuning.claims import Claims, Entry, Interval, State, Wanted
from torch_hybrid_backend.tuning.host_lock import host
from torch_hybrid_backend.tuning.local import Request, Summary
from torch_hybrid_backend.tuning.nodes import Node, Roles, roles_of
from torch_hybrid_backend.tuning.remote_compiler import RemoteCompiler, on_node
from torch_hybrid_backend.tuning.shared_tuner import SharedTuner, TunedModel

_LOOK_EVERY_S = 0.5
_PROBE_S = 120.0  # importing torch from a slow disk
_LOSSES = 3  # of a host's process, one after the other without a result in between: then the host is left out
_SETTLE_S = 600.0


def check_installed() -> None:
    """Raise ArgumentError where Ray is not installed."""
    if find_spec("ray") is None:
        raise ArgumentError("--ray needs Ray, which is not installed: pip install 'torch-hybrid-backend[tune]'")


def tune_on_cluster(
    address: str, request: Request, progress: Progress, wanted: str | None = None, threads: int | None = None
) -> Summary:
    """Tune a model on a Ray cluster until nothing is left, the time is over, or Ctrl-C. `wanted`: a fingerprint or a part of one; None: this
    machine's. `threads`: kernel threads of timed calls; None: as here, or torch's number of a node if `wanted` is given.

    Raises ArgumentError where there is no cluster at the address, HybridError where no node can time, or all have failed, and what the
    factory raises as HybridError.
    """
    check_installed()
    if "://" in address:
        raise ArgumentError(f"--ray is {address}; run the command on a node of the cluster, with host:port or auto")
    ray: Any = importlib.import_module("ray")
    start = time.monotonic()
    if wanted is None:
        threads = torch.get_num_threads() if threads is None else threads
        torch.set_num_threads(threads)
        wanted = fingerprint(CPU)
    try:
        here = {"include_dashboard": False} if address == "local" else {}
        ray.init(address, log_to_driver=False, logging_level="warning", **here)
    except failures(OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise unreachable(f"--ray {address}", error) from error
    try:
        roles = roles_of(_probed(ray, threads), wanted, versions())
        run = _Run(ray, request, roles, open_services(request.config), start)
        return run.tune(progress)
    finally:
        ray.shutdown()


def versions() -> dict[str, str]:
    """Versions of what decides kernels and times, which must be equal on all nodes."""
    return {
        "Python": f"{sys.version_info[0]}.{sys.version_info[1]}",
        "torch": torch.__version__,
        "torch_hybrid_backend": __version__,
        "torch_hybrid_backend's sources": sources_version(".", "_runtime.so")[:12],
    }


def _probed(ray: Any, threads: int | None) -> list[Node]:
    """All nodes that are alive."""
    alive = [
        (each["NodeID"], f"{each['NodeManagerAddress']} ({each['NodeID'][:8]})")
        for each in ray.nodes()
        if each["Alive"]
    ]
    asked = {
        ray.remote(_probe()).options(num_cpus=0, scheduling_strategy=on_node(node)).remote(threads): (node, name)
        for node, name in alive
    }
    ray.wait(list(asked), num_returns=len(asked), timeout=_PROBE_S)
    nodes = []
    for ref, (node, name) in asked.items():
        try:
            told = ray.get(ref, timeout=0)
        except ray.exceptions.RayError as error:
            told = {"lacks": f"it did not answer: {type(error).__name__}"}
        nodes.append(Node(node, name, **told))
    return nodes


def _probe() -> Callable[[int | None], dict[str, Any]]:
    """The function that a node runs. It is sent by value, as the package may be absent there."""

    def probe(threads: int | None) -> dict[str, Any]:
        import os

        try:
            if threads is None:
                os.environ.pop(
                    "OMP_NUM_THREADS", None
                )  # Ray's, for a task of one CPU; torch reads it when it is imported
            from torch_hybrid_backend.tuning.cluster import described
        except ImportError as error:
            return {"lacks": f"the package cannot be imported there ({error})"}
        return described(threads)

    return probe


def described(threads: int | None) -> dict[str, Any]:
    """Description of this node: fields of `Node`. `threads`: kernel threads; None: as they are."""
    if threads is not None:
        torch.set_num_threads(threads)
    return {
        "host": host(),
        "fingerprint": fingerprint(CPU),
        "threads": torch.get_num_threads(),
        "versions": versions(),
    }


class _ClaimsElsewhere:
    """`Claims` of an actor."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._get: Any = importlib.import_module("ray").get

    def claim(self, worker: str, wanted: Sequence[Wanted]) -> dict[str, str]:
        return dict(self._get(self._actor.claim.remote(worker, wanted)))

    def report(self, worker: str, found: Sequence[Wanted], is_disturbed: bool) -> None:
        self._get(self._actor.report.remote(worker, found, is_disturbed))

    def used(self, interval: Interval) -> None:
        self._get(self._actor.used.remote(interval))

    def stop(self) -> None:
        self._get(self._actor.stop.remote())


class TimingWorker:
    """An actor that times. Its methods raise what the model raises."""

    def __init__(
        self, name: str, request: Request, claims: Any, threads: int, compiling: Sequence[str], is_elsewhere: bool
    ) -> None:
        """`compiling`: nodes that compile for it. `is_elsewhere`: these are of other hosts."""
        with ignored(OSError):  # Ray's processes give way to others; this takes a right that not all users have
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        torch.set_num_threads(threads)
        own = Config.from_env(os.environ)
        kept_here = {
            name: getattr(own, name) for name in ("cache_dir", "cache_shared", "cache_keys", "compile_threads")
        }
        self._request = replace(request, config=replace(request.config, progress=False, **kept_here))
        self._timings = open_services(self._request.config).timings
        self._tuner: SharedTuner = SharedTuner(
            name,
            _ClaimsElsewhere(claims),
            self._timings,
            lambda own: RemoteCompiler(own, compiling, functools.partial(self._tuner.waiting, is_elsewhere)),
        )
        self._model: TunedModel | None = None

    def tune(self) -> None:
        """Tune the model until nothing can be claimed."""
        self._made().tune(self._tuner, keeps=False)

    def settle(self, entries: Mapping[str, Entry]) -> list[Content]:
        """See `TunedModel.settle`."""
        return self._made().settle(self._tuner, self._timings, entries)

    def _made(self) -> TunedModel:
        if self._model is None:
            if Path(self._request.folder).is_dir():  # there is one here as well
                os.chdir(self._request.folder)
            self._model = TunedModel(Factory(self._request.target), self._request.config)
        return self._model


@dataclass(slots=True)
class _Host:
    """A host that times: its nodes, the actor there, and what it does now."""

    name: str
    nodes: tuple[Node, ...]
    worker: str = ""
    actor: Any = None
    ref: Any = None
    losses: int = 0
    tried: int = -1  # by all, when the latest pass began


class _Run:
    """A cluster at work. Owns the actors."""

    def __init__(self, ray: Any, request: Request, roles: Roles, services: Services, start: float) -> None:
        self._ray, self._request, self._roles, self._services = ray, request, roles, services
        self._threads = next(node.threads for nodes in roles.timing.values() for node in nodes)
        self._start = start
        self._numbers = itertools.count()
        self._notes = list(roles.left_out)
        known = {key: dict(times) for key, times in services.timings.entries(TIMINGS).items()}
        left_s = request.budget_s - (time.monotonic() - start)
        here = ray.get_runtime_context().get_node_id()
        self._claims = ray.remote(Claims).options(num_cpus=0, scheduling_strategy=on_node(here)).remote(known, left_s)
        self._hosts = {name: _Host(name, nodes) for name, nodes in roles.timing.items()}
        self._failed: set[str] = set()

    def tune(self, progress: Progress) -> Summary:
        """Run until nothing is left or the time is over; then settle on one host."""
        is_stopped = False
        while True:
            try:
                state = self._look(progress, begins=not is_stopped)
                if state is not None:
                    break
            except KeyboardInterrupt:
                if is_stopped:
                    state = self._state()
                    break
                is_stopped = True
                progress.say("stopping: rounds under way are finished; Ctrl-C again ends at once")
                self._claims.stop.remote()
        entries: Mapping[str, Entry] = self._from_claims(self._claims.entries.remote())
        self._keep(entries)
        try:
            is_settled = not is_stopped and self._settle(entries, progress)
        except KeyboardInterrupt:
            is_settled = False
        hosts = len({interval.host for interval in state.intervals})
        cache = self._services.store.root
        return Summary(state, hosts, time.monotonic() - self._start, cache, is_settled, tuple(self._notes))

    def _look(self, progress: Progress, *, begins: bool) -> State | None:
        """Take what was found since the last look, and begin what can begin. The final state once nothing runs any more."""
        for each in self._hosts.values():
            if begins and each.actor is None and each.name not in self._failed:
                self._begin(each)
        running = {each.ref: each for each in self._hosts.values() if each.ref is not None}
        ready, _ = self._ray.wait(list(running), timeout=_LOOK_EVERY_S) if running else ([], [])
        for ref in ready:
            running[ref].ref = None
            self._ended(running[ref], ref)
        state = self._state()
        gain = f"{1 - state.now_us / state.before_us:.1%} less" if state.before_us else ""
        progress.reach(state.tried, state.tried + state.left, gain)
        if any(each.ref is not None for each in self._hosts.values()):
            return None
        alive = [each for each in self._hosts.values() if each.actor is not None]
        if begins and not state.is_over:
            if not alive and len(self._failed) == len(self._hosts):
                raise HybridError("; ".join(self._notes))
            if len(alive) + len(self._failed) < len(self._hosts):
                return None
            # What a process had claimed that ended is left, though all others have passed it.
            again = [each for each in alive if state.left and state.tried > each.tried]
            for each in again:
                each.tried = state.tried
                each.ref = each.actor.tune.remote()
            if again:
                return None
        return state

    def _state(self) -> State:
        """Progress of tuning; new times are kept."""
        state: State = self._from_claims(self._claims.state.remote())
        self._keep(state.entries)
        return state

    def _keep(self, entries: Mapping[str, Entry]) -> None:
        for key, entry in entries.items():
            if entry.times:
                self._services.timings.put_entry(TIMINGS, key, entry.times, is_disturbed=entry.is_disturbed)

    def _begin(self, each: _Host) -> None:
        """Start a process on a host, on each of its nodes in turn."""
        node = each.nodes[each.losses % len(each.nodes)]
        compiling = self._roles.compiling_for(each.name)
        each.worker = f"{node.name} {next(self._numbers)}"
        each.actor = (
            self._ray.remote(TimingWorker)
            .options(num_cpus=0, max_restarts=0, scheduling_strategy=on_node(node.id))
            .remote(
                each.worker,
                self._request,
                self._claims,
                self._threads,
                [node.id for node in compiling],
                each.name not in {node.host for node in compiling},
            )
        )
        each.ref = each.actor.tune.remote()

    def _ended(self, each: _Host, ref: Any) -> None:
        """Take the end of a pass. A process that ended is dropped. Raises HybridError for what the model or its factory raised."""
        try:
            self._ray.get(ref)
        except self._ray.exceptions.RayTaskError as error:
            self._state()  # raises where that is what the process had lost
            cause = error.cause if isinstance(error.cause, BaseException) else error
            why = str(cause) if isinstance(cause, HybridError) else f"{type(cause).__name__}: {cause}"
            why = why.removeprefix(f"{self._request.target}: ")
            raise HybridError(f"{self._request.target} cannot be tuned on {each.worker}: {why}") from error
        except self._ray.exceptions.RayError as error:
            state = self._state()
            each.losses = 1 if state.tried > each.tried else each.losses + 1
            each.tried = state.tried
            self._from_claims(self._claims.drop.remote(each.worker))
            self._ray.kill(each.actor)
            each.actor = None
            self._notes.append(
                f"the process that timed on {each.worker} ended ({type(error).__name__}): its round is tried again"
            )
            if each.losses >= _LOSSES:
                self._failed.add(each.name)
                self._notes.append(
                    f"{each.worker} is left out, as {_LOSSES} of its processes have ended one after the other"
                )

    def _settle(self, entries: Mapping[str, Entry], progress: Progress) -> bool:
        """Have a host make the first call with the fastest kernels, and keep what it returns. True if that worked."""
        progress.at("the first call with the fastest kernels")
        for each in self._hosts.values():
            if each.actor is None:
                continue
            try:
                found: list[Content] = self._ray.get(each.actor.settle.remote(entries), timeout=_SETTLE_S)
            except self._ray.exceptions.RayError as error:
                self._notes.append(
                    f"{each.worker} cannot make the first call with the fastest kernels: {type(error).__name__}"
                )
                continue
            try:
                for content in found:
                    entry = entries.get(content.key) if content.kind == TIMINGS else None
                    if entry is not None and entry.times and entry.is_disturbed:
                        continue  # it stays with all that was found out
                    self._services.store.remove(content.kind, content.key)
                    self._services.store.put(content.kind, content.key, content.data, content.suffix)
            except CacheError as error:
                self._notes.append(str(error))
                return False
            return True
        return False

    def _from_claims(self, ref: Any) -> Any:
        try:
            return self._ray.get(ref)
        except self._ray.exceptions.RayError as error:
            raise HybridError(
                "the process that shares the work out has ended; the same command goes on from what is kept"
            ) from error
