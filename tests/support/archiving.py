"""The job ``dledger-archive --write`` without a JVM: ``deltalake`` writes rows of the log, this process hashes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
from deltalake import write_deltalake

from dledger_core import Client, RowsDigest, rows_digest
from dledger_core.archive import ArchiveTable
from jobs._archive.proving import Proving
from spark_connector.schemas import ENTRY_SCHEMA

STEPS = ("write", "written", "prove")
"""Places at which a job can be killed: before its first write, after it, and before its first proof of rows."""


class JobKilledError(Exception):
    """Ends a run as a kill does: at a step, without another word to the log."""


class DirectJob:
    """Runs of the job, all on one table, which is made.

    Args:
        client: of the log.
        path: the table.
    """

    def __init__(self, client: Client, path: Path) -> None:
        self._client, self._path = client, path
        self._killed_at = ""
        write_deltalake(path, ENTRY_SCHEMA.empty_table())

    def start(self, killed_at: str = "") -> Proving:
        """Begin a run, which raises JobKilledError at one of STEPS."""
        self._killed_at = killed_at
        return Proving(self._client, ArchiveTable(str(self._path)), self._digests, self._write)

    def _step(self, name: str) -> None:
        if name == self._killed_at:
            raise JobKilledError

    def _digests(self, ranges: Sequence[tuple[int, int]]) -> list[RowsDigest]:
        found = [rows_digest(ArchiveTable(str(self._path)).rows(self._client.group, *one)) for one in ranges]
        if any(one.rows for one in found):
            self._step("prove")
        return found

    def _write(self, start: int, end: int) -> None:
        self._step("write")
        at, batches, group = start, [], self._client.group
        while at < end:
            found = self._client.fetch(at, end, max_bytes=8 << 20, min_end=end)
            batches.append(found.batch)
            at = found.next_index
        rows = pa.Table.from_batches(batches)
        rows = rows.add_column(0, "group", pa.array([group] * rows.num_rows, pa.string()))
        where = f'"group" = \'{group}\' AND "index" >= {start} AND "index" < {end}'
        write_deltalake(self._path, rows, mode="overwrite", predicate=where)
        self._step("written")
