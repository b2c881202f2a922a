"""A filled store on a disk in memory, with access to the bytes of its records and index rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dledger_core.config import StorageConfig
from dledger_core.record import INDEX_RECORD_BYTES, segment_name
from dledger_core.storage import CommitLog, Finding, open_store
from dledger_core.storage.write.log_writer import LogHooks
from tests.support.faulty_files import FaultyFiles
from tests.support.logs import STORE, append, open_log, read_all

DATA, INDEX, META = STORE / "data", STORE / "index", STORE / "meta"


@dataclass
class Sample:
    """A closed store.

    Attributes:
        files: its disk.
        config: its segment sizes.
        positions: position of each entry, and the end of the log.
        entries: term and body of each entry.
    """

    files: FaultyFiles
    config: StorageConfig
    positions: list[int]
    entries: list[tuple[int, bytes]]

    @classmethod
    def fill(
        cls,
        config: StorageConfig,
        batches: Iterable[tuple[Sequence[bytes], int, bytes | None]],
        commit_index: int | None = None,
    ) -> Sample:
        """Append batches of (bodies, term, control) to a new store and close it; all entries are committed."""
        log = open_log(files := FaultyFiles(), config=config)
        for bodies, term, control in batches:
            append(log, bodies, term, control=control)
        positions = [int(log.position_of(index)) for index in range(log.last_index() + 2)]
        entries = read_all(log)
        log.close(log.last_index() if commit_index is None else commit_index)
        return cls(files, config, positions, entries)

    @property
    def last(self) -> int:
        """Index of the last entry."""
        return len(self.entries) - 1

    def clone(self) -> Sample:
        return replace(self, files=self.files.clone())

    def open(self, hooks: LogHooks | None = None) -> CommitLog:
        """Open and check the store as a node does before it serves."""
        return open_log(self.files, config=self.config, hooks=hooks).checked()

    def at(self, position: int) -> memoryview:
        """The bytes of a data file from ``position`` on, to look at or to damage."""
        offset = position % self.config.data_segment_bytes
        return memoryview(self.files.content(DATA / segment_name(position - offset)))[offset:]

    def record(self, index: int) -> memoryview:
        """The bytes of a data file from an entry's record on."""
        return self.at(self.positions[index])

    def row(self, index: int) -> memoryview:
        """The bytes of an index row."""
        offset = index * INDEX_RECORD_BYTES % self.config.index_segment_bytes
        path = INDEX / segment_name(index * INDEX_RECORD_BYTES - offset)
        return memoryview(self.files.content(path))[offset : offset + INDEX_RECORD_BYTES]

    def content(self, *directories: Path) -> dict[Path, bytes]:
        """The files in the directories; in all of them by default. The lock is left out."""
        names = ((path, inode) for path, inode in self.files.names.items() if path.name != "lock")
        return {path: bytes(inode.content) for path, inode in names if path.parent in directories or not directories}

    def findings(self) -> tuple[Finding, ...]:
        """Result of ``verify``, which changes nothing."""
        before = self.content()
        with open_store(STORE, files=self.files) as reader:
            found = reader.verify().findings
        assert self.content() == before
        return found
