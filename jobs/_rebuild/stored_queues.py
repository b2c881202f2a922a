"""The consume queues that a broker has, in files or in RocksDB, for the comparison with the log."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from dledger_core.rocketmq import (
    PREFILL,
    UNIT_BYTES,
    RocksDBQueues,
    decode_units,
    ext_tags_codes,
    queues_in_rocksdb,
)

from .._report.drill_down import Fields

__all__ = ["FOUND", "PARTS", "Slot", "StoredQueues", "stored_queues"]

Slot = tuple[str, int, int]
"""Topic, queue id and slot."""
PARTS: Final = "topic string, queue_id int, first bigint, path string"
FOUND: Final = (
    "topic string, queue_id int, slot bigint, position bigint, found_size int, found_tags bigint, lost_tags boolean"
)
_NAMES: Final = [column.split()[0] for column in FOUND.split(", ")]
_NAME_DIGITS: Final = 20
_QUEUE_MAX: Final = (1 << 31) - 1
_SURROGATES: Final = re.compile("[\ud800-\udfff]")
"""Bytes of a name that are not UTF-8."""


class StoredQueues(ABC):
    """The consume queues of a broker.

    Args:
        directory: of the topics, or of the database; the executors share it.

    Attributes:
        noun: of a part.
        label: of the whole, for the page.
        indexed_end: position of the log up to which the broker has indexed it; None if this is not recorded. Later
            messages have no unit yet.
    """

    noun = "file"
    label = "files"
    indexed_end: int | None = None

    def __init__(self, directory: str) -> None:
        self.directory: Final = directory

    @abstractmethod
    def parts(self) -> list[tuple[str, int, int, str]]:
        """Return a row for each part that a task reads: topic, queue id, first slot and path."""

    @property
    @abstractmethod
    def read(self) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
        """A function for ``mapInArrow`` from PARTS to FOUND."""

    @abstractmethod
    def place(self, slot: Slot) -> tuple[Path, int | None]:
        """Return the file of a slot and the offset of its unit there, None if it has none."""

    @abstractmethod
    def unit(self, slot: Slot) -> Fields | None:
        """Return a unit; None if the slot is empty or outside of the queue."""


def stored_queues(directory: str) -> StoredQueues:
    """Return the queues in a directory that ``check_compared`` returned."""
    return _InRocksDB(directory) if queues_in_rocksdb(Path(directory)) else _InFiles(directory)


class _InFiles(StoredQueues):
    """Queues in files below ``consumequeue/<topic>/<queue>/``."""

    def parts(self) -> list[tuple[str, int, int, str]]:
        found = []
        for path in sorted(Path(self.directory).glob("*/*/" + "[0-9]" * _NAME_DIGITS)):
            queue, topic = path.parent.name, path.parent.parent.name
            named = queue.isascii() and queue.isdecimal() and int(queue) <= _QUEUE_MAX and not _SURROGATES.search(topic)
            if named and path.is_file():
                found.append((topic, int(queue), int(path.name) // UNIT_BYTES, str(path)))
        return found

    @property
    def read(self) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
        return _read_files

    def place(self, slot: Slot) -> tuple[Path, int | None]:
        topic, queue_id, number = slot
        queue = Path(self.directory) / topic / str(queue_id)
        at = number * UNIT_BYTES
        files = [path for path in sorted(queue.glob("[0-9]*")) if path.name.isdecimal() and int(path.name) <= at]
        if not files or at - int(files[-1].name) >= files[-1].stat().st_size:
            return queue, None
        return files[-1], at - int(files[-1].name)

    def unit(self, slot: Slot) -> Fields | None:
        file, offset = self.place(slot)
        if offset is None:
            return None
        with file.open("rb") as opened:
            opened.seek(offset)
            content = opened.read(UNIT_BYTES)
        if len(content) < UNIT_BYTES:
            return None
        (unit,) = decode_units(content)
        blank = all(unit[name] == PREFILL[name] for name in ("physical_offset", "size"))
        if blank or unit["physical_offset"] < 0 or unit["size"] <= 0:
            return None
        found = _fields(unit)
        tags, lost = ext_tags_codes(file.parent, np.array([found["tags_code"]], np.int64))
        return found | {"tags_code": "none in consumequeue_ext" if lost[0] else int(tags[0])}


class _InRocksDB(StoredQueues):
    """Queues in a database."""

    noun = "queue"
    label = "RocksDB"

    def __init__(self, directory: str) -> None:
        super().__init__(directory)
        with RocksDBQueues(Path(directory)) as queues:
            self._queues = sorted(queues.ends)
            self.indexed_end = queues.indexed_end

    def parts(self) -> list[tuple[str, int, int, str]]:
        return [(topic, queue_id, 0, self.directory) for topic, queue_id in self._queues]

    @property
    def read(self) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
        return _read_database

    def place(self, slot: Slot) -> tuple[Path, int | None]:
        return Path(self.directory), None

    def unit(self, slot: Slot) -> Fields | None:
        with RocksDBQueues(Path(self.directory)) as queues:
            found = queues.unit(*slot)
        return None if found is None else _fields(found)


def _fields(unit: Any) -> dict[str, Any]:
    names = {"position": "physical_offset", "size": "size", "tags_code": "tags_code"}
    return {name: int(unit[column]) for name, column in names.items()}


def _read_files(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for row in batch.to_pylist():
            slots = decode_units(Path(row["path"]).read_bytes())
            ended = np.flatnonzero((slots["physical_offset"] < 0) | (slots["size"] <= 0))
            slots = slots[: ended[0]] if len(ended) else slots
            blank = (slots["physical_offset"] == PREFILL["physical_offset"]) & (slots["size"] == PREFILL["size"])
            at = np.flatnonzero(~blank)
            tags, lost = ext_tags_codes(Path(row["path"]).parent, slots["tags_code"][at].astype(np.int64))
            yield _batch(row, at.astype(np.int64) + row["first"], slots[at], tags, lost)


def _read_database(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    rows = [row for batch in batches for row in batch.to_pylist()]
    if not rows:
        return
    with RocksDBQueues(Path(rows[0]["path"])) as queues:
        for row in rows:
            if (row["topic"], row["queue_id"]) not in queues.ends:  # deleted meanwhile, with its topic
                continue
            for slots, units in queues.units(row["topic"], row["queue_id"]):
                tags = units["tags_code"].astype(np.int64)
                yield _batch(row, slots, units, tags, np.zeros(len(units), bool))


def _batch(queue: Fields, slots: Any, units: Any, tags: Any, lost: Any) -> pa.RecordBatch:
    columns = [
        pa.repeat(pa.scalar(queue["topic"]), len(units)),
        pa.repeat(pa.scalar(queue["queue_id"], pa.int32()), len(units)),
        pa.array(slots),
        pa.array(units["physical_offset"].astype(np.int64)),
        pa.array(units["size"].astype(np.int32)),
        pa.array(tags),
        pa.array(lost),
    ]
    return pa.RecordBatch.from_arrays(columns, names=_NAMES)
