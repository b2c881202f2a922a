"""Proves ranges of a log's archive: digests of the table's rows go to the leader, which compares and records them.

Before each proof the rows of all recorded ranges are counted, because a table can lose rows after they were proved: by
RESTORE, an overwrite or DELETE. A range that is not equal is compared with the log row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import pyarrow as pa

from dledger_core import (
    READ_SCHEMA,
    ArchivedRange,
    ArchiveRefusedError,
    Client,
    IndexOutOfRangeError,
    LogSlice,
    RowsDigest,
)
from dledger_core.archive import ArchiveTable
from spark_connector.errors import ArchiveTableError

from .differences import Difference, Kind, find_differences

__all__ = ["Digests", "Finding", "Proved", "Proving", "Write", "delete_statement", "retried"]

Digests: TypeAlias = Callable[[Sequence[tuple[int, int]]], Sequence[RowsDigest]]
"""Returns the digests of the table's rows in ranges [start, end)."""
Write: TypeAlias = Callable[[int, int], None]
"""Replaces the table's rows of [start, end) by those of the log."""
_FETCH_BYTES: Final = 8 << 20
_PIN: Final = "dledger-archive"
"""One name for all jobs of a log: the pin of a job that was killed is that of its next run, which releases it."""
_PIN_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Finding:
    """Rows of the table that are not those of the log.

    Attributes:
        kind: of ``differences.Kind``; ``lost`` where rows of a recorded range are, and the log has trimmed it.
        start: first index.
        end: end index (exclusive).
        rows: number of rows that are missing or wrong.
        meaning: one line.
        next_step: what to do.
    """

    kind: str
    start: int
    end: int
    rows: int
    meaning: str
    next_step: str


@dataclass
class Proved:
    """Result of a run.

    Attributes:
        ranges: ranges that were recorded, or with ``--verify`` found equal.
        rows: their rows.
        written: indexes whose rows were written from the log.
        end: end of the recorded ranges.
        behind: first index that the table does not have yet, if a complete range waits for its rows; else None.
        findings: rows that are not those of the log; nothing was recorded from there on.
    """

    ranges: int = 0
    rows: int = 0
    written: int = 0
    end: int | None = None
    behind: int | None = None
    findings: list[Finding] = field(default_factory=list)


