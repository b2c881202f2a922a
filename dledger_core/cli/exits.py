"""How commands and jobs end: exit codes and signals.

A command that only reads is interrupted: SIGTERM and Ctrl-C raise KeyboardInterrupt. Work that must stop between two
steps polls an event instead.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

EXIT_OK: Final = 0
EXIT_FINDING: Final = 1
EXIT_INCOMPLETE: Final = 2
"""The result is incomplete, or a job was stopped."""
EXIT_USAGE: Final = 3
"""Wrong usage, unreachable nodes, or an I/O error."""
EXIT_STORAGE: Final = 4
"""A storage failure; the store needs verification."""
EXIT_INTERRUPTED: Final = 130
"""A signal ended the command."""


def interrupt_on_sigterm() -> None:
    """Let SIGTERM raise KeyboardInterrupt, as Ctrl-C does. Call it from the main thread."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@contextmanager
def stop_requests() -> Iterator[threading.Event]:
    """Set the yielded event on SIGTERM or Ctrl-C, until the block ends.

    Signals reach the main thread only: in another thread the event is never set.
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
