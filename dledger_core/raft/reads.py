"""ReadIndex bookkeeping (Ongaro's thesis, section 6.4): requests wait for a round that a majority echoes."""

from __future__ import annotations

from collections import deque

from dledger_core.ids import Index
from dledger_core.raft.ready import ReadReady

__all__ = ["ReadQueue"]


class ReadQueue:
    """Requests not yet in a round, rounds on their way, and answers for the next Ready."""

    __slots__ = ("_rounds", "answers", "waiting")

    def __init__(self) -> None:
        self.waiting: list[int] = []
        self.answers: list[ReadReady] = []
        self._rounds: deque[tuple[int, Index, list[int]]] = deque()

    @property
    def in_round(self) -> bool:
        """Whether a round is on its way."""
        return bool(self._rounds)

    def start_round(self, number: int, commit_index: Index) -> None:
        """Puts all waiting requests into heartbeat round ``number``, which is about to leave."""
        if self.waiting:
            self._rounds.append((number, commit_index, self.waiting))
            self.waiting = []

    def confirm(self, number: int) -> None:
        """Answers every request whose round a majority has echoed."""
        while self._rounds and self._rounds[0][0] <= number:
            _, index, requests = self._rounds.popleft()
            self.answers.extend(ReadReady(request, index) for request in requests)

    def fail(self) -> None:
        """Answers every open request with None: leadership is gone."""
        for _, _, requests in self._rounds:
            self.answers.extend(ReadReady(request, None) for request in requests)
        self.answers.extend(ReadReady(request, None) for request in self.waiting)
        self._rounds.clear()
        self.waiting = []
