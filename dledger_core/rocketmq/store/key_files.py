"""RocketMQ's index files, by which a broker finds messages by key.

All integers are big-endian. A file has a header, hash slots, and units, numbered from 1::

    0   8  store time of the first message    unit  0  4  hash of "topic#key"
    8   8  store time of the last one               4  8  physical offset of the message
    16  8  physical offset of the first one         12 4  seconds after the first one's store time
    24  8  physical offset of the last one          16 4  number of the previous unit in the same slot, 0 = none
    32  4  used slots
    36  4  number of the next unit
    40  4  each slot: number of its newest unit, 0 = none; the slot of a key is its hash modulo their number

Source: RocketMQ's ``IndexFile`` and ``IndexService``. A file is named by the time at which it was made.
"""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dledger_core.errors import ConfigError, CorruptRecordError
from dledger_core.rocketmq.message.keys import Keys
from dledger_core.rocketmq.store.broker_conf import broker_properties, whole_number
from dledger_core.storage.files.file_system import Files

KEY_UNIT: Final = np.dtype([("hash", ">i4"), ("position", ">i8"), ("seconds", ">i4"), ("previous", ">i4")])
"""One unit of an index file."""
_HEADER: Final = np.dtype(
    [
        ("first_ms", ">i8"),
        ("last_ms", ">i8"),
        ("first_position", ">i8"),
        ("last_position", ">i8"),
        ("used_slots", ">i4"),
        ("next_unit", ">i4"),
    ]
)
_SLOT: Final = np.dtype(">i4")
_SECONDS_MAX: Final = (1 << 31) - 1
_HASH_MAX: Final = (1 << 31) - 1
_I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class KeyFileSize:
    """The size of index files, which a broker takes from its configuration and never from the files.

    Attributes:
        slots: hash slots, ``maxHashSlotNum``.
        units: units, ``maxIndexNum``; the first one stays unused.
    """

    slots: int
    units: int

    @property
    def bytes(self) -> int:
        """Bytes of a file."""
        return _HEADER.itemsize + self.slots * _SLOT.itemsize + self.units * KEY_UNIT.itemsize


def key_file_size(conf: Path | None, broker: Path | None) -> KeyFileSize:
    """Return the size of a broker's index files.

    Args:
        conf: its configuration; None = RocketMQ's defaults.
        broker: its directory; None = unknown.

    Raises:
        ConfigError: its index files have another size, or the configuration cannot be read.
    """
    properties = broker_properties(conf)
    slots = whole_number(properties, "maxHashSlotNum", 5_000_000, conf)
    size = KeyFileSize(slots, whole_number(properties, "maxIndexNum", 20_000_000, conf))
    first = next(iter(key_file_paths(broker / "index")), None) if broker is not None else None
    found = None if first is None else first.stat().st_size
    if found not in (None, size.bytes):
        raise ConfigError(
            f"the broker's index files have {found} bytes: it has another maxHashSlotNum or maxIndexNum",
            str(broker),
            "name its configuration with --broker-conf",
        )
    return size


def key_file_paths(directory: Path) -> list[Path]:
    """Return the index files in a directory, oldest first; none if it is missing."""
    return sorted(path for path in directory.glob("[0-9]" * 17) if path.is_file())


