"""A disk that is nearly full: appends are refused before anything of them is written, and taken again by themselves.

What is on its way to the disk counts as written, so a fast leader does not run through the reserve between two looks.
Control entries (a leader's NOOP, the end of a transaction) live on the reserve. A follower whose disk is nearly full
does not answer what it cannot take: the leader goes on with the others, and asks again without sending again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from dledger_core.errors import DiskFullError
from dledger_core.ids import Position
from dledger_core.raft import AppendEntries, Message, RawNode
from dledger_core.storage import CommitLog
from dledger_core.storage.files.file_system import DiskSpace

__all__ = ["SpaceGuard"]

_LOG = logging.getLogger(__name__)

RETRY_AFTER_MS: Final = 1000
_NEAR: Final = 16
"""While so many reserves are free, nobody counts what the other logs of the node are about to write."""
SMALL_BYTES: Final = 64 << 10
"""What a follower still takes at once when half of the reserve is gone: a NOOP, the end of a transaction."""


class SpaceGuard:
    """Room for one log; lives on the event loop.

    Args:
        group: its name, for messages.
        log: the log.
        reserve_bytes: appends are refused while less is free; 0 = never.
    """

    def __init__(self, group: str, log: CommitLog, reserve_bytes: int) -> None:
        self._group = group
        self._log = log
        self._reserve_bytes = reserve_bytes
        self._neighbours: Sequence[SpaceGuard] = ()
        self._seen = log.space()  # the first look: a small disk may be full before the clock strikes
        self._full = False

    @property
    def is_full(self) -> bool:
        """Whether appends are refused."""
        if not self._full and self._left() < self._reserve_bytes:
            self._full = True
            _LOG.warning("group %s: the disk is nearly full, appends are refused", self._group)
        return self._full

    def observe(self, position: Position, space: DiskSpace, neighbours: Sequence[SpaceGuard] = ()) -> None:
        """Takes note of what ``CommitLog.space`` found, and of the logs that share the disk, this one included."""
        self._seen = position, space
        self._neighbours = neighbours
        # A little more than the bound must be free again, or every freed block would be an answer to one append.
        if self._full and self._left() >= self._reserve_bytes + self._reserve_bytes // 8:
            self._full = False
            _LOG.warning("group %s: there is room on the disk again, appends are taken", self._group)

    def check(self) -> None:
        """Raises DiskFullError if an append would eat into the reserve."""
        if self.is_full:
            raise DiskFullError(
                "the disk is nearly full",
                str(self._log.directory),
                f"free some space on it, or let retention do so; retry after {RETRY_AFTER_MS} ms",
                {"group": self._group, "free_bytes": self._left(), "retry_after_ms": RETRY_AFTER_MS},
            )

    def admits(self, message: Message, raft: RawNode) -> bool:
        """Whether a follower may take a message; what it may not counts as lost.

        A question about entries that were not taken is not answered either, or the leader would send them again.
        """
        if not isinstance(message, AppendEntries) or not self.is_full:
            return True
        left, nbytes = self._left(), sum(batch.nbytes for batch in message.batches)
        if left >= self._reserve_bytes // 2:
            return True
        if nbytes:
            return nbytes <= SMALL_BYTES and left - nbytes >= self._reserve_bytes // 8
        return message.prev_index <= raft.last_index

    def _left(self) -> int:
        """Bytes that will be free once all is written that was staged."""
        free = self._seen[1].free_bytes
        left = free - self._coming()
        if self._neighbours and left < _NEAR * self._reserve_bytes:
            left = free - sum(guard._coming() for guard in self._neighbours)
        return left

    def _coming(self) -> int:
        """Bytes that were staged since the last look, or were not written then."""
        coming = max(0, self._log.staged_end - self._seen[0])
        return coming + coming * 2 // 3  # of the smallest entries the index is two thirds more
