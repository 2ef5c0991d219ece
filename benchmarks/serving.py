"""Engines behind one server: requests per second at equal p99, and what the server itself costs.

    python -m benchmarks.serving --models resnet50,bert_base,minilm --out build/serving.json

All engines run in the same Ray Serve application of ours (protocol, batches, thread), prepared for 1, 2, 4, ... rows up to `--batch`; only the
call of the model differs. Clients ask one request after the other, in a process of their own, over loopback. Their number grows; an
engine's figure is the most requests per second at which p99 is within the limit: `--p99-factor` times eager's p99 with one client. "echo"
is an application of Serve that returns the body; the small model beside it shows what our layer adds.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ENGINES = ("eager", "openvino", "onnxruntime", "hybrid")
PORT = 8765


def main(argv: Sequence[str] | None = None) -> int:
    """Serve each engine in turn, measure, write the file after each, print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="resnet50,bert_base,minilm")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--size", choices=("small", "full"), default="full")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--clients", default="1,2,4,8")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--p99-factor", type=float, default=3.0)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "serving.json")
    parser.add_argument("--load", help=argparse.SUPPRESS)  # a process of clients: its work as JSON
    arguments = parser.parse_args(argv)
    if arguments.load is not None:
        print(json.dumps(_load(**json.loads(arguments.load))))
        return 0
    from benchmarks import machine

    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"machine": machine.describe(), "revision": machine.revision(), "results": []}
    with tempfile.TemporaryDirectory() as folder, Cluster(arguments.threads) as _:
        record["results"] += _layers(Path(folder), arguments.seconds)
        for model in arguments.models.split(","):
            file = exported(model, arguments.size, arguments.batch, Path(folder))
            for engine in arguments.engines.split(","):
                record["results"].append(_measured(model, engine, file, arguments))
                arguments.out.write_text(json.dumps(record, indent=2) + "\n")
    print(report(record, arguments.p99_factor))
    return 0


def report(record: dict[str, Any], p99_factor: float) -> str:
    """A line for each model and engine. The limit of a model is `p99_factor` times eager's p99 with one client."""
    lines = []
    rows = record["results"]
    limits = {row["model"]: p99_factor * row["load"][0]["p99_ms"] for row in rows if row["engine"] == "eager"}
    for row in rows:
        name = f"{row['model']}, {row['engine']}"
        if "load" not in row:
            lines.append(f"{name}: {row['missing']}")
            continue
        first = row["load"][0]
        line = f"{name}: one client {first['p50_ms']:.2f} ms (p99 {first['p99_ms']:.2f})"
        if (limit := limits.get(row["model"])) is not None:
            within = [each["per_s"] for each in row["load"] if each["p99_ms"] <= limit]
            line += f"; {max(within, default=0.0):.1f} requests/s with p99 below {limit:.1f} ms"
        lines.append(line)
    return "\n".join(lines)


class Cluster:
    """Ray Serve on loopback, for two replicas of so many threads."""

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def __enter__(self) -> Cluster:
        from torch_hybrid_backend.driver.serve_command import set_safe_defaults

        set_safe_defaults(os.environ, is_new=True)
        import ray
        from ray import serve

        ray.init("local", num_cpus=2 * self._threads + 1, include_dashboard=False, log_to_driver=False)
        serve.start(http_options={"host": "127.0.0.1", "port": PORT})
        return self

    def __exit__(self, *_: object) -> None:
        import ray
        from ray import serve

        serve.shutdown()
        ray.shutdown()


def _layers(folder: Path, seconds: float) -> list[dict[str, Any]]:
    """A bare echo, and our server with a model that does nearly nothing, asked with the same body."""
    import torch
    from ray import serve

    from torch_hybrid_backend.driver.export import export
    from torch_hybrid_backend.serve import deployment

    file = folder / "tiny.hybrid"
    export(torch.nn.Linear(8, 8).eval(), (torch.randn(1, 8),), file)
    serve.run(echo(), name="echo", route_prefix="/echo")
    serve.run(deployment(file, max_batch=1, batch_wait_ms=0), name="measured", route_prefix="/")
    work = {
        "model": file.stem,
        "file": str(file),
        "clients": 1,
        "seconds": seconds,
        "prefix": "/echo",
    }
    bare, ours = _in_process(work)["turns"]
    for name in ("echo", "measured"):
        serve.delete(name)
    return [{"model": "tiny", "engine": name, "load": [each]} for name, each in (("echo", bare), ("hybrid", ours))]


def echo() -> Any:
    """An application that returns the body. It imports torch, which takes 120 MiB of private memory by itself."""
    from ray import serve

    class Echo:
        def __init__(self) -> None:
            importlib.import_module("torch")

        async def __call__(self, request: Any) -> bytes:
            body: bytes = await request.body()
            return body

    return serve.deployment(Echo).bind()


