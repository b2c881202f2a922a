"""Consume queues in RocksDB (``storeType=defaultRocksDB``), read without a change of their database.

The database is the directory ``consumequeue``. All integers are big-endian. A topic is its length (4 bytes) and its
name in UTF-8, a queue id has 4 bytes, and a byte 1 is between all parts of a key. There are two column families::

    default   topic, queue id, slot (8)           -> physical offset (8), size (4), tags code (8), store time in ms (8)
    offset    topic, "max" or "min", queue id     -> physical offset (8), slot (8)
              CHECKPOINT_TOPIC, "max", queue 0    -> position up to which the broker has indexed the log (8)

A broker writes both without RocksDB's log, and RocksDB flushes them together. So a killed or running broker has units
in memory that are in no file; when it starts again, it indexes the CommitLog from that position on. Units after the
greatest slot of a queue are left over from a truncated log and not served.

The binding (``rocksdict``, extra ``rocksdb``) writes a file of its own into each database that it opens, in every mode.
So it opens a temporary directory, read-only: copies of the two files that name the others, and links to those, which
RocksDB never changes.
"""

from __future__ import annotations

import re
import struct
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from dledger_core.errors import ConfigError, CorruptRecordError
from dledger_core.rocketmq.store.consume_queue import QueueEnd

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["STORED_UNIT", "RocksDBQueues", "require_rocksdb"]

STORED_UNIT: Final = np.dtype([("physical_offset", ">i8"), ("size", ">i4"), ("tags_code", ">i8"), ("stored_ms", ">i8")])
"""The value of a unit."""
_OFFSETS: Final = "offset"
_SEPARATOR: Final = b"\1"
_CHECKPOINT_TOPIC: Final = "CHECKPOINT_TOPIC"
_CURRENT: Final = "CURRENT"
_MANIFEST: Final = re.compile("MANIFEST-[0-9]+")
_IMMUTABLE: Final = {".sst", ".log"}
"""Tables, and RocksDB's own log, which a read-only instance does not write."""
_BLOCK_BYTES: Final = 32 << 10
_RECORD_HEADER: Final = 7
_CHUNK: Final = 1 << 16
_SLOT_BYTES: Final = 8
_ATTEMPTS: Final = 3
"""A running broker may delete a file between the reading of its list and its opening."""
_INSTALL: Final = "pip install 'rocksdict~=0.3.29'"