class KeyUnits:
    """An index file for reading.

    Args:
        path: the file.
        size: its size by the broker's configuration.

    Attributes:
        path: the file.
        count: number of units.
        positions: int64: the physical offsets of all units; a broker appends them in order.

    Raises:
        CorruptRecordError: the file has another size, or its header is impossible.
    """

    def __init__(self, path: Path, size: KeyFileSize) -> None:
        self.path: Final = path
        with path.open("rb") as file:
            found = os.fstat(file.fileno()).st_size
            if found != size.bytes:
                raise _unreadable(path, f"it has {found} bytes, not {size.bytes}")
            [header] = np.frombuffer(file.read(_HEADER.itemsize), _HEADER)
            self.count: Final = int(header["next_unit"]) - 1
            if not 0 <= self.count < size.units:
                raise _unreadable(path, f"its header names {self.count} keys")
            self._first_ms = int(header["first_ms"])
            self._slots = np.frombuffer(file.read(size.slots * _SLOT.itemsize), _SLOT)
            file.seek(KEY_UNIT.itemsize, os.SEEK_CUR)  # the unused unit
            self._units = np.frombuffer(file.read(self.count * KEY_UNIT.itemsize), KEY_UNIT)
        self.positions: Final[_I64] = self._units["position"].astype(np.int64)

    def between(self, start: int, stop: int) -> tuple[_I64, _I64, _I64]:
        """Return position, hash and store time in ms of the units with positions in [start, stop), by position.

        Times are cut to whole seconds; that of a unit with 0 seconds is -1, because earlier times are written as 0 too.
        """
        ordered = bool((self.positions[1:] >= self.positions[:-1]).all())
        rows: Any
        if ordered:
            rows = slice(*np.searchsorted(self.positions, [start, stop]))
        else:
            rows = np.flatnonzero((self.positions >= start) & (self.positions < stop))
            rows = rows[np.argsort(self.positions[rows], kind="stable")]
        seconds = self._units["seconds"][rows].astype(np.int64)
        times = np.where(seconds > 0, self._first_ms + 1000 * seconds, -1)
        return self.positions[rows], self._units["hash"][rows].astype(np.int64) & _HASH_MAX, times

    def wrong_links(self) -> int:
        """Return the number of slots and units that do not name the previous unit of their slot."""
        slots = self._units["hash"].astype(np.int64) % len(self._slots)
        order = np.argsort(slots, kind="stable")
        same = np.zeros(len(order), np.bool_)
        same[1:] = slots[order][1:] == slots[order][:-1]
        previous = np.zeros(len(order), np.int64)
        previous[order] = np.where(same, np.roll(order + 1, 1), 0)
        heads = np.zeros(len(self._slots), np.int64)
        last = np.append(~same[1:], True)[: len(order)]
        heads[slots[order[last]]] = order[last] + 1
        return int((previous != self._units["previous"]).sum() + (heads != self._slots).sum())


def _unreadable(path: Path, what: str) -> CorruptRecordError:
    return CorruptRecordError(f"the index file cannot be read: {what}", str(path), "rebuild the index files")


@dataclass(slots=True)
class KeyFile:
    """The header of the newest file, and the number of files before it.

    Attributes:
        number: of the file, from 0.
        first_ms: store time of the first message; before the first unit, that of the last one in the previous file.
        last_ms: store time of the last message.
        first_position: its physical offset.
        last_position: physical offset of the last message.
        used_slots: number of slots with a unit.
        next_unit: number of the next unit; 1 = none so far.
    """

    number: int = 0
    first_ms: int = 0
    last_ms: int = 0
    first_position: int = 0
    last_position: int = 0
    used_slots: int = 0
    next_unit: int = 1

    def saved(self) -> dict[str, int]:
        """Return the fields for JSON."""
        return asdict(self)


