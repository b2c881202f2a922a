"""Stopping on SIGTERM and Ctrl-C.

A command that only reads is interrupted: both signals raise KeyboardInterrupt. Work that must end between two steps
polls an event instead.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["interrupt_on_sigterm", "stop_requests"]


def interrupt_on_sigterm() -> None:
    """Let SIGTERM raise KeyboardInterrupt, as Ctrl-C does. Call it from the main thread."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@contextmanager
def stop_requests() -> Iterator[threading.Event]:
    """Set the yielded event on SIGTERM or Ctrl-C, until the block ends.

    Signals reach the main thread only: in another thread the event stays as it is.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {
        number: signal.signal(number, lambda _number, _frame: stop.set()) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
