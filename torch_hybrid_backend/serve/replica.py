"""The Ray Serve deployment: one model, called by one thread, for requests that `serve.batch` joins.

    HTTP -> web -> protocol.decode -> ServedModel.work -> serve.batch -> ServedModel.run (engine thread) -> protocol.encode

Autoscaling, queues, draining, health checks and rollouts are Ray Serve's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import torch
from ray import serve
from ray.serve.grpc_util import RayServegRPCContext

from torch_hybrid_backend.artifact.tokenizer import open_tokenizer
from torch_hybrid_backend.errors import ArgumentError, HybridError, RequestError, failures
from torch_hybrid_backend.serve import rpc
from torch_hybrid_backend.serve.metrics import Metrics
from torch_hybrid_backend.serve.protocol import Tensors
from torch_hybrid_backend.serve.served_model import ServedModel, Work
from torch_hybrid_backend.serve.settings import Settings
from torch_hybrid_backend.serve.web import application, check_name, metadata

_CODES = {404: grpc.StatusCode.NOT_FOUND, 413: grpc.StatusCode.RESOURCE_EXHAUSTED}
_LOG = logging.getLogger("ray.serve")


@serve.ingress()
class Replica:
    """A replica, which has a model once `reconfigure` has run."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.max_body_bytes = int(settings.max_body_mib * 2**20)
        # Threads of PyTorch's are counted by each thread that runs a model.
        threads = settings.threads
        self._engine = ThreadPoolExecutor(1, "engine", torch.set_num_threads, (threads,))
        self._opener = ThreadPoolExecutor(1, "opener", torch.set_num_threads, (threads,))
        self.metrics = Metrics()
        self.tokenizer = None if settings.tokenizer is None else open_tokenizer(Path(settings.tokenizer))
        # A generation has the model's cache until it ends.
        self._generation = asyncio.Lock()
        self._model: ServedModel | None = None
        self._swap: tuple[Path, asyncio.Task[None]] | None = None  # the last one
        joined: Any = self._joined  # `serve.batch` gave it setters
        joined.set_max_batch_size(settings.max_batch)
        joined.set_batch_wait_timeout_s(settings.batch_wait_ms / 1e3)

    @property
    def model(self) -> ServedModel:
        """The model that is served now."""
        assert self._model is not None, "Serve calls reconfigure before the first request"
        return self._model

    async def reconfigure(self, config: Mapping[str, Any] | None, rank: object) -> None:
        """Serve the file that `config["artifact"]` names, or that of the settings for None.

        Serve calls this when a replica starts, without a user_config too, as there is a `rank`; a file that cannot be served then raises
        ArtifactError or ArgumentError, which Serve's status shows. Later the file is opened beside the requests after this returns, as Serve
        sends none to a replica that reconfigures. One that cannot be served leaves the present one, and the error goes to the log: Serve
        stops a replica whose `reconfigure` raises, and of one replica nothing would be left.
        """
        if self._model is None:
            self._model = await self._opened(self._path_of(config))
            self.metrics.swapped(self._model)
            return
        try:
            path = self._path_of(config)
        except HybridError as error:
            self._swap_failed(error)
            return
        wanted = self.model.path
        if self._swap is not None and not self._swap[1].done():
            wanted = self._swap[0]
        if path == wanted:
            return  # another rank
        if self._swap is not None:
            self._swap[1].cancel()  # the file that is asked for last is served
        if path != self.model.path:
            self._swap = path, asyncio.get_running_loop().create_task(self._swap_to(path))

    async def _swap_to(self, path: Path) -> None:
        """Serve a file from the next request on, once it is open."""
        try:
            model = await self._opened(path)
        except HybridError as error:
            self._swap_failed(error)
            return
        self.metrics.swapped(model, self.model)
        self._model = model

    def _swap_failed(self, error: HybridError) -> None:
        self.metrics.swap_failed(self.model)
        _LOG.error("%s is still served: %s", self.model.path, error)

    async def check_health(self) -> None:
        """Make a sample call of the file, in the thread of the requests. Raises ArtifactError where its results changed.

        Amid a generation nothing is checked, as the calls would write to its cache.
        """
        if self._generation.locked():
            return
        async with self._generation:
            await asyncio.get_running_loop().run_in_executor(self._engine, self.model.check)

    async def infer(self, model: ServedModel, request: Tensors) -> Tensors:
        """The answer to a request. Raises RequestError."""
        outputs = {each.name for each in model.outputs}
        for name in request.outputs or ():
            if name not in outputs:
                raise RequestError(f"{model.name} has no output {name!r}; it gives {', '.join(sorted(outputs))}")
        work = model.work(request.tensors)
        with self.metrics.request(model):
            # A batch of one waits for no other request.
            run: Any = self._joined if self._settings.max_batch > 1 else self._alone
            result: dict[str, torch.Tensor] | HybridError = await run((model, work))
        if isinstance(result, HybridError):
            raise result
        asked = {name: result[name] for name in (request.outputs or result)}
        return Tensors(asked, request.id, request.outputs, request.binary)

    # Methods of gRPC are called by their names in the protocol.
    async def ServerLive(self, request: bytes) -> Any:  # noqa: N802
        return self._rpc("ServerLiveResponse", live=True)

    async def ServerReady(self, request: bytes) -> Any:  # noqa: N802
        return self._rpc("ServerReadyResponse", ready=True)

    async def ServerMetadata(self, request: bytes) -> Any:  # noqa: N802
        return rpc.server_metadata()

    async def ModelReady(self, request: bytes, grpc_context: RayServegRPCContext) -> Any:  # noqa: N802
        with _told(grpc_context):
            asked = rpc.message("ModelReadyRequest", request)
            check_name(self.model, asked.name, asked.version)
            return self._rpc("ModelReadyResponse", ready=True)

    async def ModelMetadata(self, request: bytes, grpc_context: RayServegRPCContext) -> Any:  # noqa: N802
        with _told(grpc_context):
            asked = rpc.message("ModelMetadataRequest", request)
            check_name(self.model, asked.name, asked.version)
            return rpc.model_metadata(metadata(self.model))

    async def ModelInfer(self, request: bytes, grpc_context: RayServegRPCContext) -> Any:  # noqa: N802
        with _told(grpc_context):
            if len(request) > self.max_body_bytes:
                raise RequestError(
                    f"the request has {len(request)} bytes; this server takes at most {self.max_body_bytes}", 413
                )
            asked = rpc.message("ModelInferRequest", request)
            model = self.model
            check_name(model, asked.model_name, asked.model_version)
            return rpc.infer_response(model.name, model.version, await self.infer(model, rpc.tensors_of(asked)))

    @staticmethod
    def _rpc(name: str, **fields: Any) -> Any:
        answer = rpc.message(name)
        for field, value in fields.items():
            setattr(answer, field, value)
        return answer

    async def tokens(self, model: ServedModel, tokens: Iterator[int]) -> AsyncGenerator[int, None]:
        """The tokens of a generation, when those before it have ended. A client that leaves ends its own."""
        loop = asyncio.get_running_loop()
        async with self._generation:
            with self.metrics.request(model):
                while (token := await loop.run_in_executor(self._engine, next, tokens, None)) is not None:
                    self.metrics.generated(model)
                    yield token

    def answered(self, status: int) -> None:
        """Count an answer to a call of the model."""
        self.metrics.answered(self.model, status)

    def latency(self) -> dict[str, float]:
        """Milliseconds of the last requests: p50_ms, p99_ms, and their count."""
        return self.metrics.latency()

    def __serve_build_asgi_app__(self) -> Any:
        return application(self)

    async def _alone(self, work: tuple[ServedModel, Work]) -> dict[str, torch.Tensor] | HybridError:
        (result,) = await asyncio.get_running_loop().run_in_executor(self._engine, self._run, [work])
        return result

    @serve.batch
    async def _joined(self, works: Sequence[tuple[ServedModel, Work]]) -> list[dict[str, torch.Tensor] | HybridError]:
        return await asyncio.get_running_loop().run_in_executor(self._engine, self._run, works)

    def _run(self, works: Sequence[tuple[ServedModel, Work]]) -> list[dict[str, torch.Tensor] | HybridError]:
        results: dict[int, dict[str, torch.Tensor] | HybridError] = {}
        # A rollout may come between two requests of one batch.
        for model in {id(model): model for model, _ in works}.values():
            numbers = [number for number, (asked, _) in enumerate(works) if asked is model]
            its = [works[number][1] for number in numbers]
            start = time.perf_counter()
            done = model.run(its, self._settings.max_batch)
            self.metrics.batch(model, sum(work.rows or 1 for work in its), time.perf_counter() - start)
            results.update(zip(numbers, done, strict=True))
        return [results[number] for number in range(len(works))]

    def _path_of(self, config: Mapping[str, Any] | None) -> Path:
        if config is None:
            return self._settings.path_of(self._settings.artifact)
        if not isinstance(config, Mapping) or set(config) != {"artifact"}:
            raise ArgumentError(f'user_config is {config!r}; it must be {{"artifact": "NAME.hybrid"}}')
        return self._settings.path_of(config["artifact"])

    async def _opened(self, path: Path) -> ServedModel:
        return await asyncio.get_running_loop().run_in_executor(self._opener, self._open, path)

    def _open(self, path: Path) -> ServedModel:
        try:
            return ServedModel(path, self._settings.keys or None, self._settings.model)
        except HybridError:
            raise
        except failures(Exception) as error:  # the model runs when it is opened, and operators raise what they like
            raise ArgumentError(f"cannot open {path}: {type(error).__name__}: {error}") from error


