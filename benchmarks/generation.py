"""Tokens a second of a Llama: transformers' `generate` in eager and compiled, `compile_generation`, files, and llama.cpp, beside what memory
delivers.

    python -m benchmarks.generation
    python -m benchmarks.generation --sides "generate int4" "loop int4" "llama.cpp int4" --budget-s 5
    python -m benchmarks.generation --layers 24 --hidden 1024                   0.3 billion parameters
    python -m benchmarks.generation --layers 22 --hidden 2048 --key-heads 4     TinyLlama's shape, 1.1 billion

The model has random weights and 0.12 billion parameters (12 layers of 768), a static cache, a prompt of 64 tokens and 64 new ones, chosen
greedily. Each side runs in a process of its own. `ms`: of one new token, the prompt's time taken off; `plan`: of the compiled call
within it; `ceiling`: the time in which memory delivers the weights that a token reads, at the read bandwidth that the same process measures.
"generate": `model.forward` is compiled; "loop": `compile_generation`; "file": `export_generation`, and the file that it made opened again. Run
it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import llamacpp, machine, roofline
from benchmarks.decoding import GROUP
from benchmarks.table import RESULTS
from torch_hybrid_backend.bench.peers import add_peers_folder

_PROMPT, _TOKENS = 64, 64
_PRECISIONS = {"float32": "as-written", "bf16": "bf16", "int8": "int8-weights", "int4": "int4-weights"}
# Bytes of a weight that a token reads, with its scales.
_BYTES = {"float32": 4.0, "bf16": 2.0, "int8": 1.0, "int4": 0.5 + 2 / GROUP}
# The text of n tokens behind the prompt.
Generate = Callable[[int], list[int]]


def _model(layers: int, hidden: int, key_heads: int | None = None) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = hidden // 64
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=(hidden * 8 // 3 + 255) // 256 * 256,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads or (heads // 3 if heads % 3 == 0 else heads // 4),
        vocab_size=32000,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def _options(bits: str) -> dict[str, Any]:
    # Random weights: how far off they are tells nothing.
    return {"precision": _PRECISIONS[bits], "precision_tolerance": 1.0}


def _generate(model: Any, prompt: torch.Tensor, bits: str) -> Generate:
    from transformers import StaticCache

    config = model.config
    cache = StaticCache(config=config, max_cache_len=_PROMPT + _TOKENS)
    heads, size = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    cache.early_initialization(1, heads, size, torch.float32, torch.device("cpu"))
    if bits != "eager":
        model.forward = torch.compile(model.forward, backend="hybrid", options=_options(bits))

    def generate(tokens: int) -> list[int]:
        cache.reset()
        found = model.generate(prompt, past_key_values=cache, max_new_tokens=tokens, do_sample=False)
        return list(found[0, _PROMPT:].tolist())

    return generate


def _loop(model: Any, prompt: torch.Tensor, bits: str) -> Generate:
    from torch_hybrid_backend import compile_generation

    decoder = compile_generation(model, max_length=_PROMPT + _TOKENS, options=_options(bits))
    return lambda tokens: list(decoder.generate(prompt, tokens))


def _file(model: Any, prompt: torch.Tensor, bits: str) -> Generate:
    from torch_hybrid_backend import export_generation, load

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "decoder.hybrid"
        export_generation(model, path, max_length=_PROMPT + _TOKENS, options=_options(bits))
        shipped = load(path)
    return lambda tokens: list(shipped.generate(prompt, tokens))


def _llama_cpp(model: Any, prompt: torch.Tensor, bits: str) -> Generate:
    kind = {"int8": "Q8_0", "int4": "Q4_0"}[bits]
    step = llamacpp.LlamaCpp(model, kind, _PROMPT + _TOKENS, prompt[:, :-1])

    def tokens(count: int) -> Iterator[int]:
        step.rewind()
        token = int(step(prompt[:, -1:]).argmax())
        yield token
        for _ in range(count - 1):
            token = int(step(torch.tensor([[token]])).argmax())
            yield token

    return lambda count: list(tokens(count))


_WAYS = {"generate": _generate, "loop": _loop, "file": _file, "llama.cpp": _llama_cpp}
SIDES = (
    "generate eager",
    *(f"{way} {bits}" for bits in _PRECISIONS for way in ("generate", "loop", "file")),
    "llama.cpp int8",
    "llama.cpp int4",
)


def _counted(times: list[float], call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            times.append(time.perf_counter() - start)

    return timed


def run_side(side: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of one side, in this process."""
    from torch_hybrid_backend.runtime.native.ops import Plan

    add_peers_folder()
    way, _, bits = side.rpartition(" ")
    model = _model(arguments.layers, arguments.hidden, arguments.key_heads)
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    prompt = torch.randint(0, 32000, (1, _PROMPT), generator=torch.Generator().manual_seed(1))
    in_plan: list[float] = []
    with torch.no_grad():
        generate = _WAYS[way](model, prompt, bits)
        for _ in range(2):
            generate(4)
        Plan.run = _counted(in_plan, Plan.run)  # type: ignore[method-assign]
        first, whole, plans = [], [], []
        end = time.perf_counter() + arguments.budget_s
        while time.perf_counter() < end or len(whole) < 3:
            for times, tokens in ((first, 1), (whole, _TOKENS)):
                in_plan.clear()
                start = time.perf_counter()
                generate(tokens)
                times.append(time.perf_counter() - start)
            plans.append(statistics.median(in_plan) if in_plan else 0.0)
        bandwidth = roofline.read_gbytes(torch.get_num_threads())
    ms = (min(whole) - min(first)) / (_TOKENS - 1) * 1e3
    read = linear * (
        llamacpp.BYTES[{"int8": "Q8_0", "int4": "Q4_0"}[bits]] if way == "llama.cpp" else _BYTES.get(bits, 4.0)
    )
    return {
        "side": side,
        "ms": round(ms, 3),
        "tokens_per_s": round(1e3 / ms, 1),
        "plan_ms": round(min(plans) * 1e3, 3),
        "ceiling_ms": round(read / bandwidth / 1e6, 3),
        "read_gbytes_per_s": round(bandwidth, 1),
    }


