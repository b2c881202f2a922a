"""Stream offsets and the Spark checkpoint that stores them: the next index of each group that a query reads, as JSON.

::

    {"groups": {"default": {"check": 305419896, "log": "<uuid>", "next": 1200, "term": 7}}, "v": 1}

``next`` is the next index to read. ``term`` and ``check`` describe the record before it, ``log`` is the uuid of the
log. Together they detect a re-created, rolled-back or rewritten log. ``check`` is the CRC-32 of that record's index,
term and position (three big-endian 64-bit integers) and its body's CRC-32 (big-endian, 32 bits). If no record precedes
``next``, ``term`` is -1 and ``check`` is null. A Java store has no uuid: ``log`` is null.

Spark compares offsets as strings, so the keys are always sorted and equal offsets have equal texts.

The checkpoint is read without Spark. Spark writes ``metadata`` (the query's id), ``offsets/N`` before micro-batch N
runs (a version, a line about the batch, then the end offset of each source on a line) and ``commits/N`` after its
commit. The first micro-batch of this source is empty and records the start of the query.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from dledger_core.archive import local_path
from dledger_core.client import EntryCheck, LogPosition
from spark_connector.errors import CheckpointError

__all__ = [
    "VERSION",
    "GroupOffset",
    "LatestOffset",
    "LogEnd",
    "MicroBatch",
    "SparkCheckpoint",
    "StreamOffset",
    "has_committed",
    "local_path",
    "planned_offset",
    "read_checkpoint",
    "read_offsets",
]

# Every offset has it, so that an older connector rejects an offset whose fields have another meaning
# (test_foreign_and_newer_offsets_are_rejected). Offsets of earlier releases stay readable
# (test_query_resumes_from_kept_checkpoint).
VERSION: Final = 1
_KEYS: Final = {"check", "log", "next", "term"}
_SPARK_VERSION: Final = "v1"
# Spark writes this for a source that has no offset yet.
_NOT_STARTED: Final = "-"


@dataclass(frozen=True, slots=True)
class GroupOffset:
    """The next index of one group, and the record before it.

    Attributes:
        next: the next index to read.
        log: uuid of the log, None if it has none.
        term: term of the record before ``next``; -1 if there is none.
        check: its check; None if there is none.
    """

    next: int
    log: str | None = None
    term: int = -1
    check: int | None = None

    @property
    def last_consumed(self) -> EntryCheck | None:
        """Term and check of the record before ``next``, None if unknown."""
        return None if self.check is None else EntryCheck(self.term, self.check)

    @property
    def position(self) -> LogPosition:
        """The position in the log, for ``find_loss``."""
        return LogPosition(self.next, self.log, self.term, self.check)

    def to_json(self) -> dict[str, Any]:
        """Return the stored map, with sorted keys."""
        return {"check": self.check, "log": self.log, "next": self.next, "term": self.term}

    @classmethod
    def at(cls, index: int, log: str | None, before: EntryCheck | None) -> GroupOffset:
        """Make the offset at ``index``; ``before`` describes the previous record."""
        # Term and check together: a log that was restored and continued can have another body at the same index and
        # term (test_checkpoint_of_another_log_is_error_or_counted_warning).
        return cls(index, log) if before is None else cls(index, log, before.term, before.check)


@dataclass(frozen=True, slots=True)
class StreamOffset:
    """The offsets of all groups of a query."""

    groups: Mapping[str, GroupOffset]

    @property
    def next_indexes(self) -> dict[str, int]:
        """The next index of each group, in the form of the options ``startingOffsets`` and ``endingOffsets``."""
        return {group: self.groups[group].next for group in sorted(self.groups)}

    def to_json(self) -> dict[str, Any]:
        """Return the map that Spark stores; equal offsets have equal texts."""
        # Sorted: Spark decides by the text whether there is a new offset, and Python orders a map by insertion
        # (test_offset_round_trip_has_same_text_in_any_order).
        return {"groups": {group: self.groups[group].to_json() for group in sorted(self.groups)}, "v": VERSION}

    @classmethod
    def from_json(cls, data: Any, where: str = "checkpoint") -> StreamOffset:
        """Parse the output of ``to_json``.

        Raises:
            CheckpointError: made by a newer version, or not an offset of this source; ``where`` names the file.
        """
        groups = _groups(data, where)
        return cls({group: _group_offset(fields, where) for group, fields in sorted(groups.items())})

    @classmethod
    def from_text(cls, text: Any, where: str = "checkpoint") -> StreamOffset | None:
        """Parse an offset from Spark's files or progress reports; None if it is missing or of another source.

        Raises:
            CheckpointError: an offset of this source is damaged or has a newer version.
        """
        data = _of_this_source(text)
        return None if data is None else cls.from_json(data, where)


@dataclass(frozen=True, slots=True)
class LogEnd:
    """End of a log when a micro-batch was planned, and the lag between them.

    Attributes:
        end: end of the readable entries (exclusive).
        log: uuid of the log, None if it has none.
        records: indexes from the first unread entry on; 0 if there is none, None if unknown, as are the others. A
            CommitLog has none, so its messages are not counted.
        bytes: size of their records in the log.
        seconds: age of the first unread entry; None also if its append time is unknown.
        waiting: those of the indexes that wait for an open transaction.
        transaction: the oldest one, if it is known.
    """

    end: int
    log: str | None = None
    records: int | None = None
    bytes: int | None = None
    seconds: float | None = None
    waiting: int = 0
    transaction: str | None = None


@dataclass(frozen=True, slots=True)
class LatestOffset:
    """The ends of a query's logs with its lag, shown by Spark as ``sources[].latestOffset`` of a progress report.

    ::

        {"groups": {"default": {"behind": {"bytes": 92160, "records": 674, "seconds": 1740.2},
                                "check": null, "log": "<uuid>", "next": 1874, "term": -1}},
         "losses": {"entries": 0, "events": 0}, "metrics": {"avgOffsetsBehindLatest": "674.0",
         "maxOffsetsBehindLatest": "674", "minOffsetsBehindLatest": "674"}, "v": 1}

    A group whose entries wait for an open transaction has ``waiting`` too. ``metrics`` has the names and the texts of
    Kafka's source.

    Attributes:
        groups: the logs.
        losses: losses that ``failOnDataLoss=false`` accepted in this run.
        lost: entries lost with them.
    """

    groups: Mapping[str, LogEnd]
    losses: int = 0
    lost: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the map that Spark shows."""
        groups = {}
        for group, end in sorted(self.groups.items()):
            lag = None
            if end.bytes is not None:
                lag = {"bytes": end.bytes, "records": end.records, "seconds": end.seconds}
            groups[group] = GroupOffset(end.end, end.log).to_json() | {"behind": lag}
            if end.waiting:
                groups[group] |= {"waiting": {"records": end.waiting, "transaction": end.transaction}}
        # Offsets of a CommitLog are positions, so its bytes are the offsets.
        offsets = [end.bytes if end.records is None else end.records for end in self.groups.values()]
        known = [count for count in offsets if count is not None]
        metrics = {}
        if known:
            values = {"avg": sum(known) / len(known), "max": max(known), "min": min(known)}
            metrics = {f"{name}OffsetsBehindLatest": str(value) for name, value in values.items()}
        losses = {"entries": self.lost, "events": self.losses}
        return {"groups": groups, "losses": losses, "metrics": metrics, "v": VERSION}

    @classmethod
    def from_text(cls, text: Any) -> LatestOffset | None:
        """Parse the text of a progress report; None if it is missing or of another source.

        Spark 4.1 does not ask a source for it and shows the end of the micro-batch instead: no group then.
        """
        data = _of_this_source(text)
        if data is None:
            return None
        groups = {}
        for group, fields in _groups(data, "progress report").items():
            if "behind" not in fields:
                continue
            lag, waiting = fields.get("behind") or {}, fields.get("waiting") or {}
            groups[group] = LogEnd(
                fields["next"],
                fields.get("log"),
                lag.get("records"),
                lag.get("bytes"),
                lag.get("seconds"),
                waiting.get("records", 0),
                waiting.get("transaction"),
            )
        losses = data.get("losses") or {}
        return cls(groups, losses.get("events", 0), losses.get("entries", 0))


def _of_this_source(text: Any) -> dict[str, Any] | None:
    """Return the map in a text (or the map itself) if it has the shape of this source's offsets."""
    data = text
    if isinstance(text, (str, bytes)):
        try:
            data = json.loads(text)
        except ValueError:
            # PySpark 4.1 makes the text of a progress report from the parsed JSON by str().
            try:
                data = ast.literal_eval(str(text))
            except (ValueError, SyntaxError):
                return None
    # A query may read several sources, and one checkpoint has the offsets of all. Other sources use other shapes,
    # Kafka's a map of topics (test_other_sources_have_no_offset).
    return data if isinstance(data, dict) and "v" in data and isinstance(data.get("groups"), dict) else None


def _groups(data: Any, where: str) -> dict[str, Any]:
    """Return the groups of an offset.

    Raises:
        CheckpointError: made by a newer version, or not an offset of this source.
    """
    version = data.get("v") if isinstance(data, dict) else None  # another source's offset may be a bare number
    if isinstance(version, int) and version > VERSION:
        raise CheckpointError(
            f"the offset has version {version}, this connector reads up to {VERSION}",
            where,
            "use the connector that wrote it, or a newer one",
        )
    # An offset of another source must not become the start of a group: a query over a changed source would begin at any
    # index (test_foreign_and_newer_offsets_are_rejected).
    if version != VERSION or not isinstance(data.get("groups"), dict):
        raise _not_an_offset(data, where)
    return dict(data["groups"])


def _group_offset(fields: Any, where: str) -> GroupOffset:
    if not isinstance(fields, dict) or not set(fields) >= _KEYS:
        raise _not_an_offset(fields, where)
    log, check = fields["log"], fields["check"]
    numbers = [fields["next"], fields["term"], *([] if check is None else [check])]
    # `type` and not isinstance: a bool is an int in Python, and `true` is not an index
    # (test_foreign_and_newer_offsets_are_rejected).
    if not all(type(number) is int for number in numbers) or not (log is None or isinstance(log, str)):
        raise _not_an_offset(fields, where)
    return GroupOffset(fields["next"], log, fields["term"], check)


def _not_an_offset(data: Any, where: str) -> CheckpointError:
    return CheckpointError(
        f"{str(data)[:200]} is not an offset of this source",
        where,
        "the checkpoint belongs to another source or is damaged: use a new checkpoint directory, or restore this one",
    )


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
        # The first micro-batch is empty, so its end is the start of the query before its commit too. An uncommitted
        # later one is not the progress of the sink: the query will run it again
        # (test_query_exports_progress_of_its_sink, test_checkpoint_without_start_is_not_exported).
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
    # Spark writes these files under another name and renames them, so a name alone shows the commit.
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
    # The options of one query name one source: which of several offsets is meant cannot be known
    # (test_other_sources_have_no_offset).
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


def _numbers(directory: Path) -> set[int]:
    if not directory.is_dir():
        return set()
    # Spark stores a hidden .crc file with each entry. isascii, because isdigit accepts characters that int rejects,
    # such as a superscript two.
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
    # The lines after it have the meaning of this version only. A file that a crash left empty fails here too
    # (test_damaged_checkpoint_is_rejected).
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