class Proving:
    """Proves the ranges of one log in one table.

    Args:
        client: of the group.
        table: the archive.
        digests: computes digests, in executors.
        write: writes rows; None = the table is only read.
        at_once: number of ranges whose digests are computed at once.
    """

    def __init__(
        self, client: Client, table: ArchiveTable, digests: Digests, write: Write | None = None, at_once: int = 16
    ) -> None:
        self._client = client
        self._table = table
        self._digests = digests
        self._write = write
        self._at_once = at_once
        self._recorded: list[ArchivedRange] = []
        self._counted = self._read = -1
        self._differs = False
        self._is_pinned = False

    def prove(self, until: int | None = None) -> Proved:
        """Prove what the log offers, in order, up to the first range that is not equal.

        Raises:
            ArchiveRefusedError: the log cannot have an archive.
            ArchiveTableError: the table cannot be read.
        """
        try:
            return self._prove(until)
        finally:
            # Retention waits for the archive now, and must not wait for an hour (test_pin_ends_with_the_proof).
            if self._is_pinned:
                self._is_pinned = False
                self._client.pin(_PIN, 0, 0.0)

    def _prove(self, until: int | None) -> Proved:
        done, written = Proved(), set[int]()
        while not done.findings and done.behind is None:
            offered = self._client.archivable_ranges(until=until)
            done.end, done.findings = offered.start, self._foreign(offered.visible_end)
            batch = offered.ranges[: self._at_once]
            if not batch or done.findings:
                break
            if not self._recorded:
                self._refresh()
                # Retention does not wait for an archive that has no range yet. For one that has, the pin of a job that
                # was killed would hold it back for an hour (test_pin_of_a_killed_job_ends_with_the_next_run).
                self._is_pinned = not self._recorded
                self._client.pin(_PIN, *((offered.start, _PIN_S) if self._is_pinned else (0, 0.0)))
            self._counted, self._read, self._differs = -1, self._table.version, False
            digests = self._digests([(one.start, one.end) for one in batch])
            for number, (one, digest) in enumerate(zip(batch, digests, strict=True)):
                if not self._has_rows(batch[number:], digests[number:], done) or not self._records(one, digest):
                    break
                done.ranges, done.rows, done.end = done.ranges + 1, done.rows + digest.rows, one.end
            else:
                continue
            if not done.findings and self._differs:
                if self._write is not None and one.start not in written:
                    self._replace(batch, digests, number, written, done)
                else:
                    self._compare(one.start, one.end, done)
        return done

    def _replace(
        self, batch: Sequence[LogSlice], digests: Sequence[RowsDigest], number: int, written: set[int], done: Proved
    ) -> None:
        """Write a range from the log, with those after it that the table does not have at all: one commit of Delta."""
        assert self._write is not None, "the caller may write"
        start, end = batch[number].start, batch[number].end
        written.add(start)
        for one, digest in zip(batch[number + 1 :], digests[number + 1 :], strict=True):
            if digest.rows:
                break
            written.add(one.start)
            end = one.end
        self._write(start, end)
        done.written += end - start

    def verify(self) -> Proved:
        """Compare all recorded ranges with the digests that the log has recorded."""
        done = Proved()
        self._refresh()
        for batch in _batches(self._recorded, self._at_once):
            for one, digest in zip(batch, self._digests([(one.start, one.end) for one in batch]), strict=True):
                if self._write is not None and not _is(one, digest) and one.start >= self._client.bounds().first_index:
                    self._write(one.start, one.end)
                    done.written += one.end - one.start
                    [digest] = self._digests([(one.start, one.end)])  # noqa: PLW2901
                if _is(one, digest):
                    done.ranges, done.rows = done.ranges + 1, done.rows + one.rows
                else:
                    self._compare(one.start, one.end, done, proved=one.rows)
            done.end = batch[-1].end
        return done

    def _refresh(self) -> None:
        """Ask for the ranges that were recorded since; all of them if the log was continued below the newest one."""
        found = self._client.archived_ranges(self._recorded[-1].end if self._recorded else 0)
        end = None if found.archive is None else found.archive.end
        if self._recorded and self._recorded[-1].end != (found.ranges[0].start if found.ranges else end):
            self._recorded, self._counted = [], -1
            found = self._client.archived_ranges(0)
        while found.ranges:
            self._recorded += found.ranges
            found = self._client.archived_ranges(self._recorded[-1].end)

    def _foreign(self, visible_end: int) -> list[Finding]:
        """Find rows after the end of the log, which another log of this name wrote."""
        # The table was opened before the leader named the end, and `ingest` writes no row after it. A table that had to
        # be opened again is newer, so rows count only if they are after a later end too.
        rows = last = 0
        for end in (visible_end, None):
            visible_end = self._client.archivable_ranges().visible_end if end is None else end
            rows, last = self._table.rows_from(self._client.group, visible_end)
            if not rows:
                self._table.reopen()
                return []
        return [self._finding(Difference(visible_end, last + 1, Kind.FOREIGN, rows, is_alone=True))]

    def _has_rows(self, batch: Sequence[LogSlice], digests: Sequence[RowsDigest], done: Proved) -> bool:
        """Whether the newest version of the table still has the rows of all recorded ranges, and those of the digests.

        Args:
            batch: the ranges to prove now.
            digests: of their rows.
            done: gets a finding if a recorded range has another number of rows.
        """
        self._table.reopen()
        if self._table.version == self._counted:
            return True
        self._refresh()
        group, known = self._client.group, self._recorded
        if known and self._table.count(group, known[0].start, known[-1].end) != sum(one.rows for one in known):
            low, high = 0, len(known)
            while high - low > 1:
                middle = (low + high) // 2
                expected = sum(one.rows for one in known[low:middle])
                is_equal = self._table.count(group, known[low].start, known[middle - 1].end) == expected
                low, high = (middle, high) if is_equal else (low, middle)
            self._compare(known[low].start, known[low].end, done, proved=known[low].rows)
            return False
        counted, read = self._table.count(group, batch[0].start, batch[-1].end), sum(one.rows for one in digests)
        if counted != read and self._table.version == self._read:
            raise ArchiveTableError(
                f"the statistics count {counted} rows in [{batch[0].start}, {batch[-1].end}), the files have {read}",
                self._table.uri,
                "write these rows again, for example with OPTIMIZE: their statistics are wrong",
            )
        if counted != read:
            return False  # rows were written since: the digests are computed again
        self._counted = self._table.version
        return True

    def _records(self, one: LogSlice, digest: RowsDigest) -> bool:
        """Whether the log records a range now; ``_differs`` is set if its rows are not equal."""
        self._differs = False
        try:
            equal = self._client.prove_archived(one.start, one.end, digest, table=self._table.uri).equal
        except ArchiveRefusedError as error:
            # Another job may have proved it meanwhile.
            if error.reason != "not-next" or self._client.archivable_ranges().start == one.start:
                raise
            return False
        self._differs = not equal
        return equal

    def _compare(self, start: int, end: int, done: Proved, proved: int | None = None) -> None:
        """Name the rows of a range that differ; a range of which the table has only the beginning is behind.

        Args:
            start: first index.
            end: end index (exclusive).
            done: gets the findings.
            proved: number of rows if the range is a recorded one.
        """
        group = self._client.group
        found = self._table.rows(group, start, end)
        try:
            entries = self._entries(start, end)
        except IndexOutOfRangeError:
            what = f"{proved} rows were proved, the table has {found.num_rows} and others, and the log has trimmed them"
            remedy = "put a version or a copy of the table there that has them, then run dledger-archive --verify again"
            done.findings.append(Finding("lost", start, end, found.num_rows, what, remedy))
            return
        differences = find_differences(entries, found)
        missing = [one for one in differences if one.kind is Kind.MISSING]
        if proved is None and missing == differences:
            first = missing[0].start if missing else end
            if not self._table.rows_from(group, first)[0]:
                done.behind = first
                return
        done.findings += map(self._finding, differences)
        if not differences:
            what = "the range was not equal, and is now: another program has changed the table meanwhile"
            done.findings.append(Finding("changed", start, end, 0, what, "run the job again"))

    def _entries(self, start: int, end: int) -> pa.Table:
        batches, at = [], start
        while at < end:
            found = self._client.fetch(at, end, max_bytes=_FETCH_BYTES, min_commit=end - 1, min_end=end)
            batches.append(found.batch)
            at = found.next_index
        return pa.Table.from_batches(batches, READ_SCHEMA)

    def _finding(self, one: Difference) -> Finding:
        meaning = {
            Kind.MISSING: "the table lacks rows of these entries",
            Kind.DOUBLED: "the table has the rows of these entries more than once",
            Kind.CHANGED: f"the rows differ from the entries in {', '.join(one.columns)}",
            Kind.FOREIGN: "the rows are not entries of this log: another log of this name wrote them",
        }[one.kind]
        next_step = "run dledger-archive --write, which replaces the rows of the range by those of the log"
        if one.kind is Kind.FOREIGN and (one.is_alone or "term" in one.columns):
            next_step = delete_statement(self._table.uri, self._client.group, one)
        return Finding(one.kind, one.start, one.end, one.rows, meaning, next_step)


