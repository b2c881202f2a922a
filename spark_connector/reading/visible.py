"""What ``read_committed`` readers see of a store, told from its files as a server would.

A store of ours has a snapshot of its tables; the control entries behind it bring them up to date. A process keeps them
for each store, so a log that grows is looked at only where it is new. A store that Java wrote hides nothing.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dledger_core.ids import Index
from dledger_core.record import MAGIC_CONTROL, MAGIC_DATA, READ_SCHEMA, TIME_MASK, empty_batch, inside
from spark_connector.reading.logs import Chunk

if TYPE_CHECKING:
    from dledger_core import StoreReader
    from dledger_core.storage.tables import LogTables
    from spark_connector.reading.planning import Range

__all__ = ["losers_of", "read_chunk", "unseen", "visible_end"]

_SKIPPED_MIN: Final = 1024
"""A read ends before so many entries that are not wanted; fewer are read and dropped."""
_WALK_BYTES: Final = 8 << 20
_NOTHING: Final = empty_batch(READ_SCHEMA)


class _Known:
    """The tables of one store, and up to where its log was looked at."""

    def __init__(self, view: StoreReader) -> None:
        from dledger_core.storage.files import OsFiles
        from dledger_core.storage.layout import Layout
        from dledger_core.storage.prefix import load_tables

        assert view.meta is not None
        self.tables: LogTables = load_tables(OsFiles(), Layout(view.path), view.meta)
        self.log_uuid = view.log_uuid
        self.seen = self.loaded = max(self.tables.applied_index + 1, view.first_index)

    def serves(self, view: StoreReader) -> bool:
        """Whether nothing of the log is missing between what was looked at and what the view holds.

        A snapshot may be newer than the view: outcomes that it knows ahead do no harm.
        """
        known = self.seen <= max(view.last_index + 1, self.loaded)
        return self.log_uuid == view.log_uuid and view.first_index <= self.seen and known

    def extend(self, view: StoreReader, end: int) -> None:
        for index, time_ms, magic, body in view.control_entries(self.seen, end):
            if magic == MAGIC_DATA:  # its row is missing in the index, which each such entry is searched for
                self._walk(view, index, end)
                break
            if magic == MAGIC_CONTROL:
                self.tables.apply(index, time_ms, body)
        self.seen = max(self.seen, end)

    def _walk(self, view: StoreReader, start: int, end: int) -> None:
        """Looks at the records themselves."""
        while start < end:
            records = view.records(start, end, _WALK_BYTES)
            for at in np.flatnonzero(records.headers["magic"] == MAGIC_CONTROL).tolist():
                one = records.slice(at, at + 1)
                time_ms = int(one.headers["mark"][0]) & TIME_MASK
                self.tables.apply(Index(start + at), time_ms, bytes(one.bodies))
            start += records.count


_known: dict[tuple[int, str], _Known] = {}
_guesses: WeakKeyDictionary[StoreReader, _Known] = WeakKeyDictionary()
"""Of views of which more was asked than is known to be committed: that may still be replaced by something else."""
_lock = threading.Lock()


def _known_of(view: StoreReader, end: int) -> _Known:
    """Returns what is known of the store, to be extended to ``end``; the caller holds the lock."""
    if view.commit_index is None or end > view.commit_index + 1:
        if view not in _guesses:
            _guesses[view] = _Known(view)
        return _guesses[view]
    key = (os.getpid(), str(view.path))
    known = _known.get(key)
    if known is None or not known.serves(view):
        known = _known[key] = _Known(view)
    return known


def _tables(view: StoreReader, end: int) -> LogTables:
    """Returns the tables as of ``end`` or later; the caller holds the lock."""
    known = _known_of(view, end)
    known.extend(view, end)
    return known.tables


def unseen(view: StoreReader, end: int) -> int:
    """Returns in how many entries before ``end`` control entries are still to be looked for; see ``visible_end``."""
    with _lock:
        return 0 if view.meta is None else max(0, end - _known_of(view, end).seen)


def visible_end(view: StoreReader, end: int) -> int:
    """Returns where readers stop that do not see open transactions.

    Args:
        view: the store.
        end: the end of what is committed, or taken for it.

    Raises:
        CorruptRecordError: a control entry is damaged, or the snapshot that stands for deleted ones.
    """
    if view.meta is None:
        return end
    with _lock:
        return int(_tables(view, end).transactions.visible_end(end))


def losers_of(view: StoreReader, start: int, end: int, known_end: int) -> list[tuple[int, int]]:
    """Returns the ranges of [start, end) whose entries belong to attempts that lost, sorted.

    Args:
        view: the store.
        start: first index.
        end: index behind the last one; below the visible end as of ``known_end``.
        known_end: the end of what is committed, or taken for it.

    Raises:
        CorruptRecordError: as ``visible_end``.
    """
    if view.meta is None:
        return []
    with _lock:
        return _tables(view, known_end).transactions.losers(start, end)


def read_chunk(view: StoreReader, part: Range, start: int, max_bytes: int, *, known_end: int | None) -> Chunk:
    """Reads data entries from ``start`` on, up to the range's end or ``max_bytes``; one entry at least is looked at.

    Args:
        view: the store.
        part: the range being read.
        start: where to go on.
        max_bytes: bound on the records.
        known_end: attempts are left out that lost as far as the log says up to there; None leaves none out.

    Raises:
        IndexOutOfRangeError: ``start`` is not in the log.
        CorruptRecordError: a record is damaged.
    """
    lost = [] if known_end is None else losers_of(view, start, part.end, known_end)
    while lost and lost[0][0] <= start:
        start = max(start, lost.pop(0)[1])
    if start >= part.end:
        return Chunk(_NOTHING, part.end)
    stop = next((low for low, high in lost if high - low > _SKIPPED_MIN), part.end)
    batch = view.read(start, stop, max_bytes=max_bytes)
    indexes = np.asarray(batch.column("index"))
    keep = pc.equal(batch.column("magic"), MAGIC_DATA)
    if lost:
        keep = pc.and_(keep, pa.array(~inside(indexes, lost)))
    if keep.false_count:  # a filter copies all bodies
        batch = batch.filter(keep)
    return Chunk(batch.drop_columns("magic"), int(indexes[-1]) + 1)
