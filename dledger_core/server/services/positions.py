"""Reads by position: an entry of the log, or messages of the CommitLog that precedes it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dledger_core.errors import BehindError, CorruptRecordError, IndexOutOfRangeError
from dledger_core.server.replica.replica import Replica

__all__ = ["LogPrefix", "OpenLogPrefix", "Positions", "PrefixMessages"]


class PrefixMessages(Protocol):
    """Consecutive messages of a ``LogPrefix``."""

    @property
    def sizes(self) -> npt.NDArray[np.uint32]:
        """Bytes of each message; empty where the file's messages end."""

    @property
    def data(self) -> memoryview:
        """The messages."""

    @property
    def count(self) -> int:
        """Number of messages."""

    @property
    def next_position(self) -> int:
        """Position to continue from."""


class LogPrefix(Protocol):
    """The CommitLog that precedes a log: its messages by position. Thread-safe."""

    @property
    def end(self) -> int:
        """Position after its last file, where the log may start."""

    def read(self, position: int, max_bytes: int) -> PrefixMessages | None:
        """Return messages from ``position`` on, up to ``max_bytes`` but at least one; None if no file contains it.

        Raises:
            IndexOutOfRangeError: no message starts at ``position``.
            CorruptRecordError: the message is damaged, or its file cannot be read.
            BadRequestError: the message is too large.
        """


OpenLogPrefix = Callable[[Path, str], LogPrefix]
"""Opens the CommitLog that precedes a store, given the store's directory and the fingerprint of the CommitLog."""


class Positions:
    """Reads by position from one replica; coroutines run on the node's event loop, disk work in ``executor``.

    Args:
        replica: the group's replica.
        executor: threads that read; None = the loop's own.
        open_prefix: opens the CommitLog that precedes the log; None = a preceding CommitLog is not served.
    """

    def __init__(self, replica: Replica, executor: Executor | None, open_prefix: OpenLogPrefix | None = None) -> None:
        self._replica = replica
        self._executor = executor
        self._open_prefix = open_prefix
        self._prefix: LogPrefix | None = None

    def _log_prefix(self) -> LogPrefix | None:
        """Return the CommitLog that precedes the log; a snapshot install may have brought its fingerprint."""
        fingerprint = self._replica.log.commitlog_prefix
        if self._prefix is None and fingerprint is not None and self._open_prefix is not None:
            self._prefix = self._open_prefix(self._replica.log.directory, fingerprint)
        return self._prefix

    async def at(self, position: int, max_bytes: int) -> PrefixMessages | int:
        """Return the messages or the entry at a position.

        Returns:
            At least one message of the preceding CommitLog; or, in the log, the index of the entry at or after the
            position, at most the end of the entries that are committed here.

        Raises:
            IndexOutOfRangeError: ``position`` was deleted, or no message of the CommitLog starts there.
            CorruptRecordError: the message is damaged here.
            BehindError: a snapshot install has just restarted the log, and it contains no entry yet.
        """
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._at, position, max_bytes)

    def _at(self, position: int, max_bytes: int) -> PrefixMessages | int:
        log = self._replica.log
        while True:
            first = log.first_index()
            try:
                found = self._find(position, max_bytes, first)
            except (IndexOutOfRangeError, CorruptRecordError):
                if first == log.first_index():
                    raise
                continue  # retention has deleted the log's first segment meanwhile
            if first == log.first_index():
                return found

    def _find(self, position: int, max_bytes: int, first: int) -> PrefixMessages | int:
        log = self._replica.log
        if log.last_index() < first and first > 0:
            raise BehindError(
                "the log was just restarted by a snapshot install",
                f"group {self._replica.group}",
                "ask another replica",
            )
        begin = log.position_of(first)
        while position < begin:
            prefix = self._log_prefix()
            found = prefix.read(position, max_bytes) if prefix is not None and position < prefix.end else None
            if found is None:
                raise self._out_of_range(position, begin)
            if found.count:
                return found
            position = found.next_position
        return min(int(log.index_at_position(position)), int(self._replica.readable_end))

    def _out_of_range(self, position: int, begin: int) -> IndexOutOfRangeError:
        return IndexOutOfRangeError(
            f"position {position} is before the log's first entry",
            f"group {self._replica.group} on {self._replica.node_id}",
            f"read from position {begin} on"
            + ("; older messages need the CommitLog next to the store" if self._log_prefix() is not None else ""),
            {"position": position, "first_position": begin},
        )
