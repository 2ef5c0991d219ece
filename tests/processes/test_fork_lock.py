"""A lock that is free in a forked child."""

from __future__ import annotations

import os
import threading

from torch_hybrid_backend.processes.fork_lock import ForkLock


def test_a_fork_while_another_thread_has_it() -> None:
    """The child can acquire the lock. In the parent, the thread still holds the lock, and releases it."""
    lock, taken, give_back = ForkLock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock, lock:
            taken.set()
            give_back.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert taken.wait(60)
    child = os.fork()
    if child == 0:
        got: list[int] = []

        def take() -> None:
            with lock:
                got.append(1)

        other = threading.Thread(target=take, daemon=True)
        other.start()
        other.join(60)
        os._exit(0 if got else 1)
    assert os.waitpid(child, 0)[1] == 0
    free = threading.Event()

    def take_later() -> None:
        with lock:
            free.set()

    waiting = threading.Thread(target=take_later)
    waiting.start()
    assert not free.wait(0.05)
    give_back.set()
    assert free.wait(60)
    thread.join()
    waiting.join()
