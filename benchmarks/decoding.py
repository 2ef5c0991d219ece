"""Decoding one token of a language model: ours in each precision of weights, eager, and peers, beside what memory delivers.

    python -m benchmarks.decoding
    python -m benchmarks.decoding --layers 2 --cache 256 --sides "hybrid float32" "hybrid int4" --profile
    python -m benchmarks.decoding --tokens 128       a prompt in place of one token

The model is a Llama of TinyLlama-1.1B's shape with random weights and a static cache, one token a call. Each side runs in a process of its
own, so that the whole model in float32 (4.4 GB) is there once; each process also measures how fast all cores read memory. `ms`: of a
token; `MB`: of weights that a token reads, with scales and zero points, as the side keeps them; `share`: of the measured bandwidth that these
bytes alone make; `kept`: bytes that our plan keeps of weights beside the parameters, over float32's; `error`: of the logits, relative root
mean square. "aten" is PyTorch's operators on packed weights, called from eager; "torchao" its weight-only quantization through inductor
with freezing, in bfloat16; "llama.cpp" its blocks of 32 weights in 8 bits (Q8_0) and 4 (Q4_0), where `make .venv/llama_cpp` has built it. Run
it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from benchmarks import llamacpp, machine, roofline
from benchmarks.table import RESULTS
from torch_hybrid_backend.bench.peers import add_peers_folder
from torch_hybrid_backend.measuring.measure import measure

aten = torch.ops.aten

GROUP = 32
_PROMPT = 16  # positions of the cache that are taken before the first token
# (n, k) -> bytes of a weight.
Bytes = Callable[[int, int], float]


class Step(Protocol):
    """A decoder as a side runs it."""

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Input ids (1, tokens) -> logits (1, 32000) of the last one. Moves on by the tokens."""

    def rewind(self) -> None:
        """Back to behind the prompt."""


def tiny_llama(layers: int, positions: int) -> nn.Module:
    """A Llama of TinyLlama-1.1B's shape."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        vocab_size=32000,
        max_position_embeddings=max(2048, positions),
    )
    return LlamaForCausalLM(config).eval()


class Decoder(nn.Module):
    """A model with a static cache: input ids (1, tokens) -> logits (1, 32000) of the last token. Every call moves on by its tokens."""

    def __init__(self, model: nn.Module, positions: int) -> None:
        from transformers import StaticCache

        super().__init__()
        self.model, self.positions = model, positions
        self.cache = StaticCache(config=model.config, max_cache_len=positions)
        model(_ids(_PROMPT), past_key_values=self.cache, use_cache=True)  # it makes the cache's tensors

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1]

    def rewind(self) -> None:
        """Back to behind the prompt."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(_PROMPT)


def _ids(tokens: int) -> torch.Tensor:
    return torch.randint(0, 32000, (1, tokens), generator=torch.Generator().manual_seed(tokens))


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """`prepare`: the decoder as the side runs it; it may change the decoder's model. `bytes`: what it reads of a weight."""

    name: str
    prepare: Callable[[Decoder], Step]
    bytes: Bytes
    in_half: bool = False  # the model is converted to bfloat16 first


def _hybrid(precision: str) -> Callable[[Decoder], Step]:
    def prepare(decoder: Decoder) -> Step:
        # Random weights: how far off they are tells nothing.
        options = {"precision": precision, "precision_tolerance": 1.0}
        return torch.compile(decoder, backend="hybrid", options=options, fullgraph=True, dynamic=False)

    return prepare


