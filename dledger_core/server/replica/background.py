"""Work that may take seconds, next to the iterations of a replica."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

Background = Callable[[Callable[[], None]], object]
"""Runs a function, at once or later, perhaps in another thread; nothing waits for it."""


class Work(Generic[T]):
    """A function that runs in the background, and its result once it has ended."""

    def __init__(self, background: Background, function: Callable[[], T]) -> None:
        self._outcome: list[T | BaseException] = []
        background(lambda: self._run(function))

    def _run(self, function: Callable[[], T]) -> None:
        try:
            self._outcome.append(function())
        except BaseException as error:  # noqa: BLE001 - raised where the result is used
            self._outcome.append(error)

    @property
    def is_done(self) -> bool:
        """Whether it has ended."""
        return bool(self._outcome)

    def result(self) -> T:
        """Return its result, or raise its error."""
        (outcome,) = self._outcome
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome
