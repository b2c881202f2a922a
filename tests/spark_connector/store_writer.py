"""Writes real stores without servers: a log that gets new entries, is re-created, or loses its first entries."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dledger_core import control
from dledger_core.config import StorageConfig
from dledger_core.ids import GroupName, Index, NodeId, Term
from dledger_core.raft import HardState
from dledger_core.record import Columns, ProposedBatch
from dledger_core.storage import CommitLog
from dledger_core.storage.tables.tables import LogTables, TableChanges

_times = itertools.count(1_700_000_000_000, 1000)


class StoreWriter:
    """A store at ``<directory>/<group>/dledger-n0`` in which everything appended is committed at once."""

    def __init__(
        self,
        directory: Path,
        *,
        group: str = "default",
        uuid: str | None = "log-1",
        term: int = 1,
        segment_bytes: int = 1 << 16,
    ) -> None:
        self.path = directory / group / "dledger-n0"
        config = StorageConfig(data_segment_bytes=segment_bytes, index_segment_bytes=1 << 12, preallocate_bytes=0)
        self._log = CommitLog.open(self.path, group=GroupName(group), node_id=NodeId("n0"), config=config)
        if uuid is not None and self._log.log_uuid is None:
            self._log.adopt_uuid(uuid)
        self.term = term

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._log.close(self._log.last_index())

    @property
    def end(self) -> int:
        return self._log.last_index() + 1

    def append(self, bodies: Sequence[bytes], *, noop: bool = False, entry: dict[str, Any] | None = None) -> None:
        """Append one batch, led by a control entry if ``noop`` or if one is given."""
        led = control.pack(entry or {}) if noop or entry is not None else None
        batch = self._log.place(
            ProposedBatch(Columns.from_bodies(bodies), led), Index(self.end), Term(self.term), next(_times)
        )
        self._log.persist(HardState(Term(self.term), None), None, [batch])
        self._log.save_checkpoint(self._log.last_index())

    def append_numbers(self, count: int, text: str = "body") -> None:
        """Append ``count`` entries whose bodies tell their index."""
        self.append([f"{text}-{index}".encode() for index in range(self.end, self.end + count)])

    def append_attempt(self, count: int, *, batch: int, run: str = "r1") -> control.Part:
        """Append ``count`` numbered entries as part of a transaction of the query ``q``."""
        first = self.end + 1
        bodies = [f"body-{index}".encode() for index in range(first, first + count)]
        self.append(bodies, entry={"k": "attempt", "q": "q", "b": batch, "r": run, "a": "uuid", "n": count, "c": 7})
        return control.Part(first, first + count - 1, count, 7)

    def commit(self, *parts: control.Part, batch: int, run: str = "r1") -> None:
        """Commit a transaction of the query ``q``."""
        self.append([], entry={"k": "commit", "q": "q", "b": batch, "r": run, "parts": [list(part) for part in parts]})

    def trim(self) -> int:
        """Delete all data files but the last, as retention does; return the new first index."""
        last, tables = self._log.last_index(), LogTables()
        for index, time_ms, body in self._log.control_entries(0, last + 1):
            tables.apply(index, time_ms, body)
        return int(self._log.trim(last, TableChanges.complete(tables), last))
