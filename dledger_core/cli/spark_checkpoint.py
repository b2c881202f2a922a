"""What the checkpoint of a Spark query that reads our logs holds; read as it lies there, without Spark.

Spark writes ``metadata`` (the query's id), ``offsets/N`` before micro-batch N runs (a version, a line about the batch,
then one line for each source: where the micro-batch ends) and ``commits/N`` when it is done. A source's line is ours if
it is a map with ``v`` and ``groups``. The first micro-batch of our source is empty and holds the start of the query.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from dledger_core.errors import ConfigError

__all__ = ["MicroBatch", "Position", "SparkCheckpoint", "read_checkpoint"]

_SPARKS_VERSION: Final = "v1"
_OFFSET_VERSION: Final = 1
_NOT_ONE: Final = "name the directory that was given as checkpointLocation: it holds metadata and offsets"


@dataclass(frozen=True, slots=True)
class Position:
    """How far one group is read.

    Attributes:
        next_index: the next index to read.
        log: uuid of the log, None if it has none.
        term: term of the entry before ``next_index``, -1 if there is none.
    """

    next_index: int
    log: str | None
    term: int


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A planned micro-batch.

    Attributes:
        number: its batch id.
        committed: whether it is done: its rows are in the sink.
        planned_at: when it was planned.
        ends: per source where it ends, None for a source that is not ours.
    """

    number: int
    committed: bool
    planned_at: datetime | None
    ends: tuple[Mapping[str, Position] | None, ...]


@dataclass(frozen=True, slots=True)
class SparkCheckpoint:
    """A query's checkpoint.

    Attributes:
        path: its directory.
        query_id: the query's id, None if it is not recorded.
        batches: the micro-batches that Spark still keeps, in order; one at least.
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
        """The newest one that is done."""
        return next((batch for batch in reversed(self.batches) if batch.committed), None)

    @property
    def reached(self) -> MicroBatch:
        """The micro-batch up to whose end everything is in the sink; the empty first one if none is committed.

        Raises:
            ConfigError: there is no such micro-batch.
        """
        batch = self.committed or self.batches[0]
        if not batch.committed and batch.number != 0:
            raise ConfigError(
                "no micro-batch of this checkpoint is committed, and the first one is gone",
                str(self.path / "commits"),
                "its files were deleted or copied in part: restore commits/",
            )
        return batch


def read_checkpoint(path: Path) -> SparkCheckpoint:
    """Reads a checkpoint.

    Raises:
        ConfigError: the directory is no checkpoint, is damaged, or is of a query that reads none of our logs.
    """
    numbers = _numbers(path / "offsets")
    if not numbers:
        what = "no micro-batch was planned here yet" if (path / "metadata").is_file() else "no checkpoint is here"
        raise ConfigError(what, str(path), _NOT_ONE)
    done = _numbers(path / "commits")
    found = (_micro_batch(path / "offsets" / str(number), number, number in done) for number in sorted(numbers))
    batches = tuple(batch for batch in found if batch is not None)
    if not any(ends is not None for batch in batches for ends in batch.ends):
        raise ConfigError("the query of this checkpoint reads no dledger log", str(path), "name another checkpoint")
    return SparkCheckpoint(path, _query_id(path / "metadata"), batches)


def _numbers(directory: Path) -> set[int]:
    if not directory.is_dir():
        return set()
    return {int(file.name) for file in directory.iterdir() if file.name.isascii() and file.name.isdigit()}


def _query_id(file: Path) -> str | None:
    if not file.is_file():
        return None
    data = _parse(file, file.read_bytes())
    identity = data.get("id") if isinstance(data, dict) else None
    return identity if isinstance(identity, str) else None


def _micro_batch(file: Path, number: int, committed: bool) -> MicroBatch | None:
    try:
        head, _, rest = file.read_bytes().partition(b"\n")
    except FileNotFoundError:
        return None  # the query runs, and Spark deletes what it no longer needs
    if head.decode(errors="replace").strip() != _SPARKS_VERSION:
        raise ConfigError(
            f"the file begins with {head[:20]!r}, not with {_SPARKS_VERSION}",
            str(file),
            "it is damaged, or another version of Spark wrote it",
        )
    about, *sources = rest.split(b"\n")
    planned = _parse(file, about)
    at = planned.get("batchTimestampMs") if isinstance(planned, dict) else None
    # The clock's beginning stands for a batch whose time Spark did not record.
    planned_at = datetime.fromtimestamp(at / 1000, UTC) if isinstance(at, int) and at > 0 else None
    return MicroBatch(number, committed, planned_at, tuple(_ends(file, line) for line in sources if line.strip()))


def _ends(file: Path, line: bytes) -> Mapping[str, Position] | None:
    """Returns the positions of a source's line; None if the source is not ours, or has not begun."""
    if not line.startswith(b"{"):
        return None
    data = _parse(file, line)
    version, groups = data.get("v"), data.get("groups")
    if version is None or not isinstance(groups, dict):
        return None
    if version != _OFFSET_VERSION:
        raise ConfigError(
            f"the offset has version {version}, this dledger reads version {_OFFSET_VERSION}",
            str(file),
            "use the dledger that wrote it",
        )
    return {group: _position(file, fields) for group, fields in sorted(groups.items())}


def _position(file: Path, fields: Any) -> Position:
    if isinstance(fields, dict):
        next_index, log, term = fields.get("next"), fields.get("log"), fields.get("term")
        if type(next_index) is int and type(term) is int and (log is None or isinstance(log, str)):
            return Position(next_index, log, term)
    raise _damaged(file)


def _parse(file: Path, text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise _damaged(file) from None


def _damaged(file: Path) -> ConfigError:
    return ConfigError("the file is damaged: it does not hold what Spark writes there", str(file), "restore it")
