"""Durable rows of the tables that are derived from a log: the one exception to the seam of ``file_system``.

A ``TableStore`` maps keys to values, in the order of the keys, and changes by transactions. SQLite keeps the rows in
one file and writes only what changes, in a thread of its own: a table of a million rows costs a checkpoint nothing.

Settings of SQLite: a rollback journal, truncated after each transaction, with ``synchronous = FULL``. Each transaction
is durable when it ends, and between two transactions the store is one file, which can be copied and read without
anything else. A write-ahead log would save one sync per transaction, in a thread for which nothing waits, and would
need shared memory next to the file, also to read it.
"""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias
from urllib.parse import quote

Rows: TypeAlias = list[tuple[bytes, bytes]]
"""Keys and values, in the order of the keys."""
Changes: TypeAlias = Mapping[bytes, bytes | None]
"""New values by key; None removes the row."""

_WAIT_S: Final = 60.0
"""For a reader of another process, which reads the file in one go."""
_SCHEMA: Final = (
    "CREATE TABLE IF NOT EXISTS rows (key BLOB PRIMARY KEY, value BLOB NOT NULL, crc INTEGER NOT NULL) WITHOUT ROWID"
)


class DamagedTablesError(ValueError):
    """The rows cannot be read, or are not those that were written."""


class TableStore(Protocol):
    """Rows that change by transactions. One thread writes; a failure is final.

    A crash loses the last transactions since ``sync``, perhaps none of them, but never a part of one.
    """

    def read(self) -> Rows | None:
        """Return all rows that were written, or None if there are none; raise DamagedTablesError."""

    def write(self, changes: Changes, *, replace: bool = False) -> None:
        """Start a transaction, which ends before later ones begin, and return.

        A failure is reported by ``sync``, and to ``on_failed`` of ``Files.open_tables``.

        Args:
            changes: the rows that change.
            replace: whether to remove all other rows, also damaged ones.
        """

    def sync(self) -> None:
        """Return once all transactions are durable; raise the OSError of the first one that failed."""

    def scan(self, begin: bytes, end: bytes, count: int) -> Rows:
        """Return rows with a key between ``begin`` and ``end``, both excluded, in order, at most ``count``.

        All transactions that were started are included; any thread may call. Raises OSError.
        """

    def image(self) -> bytes:
        """Return all durable rows as bytes, which ``Files.rows_in_image`` reads; empty if there are none.

        Any thread may call, while another one writes.
        """

    def rewrite(self) -> None:
        """Write all rows again, because the disk may lack what can be read; raise OSError."""

    def close(self) -> None:
        """End the transactions and the thread; raise nothing."""


def _journal(path: Path) -> Path:
    return path.with_name(path.name + "-journal")


def row_crc(key: bytes, value: bytes) -> int:
    """Return the CRC-32 that is stored with a row."""
    return zlib.crc32(value, zlib.crc32(key))


