"""A builder without TensorRT and without torch, so that its process starts quickly: the engine's bytes are the request itself.

If the environment names a folder, each build writes a file there when it begins, and waits for a file called "go". A cancelled build ends at
once, or, if there is a file called "stubborn", when that file is removed.
"""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

FOLDER = "FOLDER_OF_FAKE_BUILDS"
_ASKED, _MADE = b"hybrid trt request 1\n", b"hybrid trt engine 1\n"


def build(request: bytes, going_on: Callable[[float], bool]) -> bytes:
    """Build as `engines.tensorrt.build.build` does."""
    if folder := os.environ.get(FOLDER):
        Path(folder, f"{os.getpid()}.begun").touch()
        while not Path(folder, "go").exists():
            if not going_on(0.5):
                while Path(folder, "stubborn").exists():
                    time.sleep(0.002)
                raise RuntimeError("stopped")
            time.sleep(0.002)
    (length,) = struct.unpack_from("<Q", request, len(_ASKED))
    asked = json.loads(request[len(_ASKED) + 8 :][:length])
    changing = sum(isinstance(each, list) for each in asked["inputs"]) - len(asked["constants"])  # others are sizes
    made = {
        "inputs": [f"input{i}" for i in range(changing)],
        "outputs": [f"output{i}" for i in range(len(asked["outputs"]))],
        "layers": [f"fake: {changing} inputs"],
        "versions": "none",
        "plan_bytes": len(request),
    }
    header = json.dumps(made).encode()
    return _MADE + struct.pack("<Q", len(header)) + header + request
