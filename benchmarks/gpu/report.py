"""A record of the benchmark as text: ceilings, tests, what the host takes, kernels, models, and how they stand against the goals."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks import results
from benchmarks.results import Record
from torch_hybrid_backend.config import Config

# The goals of the Triton engine.
_GEOMETRIC_MEAN = 1.1
_SHARES = {"pointwise": 0.9, "norms": 0.9, "softmax": 0.9, "reductions": 0.9, "transposition": 0.9, "gather": 0.9}
_SHARES |= {"gemv": 0.8}
_OF_EAGER_MATMUL = 0.95
_LAUNCH_US, _FIXED_US = 0.5, 10.0
_MEMORY_OF_EAGER = 1.05
_PEERS = ("eager", "inductor", results.OURS)
# The goals of TensorRT beside Triton.
_OF_BETTER_ENGINE = 1.02
_ENGINES_MEMORY_OF_EAGER = 1.1
_WARM_S = 3.0
_MEASURE_BUDGET_S = Config().measure_budget_s
_ENGINE_PEERS = ("eager", "inductor", "torch_tensorrt", "triton", "tensorrt", results.OURS)


def report(record: Record) -> str:
    """Every part that there is something of."""
    return "\n\n".join("\n".join(part) for part in map(list, _parts(record)) if part)


def _parts(record: Record) -> Iterator[Iterator[str]]:
    yield _machine(record)
    yield _figures("ceilings", record.get("rooflines", {}))
    yield _figures("gpu tests", record.get("tests", {}))
    yield _figures("host, microseconds", record.get("host", {}))
    yield _kernels(record)
    yield _figures("TensorRT", record.get("tensorrt", {}))
    yield _models(record)
    yield _engines(record)
    yield _gaps(record)
    yield _goals(record)


def _machine(record: Record) -> Iterator[str]:
    about = record["machine"]
    versions = about.get("versions", {})
    yield f"{about.get('device')}, torch {versions.get('torch')}, triton {versions.get('triton')}, python {versions.get('python')}"


def _figures(title: str, figures: Mapping[str, Any]) -> Iterator[str]:
    if figures:
        yield f"{title}: " + ", ".join(f"{name} {value}" for name, value in figures.items())


def _rows(entries: Sequence[Mapping[str, Any]]) -> dict[results.Row, dict[str, Mapping[str, Any]]]:
    """The results by row and peer."""
    rows: dict[results.Row, dict[str, Mapping[str, Any]]] = {}
    for entry in entries:
        rows.setdefault((entry["model"], entry["batch"]), {})[entry["peer"]] = entry
    return rows


def _kernels(record: Record) -> Iterator[str]:
    rows = _rows(record["kernels"])
    if rows:
        yield f"{'kernel':<26} {'eager us':>9} {'inductor':>9} {'hybrid':>9}  reached, of the ceiling; best other / hybrid"
    for (name, _), peers in rows.items():
        own = peers.get("hybrid", {})
        rate = f"{own['gbytes']} GB/s" if "gbytes" in own else f"{own['tflops']} TFLOP/s" if "tflops" in own else "-"
        share = f", {own['share']:.0%}" if "share" in own else ""
        times = " ".join(_cell(peers.get(peer, {}), 1e3) for peer in _PEERS)
        yield f"{name:<26} {times}  {rate}{share}; {_ratio(peers)}"


def _engines(record: Record) -> Iterator[str]:
    """Rows that compare engines: TensorRT alone, Triton alone, both, and Torch-TensorRT's own backend."""
    rows = _engine_rows(record)
    if rows:
        heads = " ".join(f"{peer[:9]:>9}" for peer in _ENGINE_PEERS)
        yield f"{'model, ms':<36} {'batch':>5} {heads}  better engine / hybrid; peak MiB; build, warm start s (builds)"
    for (name, batch), peers in rows.items():
        times = " ".join(_cell(peers.get(peer, {}), 1.0) for peer in _ENGINE_PEERS)
        own, better = peers.get(results.OURS, {}), _better_engine(peers)
        ratio = f"{better / own['median_ms']:.2f}" if better is not None and "median_ms" in own else "-"
        memory = " / ".join(_shown(_memory_mib(peers.get(peer, {}))) for peer in _ENGINE_PEERS)
        seconds = f"{own.get('build_s', '-')}, {own.get('warm_s', '-')} ({own.get('warm_builds', '-')})"
        yield f"{name:<36} {batch:>5} {times}  {ratio}; {memory}; {seconds}"


