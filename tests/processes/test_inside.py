"""Time limits and error descriptions of child processes. tests/codegen/workers/ and tests/builds/ test their end with the parent."""

from __future__ import annotations

import signal
import subprocess
import sys

from torch_hybrid_backend.processes.inside import described


def test_a_time_limit() -> None:
    """Work that is done in time is not disturbed. Late work ends the process, also while it hangs outside Python."""
    script = """
import time
from torch_hybrid_backend.processes.inside import time_limit
with time_limit(0.05):
    pass
time.sleep(0.1)
print("alive", flush=True)
with time_limit(0.05):
    sum(range(1 << 60))
"""
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("alive\n", -signal.SIGALRM)


def test_described() -> None:
    """An error's type, message and traceback, as texts."""
    try:
        raise ValueError("odd")
    except ValueError as error:
        fields = described(error)
    assert (fields["type"], fields["message"]) == ("ValueError", "odd")
    assert "test_inside.py" in fields["traceback"]
