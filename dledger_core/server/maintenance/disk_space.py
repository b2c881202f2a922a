"""Disk-full guard: reject appends before anything is written, and accept them again once space is free.

Staged bytes count as written, so that a fast leader does not use up the reserve between two checks of the disk.
Control entries (a leader's no-op, the end of a transaction) may use the reserve. A follower accepts entries until half
of the reserve is used, then small messages only, and no entries once an eighth is left. It sends no response to an
AppendEntries that it does not accept: the leader continues with the others, and probes without sending the entries
again. Its responses to heartbeats report that, so that the leader does not count it. It does not take over leadership
either, so that a leader whose own disk is nearly full can offer it to one voter after another.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from dledger_core.config import LIMITS, StorageLimits
from dledger_core.errors import DiskFullError
from dledger_core.ids import Position
from dledger_core.raft import AppendEntries, Message, RawNode, TimeoutNow
from dledger_core.storage import CommitLog
from dledger_core.storage.files.file_system import DiskSpace

_LOG = logging.getLogger(__name__)

_RETRY_MS: Final = 1000
"""Pause that DISK_FULL asks a client for: free space appears by deletion, not within a retry's usual pause."""
_NEAR: Final = 16
"""While free space is above this many reserves, staged bytes of the node's other logs are not counted."""


class SpaceGuard:
    """Disk-full guard of one log; lives on the event loop.

    Args:
        group: its name, for messages.
        log: the log.
        reserve_bytes: free space below which appends are rejected; 0 = never.
        limits: the node's limits.
    """

    def __init__(self, group: str, log: CommitLog, reserve_bytes: int, limits: StorageLimits = LIMITS) -> None:
        self._group = group
        self._log = log
        self._reserve_bytes = reserve_bytes
        self._limits = limits
        self._neighbours: Sequence[SpaceGuard] = ()
        self._seen = log.space()  # a small disk may be full before the first check
        self._full = False

    @property
    def is_full(self) -> bool:
        """Whether appends are rejected; checks the free space first."""
        if not self._full and (free := self._free_bytes()) < self._reserve_bytes:
            self._full = True
            _LOG.warning("disk nearly full, rejecting appends: group=%s free_bytes=%d", self._group, free)
        return self._full

    @property
    def accepts_entries(self) -> bool:
        """Whether a follower with this disk accepts all entries, so that it acknowledges appends."""
        return not self.is_full or self._free_bytes() >= self._reserve_bytes // 2

    @property
    def free_bytes(self) -> int:
        """Free bytes of the disk at the last check, without those that are staged since; never negative."""
        return max(self._free_bytes(), 0)

    @property
    def total_bytes(self) -> int:
        """Size of the disk."""
        return self._seen[1].total_bytes

    def observe(self, position: Position, space: DiskSpace, neighbours: Sequence[SpaceGuard] = ()) -> None:
        """Record the result of ``CommitLog.space``, and the guards of all logs on the disk, this one included."""
        self._seen = position, space
        self._neighbours = neighbours
        # An eighth more than the reserve must be free again: otherwise each freed block would admit one append.
        if self._full and self._free_bytes() >= self._reserve_bytes + self._reserve_bytes // 8:
            self._full = False
            _LOG.warning("disk space free again, accepting appends: group=%s", self._group)

    def check(self) -> None:
        """Raise DiskFullError if an append would use the reserve."""
        if self.is_full:
            raise DiskFullError(
                "the disk is nearly full",
                str(self._log.directory),
                f"free disk space or set a retention; retry after {_RETRY_MS} ms",
                {"group": self._group, "free_bytes": self._free_bytes(), "retry_after_ms": _RETRY_MS},
            )

    def admits(self, message: Message, raft: RawNode) -> bool:
        """Whether this node may accept a message; a rejected one counts as lost.

        A probe about entries that were rejected gets no response either: otherwise the leader would send them again.
        """
        if isinstance(message, TimeoutNow):
            return not self.is_full
        if not isinstance(message, AppendEntries) or self.accepts_entries:
            return True
        free, nbytes = self._free_bytes(), sum(batch.nbytes for batch in message.batches)
        if nbytes:
            return nbytes <= self._limits.small_message_bytes and free - nbytes >= self._reserve_bytes // 8
        return message.prev_index <= raft.last_index

    def _free_bytes(self) -> int:
        """Free bytes once everything staged is written."""
        free = self._seen[1].free_bytes
        left = free - self._unwritten_bytes()
        if self._neighbours and left < _NEAR * self._reserve_bytes:
            left = free - sum(guard._unwritten_bytes() for guard in self._neighbours)
        return left

    def _unwritten_bytes(self) -> int:
        """Bytes that were staged since the last check, or were not written then."""
        nbytes = max(0, self._log.staged_end - self._seen[0])
        return nbytes + nbytes * 2 // 3  # worst case: empty bodies, where the index adds two thirds
