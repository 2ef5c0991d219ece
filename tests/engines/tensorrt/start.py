"""Measure the time before a process's first call that TensorRT takes: to cut a model's graphs into regions, and to get the regions' engines.

    python -m tests.engines.tensorrt.start FOLDER gpt2        # twice: the second process finds what the first one kept in FOLDER

Prints seconds, and true if torch_tensorrt was imported, as JSON. There is no GPU: engines are built and not loaded.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

from tests.engines.tensorrt import no_gpu  # noqa: F401  before anything imports torch_tensorrt
from tests.engines.tensorrt.contexts_for_tests import FakeEngine, FakeStream, FakeStreams
from tests.engines.tensorrt.regions_for_tests import engine
from tests.engines.tensorrt.test_zoo_partitions import mains
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.engine import PendingRegion
from torch_hybrid_backend.partition.regions import partition_graph


def main(folder: str, name: str) -> None:
    """Cut a model of the zoo, and wait for its engines."""
    offered = engine(
        Path(folder),
        load=lambda plan, device: FakeEngine(),
        streams=lambda device: FakeStreams(FakeStream(7)),
        verdicts=None,  # its own, in the folder
    )
    offered.devices = frozenset({"cuda"})
    graphs = mains(name, torch.float32)
    start = time.perf_counter()
    cuts = [partition_graph(graph, [offered], Config()).graph for graph in graphs]
    cut_s = time.perf_counter() - start
    regions = [each.region for cut in cuts for each in cut.segments if each.engine_hint == offered.name]
    compiled = offered.compile(regions, Deadline(600))
    for each in compiled:
        assert not isinstance(each, Exception), each
        if isinstance(each, PendingRegion):
            while not each.done:
                time.sleep(0.01)
            each.result()
    said = {
        "partition_s": round(cut_s, 3),
        "engines_s": round(time.perf_counter() - start - cut_s, 3),
        "regions": len(regions),
        "pending": sum(isinstance(each, PendingRegion) for each in compiled),
        "imports_torch_tensorrt": "torch_tensorrt" in sys.modules,
    }
    print(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
