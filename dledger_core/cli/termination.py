"""SIGTERM unwinds a command like Ctrl-C, so that whoever stops us also gets the cleaning up.

Python drops what a signal's handler raises inside a destructor or a weak reference's callback; a wait on a Java object
and an import have such callbacks. A signal that was lost so is sent again. Pydantic, while it makes a model of a class,
turns what a handler raises into an error of its own: that is told apart.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Final, NoReturn

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

__all__ = ["is_interruption", "lost_signals_return", "termination_unwinds"]

_RETURNS_AFTER_S: Final = 0.05  # the callback that swallowed it is over by then; if not, it comes once more


@contextmanager
def termination_unwinds() -> Iterator[None]:
    """Inside, SIGTERM raises KeyboardInterrupt like Ctrl-C, and neither is lost. For the main thread."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        with lost_signals_return(KeyboardInterrupt):
            yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def lost_signals_return(*raised: type[BaseException]) -> Iterator[None]:
    """Inside, a signal whose handler raised where Python drops exceptions comes again a moment later.

    Args:
        raised: what the handlers raise; its first argument is the signal's number, SIGINT's where it has none.
    """
    before, returning = sys.unraisablehook, list[threading.Timer]()

    def send_again(dropped: UnraisableHookArgs) -> None:
        before(dropped)
        if isinstance(dropped.exc_value, raised):
            number = next(iter(dropped.exc_value.args), signal.SIGINT)
            # To the main thread: a signal to any other would not end the call that it waits in.
            to = (threading.main_thread().ident, number)
            timer = threading.Timer(_RETURNS_AFTER_S, signal.pthread_kill, to)
            timer.daemon = True
            returning.append(timer)
            timer.start()

    sys.unraisablehook = send_again
    try:
        yield
    finally:
        sys.unraisablehook = before
        for timer in returning:
            timer.cancel()
            timer.join()  # after it the caller takes the handlers away: a late SIGTERM would kill


def is_interruption(error: BaseException) -> bool:
    """Whether an error is a KeyboardInterrupt in truth: of one that it met pydantic keeps nothing but the text."""
    kind = type(error)  # by name: an error must not import what may be what is missing
    of_pydantic = kind.__module__.startswith("pydantic_core") and kind.__name__ == "SchemaError"
    return of_pydantic and KeyboardInterrupt.__name__ in str(error)


def _interrupt(number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt(number)
