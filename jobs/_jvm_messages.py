"""The messages of Spark's JVM while it starts, which a user sees only if the start fails.

Ivy's report of the jars and Spark's notes about its log take about 45 lines of stderr, and no setting of Spark leaves
them out. The JVM inherits this process's stderr. So that is a pipe while the JVM starts, and a thread passes on what
the JVM and its Python workers write to it later, such as warnings of a task.
"""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Final

__all__ = ["HeldBack", "held_back"]

_STDERR: Final = 2
_DRAIN_S: Final = 1.0
_POLL_S: Final = 0.01


@contextmanager
def held_back() -> Iterator[HeldBack | None]:
    """Keep back what processes write to stderr that start in this block; write it if the block fails.

    Yields the messages; None if the program was started without stderr.
    """
    try:
        terminal = os.dup(_STDERR)
    except OSError:
        yield None
        return
    sys.stderr.flush()
    reading, writing = os.pipe()
    os.dup2(writing, _STDERR)
    os.close(writing)
    relay = HeldBack(reading, terminal)
    try:
        yield relay
    except BaseException:
        relay.show()
        raise
    finally:
        sys.stderr.flush()
        relay.pass_on()  # while this process still writes to the pipe
        os.dup2(terminal, _STDERR)


class HeldBack:
    """Reads a pipe to its end: keeps its bytes at first, and writes them to a file from ``pass_on`` on."""

    def __init__(self, reading: int, target: int) -> None:
        self._reading, self._target = reading, target
        self._kept: list[bytes] | None = []
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="jvm-messages", daemon=True).start()

    def text(self) -> str:
        """Return the bytes that were kept."""
        self._drain()
        with self._lock:
            return b"".join(self._kept or ()).decode(errors="replace")

    def forget(self) -> None:
        """Forget them: an error says what they mean."""
        with self._lock:
            self._kept = []

    def show(self) -> None:
        """Write the bytes that were kept."""
        self._drain()
        with self._lock:
            for part in self._kept or ():
                os.write(self._target, part)
            self._kept = []

    def pass_on(self) -> None:
        """Forget the bytes that were kept, and write all later ones."""
        self._drain()
        with self._lock:
            self._kept = None

    def _drain(self) -> None:
        """Wait until the thread has taken the bytes that are in the pipe."""
        deadline = time.monotonic() + _DRAIN_S
        while self._is_readable(0) and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def _is_readable(self, wait_s: float | None) -> bool:
        with self._lock if wait_s == 0 else nullcontext():  # the thread takes bytes with the lock
            return bool(select.select([self._reading], [], [], wait_s)[0])

    def _run(self) -> None:
        part = b" "
        while part and self._is_readable(None):
            with self._lock:
                part = os.read(self._reading, 1 << 16)
                if self._kept is not None:
                    self._kept.append(part)
                else:
                    os.write(self._target, part)
        os.close(self._reading)
        os.close(self._target)
