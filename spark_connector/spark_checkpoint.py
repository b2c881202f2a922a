"""The Spark checkpoint of a query that reads logs with this connector, read without Spark.

Spark writes ``metadata`` (the query's id), ``offsets/N`` before micro-batch N runs (a version, a line about the batch,
then the end offset of each source on a line) and ``commits/N`` after its commit. The first micro-batch of this source
is empty and records the start of the query.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from spark_connector.errors import CheckpointError
from spark_connector.offsets import StreamOffset

__all__ = [
    "MicroBatch",
    "SparkCheckpoint",
    "has_committed",
    "input_of",
    "local_path",
    "planned_offset",
    "read_checkpoint",
    "read_offsets",
]

_SPARK_VERSION: Final = "v1"
_NOT_STARTED: Final = "-"
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")
_FILE_SCHEME: Final = re.compile(r"file:(//(?=/)|(?=/(?!/)))")


def local_path(location: str) -> Path | None:
    """Return the absolute path of a Spark location; None if it is not in this machine's file system.

    Spark does not decode %20 and similar escapes in ``file:`` locations, so neither does this function.
    """
    location = _FILE_SCHEME.sub("", location, count=1)
    return None if not location or _SCHEME.match(location) else Path(location).absolute()


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A planned micro-batch.

    Attributes:
        number: its batch id.
        committed: whether its rows are in the sink.
        planned_at: time of its planning.
        ends: end offset per source, None for another source or one that has not started.
    """

    number: int
    committed: bool
    planned_at: datetime | None
    ends: tuple[StreamOffset | None, ...]


@dataclass(frozen=True, slots=True)
class SparkCheckpoint:
    """A query's checkpoint.

    Attributes:
        path: its directory.
        query_id: the query's id, None if it is not recorded.
        batches: the micro-batches that Spark retains, in order; at least one.
    """

    path: Path
    query_id: str | None
    batches: tuple[MicroBatch, ...]

    @property
    def planned(self) -> MicroBatch:
        """The newest planned micro-batch."""
        return self.batches[-1]

    @property
    def committed(self) -> MicroBatch | None:
        """The newest committed micro-batch."""
        return next((batch for batch in reversed(self.batches) if batch.committed), None)

    @property
    def reached(self) -> MicroBatch:
        """The micro-batch whose end is the progress of the sink; the empty first one if none is committed.

        Raises:
            CheckpointError: there is no such micro-batch.
        """
        batch = self.committed or self.batches[0]
        if not batch.committed and batch.number != 0:
            raise CheckpointError(
                "no micro-batch of this checkpoint is committed, and the first one is missing",
                str(self.path / "commits"),
                "its files were deleted or copied in part: restore commits/",
            )
        return batch


def read_checkpoint(path: Path) -> SparkCheckpoint:
    """Read a checkpoint.

    Raises:
        CheckpointError: the directory is not a checkpoint, is damaged, or its query does not read a dledger log.
    """
    numbers = _numbers(path / "offsets")
    if not numbers:
        what = (
            "no micro-batch was planned yet" if (path / "metadata").is_file() else "the directory is not a checkpoint"
        )
        remedy = "name the checkpointLocation of the query: it contains metadata and offsets"
        raise CheckpointError(what, str(path), remedy)
    done = _numbers(path / "commits")
    found = (_micro_batch(path / "offsets" / str(number), number, number in done) for number in sorted(numbers))
    batches = tuple(batch for batch in found if batch is not None)
    if not any(ends is not None for batch in batches for ends in batch.ends):
        raise CheckpointError("the query of this checkpoint reads no dledger log", str(path), "name another checkpoint")
    return SparkCheckpoint(path, _query_id(path / "metadata"), batches)


def planned_offset(location: str) -> StreamOffset | None:
    """Return the end of the newest planned micro-batch of a query with one source.

    Returns:
        None if none is planned, or if the checkpoint is not on this machine.

    Raises:
        CheckpointError: the query has other sources, or the file is damaged.
    """
    path = local_path(location)
    numbers = set() if path is None else _numbers(path / "offsets")
    if path is None or not numbers:
        return None
    file = path / "offsets" / str(max(numbers))
    _, sources = _lines(file)
    if len(sources) != 1:
        remedy = "use a new checkpoint directory"
        raise CheckpointError(f"the query of this checkpoint has {len(sources)} sources", str(file), remedy)
    return None if sources[0] == _NOT_STARTED else StreamOffset.from_json(_parsed(file, sources[0]), str(file))


def read_offsets(file: Path) -> tuple[StreamOffset | None, ...]:
    """Return the end of a micro-batch per source from its file in ``offsets``; None for other sources.

    Raises:
        CheckpointError: the file is damaged, or another version of Spark wrote it.
    """
    _, sources = _lines(file)
    return tuple(
        StreamOffset.from_text(_parsed(file, line), str(file)) if line.startswith("{") else None for line in sources
    )


def has_committed(location: str) -> bool | None:
    """Whether the query of this checkpoint has committed a micro-batch; None if this process cannot read it."""
    path = local_path(location)
    return None if path is None else bool(_numbers(path / "commits"))


def input_of(location: str, batch_id: int) -> str:
    """Return a digest of a micro-batch's entry in Spark's offset log; empty if this process cannot read it."""
    path = local_path(location)
    try:
        return "" if path is None else hashlib.sha256((path / "offsets" / str(batch_id)).read_bytes()).hexdigest()[:32]
    except OSError:
        return ""


def _numbers(directory: Path) -> set[int]:
    if not directory.is_dir():
        return set()
    return {int(file.name) for file in directory.iterdir() if file.name.isascii() and file.name.isdigit()}


def _query_id(file: Path) -> str | None:
    if not file.is_file():
        return None
    data = _parsed(file, file.read_text(encoding="utf-8", errors="replace"))
    identity = data.get("id") if isinstance(data, dict) else None
    return identity if isinstance(identity, str) else None


def _micro_batch(file: Path, number: int, committed: bool) -> MicroBatch | None:
    try:
        about, _ = _lines(file)
        planned, ends = _parsed(file, about), read_offsets(file)
    except FileNotFoundError:
        return None  # the query is running, and Spark has deleted the file
    at = planned.get("batchTimestampMs") if isinstance(planned, dict) else None
    # Spark writes 0 for a batch whose time it did not record.
    planned_at = datetime.fromtimestamp(at / 1000, UTC) if isinstance(at, int) and at > 0 else None
    return MicroBatch(number, committed, planned_at, ends)


def _lines(file: Path) -> tuple[str, list[str]]:
    """Return the line about the micro-batch and that of each source."""
    first_line, *rest = file.read_text(encoding="utf-8", errors="replace").split("\n")
    if first_line.strip() != _SPARK_VERSION:
        what = f"the file starts with {first_line[:20]!r}, not with {_SPARK_VERSION}"
        raise CheckpointError(what, str(file), "it is damaged, or another version of Spark wrote it")
    return (rest[0] if rest else ""), [line for line in rest[1:] if line.strip()]


def _parsed(file: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        what = "the file is damaged: its content is not the JSON that Spark writes"
        raise CheckpointError(what, str(file), "restore the file from a backup") from None
