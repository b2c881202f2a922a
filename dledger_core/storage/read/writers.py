"""The programs that write stores, this one and Java's generations A and B: how the log of each begins and ends."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final, Literal, Protocol

import numpy as np

from dledger_core.ids import Index
from dledger_core.record import HEADER_BYTES, INDEX_RECORD_BYTES
from dledger_core.storage.check.judge import JAVA_A, JAVA_B, Rules, ScanCursor, native_rules
from dledger_core.storage.files.file_system import Files
from dledger_core.storage.files.index_file import IndexFile
from dledger_core.storage.files.layout import Layout, LogMeta, load_log_meta
from dledger_core.storage.files.meta_files import Checkpoint, load_checkpoint, read_properties
from dledger_core.storage.read.record_reader import RecordReader
from dledger_core.storage.tables.tables import LogTables, load_tables

WriterName = Literal["dledger-python", "java-a", "java-b"]
_TAIL_SEGMENTS: Final = 3
_TAIL_BYTES: Final = 1 << 30
"""Java recovers its last three files. Where files are as large as its default, two contain all that it can have had in
memory only, and reading a third takes a second.
"""
_FIRST_ROWS: Final = 1 << 16


class Writer(Protocol):
    """The program that wrote a store, with what it recorded there."""

    @property
    def name(self) -> WriterName:
        """This program, or Java's generation A or B."""

    @property
    def rules(self) -> Rules:
        """Evidence that its records have."""

    @property
    def meta(self) -> LogMeta | None:
        """Identity and constants of the log; None if it records none, as Java."""

    @property
    def checkpoint(self) -> Checkpoint | None:
        """Entries that were durable; None if none are recorded."""

    @property
    def commit_index(self) -> Index | None:
        """The recorded commit index; above the last entry if the end of the log is lost."""

    def first_index(self, reader: RecordReader, rows: IndexFile) -> int:
        """Return the index of the log's first entry."""

    def tail_start(self, reader: RecordReader, rows: IndexFile, first_index: int) -> ScanCursor:
        """Return the place from which on the records decide where the log ends."""

    def tables(self) -> LogTables:
        """Return producers and transactions as of the last snapshot."""


@dataclass(frozen=True, slots=True)
class Native:
    """This program: identity, checkpoint and tables are recorded."""

    files: Files
    layout: Layout
    meta: LogMeta
    checkpoint: Checkpoint | None
    name: WriterName = "dledger-python"

    @property
    def rules(self) -> Rules:
        """See ``Writer``; only committed entries are compared, the others may be overwritten while a view is open."""
        committed = -1 if self.checkpoint is None else self.checkpoint.commit_index
        return replace(native_rules(self.meta), cross_checked_to=committed + 1)

    @property
    def commit_index(self) -> Index | None:
        """See ``Writer``."""
        return None if self.checkpoint is None else Index(self.checkpoint.commit_index)

    def first_index(self, reader: RecordReader, rows: IndexFile) -> int:
        """Return the recorded index, unless the files begin elsewhere and their first record has another."""
        found = None if reader.data.bases[:1] == (self.meta.first_position,) else reader.first_record()
        return self.meta.first_index if found is None else found[0]

    def tail_start(self, reader: RecordReader, rows: IndexFile, first_index: int) -> ScanCursor:
        """Return the place after the checkpoint, or the first record."""
        checkpoint = self.checkpoint
        covered = checkpoint is not None and checkpoint.durable_index >= first_index
        if checkpoint is not None and covered and reader.data.covers(checkpoint.position):
            return ScanCursor(checkpoint.position, checkpoint.durable_index + 1)
        return _first_place(reader, first_index)

    def tables(self) -> LogTables:
        """See ``Writer``."""
        return load_tables(self.files, self.layout, self.meta)


@dataclass(frozen=True, slots=True)
class Java:
    """Java's DLedger: only generation A records a commit index, and neither an identity."""

    name: WriterName
    rules: Rules
    commit_index: Index | None = None
    meta: None = None
    checkpoint: None = None

    def first_index(self, reader: RecordReader, rows: IndexFile) -> int:
        """Return the index as in the first record, unless the row of its position has another.

        Neither has a CRC, but the rows after it show which rows continue each other.
        """
        found, bases, files = reader.first_record(), reader.data.bases, rows.segments.bases
        named = 0 if found is None else found[0]
        if not bases or not files:
            return named
        position = bases[0] if found is None else found[1]
        if found is not None:
            row = rows.read(named, named + 1)[0]
            if (int(row["index"]), int(row["position"])) == found and row["size"] >= HEADER_BYTES:
                return named
        end = (files[-1] + rows.segments.segment_bytes) // INDEX_RECORD_BYTES
        for at in range(files[0] // INDEX_RECORD_BYTES, end, _FIRST_ROWS):
            read = rows.read(at, at + _FIRST_ROWS)
            own = (read["position"] == position) & (read["index"] == np.arange(at, at + len(read)))
            own &= read["size"] >= HEADER_BYTES
            if bool(own.any()):
                return at + int(np.argmax(own))
            if not bool((read["size"] > 0).any()):
                break
        return named

    def tail_start(self, reader: RecordReader, rows: IndexFile, first_index: int) -> ScanCursor:
        """Return the start of one of the last files, the first one whose first record has an index row."""
        data = reader.data
        tail = min(_TAIL_SEGMENTS, 1 + -(-_TAIL_BYTES // data.segment_bytes))
        for base in reversed(data.bases[: max(len(data.bases) - tail + 1, 1)]):
            header = reader.header_at(base)
            if header is not None:
                row = rows.read(header.index, header.index + 1)[0]
                same = (int(row["position"]), int(row["size"]), int(row["index"]), int(row["term"]))
                if same == (base, header.size, header.index, header.term):
                    return ScanCursor(base, header.index)
        return _first_place(reader, first_index)

    def tables(self) -> LogTables:
        """See ``Writer``; Java has neither producers nor transactions."""
        return LogTables()


def _first_place(reader: RecordReader, first_index: int) -> ScanCursor:
    bases = reader.data.bases
    return ScanCursor(bases[0], first_index) if bases else ScanCursor(0)


def writer_of(files: Files, layout: Layout) -> Writer:
    """Return the program that wrote a store: this one where there is an identity, Java's A where its checkpoint is."""
    meta = load_log_meta(files, layout.log_meta)
    if meta is not None:
        return Native(files, layout, meta, load_checkpoint(files, layout.checkpoint))
    pairs = read_properties(files, layout.root / "checkpoint")
    if pairs is None:
        return Java("java-b", JAVA_B)
    text = pairs.get("committedIndex", "")
    return Java("java-a", JAVA_A, Index(int(text)) if re.fullmatch("-1|[0-9]{1,18}", text, re.ASCII) else None)
