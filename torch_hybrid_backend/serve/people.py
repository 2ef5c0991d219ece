"""The page for people: a model, what it takes and gives, its plan, how long requests take, and a form that sends one. It loads nothing from
elsewhere."""

from __future__ import annotations

import functools
import json
import re
from html import escape
from importlib import resources
from typing import Any

from torch_hybrid_backend.serve.protocol import Tensors, encode
from torch_hybrid_backend.serve.served_model import ServedModel


def page(model: ServedModel, described: dict[str, Any], base: str) -> str:
    """The page as HTML. `described`: the model's metadata. `base`: the path that addresses on the page begin with, "/" at its end."""
    manifest = model.model.manifest
    facts = [
        f"version {model.version}",
        manifest.model,
        model.path.name,
        f"torch {manifest.torch}",
        f"torch_hybrid_backend {manifest.package}",
        "rows are joined" if model.most_rows not in (None, 1) else "requests are answered one by one",
    ]
    # A "<" in a name would end the script.
    data = json.dumps({**described, "facts": facts, "generates": model.generates}).replace("<", "\\u003c")
    parts = {"title": escape(model.name), "base": escape(base), "model": data, "script": _text("page.js")}
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _text("index.html"))


def sample_request(model: ServedModel) -> bytes:
    """The sample call of the file as the body of a request."""
    body, _ = encode(model.name, model.version, Tensors(model.sample()))
    said = json.loads(body)
    return json.dumps({"inputs": said["outputs"]}, separators=(",", ":")).encode()


@functools.cache
def _text(name: str) -> str:
    return (resources.files("torch_hybrid_backend.serve") / "page" / name).read_text(encoding="utf-8")
