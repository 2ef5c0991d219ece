"""Clients that ask a server without end, and what they were answered."""

from __future__ import annotations

import http.client
import json
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

# Seconds after which a request counts as hanging.
HANGS_S = 30
_CASES = 8


class Load:
    """Clients that ask one after the other. `answers`: "right", "wrong", "hung", the status of an error, or the name of an exception.
    `networks`: those whose results are right. `retry_after`: values of this header. `seconds`: of the last answers."""

    def __init__(self, address: str, networks: Sequence[nn.Module], clients: int = 3) -> None:
        self.answers: Counter[str] = Counter()
        self.retry_after: Counter[str | None] = Counter()
        self.seconds: deque[float] = deque(maxlen=1000)
        self._host, _, prefix = address.partition("/")
        self._path = f"/{prefix}/v2/models/network/infer"
        self._clients = clients
        self._ended = threading.Event()
        generator = torch.Generator().manual_seed(0)
        inputs = [torch.randn(1, 8, generator=generator) for _ in range(_CASES)]
        with torch.no_grad():
            self._cases = [(_body(x), [network(x).numpy() for network in networks]) for x in inputs]

    @property
    def errors(self) -> int:
        """The number of answers that are errors."""
        return self.answers.total() - self.answers["right"] - self.answers["wrong"]

    @contextmanager
    def running(self) -> Iterator[Load]:
        with ThreadPoolExecutor(self._clients) as threads:
            asking = [threads.submit(self._ask_on, number) for number in range(self._clients)]
            try:
                yield self
            finally:
                self._ended.set()
            for each in asking:
                each.result()

    def wait_for(self, count: int) -> None:
        """Wait for so many more right answers."""
        wanted, deadline = self.answers["right"] + count, time.monotonic() + 60
        while self.answers["right"] < wanted:
            assert time.monotonic() < deadline, self.answers
            time.sleep(0.02)

    def _ask_on(self, number: int) -> None:
        connection = http.client.HTTPConnection(self._host, timeout=HANGS_S)
        while not self._ended.is_set():
            number += 1
            start = time.perf_counter()
            told = self._ask(connection, number % _CASES)
            took = time.perf_counter() - start
            self.seconds.append(took)
            self.answers["hung" if took > HANGS_S - 1 else told] += 1
            if told != "right":
                time.sleep(0.05)  # as a client that tries again
        connection.close()

    def _ask(self, connection: http.client.HTTPConnection, case: int) -> str:
        body, expected = self._cases[case]
        try:
            connection.request("POST", self._path, body)
            answer = connection.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException) as error:
            connection.close()  # the next request opens it again
            return type(error).__name__
        if answer.status != 200:
            self.retry_after[answer.headers.get("Retry-After")] += answer.status == 503
            return str(answer.status)
        (output,) = json.loads(content)["outputs"]
        got = np.array(output["data"], np.float32).reshape(output["shape"])
        return "right" if any(np.allclose(got, each, rtol=1e-3, atol=1e-4) for each in expected) else "wrong"


def _body(x: torch.Tensor) -> bytes:
    tensor = {"name": "input", "datatype": "FP32", "shape": list(x.shape), "data": x.flatten().tolist()}
    return json.dumps({"inputs": [tensor]}).encode()


def pids(part: str) -> list[int]:
    """The processes of the cluster's actors that live and whose names have a part."""
    import ray

    named = ray.util.list_named_actors(all_namespaces=True)
    found = []
    for each in named:
        try:
            if part in each["name"]:
                actor = ray.get_actor(each["name"], each["namespace"])
                found.append(ray.get(actor.__ray_call__.remote(_own_pid), timeout=30))
        except (ray.exceptions.RayError, ValueError):
            pass  # it ends, or is being started
    return found


def _own_pid(_: Any) -> int:
    return os.getpid()
