"""A ``TableStore`` in a file of ``FaultyFiles``: a crash loses the last transactions since the last ``sync``."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgpack

from dledger_core.checksum import crc32
from dledger_core.storage.files.table_store import Changes, DamagedTablesError, Rows

if TYPE_CHECKING:
    from tests.support.faulty_files import FaultyFiles


def rows_in(data: bytes) -> Rows | None:
    """Return the rows of a file, None if there are none; raise DamagedTablesError."""
    if len(data) < 4 or crc32(data[4:]) != int.from_bytes(data[:4], "big"):
        raise DamagedTablesError("the CRC is wrong")
    return [(key, value) for key, value in msgpack.unpackb(data[4:])] or None


class TableModel:
    def __init__(self, files: FaultyFiles, path: Path, on_failed: Callable[[OSError], object]) -> None:
        self._files, self._path, self._on_failed = files, path, on_failed
        self._generation = files.generation
        self._rows: dict[bytes, bytes] | None = None
        self._waiting: list[tuple[Changes, bool]] = []
        self._failure: OSError | None = None

    def read(self) -> Rows | None:
        self.sync()
        return self._files.read_tables(self._path)

    def write(self, changes: Changes, *, replace: bool = False) -> None:
        self._waiting.append((changes, replace))
        if self._files.chance.random() < 0.5:  # the thread of a real one is sometimes fast
            self._finish()

    def sync(self) -> None:
        self._finish()
        if self._failure is not None:
            raise self._failure

    def scan(self, begin: bytes, end: bytes, count: int) -> Rows:
        return [row for row in self.read() or () if begin < row[0] < end][:count]

    def image(self) -> bytes:
        return self._files.read(self._path) or b""

    def rewrite(self) -> None:
        if (data := self._files.read(self._path)) is not None:
            self._files.replace(self._path, data)

    def close(self) -> None:
        self._finish()

    def _finish(self) -> None:
        if not self._waiting or self._failure is not None or self._generation != self._files.generation:
            return
        waiting, self._waiting = self._waiting, []
        try:
            rows = self._rows if self._rows is not None or waiting[0][1] else dict(self.read() or ())
            for changes, replace in waiting:
                rows = {} if replace else dict(rows or {})
                for key, value in changes.items():
                    if value is None:
                        rows.pop(key, None)
                    else:
                        rows[key] = value
            packed = bytes(msgpack.packb(sorted((rows or {}).items())))
            self._files.replace(self._path, crc32(packed).to_bytes(4, "big") + packed)
        except (OSError, DamagedTablesError) as error:
            self._failure = error if isinstance(error, OSError) else OSError(errno.EIO, str(error), str(self._path))
            self._on_failed(self._failure)
        else:
            self._rows = rows
