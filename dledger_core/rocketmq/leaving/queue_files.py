"""Consume queues in files: written slot by slot, or compared. Writing the same slots again changes nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dledger_core.errors import CorruptRecordError
from dledger_core.record import segment_name
from dledger_core.rocketmq.store.consume_queue import PREFILL, UNIT
from dledger_core.storage.files.file_system import Files

Queue = tuple[str, int]
"""Topic and queue id."""
_I64 = npt.NDArray[np.int64]
_NAME_BYTES_MAX: Final = 255


def is_file_name(topic: str) -> bool:
    """Whether a topic can name a directory: topics come from messages and must stay in the destination."""
    return "/" not in topic and "\0" not in topic and topic not in ("", ".", "..") and len(topic.encode()) <= 255


@dataclass(slots=True)
class QueueFiles:
    """The files of all queues. ``put`` buffers; ``flush`` writes and makes durable.

    Slots between the end of a queue and the next unit get RocketMQ's pre-fill unit, because a zero unit would end the
    queue for a broker.

    Attributes:
        files: the file system.
        root: the ``consumequeue`` directory.
        file_bytes: size of a file.
        ends: the slot after the last one that is written, by queue.
        unit: dtype of a unit; those of batch topics have no holes.
    """

    files: Files
    root: Path
    file_bytes: int
    ends: dict[Queue, int]
    unit: np.dtype[np.void] = UNIT
    _waiting: dict[Queue, list[tuple[_I64, npt.NDArray[Any]]]] = field(default_factory=dict)

    def put(self, queue: Queue, slots: _I64, units: npt.NDArray[Any]) -> None:
        """Add units of one queue in log order.

        Args:
            queue: topic and queue id.
            slots: int64, shape (n,).
            units: of the dtype, shape (n,).
        """
        if len(slots):
            self._waiting.setdefault(queue, []).append((slots, units))

    def flush(self) -> None:
        """Write all buffered units durably."""
        waiting, self._waiting = self._waiting, {}
        for queue, parts in waiting.items():
            slots = np.concatenate([slots for slots, _ in parts])
            units = np.concatenate([units for _, units in parts])
            for start, run in self._runs(queue, slots, units):
                self._write(queue, start, run)

    def _runs(self, queue: Queue, slots: _I64, units: npt.NDArray[Any]) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Yield contiguous slots that follow each other; fill holes."""
        edges = [0, *(np.flatnonzero(np.diff(slots) != 1) + 1).tolist(), len(slots)]
        per_file = self._per_file
        for begin, stop in itertools.pairwise(edges):
            first = int(slots[begin])
            end = self.ends.get(queue, first - first % per_file)
            run = units[begin:stop]
            if first > end:
                run = np.concatenate([np.full(first - end, PREFILL, UNIT), run])
                first = end
            yield first, run
            self.ends[queue] = max(end, first + len(run))

    def _write(self, queue: Queue, start: int, run: npt.NDArray[Any]) -> None:
        per_file, at = self._per_file, 0
        while at < len(run):
            slot = start + at
            count = min(per_file - slot % per_file, len(run) - at)
            self._write_file(queue, slot, run[at : at + count])
            at += count

    def _write_file(self, queue: Queue, slot: int, units: npt.NDArray[Any]) -> None:
        path, offset = self._place(queue, slot)
        created = not path.exists()
        if created:
            self.files.mkdir(path.parent)
        with closing(self.files.open(path, write=True, create=True)) as file:
            if file.size() < self.file_bytes:
                file.truncate(self.file_bytes)
            file.pwritev([units.astype(self.unit).tobytes()], offset)  # numpy joins in native byte order
            file.datasync()
        if created:
            self.files.sync_dir(path.parent)

    def _place(self, queue: Queue, slot: int) -> tuple[Path, int]:
        file, row = divmod(slot, self._per_file)
        path = self.root / queue[0] / str(queue[1]) / segment_name(file * self.file_bytes)
        return path, row * self.unit.itemsize

    @property
    def _per_file(self) -> int:
        return self.file_bytes // self.unit.itemsize

    def compare(self, queue: Queue, slots: _I64, units: npt.NDArray[Any]) -> None:
        """Raise CorruptRecordError unless the files have these units.

        Args:
            queue: topic and queue id.
            slots: int64, shape (n,).
            units: of the dtype, shape (n,).
        """
        per_file = self._per_file
        edges = np.flatnonzero((np.diff(slots) != 1) | (slots[1:] % per_file == 0)) + 1
        for rows in np.split(np.arange(len(slots)), edges):
            first, wanted = int(slots[rows[0]]), units[rows]
            path, offset = self._place(queue, first)
            with closing(self.files.open(path)) as file:
                found = np.frombuffer(file.pread(len(rows) * self.unit.itemsize, offset), self.unit)
            same = found == wanted if len(found) == len(wanted) else np.zeros(1, np.bool_)
            if not bool(same.all()):
                raise CorruptRecordError(
                    "a consume queue differs from its source",
                    str(path),
                    "check the disk, remove the destination, and convert again",
                    {"topic": queue[0], "queue_id": queue[1], "queue_offset": first + int(np.argmin(same))},
                )
