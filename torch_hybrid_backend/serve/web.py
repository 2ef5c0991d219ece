"""HTTP of a replica: the routes of the Open Inference Protocol, and of the page for people. Answers come from a `Service`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from torch_hybrid_backend._version import __version__
from torch_hybrid_backend.errors import RequestError, failures
from torch_hybrid_backend.serve import completions, people
from torch_hybrid_backend.serve.completions import Generates
from torch_hybrid_backend.serve.protocol import BINARY_HEADER, Tensors, decode, encode
from torch_hybrid_backend.serve.served_model import ServedModel

_LOG = logging.getLogger("ray.serve")


class Service(Generates, Protocol):
    """A replica, as routes see it. `tokenizer`: of a model that generates text, or None."""

    max_body_bytes: int
    tokenizer: Any

    @property
    def model(self) -> ServedModel:
        """The model that is served now."""

    async def infer(self, model: ServedModel, request: Tensors) -> Tensors:
        """The answer to a request. Raises RequestError."""

    def answered(self, status: int) -> None:
        """Count an answer to a call of the model."""

    def latency(self) -> dict[str, float]:
        """Milliseconds of the last requests: p50_ms, p99_ms, and their count."""


def application(service: Service) -> Starlette:
    """The routes of a replica."""
    routes = _Routes(service)
    model = "/v2/models/{name}"
    version = model + "/versions/{version}"
    paths: dict[str, Any] = {
        "/": routes.page,
        "/v1/models": routes.openai_models,
        "/page/sample": routes.sample,
        "/page/plan": routes.plan,
        "/page/latency": routes.latency,
        "/v2": routes.server,
        "/v2/health/live": routes.ready,
        "/v2/health/ready": routes.ready,
        **{f"{each}/ready": routes.model_ready for each in (model, version)},
        **dict.fromkeys((model, version), routes.model),
    }
    posts: dict[str, Any] = {f"{each}/infer": routes.infer for each in (model, version)}
    posts["/v1/completions"] = routes.completions
    return Starlette(
        routes=[
            *(Route(path, endpoint) for path, endpoint in paths.items()),
            *(Route(path, endpoint, methods=["POST"]) for path, endpoint in posts.items()),
        ],
        exception_handlers={RequestError: _error, HTTPException: _error, Exception: _failure},
    )


class _Routes:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def server(self, request: Request) -> Response:
        return JSONResponse(
            {"name": "torch_hybrid_backend", "version": __version__, "extensions": ["binary_tensor_data"]}
        )

    async def page(self, request: Request) -> Response:
        model = self._service.model
        return HTMLResponse(people.page(model, metadata(model), f"{request.scope.get('root_path', '')}/"))

    async def sample(self, request: Request) -> Response:
        return Response(people.sample_request(self._service.model), media_type="application/json")

    async def plan(self, request: Request) -> Response:
        model = self._service.model
        return HTMLResponse(await run_in_threadpool(lambda: model.picture))

    async def latency(self, request: Request) -> Response:
        return JSONResponse(self._service.latency())

    async def ready(self, request: Request) -> Response:
        # A replica that has no model does not start, so whoever answers is ready.
        return JSONResponse({"ready": True})

    async def model_ready(self, request: Request) -> Response:
        model = self._model(request)
        return JSONResponse({"name": model.name, "ready": True})

    async def model(self, request: Request) -> Response:
        return JSONResponse(metadata(self._model(request)))

    async def openai_models(self, request: Request) -> Response:
        model = {"id": self._service.model.name, "object": "model", "created": 0, "owned_by": "torch_hybrid_backend"}
        return JSONResponse({"object": "list", "data": [model]})

    async def completions(self, request: Request) -> Response:
        try:
            return await self._counted(self._completions, request)
        except RequestError as error:
            return JSONResponse(completions.failed(error), error.status)
        except failures(Exception) as error:  # OpenAI's clients read no other shape
            _LOG.exception("a completion failed")
            return JSONResponse(completions.failed(error), 500)

    async def _completions(self, request: Request) -> Response:
        body = await read_body(request, self._service.max_body_bytes)
        # A long text takes the tokenizer seconds: other requests go on meanwhile.
        asked = await run_in_threadpool(completions.read_completion, body, self._service.model, self._service.tokenizer)
        if asked.stream:
            return StreamingResponse(completions.events(asked, self._service), media_type="text/event-stream")
        return JSONResponse(await completions.answer(asked, self._service))

    async def infer(self, request: Request) -> Response:
        return await self._counted(self._infer, request)

    async def _counted(self, respond: Callable[[Request], Awaitable[Response]], request: Request) -> Response:
        status = 500
        try:
            answer = await respond(request)
            status = answer.status_code
            return answer
        except RequestError as error:
            status = error.status
            raise
        except asyncio.CancelledError:
            status = 499  # the client has left
            raise
        finally:
            self._service.answered(status)

    async def _infer(self, request: Request) -> Response:
        model = self._model(request)
        if request.headers.get("content-encoding", "identity") != "identity":
            raise RequestError("compressed bodies are not read: send the body as it is", 415)
        body = await read_body(request, self._service.max_body_bytes)
        answer = await self._service.infer(model, decode(body, request.headers.get(BINARY_HEADER)))
        content, length = encode(model.name, model.version, answer)
        if length is None:
            return Response(content, media_type="application/json")
        return Response(content, headers={BINARY_HEADER: str(length)}, media_type="application/octet-stream")

    def _model(self, request: Request) -> ServedModel:
        model, asked = self._service.model, request.path_params
        check_name(model, asked["name"], asked.get("version"))
        return model


def check_name(model: ServedModel, name: str, version: str | None = None) -> None:
    """Raise RequestError (404) for another model or version."""
    if name != model.name:
        raise RequestError(f"there is no model {name!r}; this server has {model.name!r}", 404)
    if version not in (None, "", model.version):
        raise RequestError(f"{name} has no version {version!r}; it is {model.version!r}", 404)


def metadata(model: ServedModel) -> dict[str, Any]:
    """The protocol's description of a model."""

    def tensors(infos: Any) -> list[dict[str, Any]]:
        return [{"name": each.name, "datatype": each.datatype, "shape": list(each.sizes)} for each in infos]

    return {
        "name": model.name,
        "versions": [model.version],
        "platform": "torch_hybrid_backend",
        "inputs": tensors(model.inputs),
        "outputs": tensors(model.outputs),
    }


async def read_body(request: Request, most: int) -> bytes:
    """The body of a request. Raises RequestError (413) for one of more than `most` bytes, which is not read to its end."""
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > most:
        raise RequestError(f"the body has {length} bytes; this server takes at most {most}", 413)
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise RequestError(f"the body has more than the {most} bytes that this server takes", 413)
        parts.append(part)
    return b"".join(parts)


async def _error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        return JSONResponse({"error": error.detail}, error.status_code, headers=error.headers)
    assert isinstance(error, RequestError)
    return JSONResponse({"error": str(error)}, error.status)


async def _failure(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": f"{type(error).__name__}: {error}"}, 500)