class KeyFiles:
    """Appends keys as a broker does, so that the files equal those that it would build from the same log.

    Args:
        files: the file system.
        root: the ``index`` directory.
        size: of a file.
        started_ms: names the first file; each further one is a millisecond later.
        current: header of the newest file, from an earlier run.
    """

    def __init__(
        self, files: Files, root: Path, size: KeyFileSize, started_ms: int, current: KeyFile | None = None
    ) -> None:
        self._files = files
        self._root = root
        self._size = size
        self._started_ms = started_ms
        self.current = current or KeyFile()
        self._slots = np.zeros(size.slots, np.int32)
        self._waiting: list[npt.NDArray[Any]] = []
        self._flushed = self.current.next_unit
        if self._flushed > 1:
            self._restore_slots()

    def add(self, keys: Keys) -> None:
        """Append keys; write a file once it is full."""
        at = 0
        while at < len(keys.hashes):
            room = self._size.units - self.current.next_unit
            if room <= 0:
                self._next_file()
                continue
            stop = min(len(keys.hashes), at + room)
            self._append(keys.hashes[at:stop], keys.positions[at:stop], keys.stored_ms[at:stop])
            at = stop

    def _next_file(self) -> None:
        self.flush()
        last = self.current
        self.current = KeyFile(
            last.number + 1, last.last_ms, last.last_ms, last.last_position, last.last_position, 0, 1
        )
        self._slots[:] = 0
        self._flushed = 1

    def _append(self, hashes: _I64, positions: _I64, stored_ms: _I64) -> None:
        header = self.current
        numbers = header.next_unit + np.arange(len(hashes))
        slots = hashes % self._size.slots
        order = np.argsort(slots, kind="stable")
        ordered = slots[order]
        same = np.zeros(len(order), np.bool_)
        same[1:] = ordered[1:] == ordered[:-1]
        previous = np.empty(len(order), np.int64)
        previous[order] = np.where(same, np.roll(numbers[order], 1), self._slots[ordered])
        header.used_slots += int((previous == 0).sum())
        last = np.append(~same[1:], True)
        self._slots[ordered[last]] = numbers[order[last]]
        units = np.zeros(len(hashes), KEY_UNIT)
        units["hash"], units["position"], units["previous"] = hashes, positions, previous
        begun = header.first_ms if header.next_unit == 1 else None
        if header.next_unit == 1:
            header.first_ms, header.first_position = int(stored_ms[0]), int(positions[0])
        seconds = _seconds(stored_ms, header.first_ms)
        if begun is not None:
            seconds[0] = _seconds(stored_ms[:1], begun)[0]  # a broker sets the start after the first unit
        units["seconds"] = seconds
        header.last_ms, header.last_position = int(stored_ms[-1]), int(positions[-1])
        header.next_unit += len(hashes)
        self._waiting.append(units)

    def flush(self) -> None:
        """Make the newest file durable with all keys so far."""
        if not self._waiting:
            return
        self._files.mkdir(self._root)
        header = self.current
        units = np.concatenate(self._waiting).astype(KEY_UNIT)  # numpy joins in native byte order
        with closing(self._files.open(self._path, write=True, create=True)) as file:
            file.truncate(self._size.bytes)
            file.pwritev([units.tobytes()], self._units_at + self._flushed * KEY_UNIT.itemsize)
            file.pwritev([self._slots.astype(_SLOT).tobytes()], _HEADER.itemsize)
            file.pwritev([np.array([tuple(header.saved().values())[1:]], _HEADER).tobytes()], 0)
            file.datasync()
        self._files.sync_dir(self._root)
        self._waiting, self._flushed = [], header.next_unit

    @property
    def _units_at(self) -> int:
        return _HEADER.itemsize + self._size.slots * _SLOT.itemsize

    @property
    def _path(self) -> Path:
        made = self._started_ms + self.current.number
        return self._root / (
            datetime.fromtimestamp(made // 1000).astimezone().strftime("%Y%m%d%H%M%S") + f"{made % 1000:03d}"
        )

    def _restore_slots(self) -> None:
        """Compute the slots from the units: those on disk may be of a later state than the saved one."""
        with closing(self._files.open(self._path)) as file:
            size = KEY_UNIT.itemsize
            data = file.pread((self._flushed - 1) * size, self._units_at + size)
        slots = np.frombuffer(data, KEY_UNIT)["hash"].astype(np.int64) % self._size.slots
        order = np.argsort(slots, kind="stable")
        last = np.append(np.diff(slots[order]) != 0, True)
        self._slots[slots[order[last]]] = order[last] + 1


def _seconds(stored_ms: _I64, since_ms: int) -> _I64:
    if since_ms <= 0:
        return np.zeros(len(stored_ms), np.int64)
    # Java divides towards zero; a negative difference becomes 0 either way.
    return np.clip((stored_ms - since_ms) // 1000, 0, _SECONDS_MAX)