class SqliteTables:
    """A ``TableStore`` in a file of SQLite, which is created by the first transaction.

    Args:
        path: the file.
        on_failed: called in the store's thread with the error of the first failed transaction.
        with_descriptor: calls a function again as long as it raises an OSError because no descriptor is free.
    """

    def __init__(
        self,
        path: Path,
        on_failed: Callable[[OSError], object],
        with_descriptor: Callable[[Callable[[], Any]], Any] = lambda function: function(),
    ) -> None:
        self._path = path
        self._on_failed = on_failed
        self._with_descriptor = with_descriptor
        self._waiting: list[tuple[Changes, bool]] = []
        self._busy = False
        self._closing = False
        self._failure: OSError | None = None
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._connection: sqlite3.Connection | None = None

    def read(self) -> Rows | None:
        """See ``TableStore``."""
        self.sync()
        if not self._path.exists():
            return None
        rows: Rows | None = self._with_descriptor(self._read)
        return rows

    def _read(self) -> Rows | None:
        with _as_os_errors(self._path):
            return _rows_of(self._open())

    def write(self, changes: Changes, *, replace: bool = False) -> None:
        """See ``TableStore``."""
        with self._changed:
            self._waiting.append((changes, replace))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="dledger-tables", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def sync(self) -> None:
        """See ``TableStore``."""
        with self._changed:
            while (self._waiting or self._busy) and self._failure is None:
                self._changed.wait()
            if self._failure is not None:
                raise self._failure

    def scan(self, begin: bytes, end: bytes, count: int) -> Rows:
        """See ``TableStore``."""
        self.sync()
        if not self._path.exists():
            return []
        query = "SELECT key, value FROM rows WHERE key > ? AND key < ? ORDER BY key LIMIT ?"
        with _as_os_errors(self._path), closing(_read_only(self._path)) as connection:
            return connection.execute(query, (begin, end, count)).fetchall()

    def image(self) -> bytes:
        """See ``TableStore``."""
        with self._changed:
            while self._busy:
                self._changed.wait()
            self._busy = True  # between two transactions the file is all there is
        try:
            return self._path.read_bytes() if self._path.exists() else b""
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def rewrite(self) -> None:
        """See ``TableStore``."""
        self.sync()
        if self._path.exists():
            with _as_os_errors(self._path):
                self._open().execute("VACUUM")

    def close(self) -> None:
        """See ``TableStore``."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()
        self._disconnect()

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._busy or not (self._waiting or self._closing):
                    self._changed.wait()
                if not self._waiting or self._failure is not None:
                    return
                waiting, self._waiting, self._busy = self._waiting, [], True
            changes: dict[bytes, bytes | None] = {}
            replaces = False
            for more, replace in waiting:
                changes = {**({} if replace else changes), **more}
                replaces |= replace
            try:
                self._with_descriptor(partial(self._transact, changes, replaces))
            except (OSError, DamagedTablesError) as error:
                failure = error if isinstance(error, OSError) else OSError(errno.EIO, str(error), str(self._path))
                with self._changed:
                    self._failure, self._busy = failure, False
                    self._changed.notify_all()
                self._on_failed(failure)
                return
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _transact(self, changes: Changes, replace: bool) -> None:
        try:
            self._write(changes, replace)
        except DamagedTablesError:
            if not replace:
                raise
            self._disconnect()
            for path in (self._path, _journal(self._path)):
                path.unlink(missing_ok=True)
            self._write(changes, replace)

    def _write(self, changes: Changes, replace: bool) -> None:
        removed = ((key,) for key, value in changes.items() if value is None)
        written = ((key, value, row_crc(key, value)) for key, value in changes.items() if value is not None)
        with _as_os_errors(self._path):
            connection = self._open()
            connection.execute("BEGIN IMMEDIATE")
            try:
                if replace:
                    connection.execute("DELETE FROM rows")
                connection.executemany("DELETE FROM rows WHERE key = ?", removed)
                connection.executemany("INSERT OR REPLACE INTO rows VALUES (?, ?, ?)", written)
                connection.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
                raise

    def _open(self) -> sqlite3.Connection:
        """Return the connection; the first one rolls an interrupted transaction back."""
        if self._connection is None:
            # Transactions of the thread and calls of the owner never overlap: each of these waits in ``sync`` first.
            connection = sqlite3.connect(self._path, timeout=_WAIT_S, isolation_level=None, check_same_thread=False)
            try:
                connection.execute("PRAGMA journal_mode = TRUNCATE")
                connection.execute("PRAGMA synchronous = FULL")
                connection.execute(_SCHEMA)
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def read_sqlite(path: Path) -> Rows | None:
    """Return the rows of a file that may be in use, without changing anything; None if there are none.

    Raises:
        DamagedTablesError: the file is damaged.
        OSError: it cannot be read.
    """
    if not path.exists():
        return None
    with _as_os_errors(path):
        try:
            with closing(_read_only(path)) as connection:
                return _rows_of(connection)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN):
                raise
    # A killed node left a transaction that the next opening rolls back: do that in a copy.
    with tempfile.TemporaryDirectory() as directory, _as_os_errors(path):
        copy = Path(directory, path.name)
        for source, target in ((path, copy), (_journal(path), _journal(copy))):
            with suppress(FileNotFoundError):
                shutil.copyfile(source, target)
        with closing(sqlite3.connect(copy)) as connection:
            return _rows_of(connection)


def move_sqlite(source: Path, target: Path, sync_dir: Callable[[Path], None]) -> None:
    """Replace a file by another one, durably; both are closed. A crash leaves one of them, complete, as ``target``."""
    _journal(target).unlink(missing_ok=True)
    sync_dir(target.parent)  # SQLite would roll back what a killed node left there, in the new file
    source.replace(target)
    _journal(source).unlink(missing_ok=True)
    sync_dir(target.parent)


def rows_in_image(image: bytes) -> Rows | None:
    """Return the rows of ``SqliteTables.image``; raise DamagedTablesError."""
    if not image:
        return None
    try:
        with closing(sqlite3.connect(":memory:")) as connection:
            connection.deserialize(image)
            return _rows_of(connection)
    except sqlite3.Error as error:
        raise DamagedTablesError(str(error)) from error


def _read_only(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro", uri=True, timeout=_WAIT_S)


def _rows_of(connection: sqlite3.Connection) -> Rows | None:
    try:
        found = connection.execute("SELECT key, value, crc FROM rows ORDER BY key")
    except sqlite3.OperationalError as error:
        if "no such table" in str(error):  # the first transaction has not ended
            return None
        raise
    rows: Rows = []
    for key, value, crc in found:
        try:
            is_intact = zlib.crc32(key + value) == crc  # row_crc, without a call
        except TypeError as error:
            raise DamagedTablesError(str(error)) from None
        if not is_intact:
            raise DamagedTablesError("the CRC of a row is wrong")
        rows.append((key, value))
    return rows or None


@contextmanager
def _as_os_errors(path: Path) -> Iterator[None]:
    """Raise errors of SQLite as the seam's: OSError for the disk, DamagedTablesError for the content."""
    try:
        yield
    except sqlite3.OperationalError as error:
        number = {sqlite3.SQLITE_FULL: errno.ENOSPC, sqlite3.SQLITE_CANTOPEN: _open_error(path)}.get(
            error.sqlite_errorcode & 0xFF, errno.EIO
        )
        raise OSError(number, f"{os.strerror(number)}: {error}", str(path)) from error
    except sqlite3.DatabaseError as error:
        raise DamagedTablesError(str(error)) from error


def _open_error(path: Path) -> int:
    """Return the error number of opening a file now; SQLite reports none."""
    try:
        os.close(os.open(path.parent, os.O_RDONLY))
    except OSError as error:
        return error.errno or errno.EIO
    return errno.EIO