def require_rocksdb() -> Any:
    """Return the module ``rocksdict``.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import rocksdict
    except ImportError:
        raise ConfigError("consume queues in RocksDB need the package rocksdict", "", _INSTALL) from None
    return rocksdict


class RocksDBQueues:
    """The consume queues in a database, as its files were when it was opened. Not thread-safe.

    Args:
        directory: of the database; its broker may be running.

    Attributes:
        ends: the end of each queue that a broker serves, by topic and queue id.
        indexed_end: position up to which the broker has indexed the log; 0 in an empty database.

    Raises:
        ConfigError: the binding is not installed.
        CorruptRecordError: the database cannot be read, or has other contents.
    """

    def __init__(self, directory: Path) -> None:
        self.directory: Final = directory
        self._binding = require_rocksdb()
        self._temporary = tempfile.TemporaryDirectory(prefix="dledger-rocksdb-")
        try:
            self._units = self._open()
            self.ends, self.indexed_end = self._read_ends()
        except BaseException:
            self._temporary.cleanup()
            raise

    def units(self, topic: str, queue_id: int) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[Any]]]:
        """Yield the units of a queue that a broker serves: slots and units of STORED_UNIT, both of shape (n,).

        Raises:
            CorruptRecordError: a file is damaged, or a value is not a unit.
        """
        end, prefix = self.ends[topic, queue_id].slots, _unit_key(topic, queue_id)
        options = self._binding.ReadOptions()
        options.set_iterate_upper_bound(prefix + end.to_bytes(_SLOT_BYTES, "big"))
        options.set_readahead_size(4 << 20)
        try:
            rows = self._units.items(from_key=prefix, read_opt=options)
            while chunk := list(islice(rows, _CHUNK)):
                keys, values = zip(*chunk, strict=True)
                yield self._slots(prefix, keys), self._values(values, STORED_UNIT)
        except CorruptRecordError:
            raise
        except Exception as error:
            raise self._unreadable(error) from error

    def unit(self, topic: str, queue_id: int, slot: int) -> dict[str, int] | None:
        """Return the unit of a slot by the names of STORED_UNIT; None if it has none."""
        end = self.ends.get((topic, queue_id))
        value = self._units.get(_unit_key(topic, queue_id) + struct.pack(">q", slot))
        if end is None or slot >= end.slots or value is None:
            return None
        [found] = self._values([value], STORED_UNIT)
        return {name: int(found[name]) for name in STORED_UNIT.names or ()}

    def close(self) -> None:
        """Close the database, and delete the temporary directory."""
        self._units.close()
        self._temporary.cleanup()

    def __enter__(self) -> RocksDBQueues:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> Any:
        raw = self._binding.Options(raw_mode=True)
        raw.set_max_open_files(-1)  # all files are open from the start: a broker may delete some at any time
        families = {name: self._binding.Options(raw_mode=True) for name in ("default", _OFFSETS)}
        access = self._binding.AccessType.read_only(False)
        failure: object = None
        for attempt in range(_ATTEMPTS):
            copy = Path(self._temporary.name, str(attempt))
            try:
                self._link(copy)
                return self._binding.Rdict(str(copy), raw, column_families=families, access_type=access)
            except Exception as error:  # noqa: BLE001  (the binding has no class of its own for it)
                failure = error
        raise self._unreadable(failure)

    def _link(self, copy: Path) -> None:
        """Make a directory with the database's files: the broker appends to the manifest, so that is copied first."""
        copy.mkdir()
        current = (self.directory / _CURRENT).read_bytes()
        manifest = current.decode("ascii").strip()
        if not _MANIFEST.fullmatch(manifest):
            raise self._unreadable(f"{_CURRENT} does not name a manifest")
        content = (self.directory / manifest).read_bytes()
        if not _is_complete(content):  # RocksDB would show the tables of an earlier time, or none
            raise self._unreadable(f"{manifest} ends in the middle of a record")
        (copy / manifest).write_bytes(content)
        (copy / _CURRENT).write_bytes(current)
        for path in self.directory.iterdir():
            if path.suffix in _IMMUTABLE and path.is_file():
                (copy / path.name).symlink_to(path.absolute())

    def _read_ends(self) -> tuple[dict[tuple[str, int], QueueEnd], int]:
        ends, indexed = dict[tuple[str, int], QueueEnd](), 0
        try:
            rows = list(self._units.get_column_family(_OFFSETS).items())
        except Exception as error:
            raise self._unreadable(error) from error
        for key, value in rows:
            topic, kind, queue_id = self._parsed(key)
            if kind != b"max":
                continue
            if topic == _CHECKPOINT_TOPIC and len(value) == _SLOT_BYTES:
                (indexed,) = struct.unpack(">q", value)
            elif len(value) != 2 * _SLOT_BYTES:
                raise self._unreadable(f"the end of {topic} / {queue_id} has {len(value)} bytes")
            else:
                position, slot = struct.unpack(">qq", value)
                ends[topic, queue_id] = QueueEnd(slot + 1, position)
        return ends, int(indexed)

    def _parsed(self, key: bytes) -> tuple[str, bytes, int]:
        """Return the parts of a key of the column family ``offset``."""
        try:
            (length,) = struct.unpack_from(">i", key)
            topic, rest = key[5 : 5 + length], key[5 + length :]
            one, kind, two, queue_id = struct.unpack(">c3sci", rest)
            if length < 0 or {key[4:5], one, two} != {_SEPARATOR}:
                raise ValueError("a separator is missing")
            return topic.decode(), kind, queue_id
        except (struct.error, ValueError) as error:
            raise self._unreadable(f"an offset has the key {key[:64]!r}: {error}") from None

    def _slots(self, prefix: bytes, keys: tuple[bytes, ...]) -> npt.NDArray[np.int64]:
        size = len(prefix) + _SLOT_BYTES
        if any(len(key) != size for key in keys):
            raise self._unreadable("a key has another length than its queue's")
        return np.frombuffer(b"".join(key[-_SLOT_BYTES:] for key in keys), ">i8").astype(np.int64)

    def _values(self, values: Any, kind: np.dtype[Any]) -> npt.NDArray[Any]:
        if any(len(value) != kind.itemsize for value in values):
            raise self._unreadable(f"a unit does not have {kind.itemsize} bytes")
        return np.frombuffer(b"".join(values), kind)

    def _unreadable(self, reason: object) -> CorruptRecordError:
        what = f"the database of consume queues cannot be read: {reason}"
        return CorruptRecordError(what, str(self.directory), "leave --compare out: the log has all of it")


def _is_complete(manifest: bytes) -> bool:
    """Whether a manifest ends with a record: checksum (4), length (2, little-endian), type (1), content; in blocks."""
    at = 0
    while at < len(manifest):
        left = _BLOCK_BYTES - at % _BLOCK_BYTES
        if left < _RECORD_HEADER:
            at += left  # zeros
        elif len(manifest) - at < _RECORD_HEADER:
            return False
        else:
            at += _RECORD_HEADER + int.from_bytes(manifest[at + 4 : at + 6], "little")
    return at == len(manifest)


def _unit_key(topic: str, queue_id: int) -> bytes:
    """Return the start of the keys of a queue's units."""
    name = topic.encode()
    return b"".join(
        [len(name).to_bytes(4, "big"), _SEPARATOR, name, _SEPARATOR, queue_id.to_bytes(4, "big"), _SEPARATOR]
    )
