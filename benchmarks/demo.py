"""`make demo`: two models, eager against hybrid, in about two minutes.

(a) A sentence encoder (all-MiniLM-L6-v2, its real weights) on real sentences in batches of several lengths.
(b) ResNet-50 (random weights) on one image.

Times are medians of calls interleaved in this one process. Errors are the largest absolute difference from eager.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the weights come from a package; nothing is looked up

import torch
from torch import nn

import torch_hybrid_backend
from benchmarks.machine import cpu_name
from benchmarks.models import ZOO, minilm_directory, tensors
from torch_hybrid_backend.measuring.measure import measure
from torch_hybrid_backend.measuring.other_load import OtherLoad
from torch_hybrid_backend.report import summary
from torch_hybrid_backend.report.share import DISTURBED

_QUESTION = "How do I make my neural network answer faster on a server without a graphics card?"
_SENTENCES = (
    "Inference on ordinary processors can be sped up by compiling the model.",
    "The bakery on the corner sells rye bread until noon.",
    "Batch normalisation folds into the convolution before it.",
    "A ferry crosses the strait every forty minutes in summer.",
    "Caches and vector units decide how fast a matrix product runs.",
    "She tuned the piano by ear, one string at a time.",
    "The committee postponed its decision until the auditors had reported.",
    "Rain is expected in the north, with strong wind along the coast.",
)
_PARAGRAPH = (
    "A compiler for neural networks takes the graph of a model and looks for groups of operators that it can run as one. "
    "What it gains comes from three places: values that stay in registers instead of travelling to memory and back, weights "
    "that are laid out once in the order in which the inner loop reads them, and threads that are started once for several "
    "operators. What it risks is to be slower than the library it replaces, which experts have tuned for years; so a careful "
    "one measures both on the machine at hand, keeps the faster, and can say why. Results are checked against the original "
    "before anything is used, because a fast wrong answer is worth nothing at all."
)


class SentenceEncoder(nn.Module):
    """MiniLM with mean pooling over the words and unit length, as sentence-transformers runs it.

    tokens, mask: (batch, length) int64, mask 0 on padding.  Returns: (batch, 384) float32, rows of length 1.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bert = ZOO["minilm"].build("full")

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        states = self.bert(tokens, mask).last_hidden_state
        weights = mask.unsqueeze(-1).to(states.dtype)
        mean = (states * weights).sum(dim=1) / weights.sum(dim=1)
        return nn.functional.normalize(mean, dim=1)


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the closing table, and what it was measured on."""

    case: str
    model: nn.Module
    inputs: tuple[torch.Tensor, ...]
    eager_ms: float
    hybrid_ms: float
    compile_s: float
    max_error: float
    is_disturbed: bool


def _say(text: str) -> None:
    print(text, flush=True)


def _compare(case: str, model: nn.Module, compiled: Callable[..., object], inputs: tuple[torch.Tensor, ...]) -> Row:
    """Compile for these shapes, check against eager, time both."""
    _say(f"  {case}: compiling ...")
    start = time.perf_counter()
    compiled(*inputs)
    compile_s = time.perf_counter() - start
    result, expected = tensors(compiled(*inputs)), tensors(model(*inputs))
    error = max((a - b).abs().max().item() for a, b in zip(expected, result, strict=True))
    _say(f"  {case}: compiled in {compile_s:.1f} s, largest error {error:.1e}; timing ...")
    load = OtherLoad()
    eager, hybrid = measure([lambda: model(*inputs), lambda: compiled(*inputs)], budget_s=4.0, min_rounds=5)
    return Row(case, model, inputs, eager.median_us / 1e3, hybrid.median_us / 1e3, compile_s, error, load.is_felt())


def _encoder(backend: str) -> list[Row]:
    import transformers

    transformers.logging.disable_progress_bar()
    _say("\nSentence encoder: all-MiniLM-L6-v2, real weights, one compilation per length")
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm_directory(), local_files_only=True)
    model = SentenceEncoder().eval()
    compiled = torch.compile(model, backend=backend, dynamic=False)

    def tokens(*sentences: str) -> tuple[torch.Tensor, ...]:
        encoded = tokenizer(list(sentences), padding=True, truncation=True, max_length=128, return_tensors="pt")
        return encoded["input_ids"], encoded["attention_mask"]

    batches = {"1 question": tokens(_QUESTION), "8 sentences": tokens(*_SENTENCES), "1 paragraph": tokens(_PARAGRAPH)}
    rows = [
        _compare(f"MiniLM, {name} of {inputs[0].shape[1]} tokens", model, compiled, inputs)
        for name, inputs in batches.items()
    ]
    likeness = (compiled(*batches["8 sentences"]) @ compiled(*batches["1 question"]).T).flatten()
    _say(f'  question: "{_QUESTION}"')
    for index in likeness.topk(2).indices.tolist():
        _say(f'  {likeness[index]:.2f}  "{_SENTENCES[index]}"')
    return rows


def _resnet(backend: str) -> list[Row]:
    _say("\nResNet-50: transformers' configuration, random weights, one image of 224 x 224")
    model = ZOO["resnet50"].build("full")
    compiled = torch.compile(model, backend=backend, dynamic=False)
    return [_compare("ResNet-50, 1 image", model, compiled, ZOO["resnet50"].inputs("full", batch=1))]


def _table(rows: Sequence[Row]) -> str:
    lines = [f"{'':34} {'eager':>10} {'hybrid':>10} {'ratio':>7} {'compiled in':>12} {'max error':>10}"]
    lines += [
        f"{row.case:34} {row.eager_ms:7.2f} ms {row.hybrid_ms:7.2f} ms {row.eager_ms / row.hybrid_ms:6.2f}x "
        f"{row.compile_s:10.1f} s {row.max_error:10.1e}{f'  {DISTURBED}' if row.is_disturbed else ''}"
        for row in rows
    ]
    return "\n".join(lines)


def _plan(row: Row) -> str:
    """The plan in one line for each graph that the model gave; compiles anew, from the cache."""
    plans = torch_hybrid_backend.explain(row.model, *row.inputs, dynamic=False).plans
    return "; ".join(map(summary, plans)) or "no graph: dynamo compiled nothing"


def main(argv: Sequence[str] | None = None) -> int:
    """Run both parts and print the table. A model that falls back is slower, not an error."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", default="hybrid", help="any torch.compile backend; default: hybrid")
    backend = parser.parse_args(argv).backend
    _say(f"torch {torch.__version__}, {cpu_name()}, {torch.get_num_threads()} threads, float32")
    with torch.no_grad():
        rows = [*_encoder(backend), *_resnet(backend)]
        _say("\n" + _table(rows) + "\n\nPlans:")
        for row in rows:
            _say(f"  {row.case}: {_plan(row)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
