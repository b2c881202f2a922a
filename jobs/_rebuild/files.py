"""Writes units as RocketMQ's own ``consumequeue/<topic>/<queue>/<offset>`` files, one task per file.

The unit of queue offset q is at byte q * 20 of its queue. Slots before a queue's first unit contain RocketMQ's pre-fill
unit, and so do holes, because a zero unit ends the queue for a broker. The last file has its full size, with zeros at
the end.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from dledger_core import ConfigError
from dledger_core.record import segment_name
from dledger_core.rocketmq import PREFILL, UNIT, UNIT_BYTES

from .._directories import check_writable
from .units import OFFSET_MAX

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = ["DIRECTORY", "WrittenFiles", "check_target", "other_file_bytes", "round_up", "write_files"]

DIRECTORY: Final = "consumequeue"
INDEX_DIRECTORY: Final = "index"
_NAME_DIGITS: Final = 20
_NAME_BYTES_MAX: Final = 255
_REPORT_MAX: Final = 100
_WRITTEN: Final = "files bigint"


@dataclass(frozen=True)
class WrittenFiles:
    """The written files.

    Attributes:
        directory: the consumequeue directory.
        files: number of files.
        refused: queues that cannot be written: topic, queue_id and reason; at most 100.
    """

    directory: str
    files: int
    refused: tuple[dict[str, Any], ...]

    def summary(self) -> dict[str, Any]:
        """Return the fields of the JSON summary."""
        return {"directory": self.directory, "files": self.files, "refused_queues": list(self.refused)}


def check_target(directory: str, option: str = "--files", name: str = DIRECTORY) -> str:
    """Return the absolute directory of an option; reject one whose directory ``name`` has files.

    Raises:
        ConfigError: it is not a local directory, cannot be written, or its directory ``name`` is not empty.
    """
    if "://" in directory:
        raise ConfigError(f"{option} {directory} is not a local directory", "", "name one that all executors share")
    path = Path(directory).absolute()
    target = path / name
    check_writable(str(target), option)
    if target.is_dir() and any(target.iterdir()):
        raise ConfigError(f"{option}: {target} contains files", "", "name another directory, or move them")
    return str(path)


def round_up(file_bytes: int) -> int:
    """Return the size rounded up to a multiple of a unit, as RocketMQ does."""
    return -(-file_bytes // UNIT_BYTES) * UNIT_BYTES


def other_file_bytes(file_bytes: int, near: Iterable[Path]) -> tuple[Path, int] | None:
    """Return the first directory of consume queues whose files have another size, and that size; None if there is none.

    Args:
        file_bytes: size of a file to write.
        near: directories of consume queues; they may be missing.
    """
    for queues in near:
        sizes = (path.stat().st_size for path in queues.glob("*/*/" + "[0-9]" * _NAME_DIGITS) if path.is_file())
        size = next(sizes, file_bytes)
        if size != file_bytes:
            return queues, size
    return None


def write_files(units: DataFrame, directory: str, file_bytes: int) -> WrittenFiles:
    """Write the files of all queues to a temporary directory, then rename it.

    Args:
        units: rows of the table, one for each slot, of one group.
        directory: parent of the ``consumequeue`` directory; the executors must share it.
        file_bytes: size of a file, a multiple of a unit.
    """
    from pyspark.sql import functions as f

    per_file = file_bytes // UNIT_BYTES
    queues = _queues(units, per_file).persist()
    target, partial = Path(directory) / DIRECTORY, Path(directory) / f".{DIRECTORY}-{uuid.uuid4().hex}"
    try:
        refused = queues.where("reason is not null").select("topic", "queue_id", "reason").limit(_REPORT_MAX).collect()
        partial.mkdir(parents=True)
        rows = _rows(units, queues.where("reason is null"), per_file)
        written = rows.groupBy("topic", "queue_id", "file").applyInArrow(_writer(str(partial), per_file), _WRITTEN)
        found = written.agg(f.coalesce(f.sum("files"), f.lit(0))).first()
        assert found is not None
        if target.is_dir():
            target.rmdir()  # refused by check_target unless empty
        partial.rename(target)
    finally:
        queues.unpersist()
        shutil.rmtree(partial, ignore_errors=True)
    return WrittenFiles(str(target), int(found[0]), tuple(row.asDict() for row in refused))


def _queues(units: DataFrame, per_file: int) -> DataFrame:
    """Return a row per queue: its first and last offset, and the reason if it cannot be written."""
    from pyspark.sql import functions as f

    first, last, rows = f.col("first"), f.col("last"), f.col("rows")
    queues = units.groupBy("topic", "queue_id").agg(
        f.min("queue_offset").alias("first"), f.max("queue_offset").alias("last"), f.count("*").alias("rows")
    )
    impossible = (first < 0) | (last > OFFSET_MAX)
    # A wrong offset must not fill the disk with pre-fill units.
    sparse = last - first + 1 - rows > rows + per_file
    return queues.withColumn(
        "reason",
        f.when(_unsafe(f.col("topic")), "its topic is not a file name")
        .when(f.col("queue_id") < 0, "its queue id is negative")
        .when(impossible, "its offsets are out of range")
        .when(sparse, "it has more holes than messages"),
    )


def _unsafe(topic: Column) -> Column:
    """Return whether a topic is unsafe as a path: topics come from messages and must stay in the directory."""
    from pyspark.sql import functions as f

    odd = topic.contains("/") | topic.contains("\0") | topic.isin("", ".", "..")
    return odd | (f.octet_length(topic) > _NAME_BYTES_MAX)


def _rows(units: DataFrame, queues: DataFrame, per_file: int) -> DataFrame:
    """Return the units with the number of their file, and a marker row (position null) for each file.

    A marker has the first and last offset of its queue, and makes files without units exist.
    """
    from pyspark.sql import functions as f

    number = f.sequence(f.floor(f.col("first") / per_file), f.floor(f.col("last") / per_file))
    markers = queues.select("topic", "queue_id", f.explode(number).alias("file"), "first", "last")
    nothing = f.lit(None)
    columns = ["topic", "queue_id", "file", "queue_offset", "position", "size", "tags_code", "first", "last"]
    for name, kind in (("queue_offset", "bigint"), ("position", "bigint"), ("size", "int"), ("tags_code", "bigint")):
        markers = markers.withColumn(name, nothing.cast(kind))
    good = units.join(queues.select("topic", "queue_id", "first", "last"), ["topic", "queue_id"])
    placed = good.withColumn("file", f.floor(f.col("queue_offset") / per_file))
    return placed.select(*columns).unionByName(markers.select(*columns))


def _writer(directory: str, per_file: int) -> Callable[[pa.Table], pa.Table]:
    def write(rows: pa.Table) -> pa.Table:
        topic, queue_id, file = (rows.column(name)[0].as_py() for name in ("topic", "queue_id", "file"))
        queue = Path(directory) / topic / str(queue_id)
        queue.mkdir(parents=True, exist_ok=True)
        name = segment_name(file * per_file * UNIT_BYTES)
        # A task attempt that is retried, or runs twice, replaces the complete file.
        attempt = queue / f"{name}.{uuid.uuid4().hex}"
        attempt.write_bytes(_content(rows, file * per_file, per_file))
        attempt.replace(queue / name)
        return pa.table({"files": pa.array([1], pa.int64())})

    return write


def _content(rows: pa.Table, base: int, per_file: int) -> bytes:
    """Return the bytes of the file whose first slot is ``base``."""
    last = rows.column("last")[0].as_py()
    slots = np.zeros(per_file, UNIT)
    slots[: min(per_file, last + 1 - base)] = PREFILL
    units = rows.filter(rows.column("position").is_valid())
    at = np.asarray(units.column("queue_offset")) - base
    for field, column in (("physical_offset", "position"), ("size", "size"), ("tags_code", "tags_code")):
        slots[field][at] = np.asarray(units.column(column))
    return slots.tobytes()