def _in_its_process(side: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The same in a process of its own; where that fails, why."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "side.json"
        command = [sys.executable, "-m", "benchmarks.generation", "--only", side, "--out", str(result)]
        for name in ("layers", "hidden", "key_heads", "budget_s"):
            given = getattr(arguments, name)
            command += [] if given is None else [f"--{name.replace('_', '-')}", str(given)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            found: dict[str, Any] = json.loads(result.read_text())
            return found
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return {"side": side, "failed": lines[-1]}


def _shown(row: dict[str, Any]) -> str:
    if "failed" in row:
        return f"{row['side']:18} {row['failed']}"
    plan = f", plan {row['plan_ms']:6.2f}" if row["plan_ms"] else ""
    return (
        f"{row['side']:18} {row['tokens_per_s']:7.1f} tokens/s {row['ms']:7.2f} ms{plan}, ceiling {row['ceiling_ms']:6.2f} ms at "
        f"{row['read_gbytes_per_s']:.1f} GB/s"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.generation", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768, help="a multiple of 192 or 256")
    parser.add_argument("--key-heads", type=int, help="heads of keys; default: a third or a quarter of the heads")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--budget-s", type=float, default=10.0, help="seconds of timing for each side")
    parser.add_argument("--only", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RESULTS / machine.slug() / "generation.json", metavar="FILE")
    arguments = parser.parse_args(argv)
    if arguments.only:
        arguments.out.write_text(json.dumps(run_side(arguments.only, arguments)))
        return 0
    rows = []
    for side in arguments.sides:
        rows.append(_in_its_process(side, arguments))
        print(_shown(rows[-1]), flush=True)
    machine.write_record(
        arguments.out,
        layers=arguments.layers,
        hidden=arguments.hidden,
        key_heads=arguments.key_heads,
        prompt=_PROMPT,
        tokens=_TOKENS,
        results=rows,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
