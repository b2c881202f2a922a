"""The tables as of the committed entries, and the control entries that wait for their commit."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from dledger_core import control
from dledger_core.errors import invariant
from dledger_core.ids import NO_INDEX, Index
from dledger_core.raft import Batch, Configuration, ConfigurationInForce
from dledger_core.record import HEADER_BYTES, MAGIC_DATA, records_of
from dledger_core.storage import CommitLog
from dledger_core.storage.tables.tables import LogTables


@dataclass(frozen=True, slots=True)
class _Control:
    """A control entry that is staged and waits for its commit."""

    index: Index
    time_ms: int
    body: bytes


def known_configurations(log: CommitLog, bootstrapped: Configuration) -> list[ConfigurationInForce]:
    """Return the configurations of a log, after the one in force before its first entry."""
    known = [ConfigurationInForce(found.index, Configuration.from_bytes(found.body)) for found in log.configurations]
    if not known or known[0].index >= log.first_index():
        known.insert(0, ConfigurationInForce(NO_INDEX, bootstrapped))
    return known


class Controls:
    """The tables of one replica, and the control entries that are not applied to them yet.

    Attributes:
        commit_index: the last entry that is known to be committed.
        tables: the state as of that entry.
    """

    def __init__(self, log: CommitLog) -> None:
        self.commit_index = log.commit_index
        self.tables = log.load_tables()
        self._waiting: deque[_Control] = deque()
        # The log may have more than the stored tables: those are written once a second, see ReplicaStore.
        start, end = Index(max(self.tables.applied_index + 1, log.first_index())), log.last_index() + 1
        for index, time_ms, body in log.control_entries(start, Index(end)):
            self._waiting.append(_Control(index, time_ms, body))
        self.commit(self.commit_index)

    def stage(self, batch: Batch) -> None:
        """Record the control and configuration entries of a staged batch: if it has any, its first one is such."""
        records = records_of(batch)
        if records.first.magic == MAGIC_DATA:
            return
        view, time_ms = memoryview(records.data), records.first.time_ms
        # All of them: a leader joins the appends of many producers in one batch, and a follower that applied only the
        # first one would accept a repeat once it leads (test_batch_of_producers_has_the_same_effect_on_a_follower).
        for row in np.flatnonzero(records.headers["magic"] != MAGIC_DATA).tolist():
            begin, index = int(records.starts[row]), Index(batch.first_index + row)
            body = bytes(view[begin + HEADER_BYTES : begin + int(records.sizes[row])])
            # Not the tables' applied index: those of a snapshot may already include entries that follow it.
            last = self._waiting[-1].index if self._waiting else NO_INDEX
            invariant(index > last, "a control entry is staged out of order", index=index, last=last)
            self._waiting.append(_Control(index, time_ms, body))

    def truncate(self, index: Index) -> None:
        """Discard staged entries from ``index`` on."""
        # Another leader's entries take their place. Applied, they would end transactions that no majority has ended:
        # the simulation finds it (mutation "a truncation keeps control entries").
        while self._waiting and self._waiting[-1].index >= index:
            self._waiting.pop()

    def commit(self, commit_index: Index) -> bool:
        """Apply the entries up to ``commit_index`` to the tables; return whether there were any."""
        invariant(
            commit_index >= self.commit_index, "the commit index moved back", old=self.commit_index, new=commit_index
        )
        self.commit_index = commit_index
        if not self._waiting or self._waiting[0].index > commit_index:
            return False
        while self._waiting and self._waiting[0].index <= commit_index:
            entry = self._waiting.popleft()
            self.tables.apply(entry.index, entry.time_ms, entry.body)
        return True

    @property
    def awaits_archive(self) -> bool:
        """Whether a range of an archive is recorded by an entry that waits for its commit."""
        return any(control.unpack(entry.body).get("k") == "archived" for entry in self._waiting)

    @property
    def log_time_ms(self) -> int:
        """The newest log time of the log, committed or not."""
        staged = [control.log_time(control.unpack(entry.body)) or 0 for entry in self._waiting]
        return max([self.tables.log_time_ms, *staged])

    def restart(self, first_index: Index, tables: LogTables) -> None:
        """Replace the tables after a snapshot install; all entries before ``first_index`` are committed."""
        self._waiting.clear()
        self.tables = tables
        self.commit(Index(first_index - 1))
