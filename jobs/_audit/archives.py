"""Replicas that are archives: what the log has recorded, and the sources that read rows of tables and of nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from dledger_core import (
    ConfigError,
    CorruptRecordError,
    DLedgerError,
    IndexOutOfRangeError,
    RangeDigest,
    UnreachableError,
)
from dledger_core.archive import ArchivedRows, ArchiveTable, RecordedArchive
from dledger_core.digest import RowsHasher
from dledger_core.record import MAGIC_DATA, READ_SCHEMA
from dledger_core.rocketmq import open_log_directory
from spark_connector.errors import ArchiveDamagedError, ArchiveTableError

from .._archive.recorded import named_table, of_log, recorded_archive
from .model import ARCHIVE, AuditedReplica, Options, Snapshot
from .nodes import client_of
from .source import READ_BYTES, Gap, RangeSeen, RateLimiter, Source

Archives = Mapping[str, AuditedReplica]
"""The archive of each group's log."""


# --- the archive when the audit begins ----------------------------------------------------------------------------


def take_archives(options: Options, snapshot: Snapshot) -> Archives:
    """Return the archives that ``--archive`` names, with the ranges that the logs have recorded.

    Raises:
        ConfigError: a log cannot have an archive, or has none.
        ArchiveTableError: a table cannot be read, or is not an archive.
    """
    if options.archive is None:
        return {}
    return {group: _archive(options, group, replicas) for group, replicas in snapshot.items()}


def _archive(options: Options, group: str, replicas: Sequence[AuditedReplica]) -> AuditedReplica:
    own = [replica for replica in replicas if replica.reachable and not replica.other]
    if not own:
        what = f"--archive: no replica of group {group!r} can be read, so the archive is unknown"
        raise UnreachableError(what, options.peers or "", "start one of them")
    if all(replica.log_uuid is None for replica in own):
        raise ConfigError("--archive: a log that Java wrote has no archive", str(own[0].path), "leave --archive out")
    if any(replica.name == ARCHIVE for replica in replicas):
        raise ConfigError(f"--archive: a replica is named {ARCHIVE!r}", "", "give the replica another name")
    recorded = _of_nodes(own[0]) if options.peers is not None else _of_stores(own)
    found = of_log(recorded, group, options.peers or ", ".join(one.path for one in own))
    table, ranges = named_table(found, str(options.archive), options.archive_storage), found.ranges
    return AuditedReplica(
        group=group,
        name=ARCHIVE,
        table=table.uri,
        version=table.version,
        storage=options.archive_storage,
        recorded=ranges,
        first_index=ranges[0].start,
        last_index=ranges[-1].end - 1,
        end=ranges[-1].end,
        log_uuid=own[0].log_uuid,
        data_bytes=sum(one.nbytes for one in ranges),
    )


def _of_nodes(replica: AuditedReplica) -> RecordedArchive | None:
    with client_of(replica) as client:
        return recorded_archive(client)


def _of_stores(replicas: Iterable[AuditedReplica]) -> RecordedArchive | None:
    """Return the archive of the store that has recorded most."""
    found = []
    for replica in replicas:
        with open_log_directory(Path(replica.path), opaque=True) as opened:
            found.append(opened.recorded_archive())
    return max((one for one in found if one is not None), key=lambda one: one.ranges[-1].end, default=None)


# --- reading ------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _table(uri: str, storage: tuple[tuple[str, str], ...]) -> ArchiveTable:
    """Return the table, which a process opens once: a task reads many ranges."""
    return ArchiveTable(uri, dict(storage))


class ArchiveSource(Source):
    """The table; as entries it returns rows of ranges that are those that were proved, and nothing else."""

    is_partial = True

    def __init__(self, replica: AuditedReplica, limiter: RateLimiter) -> None:
        self._replica = replica
        self._table = _table(replica.table, tuple(sorted(replica.storage.items())))
        if self._table.version != replica.version:  # a process may have opened it for an earlier audit
            self._table.reopen()
        self._limiter = limiter

    def digests(self, start: int, end: int, span: int) -> Iterator[RangeSeen | Gap]:
        del span
        yield Gap(start, end, "unread", "an archive has no digests of entries")

    def shown(self, start: int, end: int) -> tuple[pa.RecordBatch, int]:
        rows = self._table.rows(self._replica.group, start, end)
        self._limiter.take(rows.nbytes)
        batches = rows.combine_chunks().to_batches()
        return (batches[0] if batches else pa.RecordBatch.from_pylist([], rows.schema)), end

    def entries(self, start: int, end: int) -> Iterator[pa.RecordBatch | Gap]:
        rows = ArchivedRows(self._replica.group, self._table)
        for one in self._replica.recorded:
            if one.end <= start or end <= one.start:
                continue
            at, stop = max(start, one.start), min(end, one.end)
            while at < stop:
                try:
                    batch, at = rows.part(one, at, stop, READ_BYTES)
                except (ArchiveDamagedError, ArchiveTableError):
                    break  # the comparison of the range reports it
                self._limiter.take(batch.nbytes)
                magic = pa.repeat(pa.scalar(MAGIC_DATA, pa.int64()), batch.num_rows)
                yield batch.append_column("magic", magic)

    def reopen(self) -> None:
        """Open the newest version of the table."""
        self._table.reopen()


class RowsSource(Source):
    """A replica by its rows: the digest of a range is that of rows, as the log records it for its archive.

    Args:
        source: of the replica's entries.
    """

    def __init__(self, source: Source) -> None:
        self._source = source

    def digests(self, start: int, end: int, span: int) -> Iterator[RangeSeen | Gap]:
        del span
        hasher, nbytes = RowsHasher(), 0
        for found in self._rows(start, end):
            if isinstance(found, Gap):
                yield Gap(start, end, found.kind, found.reason)
                return
            hasher.update(found)
            nbytes += pc.sum(pc.binary_length(found.column("body"))).as_py() or 0
        yield RangeSeen(RangeDigest(start, end, nbytes, hasher.digest().digest, b""))

    def table(self, start: int, end: int) -> pa.Table | Gap:
        """Return the rows of a range, of the newest version of an archive."""
        if isinstance(self._source, ArchiveSource):
            try:
                self._source.reopen()
            except ArchiveTableError as error:
                return Gap(start, end, "unread", str(error))
        batches = []
        for found in self._rows(start, end):
            if isinstance(found, Gap):
                return found
            batches.append(found)
        return pa.Table.from_batches(batches, batches[0].schema if batches else READ_SCHEMA)

    def _rows(self, start: int, end: int) -> Iterator[pa.RecordBatch | Gap]:
        at = start
        while at < end:
            try:
                batch, following = self._source.shown(at, end)
            except CorruptRecordError as error:
                yield Gap(at, end, "damaged", error.what)
                return
            except IndexOutOfRangeError as error:
                yield Gap(at, end, "deleted", str(error))
                return
            except DLedgerError as error:
                yield Gap(at, end, "unread", str(error))
                return
            if following <= at:
                yield Gap(at, end, "unread", f"the replica does not show the entries from index {at} on")
                return
            yield batch
            at = following
