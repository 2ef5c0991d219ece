"""The time of a model by layers: our kernels in the order of a call, and OpenVINO's layers as its own profile tells them.

    python -m benchmarks.layers resnet50 --batch 8 --precision bf16

Ours are medians of what PyTorch's profiler sees of each step of the plan. A profile costs time of its own, OpenVINO's more of it than ours:
compare layers, not sums; whole calls are compared by `benchmarks.run`. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.compare import ZooWork
from torch_hybrid_backend.bench import peers
from torch_hybrid_backend.bench.peers import Setting
from torch_hybrid_backend.bench.peers.hybrid import prepare

Row = tuple[str, float]
_CALLS, _WARM_CALLS = 20, 5
_PLAN = "torch_hybrid_backend::plan_run"


def ours(call: Callable[[], object]) -> list[Row]:
    """(step of the plan, or kernel of its only region, microseconds) in the order of a call."""
    for _ in range(_WARM_CALLS):
        call()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for _ in range(_CALLS):
            call()
    events = [event for event in found.events() or [] if event.cpu_parent is not None]
    steps = [event for event in events if event.cpu_parent.name == _PLAN]
    regions = {step.name for step in steps}
    kernels = [event for event in events if event.cpu_parent.name in regions]
    steps = kernels if len(regions) == 1 and kernels else steps  # one region is all of the plan: what is in it
    count = len(steps) // _CALLS
    times = ([steps[run * count + step].cpu_time_total for run in range(_CALLS)] for step in range(count))
    return [(step.name, statistics.median(own)) for step, own in zip(steps, times, strict=False)]


def openvino(work: ZooWork, setting: Setting) -> list[Row]:
    """(layer with its implementation and shape, microseconds) in the order of execution; layers of less than a microsecond are left out."""
    from torch_hybrid_backend.bench.peers.openvino import compiled_model

    model, inputs = work.build()
    compiled = compiled_model(model, inputs, setting, PERF_COUNT="YES")
    request, feed = compiled.create_infer_request(), [value.numpy() for value in inputs.args]
    layers = compiled.get_runtime_model().get_ordered_ops()
    shapes = {layer.get_friendly_name(): layer.output(0).get_partial_shape() for layer in layers if layer.outputs()}
    times: dict[str, list[float]] = defaultdict(list)
    names: dict[str, str] = {}
    for call in range(_WARM_CALLS + _CALLS):
        request.infer(feed)
        for layer in request.profiling_info if call >= _WARM_CALLS else ():
            times[layer.node_name].append(layer.real_time.total_seconds() * 1e6)
            names[layer.node_name] = f"{layer.node_type} {layer.exec_type} {shapes.get(layer.node_name, '')}"
    ordered = [name for layer in layers if (name := layer.get_friendly_name()) in times]
    rows = [(names[name], statistics.median(times[name])) for name in ordered]
    return [row for row in rows if row[1] >= 1]


def _show(title: str, rows: list[Row]) -> None:
    print(f"{title}: {sum(us for _, us in rows):.0f} us")
    for name, us in rows:
        print(f"{us:10.1f}  {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="of the catalogue")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--precision", choices=peers.PRECISIONS, default=peers.FLOAT32)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        work = ZooWork(
            model=options.model,
            size="full",
            batch=options.batch,
            threads=torch.get_num_threads(),
            folder=Path(folder),
            precision=options.precision,
        )
        model, inputs = work.build()
        calibration = work.calibration(inputs)
        setting = Setting(work.threads, work.folder, options.precision, calibration, work.precision_tolerance)
        _show("hybrid", ours(prepare(model, inputs, setting).call))
        peers.add_peers_folder()
        if importlib.util.find_spec("openvino") is None:
            print("OpenVINO is not installed: `make bench` puts the peers beside the environment.")
        else:
            _show("OpenVINO", openvino(work, setting))


if __name__ == "__main__":
    main()
