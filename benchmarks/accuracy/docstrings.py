"""MiniLM, with its real weights, guesses the package that a docstring is from: that of the most similar other docstring.

Docstrings are read from the sources of installed packages, of which none is imported. A package's own name is taken out of its texts.
"""

from __future__ import annotations

import ast
import importlib.util
import random
import re
from pathlib import Path

import torch

from benchmarks.accuracy.task import Call, Prepared, batches
from benchmarks.demo import SentenceEncoder
from benchmarks.models import Size, minilm_directory

# Those that are missing are left out.
_PACKAGES = (
    *(
        "numpy",
        "scipy",
        "sklearn",
        "torch",
        "transformers",
        "sympy",
        "networkx",
        "tvm",
        "pytest",
        "hypothesis",
        "setuptools",
        "pip",
    ),
    *(
        "huggingface_hub",
        "sentence_transformers",
        "matplotlib",
        "jinja2",
        "rich",
        "pygments",
        "joblib",
        "torchmetrics",
        "fsspec",
    ),
)
_SHORTEST = 80  # characters
_TOKENS = 32
_BATCH = 32


def _docstrings(package: str, enough: int) -> list[str]:
    """Different docstrings of the package, in an order drawn once; none where it is not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return []
    files = sorted(Path(next(iter(spec.submodule_search_locations))).rglob("*.py"))
    random.Random(0).shuffle(files)
    found: dict[str, None] = {}
    for file in files:
        try:
            tree = ast.parse(file.read_text())
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = re.sub(re.escape(package), "", ast.get_docstring(node) or "", flags=re.IGNORECASE)
                if len(text) >= _SHORTEST:
                    found.setdefault(text[:1000])
        if len(found) >= 4 * enough:
            break
    texts = list(found)
    random.Random(1).shuffle(texts)
    return texts[:enough] if len(texts) >= enough else []


def prepare(size: Size) -> Prepared:
    import transformers

    each = 320 if size == "full" else 32
    texts = {name: _docstrings(name, each) for name in (_PACKAGES if size == "full" else _PACKAGES[:4])}
    texts = {name: found for name, found in texts.items() if found}
    labels = torch.arange(len(texts)).repeat_interleave(each)
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm_directory(), local_files_only=True)
    settings = {"padding": "max_length", "truncation": True, "max_length": _TOKENS, "return_tensors": "pt"}
    encoded = tokenizer([text for found in texts.values() for text in found], **settings)
    inputs = batches(encoded["input_ids"], encoded["attention_mask"], size=_BATCH)

    def judge(call: Call) -> torch.Tensor:
        with torch.no_grad():
            rows = torch.cat([call(*batch) for batch in inputs])
        similarity = (rows @ rows.T).fill_diagonal_(-2.0)
        return (labels[similarity.argmax(1)] == labels).double()

    return Prepared(SentenceEncoder().eval(), tuple(inputs[:: max(1, len(inputs) // 8)]), judge)
