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

from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dledger_core.rocketmq.leaving.rewrite import Keys
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
_I64 = npt.NDArray[np.int64]


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
        slots: hash slots of a file, ``maxHashSlotNum``.
        units: units of a file, ``maxIndexNum``; the first one stays unused.
        started_ms: names the first file; each further one is a millisecond later.
        current: header of the newest file, from an earlier run.
    """

    def __init__(
        self, files: Files, root: Path, slots: int, units: int, started_ms: int, current: KeyFile | None = None
    ) -> None:
        self._files = files
        self._root = root
        self._slot_count = slots
        self._units_max = units
        self._started_ms = started_ms
        self.current = current or KeyFile()
        self._slots = np.zeros(slots, np.int32)
        self._waiting: list[npt.NDArray[Any]] = []
        self._flushed = self.current.next_unit
        if self._flushed > 1:
            self._restore_slots()

    def add(self, keys: Keys) -> None:
        """Append keys; write a file once it is full."""
        at = 0
        while at < len(keys.hashes):
            room = self._units_max - self.current.next_unit
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
        slots = hashes % self._slot_count
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
            file.truncate(self._units_at + self._units_max * KEY_UNIT.itemsize)
            file.pwritev([units.tobytes()], self._units_at + self._flushed * KEY_UNIT.itemsize)
            file.pwritev([self._slots.astype(_SLOT).tobytes()], _HEADER.itemsize)
            file.pwritev([np.array([tuple(header.saved().values())[1:]], _HEADER).tobytes()], 0)
            file.datasync()
        self._files.sync_dir(self._root)
        self._waiting, self._flushed = [], header.next_unit

    @property
    def _units_at(self) -> int:
        return _HEADER.itemsize + self._slot_count * _SLOT.itemsize

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
        slots = np.frombuffer(data, KEY_UNIT)["hash"].astype(np.int64) % self._slot_count
        order = np.argsort(slots, kind="stable")
        last = np.append(np.diff(slots[order]) != 0, True)
        self._slots[slots[order[last]]] = order[last] + 1


def _seconds(stored_ms: _I64, since_ms: int) -> _I64:
    if since_ms <= 0:
        return np.zeros(len(stored_ms), np.int64)
    # Java divides towards zero; a negative difference becomes 0 either way.
    return np.clip((stored_ms - since_ms) // 1000, 0, _SECONDS_MAX)