def _in_bytes(w: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    scale = w.float().abs().amax(1) / 127
    q, scale = (w / scale[:, None]).round().to(torch.int8), scale.to(w.dtype)
    return lambda x: aten._weight_int8pack_mm(x, q, scale)


def _in_nibbles(w: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    n, k = w.shape
    groups = w.float().view(n, k // GROUP, GROUP)
    scale = groups.abs().amax(2) / 7
    q = (groups / scale[:, :, None]).round() + 8
    packed = aten._convert_weight_to_int4pack_for_cpu(q.view(n, k).to(torch.int32), 2)
    # Of each group: (q - 8) * scale + zero.
    moves = torch.stack([scale, torch.zeros_like(scale)], 2).transpose(0, 1).contiguous().to(w.dtype)
    return lambda x: aten._weight_int4pack_mm_for_cpu(x, packed, GROUP, moves)


class _Packed(nn.Module):
    """A linear layer without bias on packed weights."""

    def __init__(self, linear: nn.Linear, pack: Callable[[torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]):
        super().__init__()
        self.outputs, self.multiply = linear.out_features, pack(linear.weight.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.multiply(x.flatten(0, -2)).view(*x.shape[:-1], self.outputs)


def _aten(pack: Callable[[torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]) -> Callable[[Decoder], Step]:
    def prepare(decoder: Decoder) -> Step:
        for module in list(decoder.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, _Packed(child, pack))
        return decoder

    return prepare


def _torchao(bits: int) -> Callable[[Decoder], Step]:
    def prepare(decoder: Decoder) -> Step:
        import torch._inductor.config as inductor
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        if bits == 8:
            quantize_(decoder.model, Int8WeightOnlyConfig())
        else:  # the packing of `_weight_int4pack_mm_for_cpu`
            quantize_(decoder.model, PrototypeInt4WeightOnlyConfig(group_size=GROUP))
        inductor.freezing = True
        return torch.compile(decoder, fullgraph=True, dynamic=False)

    return prepare


def _llama_cpp(kind: str) -> Callable[[Decoder], Step]:
    return lambda decoder: llamacpp.LlamaCpp(decoder.model, kind, decoder.positions, _ids(_PROMPT))


SIDES: tuple[Side, ...] = (
    Side("eager float32", lambda decoder: decoder, lambda n, k: 4.0 * n * k),
    Side("hybrid float32", _hybrid("as-written"), lambda n, k: 4.0 * n * k),
    Side("hybrid bf16", _hybrid("bf16"), lambda n, k: 2.0 * n * k),
    Side("hybrid int8", _hybrid("int8-weights"), lambda n, k: n * k + 4.0 * n),
    Side("hybrid int4", _hybrid("int4-weights"), lambda n, k: n * k * (0.5 + 2 / GROUP)),
    Side("aten int8", _aten(_in_bytes), lambda n, k: n * k + 2.0 * n, in_half=True),
    Side("aten int4", _aten(_in_nibbles), lambda n, k: n * k * (0.5 + 4 / GROUP), in_half=True),
    Side("torchao int8", _torchao(8), lambda n, k: n * k + 2.0 * n, in_half=True),
    Side("torchao int4", _torchao(4), lambda n, k: n * k * (0.5 + 4 / GROUP), in_half=True),
    Side("llama.cpp int8", _llama_cpp("Q8_0"), lambda n, k: n * k * llamacpp.BYTES["Q8_0"]),
    Side("llama.cpp int4", _llama_cpp("Q4_0"), lambda n, k: n * k * llamacpp.BYTES["Q4_0"]),
)


def run_side(side: Side, arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of one side, in this process."""
    add_peers_folder()
    threads, tokens = torch.get_num_threads(), arguments.tokens
    model = tiny_llama(arguments.layers, arguments.cache)
    shapes = [tuple(m.weight.shape) for m in model.modules() if isinstance(m, nn.Linear)]
    ids = _ids(tokens)
    with torch.no_grad():
        wanted = Decoder(model, arguments.cache)(ids)
        decoder = Decoder(model.bfloat16() if side.in_half else model, arguments.cache)
        step = side.prepare(decoder)
        got = step(ids).float()
        step.rewind()
        for _ in range(3):  # what is compiled is so for the first two calls
            step(ids)
        position = _PROMPT + 3 * tokens

        def call() -> None:
            nonlocal position
            if position + tokens > arguments.cache or tokens > 1:
                step.rewind()
                position = _PROMPT
            step(ids)
            position += tokens

        bandwidth = roofline.read_gbytes(threads)
        (timing,) = measure([call], arguments.budget_s, max_rounds=2000)
        bandwidth = max(bandwidth, roofline.read_gbytes(threads))
        profile = _profile(call) if arguments.profile else []
    ms, read = timing.low_us / 1e3, sum(side.bytes(n, k) for n, k in shapes)
    gbytes = read / ms / 1e6
    return {
        "side": side.name,
        "ms": round(ms, 3),
        "weights_mb": round(read / 1e6, 1),
        "gbytes_per_s": round(gbytes, 1),
        "read_gbytes_per_s": round(bandwidth, 1),
        "share_of_bandwidth": round(gbytes / bandwidth, 3),
        "kept_over_float32": round(_kept_bytes() / sum(4 * n * k for n, k in shapes), 4),
        "error": round(float((got - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()), 5),
        **({"profile": profile} if arguments.profile else {}),
    }


def _kept_bytes() -> int:
    """Bytes that our plans keep of weights that is not the parameters' own memory. Of several plans of one graph, those that packed the
    most."""
    from torch_hybrid_backend.runtime.executor import BoundConstants

    gc.collect()
    bound = [each for each in gc.get_objects() if type(each) is BoundConstants]
    return max((sum(tensor.nbytes for tensor in each.owned.values()) for each in bound), default=0)


def _profile(call: Callable[[], None], calls: int = 5) -> list[dict[str, Any]]:
    """Profile a call by PyTorch's profiler, the longest first: how often, and microseconds of one call."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as found:
        for _ in range(calls):
            call()
    rows = sorted(found.key_averages(), key=lambda row: -row.self_cpu_time_total)
    return [
        {"name": row.key, "count": row.count / calls, "us": round(row.self_cpu_time_total / calls, 1)} for row in rows
    ]


def _in_its_process(side: Side, arguments: argparse.Namespace) -> dict[str, Any]:
    """The same in a process of its own; where that fails, why."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "side.json"
        command = [sys.executable, "-m", "benchmarks.decoding", "--only", side.name, "--out", str(result)]
        for name in ("layers", "cache", "tokens", "budget_s"):
            command += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
        command += ["--profile"] if arguments.profile else []
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            found: dict[str, Any] = json.loads(result.read_text())
            return found
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return {"side": side.name, "failed": lines[-1]}


def _shown(row: dict[str, Any], float32_ms: float | None) -> str:
    if "failed" in row:
        return f"{row['side']:16} {row['failed']}"
    gain = f"{float32_ms / row['ms']:6.2f} x float32" if float32_ms else ""
    kept = f", kept {row['kept_over_float32']:.3f}" if row["kept_over_float32"] else ""
    return (
        f"{row['side']:16} {row['ms']:9.2f} ms {gain} {row['weights_mb']:8.1f} MB {row['gbytes_per_s']:6.1f} GB/s,"
        f" {row['share_of_bandwidth']:.2f} of {row['read_gbytes_per_s']:.1f}{kept}, error {row['error']:.4f}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    by_name = {side.name: side for side in SIDES}
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decoding", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--cache", type=int, default=512, help="positions of the static cache")
    parser.add_argument("--tokens", type=int, default=1, help="of a call; more than one are a prompt")
    parser.add_argument("--sides", nargs="+", choices=list(by_name), default=list(by_name))
    parser.add_argument("--budget-s", type=float, default=10.0, help="seconds of timing for each side")
    parser.add_argument("--profile", action="store_true", help="show what a call does, longest first")
    parser.add_argument("--only", choices=list(by_name), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RESULTS / machine.slug() / "decoding.json", metavar="FILE")
    arguments = parser.parse_args(argv)
    if arguments.cache < _PROMPT + 4 * arguments.tokens:
        parser.error(f"--cache must be at least {_PROMPT + 4 * arguments.tokens}: a prompt of {_PROMPT} and four calls")
    if arguments.only:
        arguments.out.write_text(json.dumps(run_side(by_name[arguments.only], arguments)))
        return 0
    rows: list[dict[str, Any]] = []
    for name in arguments.sides:
        row = _in_its_process(by_name[name], arguments)
        rows.append(row)
        float32_ms = next((r["ms"] for r in rows if r["side"] == "hybrid float32" and "ms" in r), None)
        print(_shown(row, float32_ms), flush=True)
        for line in row.get("profile", [])[:25]:
            print(f"    {line['us']:10.1f} us {line['count']:6.1f} x {line['name'][:90]}", flush=True)
    shown = {name: getattr(arguments, name) for name in ("layers", "cache", "tokens")}
    machine.write_record(arguments.out, **shown, results=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
