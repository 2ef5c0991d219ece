"""The process that runs samples for `run.py`: tasks come as JSON lines, outcomes go out as JSON lines, "done" after each task."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

import torch

from tests.operators import moduleinfos, opinfos
from tests.operators.execution import ERROR, Outcome
from tests.operators.report import to_wire


def main(engine: str, limit: str, cache_dir: str, threads: str) -> None:
    """Serve until the input ends."""
    # What libraries print must not get among the outcomes.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    torch.set_num_threads(int(threads))
    for line in sys.stdin:
        module, values = json.loads(line)
        kind = moduleinfos if module == moduleinfos.__name__ else opinfos
        try:
            for outcome in kind.run(kind.Task(**values), engine, int(limit) or None, Path(cache_dir), int(threads)):
                out.write(json.dumps(to_wire(outcome)) + "\n")
        except Exception as error:  # making the samples failed
            out.write(json.dumps(to_wire(Outcome(ERROR, f"no samples: {type(error).__name__}: {error}"))) + "\n")
        out.write("done\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
