"""A thread that zeroes a data file ahead of its tail while the log is being appended to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

__all__ = ["Preallocation"]

_IDLE_S: Final = 5.0


class Preallocation:
    """Runs ``step`` until it has nothing to do; starts with the first ``poke`` and goes away when the log is idle."""

    def __init__(self, step: Callable[[], bool]) -> None:
        self._step = step
        self._wanted = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()

    def poke(self) -> None:
        """Says that the tail has moved."""
        if self._wanted.is_set():
            return
        with self._lock:
            self._wanted.set()
            if self._thread is None and not self._closing.is_set():
                self._thread = threading.Thread(target=self._run, name="dledger-zero-ahead", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            woken = self._wanted.wait(_IDLE_S)
            with self._lock:
                if self._closing.is_set() or (not woken and not self._wanted.is_set()):
                    self._thread = None
                    return
            self._wanted.clear()
            while not self._closing.is_set() and self._step():
                pass

    def close(self) -> None:
        """Ends the thread and waits for it."""
        with self._lock:
            self._closing.set()
            self._wanted.set()
            thread = self._thread
        if thread is not None:
            thread.join()
