"""A Delta table as the archive of logs: the one reader of its rows, for source, commands and ``dledger-archive``.

``deltalake`` reads the table without a JVM, also one with deletion vectors or renamed physical columns. Its
``QueryBuilder`` reads times of any year, which Spark may write as INT96; ``to_pyarrow_dataset`` does neither.

An open table is one version of it. A query that fails, because VACUUM has deleted files of that version, is repeated
once with the newest version. Rows of a recorded range are returned only if they are those that were proved.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dledger_core.control import ArchivedRange
from dledger_core.digest import RowsDigest, rows_digest
from dledger_core.environment import install_command
from dledger_core.errors import ArchiveDamagedError, ArchiveTableError, ConfigError
from dledger_core.record import READ_SCHEMA, empty_batch

__all__ = ["FROM_LOG", "ArchiveTable", "ArchivedRows", "local_path", "range_with", "read_storage"]

FROM_LOG: Final = "true"
"""In place of a location: the one that the log has recorded."""
_COLUMNS: Final = ("group", *READ_SCHEMA.names)
_TYPES: Final = {"group": "string", "timestamp": "timestamp", "body": "binary"}
"""Delta's types of the columns; of all others it is long."""
_DECODED: Final = frozenset({"topic", "queue_id", "queue_offset", "tags", "keys", "properties", "msg_id"})
"""Columns that a table of decoded messages has."""
_SECRET_MIN: Final = 4
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")
_FILE_SCHEME: Final = re.compile(r"file:(//(?=/)|(?=/(?!/)))")
_NO_TEXT: Final = re.compile(r"\x1b\[[0-9;]*m|(?<=\w)\?\S*")
"""Colours, and the query of a URL, which may have a signature."""


def local_path(location: str) -> Path | None:
    """Return the absolute path of a Spark location; None if it is not in this machine's file system.

    Spark does not decode %20 and similar escapes in ``file:`` locations, so neither does this function.
    """
    location = _FILE_SCHEME.sub("", location, count=1)
    # A path like s3a://bucket is not a directory here. Read as one it would be empty, and a query with progress would
    # count as new (test_missing_and_remote_checkpoints_are_unknown).
    return None if not location or _SCHEME.match(location) else Path(location).absolute()