@contextmanager
def _told(context: RayServegRPCContext) -> Iterator[None]:
    """Tell a client of gRPC of a request's error."""
    try:
        yield
    except RequestError as error:
        context.set_code(_CODES.get(error.status, grpc.StatusCode.INVALID_ARGUMENT))
        context.set_details(str(error))
        raise


def deployment(
    settings: Settings,
    *,
    replicas: int | Mapping[str, Any],
    max_queue: int,
    given: Mapping[str, Any],
) -> Any:
    """The deployment of a file. `replicas`: their number, or the fields of Serve's `AutoscalingConfig`. `given`: options that replace ours."""
    scaling = {"autoscaling_config": dict(replicas)} if isinstance(replicas, Mapping) else {"num_replicas": replicas}
    options: dict[str, Any] = {
        **scaling,
        # A batch runs while the next one is collected.
        "max_ongoing_requests": 2 * settings.max_batch,
        "max_queued_requests": max_queue,
        "backpressure_config": {"retry_after_s": 1},
        # Of a rollout one replica is begun before an old one ends; the first that fails ends the rollout, and the old ones stay.
        "max_surge_percent": 1,
        "max_constructor_retry_count": 1,
        "ray_actor_options": {"num_cpus": settings.threads},
        "graceful_shutdown_timeout_s": 20,
        # Serve notices by it that a replica has died. Sample calls are made less often (ServedModel.check).
        "health_check_period_s": 1,
        **given,
    }
    made: Any = serve.deployment(Replica, **options)
    return made.bind(settings)
