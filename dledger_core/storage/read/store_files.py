"""The open files of a store, as a reader needs them: records by index, and the files as they are now."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dledger_core.config import DATA_SEGMENT_BYTES, INDEX_SEGMENT_BYTES
from dledger_core.errors import CorruptRecordError, StoreIncompleteError, StoreMismatchError
from dledger_core.ids import Index
from dledger_core.record import is_segment_name
from dledger_core.storage.check.judge import ScanCursor, complete_end
from dledger_core.storage.check.scan import Scanner
from dledger_core.storage.files.file_system import Files
from dledger_core.storage.files.index_file import IndexFile, OverlaidIndex
from dledger_core.storage.files.layout import Layout, check_complete
from dledger_core.storage.files.segments import Segments
from dledger_core.storage.read.log_queries import place_of
from dledger_core.storage.read.record_reader import RecordReader
from dledger_core.storage.read.writers import writer_of


class StoreFiles:
    """The files of one store, opened for reading.

    Attributes:
        files: the file system.
        layout: paths of the store.
        writer: the program that wrote it.
        rows: the index as stored on disk.
        index: the same, and in memory the rows that the files lack.
        reader: reads records by ``index``.

    Raises:
        StoreMismatchError: there is no store.
        StoreIncompleteError: a conversion into it, or a snapshot install, is not finished.
    """

    def __init__(self, files: Files, layout: Layout) -> None:
        check_complete(files, layout)
        self.files, self.layout, self.writer = files, layout, writer_of(files, layout)
        meta = self.writer.meta
        if meta is None:
            _check_directory(files, layout)
        elif meta.discarding:
            raise StoreIncompleteError(
                "a snapshot install of the store was interrupted",
                str(layout.root),
                "start its node: it completes the install",
            )
        data_bytes, index_bytes = (None, None) if meta is None else (meta.data_segment_bytes, meta.index_segment_bytes)
        data_bytes = data_bytes or _segment_bytes(files, layout.data, DATA_SEGMENT_BYTES)
        index_bytes = index_bytes or _segment_bytes(files, layout.index, INDEX_SEGMENT_BYTES)
        data = Segments.load(files, layout.data, data_bytes, gaps=True)
        self.rows = IndexFile(Segments.load(files, layout.index, index_bytes, gaps=True))
        self.index = OverlaidIndex(self.rows)
        self.reader = RecordReader(data, self.index, self.writer.rules)

    @property
    def segment_bytes(self) -> tuple[int, int]:
        """Sizes of the data files and of the index files."""
        return self.reader.data.segment_bytes, self.rows.segments.segment_bytes

    def place_of(self, index: int) -> tuple[int, int]:
        """Return position and size of an entry's record; by its index row if it is damaged."""
        try:
            return place_of(self.reader, index)[:2]
        except CorruptRecordError:
            row = self.index.read(index, index + 1)[0]
            return int(row["position"]), int(row["size"])

    @contextmanager
    def _data_now(self) -> Iterator[Segments]:
        now = Segments.load(self.files, self.layout.data, self.reader.data.segment_bytes, gaps=True)
        try:
            yield now
        finally:
            now.close()

    def first_index_now(self, first_index: Index, last_index: int) -> Index:
        """Return the first index of the files as they are now: retention may have deleted entries meanwhile."""
        with self._data_now() as now:
            if now.bases[:1] == self.reader.data.bases[:1]:
                return first_index
            found = RecordReader(now, self.rows, self.reader.rules).first_record()
        return max(first_index, Index(last_index + 1 if found is None else found[0]))

    def is_complete_now(self, place: ScanCursor) -> bool:
        """Whether a complete record is at a place now: a broker may be running, and it writes data before the index."""
        with self._data_now() as now:
            blocks = Scanner(now, self.rows, self.reader.rules, place).blocks()
            return any(complete_end(block.records) is not None for block in blocks)

    def close(self) -> None:
        """Close the data and index files."""
        self.reader.data.close()
        self.rows.segments.close()


def data_names(files: Files, directory: Path) -> list[str]:
    """Return the names of the files of ``data/`` or ``index/``, sorted."""
    return sorted(name for name in files.listdir(directory) or () if is_segment_name(name))


def _segment_bytes(files: Files, directory: Path, default: int) -> int:
    """Return the size of the files in a directory, as that of its first two files; the last may differ."""
    names = data_names(files, directory)[:2]
    return max((files.open(directory / name).size() for name in names), default=0) or default


def _check_directory(files: Files, layout: Layout) -> None:
    """Raise if a directory without identity has no ``data/`` or no data files in it."""
    names = files.listdir(layout.data)
    found = "there is no data/" if names is None else f"data/ contains {names[0]!r}" if names else ""
    if found and not any(map(is_segment_name, names or ())):
        raise StoreMismatchError(
            f"no store found ({found})", str(layout.root), "name the directory that contains data/ and index/"
        )