def read_storage(path: str | Path, option: str) -> dict[str, str]:
    """Return options of ``deltalake`` for a location from a JSON file, which ``option`` names.

    Raises:
        ConfigError: the file cannot be read, or has something else.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option} cannot be read: {error}", str(path), "name a JSON file") from None
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        what = f"{option}: the options are one JSON object of texts"
        raise ConfigError(what, str(path), 'write {"aws_region": "eu-central-1"}')
    return found


class ArchiveTable:
    """One Delta table, read by groups and index ranges. Not thread-safe; cheap to make, opened by the first query.

    Args:
        uri: its location, as Spark writes it.
        storage: options of ``deltalake`` for the location, such as credentials, which no error shows.
    """

    def __init__(self, uri: str, storage: Mapping[str, str] | None = None) -> None:
        path = local_path(uri)
        self.uri = uri if path is None else str(path)
        self._storage = dict(storage or {})
        self._table: Any = None

    def check(self) -> None:
        """Check that the table has the columns of an archive and can be read; otherwise nothing of it is proven.

        Raises:
            ArchiveTableError: there is no table, it has other columns, or a feature that the reader does not know.
        """
        self.reopen()
        columns = {field["name"]: field["type"] for field in json.loads(self._table.schema().to_json())["fields"]}
        if columns.keys() >= _DECODED:
            raise ArchiveTableError(
                "the table has decoded messages, of which the bodies of the log cannot be made again",
                self.uri,
                "name another table, which dledger-archive --write fills, or ingest without --decode message",
            )
        for name in _COLUMNS:
            expected = _TYPES.get(name, "long")
            if columns.get(name) != expected:
                found = f"has the type {columns[name]}" if name in columns else "is missing"
                what = f"the column {name} {found}; an archive has it as {expected}"
                raise ArchiveTableError(what, self.uri, "name a table that ingest or dledger-archive --write made")
        self._rows("FALSE")  # some features of Delta are refused by the first query only

    def reopen(self) -> None:
        """Open the newest version.

        Raises:
            ArchiveTableError: there is no table that can be read.
        """
        deltalake = _deltalake()
        try:
            self._table = deltalake.DeltaTable(self.uri, storage_options=self._storage)
        except Exception as error:  # noqa: BLE001  (the reader's errors have no common base but this)
            raise self._unreadable(error) from None

    def rows(self, group: str, start: int, end: int) -> pa.Table:
        """Return the rows of [start, end) of a group in index order, with the columns of READ_SCHEMA.

        Raises:
            ArchiveTableError: the table cannot be read.
        """
        return self._rows(_within(group, start, end))

    def count(self, group: str, start: int, end: int) -> int:
        """Return the number of rows of [start, end) of a group.

        From the statistics in the table's log, where they are exact: of files without deleted rows, with rows of this
        group alone, and all of them within the range. Of the indexes in other files two columns are read.

        Raises:
            ArchiveTableError: the table cannot be read.
        """
        if self._table is None:
            self.reopen()
        files = (_indexes(one, group) for one in pa.table(self._table.get_add_actions(flatten=True)).to_pylist())
        known, read, is_exact = 0, list[tuple[int, int]](), not self._has_deleted_rows()
        for low, high, rows in _merged(one for one in files if one is not None):
            if is_exact and rows is not None and start <= low and high <= end:
                known += rows
            elif low < end and high > start:
                read.append((max(low, start), min(high, end)))
        where = " OR ".join(f"({_within(group, low, high)})" for low, high in read)
        return known + (self._select("count(*) AS n", where)["n"][0].as_py() if read else 0)

    def rows_from(self, group: str, start: int) -> tuple[int, int]:
        """Return how many rows a group has from an index on, and the index of the last one; 0 and -1 without any.

        Raises:
            ArchiveTableError: the table cannot be read.
        """
        found = self._select('count(*) AS n, max("index") AS last', _within(group, start))
        return found["n"][0].as_py(), -1 if found["last"][0].as_py() is None else found["last"][0].as_py()

    @property
    def version(self) -> int:
        """The version that is open, -1 if none is."""
        return -1 if self._table is None else int(self._table.version())

    def last_writers(self, number: int) -> list[str]:
        """Return operation and program of the newest commits, newest first."""
        self.reopen()
        return [
            f"{one.get('operation')} by {one.get('engineInfo') or one.get('clientVersion') or 'an unknown program'}"
            for one in self._table.history(number)
        ]

    def _has_deleted_rows(self) -> bool:
        """Whether a file has rows that a deletion vector hides, which the statistics still count."""
        features = self._table.protocol().reader_features or []
        return "deletionVectors" in features and pa.table(self._table.deletion_vectors()).num_rows > 0

    def _rows(self, where: str) -> pa.Table:
        columns = ", ".join(f'"{name}"' for name in READ_SCHEMA.names)
        found = self._select(columns, where, 'ORDER BY "index", "term", "position"')
        # The query returns views of strings, which `take` refuses.
        return found.cast(pa.schema([field.with_nullable(True) for field in READ_SCHEMA]))

    def _select(self, columns: str, where: str, order: str = "") -> pa.Table:
        sql = f"SELECT {columns} FROM t WHERE {where} {order}"  # noqa: S608  (of names here, numbers, a checked group)
        if self._table is not None:
            try:
                return self._executed(sql)
            except Exception:  # noqa: BLE001, S110  (a file of this version was deleted, or nothing can be read)
                pass
        self.reopen()
        try:
            return self._executed(sql)
        except Exception as error:  # noqa: BLE001  (see reopen)
            raise self._unreadable(error) from None

    def _executed(self, sql: str) -> pa.Table:
        return pa.table(_deltalake().QueryBuilder().register("t", self._table).execute(sql).read_all())

    def _unreadable(self, error: Exception) -> ArchiveTableError:
        text = _NO_TEXT.sub("", " ".join(str(error).split()))
        for name, value in self._storage.items():
            if len(value) >= _SECRET_MIN:
                text = text.replace(value, f"<{name}>")
        return ArchiveTableError(
            f"the table cannot be read: {text}",
            self.uri,
            "check the location and its storage options; drop a feature of the table that deltalake does not know",
        )


class ArchivedRows:
    """The rows of a log's recorded ranges: whole ranges, each compared with the log's record. Keeps the newest one.

    Args:
        group: the log.
        table: its archive.
    """

    def __init__(self, group: str, table: ArchiveTable) -> None:
        self.group = group
        self._table = table
        self._verified: tuple[ArchivedRange, pa.Table] | None = None

    def of(self, one: ArchivedRange) -> pa.Table:
        """Return the rows of a range, equal to those that were proved.

        Raises:
            ArchiveTableError: the table cannot be read.
            ArchiveDamagedError: it does not have the rows that the log has recorded.
        """
        if self._verified is not None and self._verified[0] == one:
            return self._verified[1]
        self._verified = None  # before the next one takes its memory
        rows = self._table.rows(self.group, one.start, one.end)
        if rows_digest(rows) != RowsDigest(one.rows, one.digest):
            self._table.reopen()  # it may have been opened before the range was written
            rows = self._table.rows(self.group, one.start, one.end)
            if rows_digest(rows) != RowsDigest(one.rows, one.digest):
                raise ArchiveDamagedError(
                    f"entries [{one.start}, {one.end}) of the archive are not those that the log has proven",
                    f"group {self.group!r}, table {self._table.uri}",
                    "dledger-archive --verify names the rows; put an intact copy of the table there",
                    {"start": one.start, "end": one.end, "rows": rows.num_rows, "proven_rows": one.rows},
                )
        self._verified = one, rows
        return rows

    def part(self, one: ArchivedRange, start: int, end: int, max_bytes: int) -> tuple[pa.RecordBatch, int]:
        """Return rows of [start, end) in a range, at most about ``max_bytes`` of them, and the index to continue at.

        They end where a batch of the query ends, so that no body is copied.
        """
        rows, stop = self.of(one), min(end, one.end)
        first, last = (int(at) for at in np.searchsorted(rows.column("index").to_numpy(), [start, stop]))
        if first == last:
            return empty_batch(READ_SCHEMA), stop
        count = min(last - first, max(1, rows.num_rows * max_bytes // max(1, rows.nbytes)))
        batch = rows.slice(first, count).cast(READ_SCHEMA).to_batches()[0]
        following = first + batch.num_rows
        return batch, stop if following == last else int(rows.column("index")[following].as_py())

    def first(self, ranges: Iterable[ArchivedRange], column: str, least: int) -> int | None:
        """Return the index of the first row in ranges with at least a value; None if there is none.

        Args:
            ranges: the ranges, in order; those without such a row are not read.
            column: ``timestamp`` or ``term``.
            least: a term, or milliseconds.
        """
        is_time = column == "timestamp"
        value = pa.scalar(least * 1000, READ_SCHEMA.field(column).type) if is_time else pa.scalar(least, pa.int64())
        for one in ranges:
            greatest = one.last_time_ms if is_time else one.term
            if greatest >= least or (is_time and not greatest):  # the time of a range may be unknown
                rows = self.of(one)
                rows = rows.filter(pc.fill_null(pc.greater_equal(rows.column(column), value), False))
                if rows.num_rows:
                    return int(rows.column("index")[0].as_py())
        return None


def range_with(ranges: Sequence[ArchivedRange], index: int) -> ArchivedRange | None:
    """Return the range with an index, of ranges in order; None if none has it."""
    at = bisect_right(ranges, index, key=lambda one: one.start) - 1
    return ranges[at] if at >= 0 and index < ranges[at].end else None


def _deltalake() -> Any:
    try:
        import deltalake
    except ImportError as error:
        what = f"an archive is read with the package deltalake, and {error.name} is not installed"
        raise ArchiveTableError(what, "", install_command("archive")) from None
    return deltalake


def _within(group: str, start: int, end: int | None = None) -> str:
    escaped, below = group.replace("'", "''"), "" if end is None else f' AND "index" < {end}'
    return f'"group" = \'{escaped}\' AND "index" >= {start}{below}'


_ALL: Final = (-(1 << 63), (1 << 63) - 1)


def _indexes(action: Mapping[str, Any], group: str) -> tuple[int, int, int | None] | None:
    """Return the indexes [low, high) that a file can have rows of, and the number of rows; None if it has none.

    Args:
        action: what the table's log has about the file.
        group: the log.
    """
    low, high = action.get("min.index"), action.get("max.index")
    partition = action.get("partition.group")
    least, greatest = (partition, partition) if partition else (action.get("min.group"), action.get("max.group"))
    # Long texts are cut in the statistics, so a bound excludes a group only if it differs from the group's beginning.
    is_after = greatest is not None and group > greatest and not group.startswith(greatest[:-1])
    if is_after or (least is not None and group < least):
        return None
    is_one = least == greatest == group and (bool(partition) or action.get("null_count.group") == 0)
    if low is None or high is None or action.get("null_count.index") != 0:
        return (*_ALL, None)
    return int(low), int(high) + 1, action.get("num_records") if is_one else None


def _merged(files: Iterable[tuple[int, int, int | None]]) -> list[tuple[int, int, int | None]]:
    """Return index ranges [low, high) that do not overlap, with the rows of all files in each; None if unknown."""
    found: list[tuple[int, int, int | None]] = []
    for low, high, rows in sorted(files, key=lambda one: one[:2]):
        if found and low < found[-1][1]:
            before = found[-1]
            total = None if rows is None or before[2] is None else before[2] + rows
            found[-1] = (before[0], max(before[1], high), total)
        else:
            found.append((low, high, rows))
    return found
