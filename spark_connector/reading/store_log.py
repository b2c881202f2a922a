"""One group's log in a store directory, read as it lies there: ours or Java's, live or at rest.

A process keeps its newest view of each store. What is asked again and again while a store grows, and what task after
task reads, then costs a look behind the last known entry, not a walk over the tail of the files.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from dledger_core import BadRequestError, CorruptRecordError, IndexOutOfRangeError, StoreMismatchError
from spark_connector.errors import OptionError, RetentionError
from spark_connector.options import DLedgerOptions
from spark_connector.reading.logs import Bounds, Chunk, RecordFacts, facts_of
from spark_connector.reading.planning import Range
from spark_connector.reading.visible import read_chunk

if TYPE_CHECKING:
    from dledger_core import StoreReader
    from dledger_core.record import Records

__all__ = ["StoreLog", "fresh_view"]

_T = TypeVar("_T")
_LOOK_EVERY_S: Final = 0.1
_NAMED_MAX: Final = 4

_views: dict[tuple[int, str], StoreReader] = {}
_lock = threading.Lock()


def fresh_view(path: str) -> StoreReader:
    """Opens the store as it is now and keeps the view for this process.

    Raises:
        OptionError: there is no store.
    """
    from dledger_core import open_store

    key = (os.getpid(), path)
    with _lock:
        try:
            # An older view is not closed: another thread may be reading from it. Its files close with it.
            _views[key] = view = open_store(path, since=_views.get(key))
        except StoreMismatchError as error:
            raise OptionError(f"wrong value {path!r}: {error.what}", "path", _remedy(path, error)) from None
    return view


def _remedy(path: str, error: StoreMismatchError) -> str:
    """Names the stores below, where the path is that of a node's whole directory or of a group's."""
    below = sorted(str(data.parent) for depth in ("*", "*/*") for data in Path(path).glob(f"{depth}/data"))
    return f"use {' or '.join(below[:_NAMED_MAX])}" if below else error.remedy


class StoreLog:
    """A log in a store directory."""

    def __init__(self, options: DLedgerOptions) -> None:
        self._options = options
        self._view = fresh_view(options.path)
        # A Java store does not record its group; the directory above usually has its name.
        recorded = self._view.group or Path(options.path).resolve().parent.name
        self.group = options.groups[0] if options.groups_given else recorded

    def bounds(self) -> Bounds:
        """Looks at the store anew, so a live one is seen to grow.

        What a store records as committed is a lower bound, and Java's generation B records nothing; read_uncommitted
        reads what lies behind it too, and what open transactions hide.
        """
        self._view = view = fresh_view(self._options.path)
        shown = view.committed_end("end") if self._uncommitted else view.visible_end
        return Bounds(first=max(0, view.first_index), end=shown, commit=-1, log=view.log_uuid)

    @property
    def _uncommitted(self) -> bool:
        return self._options.isolation == "read_uncommitted"

    def record(self, index: int) -> RecordFacts:
        """Reads the record at ``index``."""
        return facts_of(self._view.read(index, index + 1), index, self.group)

    def index_at_time(self, timestamp_ms: int, bounds: Bounds) -> int:
        """Return the first entry appended at or after a time, at most the end of ``bounds``."""
        try:
            return min(self._view.index_at_time(timestamp_ms), bounds.end)
        except BadRequestError:
            raise OptionError(
                "the store holds no append times", "startingTimestamp, endingTimestamp", "give indexes instead"
            ) from None

    def wait(self, known: Bounds, timeout_ms: int) -> bool:
        """Looks for new entries every 100 ms."""
        deadline = time.monotonic() + timeout_ms / 1000
        while self.bounds().end == known.end:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(_LOOK_EVERY_S, left))
        return True

    def pin(self, name: str, start: int, seconds: float) -> None:
        """Does nothing: a store at rest deletes nothing, and a live one asks nobody."""

    def chunk(self, part: Range, start: int, replica: int) -> Chunk:
        """Reads ``fetchMaxBytes`` at most, but one entry at least; looks anew where the view does not serve."""
        return self._reading(lambda: self._chunk(part, start), part, start)

    def records(self, part: Range, start: int, max_bytes: int) -> Records:
        """Reads records as they lie on disk, of control entries and attempts that lost, too; otherwise as ``chunk``."""
        return self._reading(lambda: self._view.records(start, part.end, max_bytes), part, start)

    def _reading(self, read: Callable[[], _T], part: Range, start: int) -> _T:
        try:
            return read()
        except (IndexOutOfRangeError, CorruptRecordError):
            self._view = fresh_view(self._options.path)
        try:
            return read()
        except IndexOutOfRangeError as error:
            if start >= self._view.first_index:
                raise
            raise RetentionError.of(part.group, start, self._view.first_index, part.end) from error

    def _chunk(self, part: Range, start: int) -> Chunk:
        return read_chunk(self._view, part, start, self._options.read_bytes(files=True), uncommitted=self._uncommitted)
