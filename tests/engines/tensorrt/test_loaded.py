"""Loading engines needs TensorRT alone, and its messages go to this package's log. There is no GPU to load one on."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from torch_hybrid_backend.errors import CompileError

pytestmark = pytest.mark.tensorrt


@pytest.fixture
def loaded() -> Any:
    from torch_hybrid_backend.engines.tensorrt import loaded

    return loaded


_NO_ENGINE = """
import sys
from torch_hybrid_backend.engines.tensorrt.loaded import Loaded
from torch_hybrid_backend.errors import CompileError
try:
    Loaded(b"no engine")
except CompileError as error:
    assert "does not load the engine: " in str(error), error
else:
    raise AssertionError("it loaded no engine")
assert "torch_tensorrt" not in sys.modules
"""


def test_torch_tensorrt_is_not_imported_for_it() -> None:
    """TensorRT itself reports bytes that are no engine."""
    subprocess.run([sys.executable, "-c", _NO_ENGINE], check=True, timeout=300, cwd=Path(__file__).parents[3])


def test_the_log_of_loading_and_running_is_ours(loaded: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Messages about bytes that are no engine, and messages in calls, go to this package's log. All others go to torch_tensorrt's logger, where
    users read them."""
    with caplog.at_level(logging.DEBUG), pytest.raises(CompileError, match=r"does not load the engine: .+"):
        loaded.Loaded(b"no engine")
    said = [record.getMessage() for record in caplog.records]
    assert said
    assert {record.name for record in caplog.records} == {"torch_hybrid_backend.engines.tensorrt.log"}
    caplog.clear()
    runtime = loaded.Loaded.__new__(loaded.Loaded)
    with caplog.at_level(logging.INFO), runtime.collect_log() as messages:
        loaded._LOGGER.log(loaded.trt.ILogger.Severity.ERROR, "an address is wrong")
    loaded._LOGGER.log(loaded.trt.ILogger.Severity.ERROR, "the user's")
    assert messages.why == "an address is wrong"
    assert [(record.name.partition(" ")[0], record.levelno) for record in caplog.records] == [
        ("torch_hybrid_backend.engines.tensorrt.log", logging.INFO),
        ("torch_tensorrt", logging.ERROR),
    ]


def test_both_loggers_write_to_one_of_pythons(loaded: Any) -> None:
    """TensorRT keeps the first logger that it is given in a process: this package's or torch_tensorrt's."""
    from torch_tensorrt import logging as theirs

    from torch_hybrid_backend.engines.tensorrt.log import tensorrt_logger

    assert theirs._LOGGER is tensorrt_logger
