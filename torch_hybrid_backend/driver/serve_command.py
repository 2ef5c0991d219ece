"""The command `hybrid serve`: Ray Serve on this machine, or an application on a cluster that is there."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import secrets
import shutil
import signal
import socket
import threading
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any, TextIO

from torch_hybrid_backend.errors import ArgumentError, HybridError, failures, ignored, unreachable
from torch_hybrid_backend.machine import check_threads, most_threads
from torch_hybrid_backend.serve import check_installed, deployment
from torch_hybrid_backend.serve.rpc import ADDER

APPLICATION = "hybrid"
_LEAST_STORE_BYTES = 75 * 2**20  # Ray refuses less


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    serve = commands.add_parser(
        "serve", help="answer requests over HTTP by a model from a file, with Ray Serve (docs/guides/serving.md)"
    )
    serve.add_argument(
        "file", type=Path, help="a file that `hybrid export` wrote; other files of its folder can be rolled out"
    )
    serve.add_argument("--name", help="the name that requests call the model by; that of the file by default")
    serve.add_argument(
        "--replicas",
        default="1",
        metavar="N",
        help="processes that answer: a number, or a range for Serve to scale in, such as 1..4; default 1",
    )
    serve.add_argument("--threads", type=int, default=1, metavar="N", help="kernel threads of a replica; default 1")
    serve.add_argument(
        "--max-batch", type=int, default=8, metavar="N", help="the most rows of joined requests; default 8"
    )
    serve.add_argument(
        "--batch-wait-ms",
        type=float,
        default=2.0,
        metavar="MS",
        help="how long a request waits for others to join; default 2",
    )
    serve.add_argument(
        "--max-queue",
        type=int,
        default=100,
        metavar="N",
        help="requests that may wait before others get 503; default 100",
    )
    serve.add_argument(
        "--max-body-mib", type=float, default=64.0, metavar="MIB", help="the largest body of a request; default 64"
    )
    serve.add_argument(
        "--host", default="127.0.0.1", help="the address that HTTP is served on; default 127.0.0.1, this machine alone"
    )
    serve.add_argument("--port", type=int, default=8000, help="the port that HTTP is served on; default 8000")
    serve.add_argument("--grpc-port", type=int, metavar="N", help="serve gRPC on this port as well, on all interfaces")
    serve.add_argument(
        "--metrics-port",
        type=int,
        default=0,
        metavar="N",
        help="the port that Prometheus reads, on all interfaces, as Ray's own ports then are; by default any that is free, on 127.0.0.1",
    )
    serve.add_argument(
        "--address",
        metavar="ADDRESS",
        help="deploy to the Ray cluster at this address and return; by default one runs here until Ctrl+C",
    )
    serve.add_argument(
        "--tokenizer", type=Path, metavar="FILE", help="the tokenizer.json of a model that generates text"
    )
    serve.add_argument(
        "--key", type=Path, action="append", metavar="PEM", help="a public key, one of which must have signed the file"
    )


def serve(parsed: argparse.Namespace, out: TextIO) -> int:
    """Run `hybrid serve`."""
    check_installed()
    replicas = _replicas(parsed.replicas)
    most = replicas["max_replicas"] if isinstance(replicas, Mapping) else replicas
    check_threads(parsed.threads, "--threads")
    if parsed.address is None and most * parsed.threads > most_threads():
        raise ArgumentError(
            f"--replicas {parsed.replicas} with --threads {parsed.threads} needs {most * parsed.threads} threads; this machine has at most "
            f"{most_threads()} (256 or 4 times the processors): ask for less, or join a Ray cluster with --address"
        )
    for name, least in (("port", 1), ("grpc_port", 1), ("metrics_port", 0)):
        if (value := getattr(parsed, name)) is not None and not least <= value <= 65535:
            raise ArgumentError(f"--{name.replace('_', '-')} is {value}; it must be a number from {least} to 65535")
    if parsed.file.is_dir():
        raise ArgumentError(f"{parsed.file} is a folder; name a file that `hybrid export` wrote")
    if not parsed.file.is_file():
        raise ArgumentError(f"there is no file {parsed.file}; write one with `hybrid export`")
    if parsed.address is None:
        _check_host(parsed.host)
        # A file that cannot be served is told before a cluster is started for it. The nodes of another cluster may have other processors.
        from torch_hybrid_backend.artifact.model import LoadedModel  # heavy, so not imported for --help

        LoadedModel(parsed.file, keys=parsed.key or None, share=True, checks=False)
    set_safe_defaults(os.environ, is_new=parsed.address is None, on_loopback=not parsed.metrics_port)
    ray: Any = importlib.import_module("ray")
    ray_serve: Any = importlib.import_module("ray.serve")
    application = deployment(
        parsed.file,
        replicas=replicas,
        threads=parsed.threads,
        max_batch=parsed.max_batch,
        batch_wait_ms=parsed.batch_wait_ms,
        max_queue=parsed.max_queue,
        max_body_mib=parsed.max_body_mib,
        keys=parsed.key,
        tokenizer=parsed.tokenizer,
        model=parsed.name,
    )
    if parsed.address is not None:
        try:
            ray.init(parsed.address, log_to_driver=False)
        except failures(OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise unreachable(f"--address {parsed.address}", error) from error
    else:
        # One more than run at once: a rollout begins a replica before it ends another.
        ray.init(
            "local",
            num_cpus=(most + 1) * parsed.threads,
            include_dashboard=False,
            log_to_driver=False,
            _metrics_export_port=parsed.metrics_port or None,
        )
        _end_on_signals()
    try:
        ray_serve.start(http_options={"host": parsed.host, "port": parsed.port}, grpc_options=_grpc(parsed.grpc_port))
        _run(ray_serve, application)
        name = parsed.file.stem if parsed.name is None else parsed.name
        out.write(f"{name} answers at http://{parsed.host}:{parsed.port}/ (page), /v2/models/{name}\n")
        out.flush()
        if parsed.address is None:
            threading.Event().wait()
    except _EndedError:
        out.write("finishing the requests that are under way\n")
        out.flush()
    finally:
        if parsed.address is None:
            ray_serve.shutdown()
        ray.shutdown()
    return 0


def _check_host(host: str) -> None:
    """Raise ArgumentError for an address that this machine does not have."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except failures(OSError, UnicodeError) as error:
        raise ArgumentError(
            f"--host {host} cannot be served on: {error}; it must be an address of this machine"
        ) from error