def delete_statement(uri: str, group: str, one: Difference) -> str:
    """Return Spark's statement that removes foreign rows."""
    name, log = uri.replace("`", "``"), group.replace("'", "''")
    where = [f"`group` = '{log}'", f"`index` >= {one.start}", f"`index` < {one.end}"]
    if not one.is_alone:
        where.append("`term` IS NULL" if one.term is None else f"`term` = {one.term}")
    return f"DELETE FROM delta.`{name}` WHERE {' AND '.join(where)}"  # noqa: S608  (for the user)


def retried(write: Callable[[], None], table: ArchiveTable) -> None:
    """Write to a table, and again if another program has written to it meanwhile.

    Raises:
        ArchiveTableError: it has again.
    """
    from delta import exceptions  # which has no common base for these; its import lets PySpark raise them

    conflicts = tuple(getattr(exceptions, name) for name in exceptions.__all__)
    try:
        write()
    except conflicts:
        try:
            write()
        except conflicts:
            what = f"two programs write to the table: this job with --write, and {table.last_writers(1)[0]}"
            remedy = "stop one of them: either ingest fills the table, or dledger-archive with --write"
            raise ArchiveTableError(what, table.uri, remedy) from None


def _is(one: ArchivedRange, digest: RowsDigest) -> bool:
    return (one.rows, one.digest) == (digest.rows, digest.digest)


def _batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for at in range(0, len(items), size):
        yield items[at : at + size]