def _engine_rows(record: Record) -> dict[results.Row, dict[str, Mapping[str, Any]]]:
    return _rows([entry for entry in record["results"] if _compares_engines(entry)])


def _compares_engines(entry: Mapping[str, Any]) -> bool:
    return str(entry["model"]).endswith(" tensorrt")


def _better_engine(peers: Mapping[str, Mapping[str, Any]]) -> float | None:
    """Milliseconds of the better of TensorRT alone and Triton alone, where both have a figure."""
    times = _times(peers)
    return min(times["tensorrt"], times["triton"]) if {"tensorrt", "triton"} <= times.keys() else None


def _memory_mib(entry: Mapping[str, Any]) -> float | None:
    """A peer's peak, with what it holds beside PyTorch's allocator."""
    return entry["peak_mib"] + entry.get("outside_mib", 0.0) if "peak_mib" in entry else None


def _shown(mib: float | None) -> str:
    return "-" if mib is None else f"{mib:.0f}"


def _engine_goals(record: Record) -> Iterator[str]:
    """Rows that fall short of each goal."""
    rows = _engine_rows(record)
    slow, not_ahead, large, cold, late = [], [], [], [], []
    for (name, batch), peers in rows.items():
        title, own, better = f"{name} batch {batch}", peers.get(results.OURS, {}), _better_engine(peers)
        if better is not None and "median_ms" in own:
            if own["median_ms"] > _OF_BETTER_ENGINE * better:
                slow.append(f"{title} ({own['median_ms'] / better:.2f})")
            if (peers["tensorrt"].get("operators_compiled") or 0.0) < 1.0 and own["median_ms"] >= better:
                not_ahead.append(title)
        eager_mib, own_mib = (_memory_mib(peers.get(peer, {})) for peer in ("eager", results.OURS))
        if eager_mib and own_mib and own_mib > _ENGINES_MEMORY_OF_EAGER * eager_mib:
            large.append(f"{title} ({own_mib / eager_mib:.2f})")
        if own.get("warm_builds", 0) > 0 or own.get("warm_s", 0.0) > _WARM_S:
            cold.append(f"{title} ({own['warm_builds']} builds, {own['warm_s']} s)")
        waited = own.get("compile_s", 0.0) - peers.get("triton", {}).get("compile_s", math.inf)
        if waited > _MEASURE_BUDGET_S:
            late.append(f"{title} ({waited:.1f} s)")
    for goal, missed in (
        (f"hybrid above {_OF_BETTER_ENGINE} times the better of TensorRT and Triton alone", slow),
        ("models that TensorRT does not take whole, on which hybrid is not ahead", not_ahead),
        (f"memory above {_ENGINES_MEMORY_OF_EAGER} times eager's", large),
        (f"warm starts that build, or take above {_WARM_S:g} s", cold),
        (f"first calls that wait over {_MEASURE_BUDGET_S:g} s longer than with Triton alone", late),
    ):
        if rows:
            yield f"{goal}: {', '.join(missed) or 'none'}"


