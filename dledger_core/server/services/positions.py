"""What lies at a position: an entry of the log, or messages of the CommitLog that the group goes on behind."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from functools import cached_property
from typing import TYPE_CHECKING

from dledger_core.errors import BehindError, CorruptRecordError, IndexOutOfRangeError
from dledger_core.server.replica.replica import Replica

if TYPE_CHECKING:
    from dledger_core.rocketmq.store.commitlog_prefix import CommitLogPrefix, PrefixBatch

__all__ = ["Positions"]


class Positions:
    """Answers AT for one replica; coroutines run on the node's event loop, disk work in ``executor``."""

    def __init__(self, replica: Replica, executor: Executor) -> None:
        self._replica = replica
        self._executor = executor

    async def at(self, position: int, max_bytes: int) -> PrefixBatch | int:
        """Returns what a reader finds at a position.

        Returns:
            Messages of the old CommitLog, at least one; or, where the log has begun, the index of the entry that the
            position lies in, or of the first one behind it, at most the end of what is committed here.

        Raises:
            IndexOutOfRangeError: before what is still held, or where no message of the CommitLog begins.
            CorruptRecordError: the message is damaged here.
            BehindError: this replica has begun anew behind what its leader has, and holds nothing yet.
        """
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._at, position, max_bytes)

    @cached_property
    def _old(self) -> tuple[CommitLogPrefix, int] | None:
        """The CommitLog that the log begins behind, and where it ends; None if it begins behind none."""
        behind = self._replica.log.behind
        if behind is None:
            return None
        # Few groups have an old CommitLog: the others' nodes need not load what reads messages.
        from dledger_core.rocketmq.store.commitlog_prefix import CommitLogFingerprint, CommitLogPrefix
        from dledger_core.rocketmq.store.directory import COMMITLOG_DIRECTORY

        directory = self._replica.log.directory.parent / COMMITLOG_DIRECTORY
        return CommitLogPrefix(directory), CommitLogFingerprint.parse(behind).end

    def _at(self, position: int, max_bytes: int) -> PrefixBatch | int:
        log = self._replica.log
        while True:
            first = log.first_index()
            try:
                found = self._find(position, max_bytes, first)
            except (IndexOutOfRangeError, CorruptRecordError):
                if first == log.first_index():
                    raise
                continue  # retention took the log's beginning meanwhile
            if first == log.first_index():
                return found

    def _find(self, position: int, max_bytes: int, first: int) -> PrefixBatch | int:
        log = self._replica.log
        if log.last_index() < first and first > 0:
            raise BehindError("the log here has just begun anew", f"group {self._replica.group}", "ask another replica")
        begin = log.position_of(first)
        while position < begin:
            run = self._old[0].read(position, max_bytes) if self._old is not None and position < self._old[1] else None
            if run is None:
                raise self._out_of_range(position, begin)
            if run.count:
                return run
            position = run.next_position
        return min(int(log.index_at_position(position)), int(self._replica.readable_end))

    def _out_of_range(self, position: int, begin: int) -> IndexOutOfRangeError:
        return IndexOutOfRangeError(
            f"position {position} is before what is held here",
            f"group {self._replica.group} on {self._replica.node_id}",
            f"read from position {begin} on"
            + ("; older messages need the CommitLog beside the store" if self._old is not None else ""),
            {"position": position, "first_position": begin},
        )