class _EndedError(BaseException):
    """The user has ended the command."""


def _end_on_signals() -> None:
    """Raise _EndedError in this thread on Ctrl+C and SIGTERM, once: what ends then is not interrupted."""

    def end(*_: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        raise _EndedError

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)


def _grpc(port: int | None) -> dict[str, Any] | None:
    return None if port is None else {"port": port, "grpc_servicer_functions": [ADDER], "enable_reflection": False}


def set_safe_defaults(environment: MutableMapping[str, str], is_new: bool, on_loopback: bool = True) -> None:
    """Choose what is safe where the user chose nothing. Ray reads these settings from the environment alone, when it is imported.

    is_new: False for a cluster that is there. on_loopback: keep a new one's own ports, metrics included, to this machine.
    """
    environment.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    environment.setdefault("RAY_AUTH_MODE", "token")
    # Seconds until Serve notices that its proxy has died; 10 by default. There is no other one to answer meanwhile.
    environment.setdefault("RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S", "1")
    if not is_new:
        return
    if on_loopback:
        environment.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # for Linux as well, whatever its name says
    # Ray would take a share of all memory, and where /dev/shm is too small, as in a container, a file in /tmp in its place.
    with ignored(OSError):  # there is no /dev/shm
        store_bytes = max(_LEAST_STORE_BYTES, shutil.disk_usage("/dev/shm").free * 9 // 10)
        environment.setdefault("RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES", str(store_bytes))
    has_token = "RAY_AUTH_TOKEN" in environment or "RAY_AUTH_TOKEN_PATH" in environment
    if not has_token and not (Path.home() / ".ray" / "auth_token").exists():
        environment["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _run(ray_serve: Any, application: Any) -> None:
    """Deploy the application. Raises HybridError with the error of the replica that failed."""
    try:
        ray_serve.run(application, name=APPLICATION, route_prefix="/")
    except failures(RuntimeError) as error:
        told = ray_serve.status().applications.get(APPLICATION)
        messages = [each.message for each in told.deployments.values()] if told is not None else []
        raise HybridError(_cause("\n".join([str(error), *messages]))) from error


def _cause(text: str) -> str:
    """The last error of this package that a traceback tells of, or the text."""
    found = re.findall(r"torch_hybrid_backend\.errors\.\w+: (.+)", text)
    return str(found[-1]) if found else text.strip()


def _replicas(text: str) -> int | dict[str, int]:
    found = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", text)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= least <= most:
        raise ArgumentError(f"--replicas is {text!r}; it must be a number, at least 1, or a range such as 1..4")
    return least if least == most else {"min_replicas": least, "max_replicas": most}