def _measured(model: str, engine: str, file: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of an engine, by the number of clients; `missing` where it cannot run here."""
    from ray import serve

    from torch_hybrid_backend.bench.peers import PEERS
    from torch_hybrid_backend.serve.settings import Settings

    (peer,) = (each for each in PEERS if each.name == engine)
    if why := peer.missing():
        return {"model": model, "engine": engine, "missing": why}
    settings = Settings.of(
        file, model=None, keys=None, tokenizer=None, threads=arguments.threads, max_batch=arguments.batch
    )
    options: Any = {
        "max_ongoing_requests": 2 * arguments.batch,
        "ray_actor_options": {"num_cpus": arguments.threads},
    }
    swapped: Any = serve.deployment(_engine_replica(), name="model", **options)
    serve.run(swapped.bind(settings, model, engine, arguments.size), name="measured", route_prefix="/")
    counts = [int(each) for each in arguments.clients.split(",")]
    work = {"model": file.stem, "file": str(file), "seconds": arguments.seconds}
    try:
        return {"model": model, "engine": engine, "load": [_in_process({**work, "clients": count}) for count in counts]}
    finally:
        serve.delete("measured")


def _engine_replica() -> Any:
    """The class of our replica with another engine in it."""
    import torch

    from torch_hybrid_backend.serve.replica import Replica

    class EngineReplica(Replica):  # type: ignore[misc]
        async def __init__(self, settings: Any, model: str, engine: str, size: str) -> None:
            await super().__init__(settings)
            self._prepares = (model, engine, size)

        async def reconfigure(self, config: Any, rank: object) -> None:
            await super().reconfigure(config, rank)
            if self._prepares[1] != "hybrid":  # else the file itself
                make = asyncio.get_running_loop().run_in_executor(self._engine, self._peers, *self._prepares)
                for entry, run in zip(self.model.entries, await make, strict=True):
                    entry.run = run

        def _peers(self, model: str, engine: str, size: str) -> list[Any]:
            return [self._peer(model, engine, size, entry) for entry in self.model.entries]

        def _peer(self, model: str, engine: str, size: str, entry: Any) -> Any:
            """Function that calls a peer with the tensors of a batch. Peers read the memory of the inputs that they were prepared with."""
            from benchmarks.catalogue import MODELS
            from torch_hybrid_backend.bench.calls import Inputs, as_tensors_only
            from torch_hybrid_backend.bench.peers import PEERS, Setting, add_peers_folder

            add_peers_folder()
            (peer,) = (each for each in PEERS if each.name == engine)
            catalogued = MODELS[model]
            built, inputs = catalogued.build(size), Inputs(catalogued.inputs(size, entry.rows[1]))
            if peer.tensors_only:
                built, inputs = as_tensors_only(built, inputs)
            held = inputs.tensors()
            with torch.no_grad():
                prepared = peer.load()(built, inputs, Setting(self._settings.threads, Path(tempfile.mkdtemp())))

            def run(leaves: Sequence[Any]) -> dict[str, torch.Tensor]:
                for place, leaf in zip(held, leaves, strict=True):
                    place.copy_(leaf)
                from torch_hybrid_backend.bench.calls import tensors

                with torch.no_grad():
                    return dict(zip(entry.outputs, tensors(prepared.call()), strict=False))

            return run

    return EngineReplica


def exported(model: str, size: str, batch: int, folder: Path) -> Path:
    """The file of a model for 1, 2, 4, ... rows up to `batch`."""
    from benchmarks.catalogue import MODELS
    from torch_hybrid_backend.driver.export import export

    catalogued = MODELS[model]
    file = folder / f"{model}.hybrid"
    rows = [2**power for power in range(batch.bit_length())]
    calls: Any = {f"rows_{count}": (catalogued.inputs(size, count), {}) for count in rows}
    export(catalogued.build(size), calls, file)
    return file


def request_of(file: Path) -> tuple[bytes, dict[str, str]]:
    """The body and the headers of a request: one row of the file's sample, as bytes."""
    from torch_hybrid_backend.serve.protocol import BINARY_HEADER, bytes_of, datatype_of
    from torch_hybrid_backend.serve.served_model import ServedModel

    sample = ServedModel(file).sample()
    described = [
        {"name": name, "datatype": datatype_of(x), "shape": list(x.shape), "parameters": {"binary_data_size": x.nbytes}}
        for name, x in sample.items()
    ]
    head = json.dumps({"inputs": described, "parameters": {"binary_data_output": True}}).encode()
    body = b"".join([head, *map(bytes_of, sample.values())])
    return body, {BINARY_HEADER: str(len(head)), "Content-Type": "application/octet-stream"}


def _in_process(work: dict[str, Any]) -> dict[str, Any]:
    """The figures of clients in a process of their own."""
    command = [sys.executable, "-m", "benchmarks.serving", "--load", json.dumps(work)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, timeout=work["seconds"] + 120)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _load(model: str, file: str, clients: int, seconds: float, prefix: str | None = None) -> dict[str, Any]:
    """Requests per second, and milliseconds at p50 and p99, of so many clients. Raises RuntimeError where an answer is none.

    prefix: of another application that one client asks in turns with the model's; the result is then a pair under "turns", that one's first.
    """
    from torch_hybrid_backend.serve.metrics import percentiles

    body, headers = request_of(Path(file))
    end = 0.0

    def ask(*prefixes: str) -> list[float]:
        times = []
        connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=60)
        while time.perf_counter() < end:
            for each in prefixes:
                start = time.perf_counter()
                connection.request("POST", f"{each}/v2/models/{model}/infer", body, headers)
                answer = connection.getresponse()
                answer.read()
                if answer.status != 200:
                    raise RuntimeError(f"status {answer.status}")
                times.append(time.perf_counter() - start)
        return times

    if prefix is not None:
        end = time.perf_counter() + 1.0
        ask(prefix, "")
        end = time.perf_counter() + seconds
        times = ask(prefix, "")
        return {
            "turns": [
                {"clients": 1, "per_s": 1 / statistics.mean(each), **percentiles(each)}
                for each in (times[::2], times[1::2])
            ]
        }

    with ThreadPoolExecutor(clients) as threads:
        for warm_up in (True, False):
            length = min(1.0, seconds) if warm_up else seconds
            end = time.perf_counter() + length
            times = [each for its in threads.map(lambda _: ask(""), range(clients)) for each in its]
    return {"clients": clients, "per_s": len(times) / seconds, **percentiles(times)}


if __name__ == "__main__":
    sys.exit(main())