def _models(record: Record) -> Iterator[str]:
    rows = _rows([entry for entry in record["results"] if not _compares_engines(entry)])
    if rows:
        heads = f"{'model':<36} {'batch':>5} {'eager ms':>9} {'inductor':>9} {'hybrid':>9}"
        yield f"{heads}  best other / hybrid; peak MiB; compiled in s"
    for (name, batch), peers in rows.items():
        times = " ".join(_cell(peers.get(peer, {}), 1.0) for peer in _PEERS)
        memory, seconds = (
            " / ".join(str(peers.get(peer, {}).get(figure, "-")) for peer in _PEERS)
            for figure in ("peak_mib", "compile_s")
        )
        yield f"{name:<36} {batch:>5} {times}  {_ratio(peers)}; {memory}; {seconds}"


def _cell(entry: Mapping[str, Any], scale: float) -> str:
    return f"{entry['median_ms'] * scale:9.3f}" if "median_ms" in entry else f"{'-':>9}"


def _times(peers: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    return {peer: entry["median_ms"] for peer, entry in peers.items() if "median_ms" in entry}


def _ratio(peers: Mapping[str, Mapping[str, Any]]) -> str:
    times = _times(peers)
    other, own = results.best(times), times.get(results.OURS)
    return "-" if other is None or own is None else f"{other / own:.2f}"


def _gaps(record: Record) -> Iterator[str]:
    for entry in (*record["kernels"], *record["results"]):
        if "gap" in entry:
            yield f"no figure: {entry['model']} batch {entry['batch']} {entry['peer']}: {entry['gap']}"
        if "warm_gap" in entry:
            yield f"no warm start: {entry['model']} batch {entry['batch']} {entry['peer']}: {entry['warm_gap']}"
    for name, why in record["gaps"].items():
        yield f"no figure: {name}: {why}"


def _goals(record: Record) -> Iterator[str]:
    """The goals, and what was reached; one that nothing was measured for is left out."""
    plain = [entry for entry in record["results"] if not _compares_engines(entry)]
    for title, entries in (("kernels", record["kernels"]), ("models", plain)):
        for other in ("eager", "inductor"):
            standing = results.standing({"results": entries}, other)
            if standing.ratio is not None:
                goal = f", goal {_GEOMETRIC_MEAN}" if other == "inductor" else ""
                mean = f"{other} / hybrid {standing.ratio:.3f} (geometric mean{goal})"
                yield f"{title}: {mean}, ahead in {standing.ahead:.0%} of {standing.rows} rows"
    own = [entry for entry in record["kernels"] if entry["peer"] == results.OURS]
    if any("share" in entry for entry in own):
        missed = [f"{e['model']} {e['share']:.0%}" for e in own if e.get("share", 1.0) < _SHARES.get(e["kind"], 0.0)]
        yield f"kernels bound by memory below their goal (90% of a copy's bandwidth, GEMV 80%): {', '.join(missed) or 'none'}"
    products = {
        row: _times(peers) for row, peers in _rows([e for e in record["kernels"] if e["kind"] == "matmul"]).items()
    }
    both = {row: times for row, times in products.items() if {"eager", "hybrid"} <= times.keys()}
    slow = [row[0] for row, times in both.items() if times["eager"] < _OF_EAGER_MATMUL * times["hybrid"]]
    if both:
        yield f"matrix products below 95% of eager's speed: {', '.join(slow) or 'none'}"
    yield from _engine_goals(record)
    host = record.get("host", {})
    if host:
        verdict = host["above_bare_us"] <= _LAUNCH_US and host["fixed_us"] <= _FIXED_US
        yield f"host: {'as wished' if verdict else 'above the goal'} ({_LAUNCH_US} us a kernel above a bare launch, {_FIXED_US} us a call)"
    large = []
    for (name, batch), peers in _rows(plain).items():
        eager, inductor, hybrid = (peers.get(peer, {}).get("peak_mib") or math.inf for peer in _PEERS)
        if min(_MEMORY_OF_EAGER * eager, inductor) < hybrid < math.inf:
            large.append(f"{name} batch {batch}")
    if large:
        yield f"more memory than inductor, or than 1.05 times eager's: {', '.join(large)}"
