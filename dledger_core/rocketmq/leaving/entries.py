"""The entries of a source that become messages: where they end, which are left out, and how they are read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from dledger_core.checksum import crc32
from dledger_core.errors import ConfigError, StoreMismatchError
from dledger_core.record import MAGIC_DATA
from dledger_core.rocketmq.convert.parts import Chunk, ClassicPart, LogPart, SourceCursor, SourcePart, chunk_of
from dledger_core.rocketmq.convert.source import ConversionSource
from dledger_core.rocketmq.leaving.plan import CommittedEntry, LeaveRequest
from dledger_core.rocketmq.store.location import COMMITLOG_DIRECTORY, commitlog_next_to
from dledger_core.storage.read.store_reader import StoreReader

_CHUNK_BYTES: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class End:
    """The end of the entries to convert, its reason, and the number of entries after it."""

    index: int
    because: str
    left_out: int


class Part(NamedTuple):
    """Consecutive entries, which of them are kept, and whether these move: a classic CommitLog keeps its positions."""

    chunk: Chunk
    keep: npt.NDArray[np.bool_]
    moves: bool


class Entries:
    """The entries to convert.

    Args:
        request: with the decisions about them.
        source: the opened source.

    Raises:
        ConfigError: a decision is missing, or a part of the log is.
    """

    def __init__(self, request: LeaveRequest, source: ConversionSource) -> None:
        self.end: Final = _end_of(request, source)
        parts: tuple[SourcePart, ...] = source.parts if source.before is None else (source.before, *source.parts)
        self._parts = parts
        self.classic: Final = next((part for part in parts if isinstance(part, ClassicPart)), None)
        if self.classic is None:
            _check_complete(source)
        self.log_bytes: Final = sum(part.data_bytes for part in parts if isinstance(part, LogPart))
        self.dropped: Final = _merged(request.drop, source.first_index, self.end.index)
        self._hidden = source.hidden_ranges(drop_open=request.drop_open)

    def read(self, cursor: SourceCursor) -> Iterator[Part]:
        """Yield the entries of all parts from ``cursor`` on."""
        for number, part in enumerate(self._parts):
            if number < cursor.part:
                continue
            begin = cursor if number == cursor.part and cursor != SourceCursor() else None
            if begin is None:
                begin = SourceCursor(number, part.begin.at, part.begin.number)
            moves = isinstance(part, LogPart)
            for chunk in self._log_chunks(part, begin) if isinstance(part, LogPart) else part.read(begin):
                yield Part(chunk, self._kept(chunk), moves)

    def _log_chunks(self, part: LogPart, cursor: SourceCursor) -> Iterator[Chunk]:
        at = cursor.at
        for start, stop in [*self.dropped, (self.end.index, self.end.index)]:
            while at < start:
                records = part.reader.raw(at, start, _CHUNK_BYTES)
                at += records.count
                yield chunk_of(records, SourceCursor(cursor.part, at, at), np.zeros(records.count, np.uint32))
            at = max(at, stop)

    def _kept(self, chunk: Chunk) -> npt.NDArray[np.bool_]:
        keep = np.asarray(chunk.magics == MAGIC_DATA)
        if chunk.name == "log":
            for start, end in self._hidden:
                if start < chunk.first + chunk.count and end > chunk.first:
                    keep[max(start - chunk.first, 0) : max(end - chunk.first, 0)] = False
        return keep


def _end_of(request: LeaveRequest, source: ConversionSource) -> End:
    """Return the end of the committed entries, or raise ConfigError if a decision is missing."""
    log = source.log
    if log is None:
        raise ConfigError(
            "the directory has a classic CommitLog and no DLedger store", str(source.path), "nothing to convert"
        )
    stop = int(log.last_index) + 1
    if request.committed is not None:
        end = request.committed.index + 1
        if end > stop:
            raise ConfigError(
                f"the store ends with entry {stop - 1}, and the group has committed entry {end - 1}",
                str(log.path),
                "convert a replica that has all committed entries",
                {"last_index": stop - 1, "committed_index": end - 1},
            )
        _check_same(request.committed, log)
        return End(end, f"a majority has committed entry {end - 1}", stop - end)
    if request.until == "end":
        return End(stop, "--until end: all entries, committed or not", 0)
    committed = source.commit_index
    if committed < 0 and stop > source.first_index:
        raise ConfigError(
            "the store records no commit index",
            str(log.path),
            "name live nodes with --committed-by PEERS, or convert all entries with --until end",
            {"last_index": stop - 1},
        )
    end = min(committed + 1, stop)
    if end < stop and request.until is None:
        raise ConfigError(
            f"the store records entry {committed} as committed and has {stop - end} entries after it, which may be "
            "acknowledged",
            str(log.path),
            "name live nodes with --committed-by PEERS, convert all entries with --until end, or leave these out "
            "with --until committed",
            {"commit_index": committed, "last_index": stop - 1},
        )
    return End(end, f"the store records entry {end - 1} as committed", stop - end)


def _check_same(committed: CommittedEntry, log: StoreReader) -> None:
    """Raise StoreMismatchError unless the store has this entry: an index alone may be that of a replaced entry."""
    if committed.index < int(log.first_index):
        return
    found = log.raw(committed.index, committed.index + 1)
    if (found.first.term, crc32(found.bodies)) != (committed.term, committed.crc):
        raise StoreMismatchError(
            f"entry {committed.index} of the store is another one than the nodes have committed",
            str(log.path),
            "convert a replica that has their entries, and check that --committed-by names the nodes of this log",
            {"index": committed.index, "term": found.first.term, "committed_term": committed.term},
        )


def _check_complete(source: ConversionSource) -> None:
    """Raise ConfigError if the messages of a CommitLog precede the store, which is not a part of the source."""
    log = source.log
    if log is None:
        return
    known = log.path.parent / COMMITLOG_DIRECTORY
    meta = source.meta
    if commitlog_next_to(log.path) is not None or (meta is not None and meta.commitlog_prefix is not None):
        raise ConfigError(
            "the messages of a CommitLog precede the store",
            str(source.path),
            f"name the directory that has both, or the CommitLog with --commitlog, as {known}",
        )


def _merged(ranges: tuple[tuple[int, int], ...], first: int, stop: int) -> list[tuple[int, int]]:
    """Return the parts of ranges [start, end) that are in [first, stop), merged and sorted."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        begin, after = max(start, first), min(end, stop)
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], after)
        elif begin < after:
            found.append((begin, after))
    return found
