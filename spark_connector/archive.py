"""A Delta table as the archive of logs: the one reader of its rows, for the source and for the job ``dledger-archive``.

``deltalake`` reads the table without a JVM, also one with deletion vectors or renamed physical columns. Its
``QueryBuilder`` reads times of any year, which Spark may write as INT96; ``to_pyarrow_dataset`` does neither.

An open table is one version of it. A query that fails, because VACUUM has deleted files of that version, is repeated
once with the newest version.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

import pyarrow as pa

from dledger_core import READ_SCHEMA
from dledger_core.environment import install_command
from spark_connector.columns import ENTRY_SCHEMA, MESSAGE_SCHEMA
from spark_connector.errors import ArchiveTableError
from spark_connector.offsets import local_path

__all__ = ["ArchiveTable"]

_TYPES: Final = {"group": "string", "timestamp": "timestamp", "body": "binary"}
"""Delta's types of the columns; of all others it is long."""
_DECODED: Final = frozenset(MESSAGE_SCHEMA.names) - frozenset(ENTRY_SCHEMA.names)
_SECRET_MIN: Final = 4


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
        for name in ENTRY_SCHEMA.names:
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
        text = " ".join(str(error).split())
        for name, value in self._storage.items():
            if len(value) >= _SECRET_MIN:
                text = text.replace(value, f"<{name}>")
        return ArchiveTableError(
            f"the table cannot be read: {text}",
            self.uri,
            "check the location and its storage options; drop a feature of the table that deltalake does not know",
        )


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
