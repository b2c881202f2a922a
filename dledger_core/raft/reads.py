"""ReadIndex bookkeeping (Ongaro's thesis, section 6.4): a request waits for a heartbeat round of a majority.

A leader cannot know from its own state that it still leads: a newer leader may have committed entries that it lacks.
A majority that echoes a round sent after the request proves that at the request no newer leader had been elected.
"""

from __future__ import annotations

from collections import deque

from dledger_core.ids import Index
from dledger_core.raft.ready import ReadReady


class ReadQueue:
    """Requests that are not yet in a round, rounds in flight, and results for the next Ready."""

    __slots__ = ("_rounds", "results", "waiting")

    def __init__(self) -> None:
        self.waiting: list[int] = []
        self.results: list[ReadReady] = []
        self._rounds: deque[tuple[int, Index, list[int]]] = deque()

    @property
    def in_round(self) -> bool:
        """Whether a round is in flight."""
        return bool(self._rounds)

    def start_round(self, number: int, commit_index: Index) -> None:
        """Put all waiting requests into heartbeat round ``number``, which is about to be sent."""
        if self.waiting:
            self._rounds.append((number, commit_index, self.waiting))
            self.waiting = []

    def confirm(self, number: int) -> None:
        """Complete every request whose round a majority has echoed."""
        # A later round is a proof for all earlier requests too (test_reads_share_a_round_and_a_lost_round_is_repeated).
        while self._rounds and self._rounds[0][0] <= number:
            _, index, requests = self._rounds.popleft()
            self.results.extend(ReadReady(request, index) for request in requests)

    def fail(self) -> None:
        """Complete every open request with None, because leadership is lost."""
        # A response and not silence: the caller asks the new leader at once (test_reads_of_a_deposed_leader_fail).
        for _, _, requests in self._rounds:
            self.results.extend(ReadReady(request, None) for request in requests)
        self.results.extend(ReadReady(request, None) for request in self.waiting)
        self._rounds.clear()
        self.waiting = []
