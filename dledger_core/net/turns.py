"""Fair turns: what several connections ask for, taken one at a time from each."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    """Waiting items of several sources; those of one source keep their order.

    Attributes:
        nbytes: bytes of all of them.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._sources: dict[Hashable, deque[tuple[T, int]]] = {}
        self._next: deque[Hashable] = deque()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, source: Hashable) -> bool:
        """Whether an item of a source waits."""
        return source in self._sources

    def add(self, source: Hashable, item: T, nbytes: int) -> None:
        """Add an item after those of its source."""
        waiting = self._sources.get(source)
        if waiting is None:
            waiting = self._sources[source] = deque()
            self._next.append(source)
        waiting.append((item, nbytes))
        self.nbytes += nbytes
        self._count += 1

    def take(self, bytes_max: int) -> list[T]:
        """Remove and return items, one of each source in turn: at least one, then as many as fit."""
        taken: list[T] = []
        room = bytes_max
        while self._next:
            source = self._next[0]
            waiting = self._sources[source]
            item, nbytes = waiting[0]
            if taken and nbytes > room:
                break  # the source is the first one next time
            waiting.popleft()
            self._next.popleft()
            if waiting:
                self._next.append(source)
            else:
                del self._sources[source]
            taken.append(item)
            room -= nbytes
            self.nbytes -= nbytes
        self._count -= len(taken)
        return taken
