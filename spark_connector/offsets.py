"""Stream offsets: the next index of each group that a query reads, as JSON in the Spark checkpoint.

::

    {"groups": {"default": {"check": 305419896, "log": "<uuid>", "next": 1200, "term": 7}}, "v": 1}

``next`` is the next index to read. ``term`` and ``check`` describe the record before it, ``log`` is the uuid of the
log. Together they detect a re-created, rolled-back or rewritten log. ``check`` is the CRC-32 of that record's index,
term and position (three big-endian 64-bit integers) and its body's CRC-32 (big-endian, 32 bits). If no record precedes
``next``, ``term`` is -1 and ``check`` is null. A Java store has no uuid: ``log`` is null.

Spark compares offsets as strings, so the keys are always sorted and equal offsets have equal texts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from dledger_core import EntryCheck, LogPosition
from spark_connector.errors import CheckpointError

__all__ = ["VERSION", "GroupOffset", "LatestOffset", "LogEnd", "StreamOffset"]

VERSION: Final = 1
_KEYS = {"check", "log", "next", "term"}


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
        records: indexes from the first unread entry on; 0 if there is none, None if unknown, as are the others.
        bytes: size of their records in the log.
        seconds: age of the first unread entry; None also if its append time is unknown.
    """

    end: int
    log: str | None = None
    records: int | None = None
    bytes: int | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class LatestOffset:
    """The ends of a query's logs with its lag, shown by Spark as ``sources[].latestOffset`` of a progress report.

    ::

        {"groups": {"default": {"behind": {"bytes": 92160, "records": 674, "seconds": 1740.2},
                                "check": null, "log": "<uuid>", "next": 1874, "term": -1}},
         "losses": {"entries": 0, "events": 0}, "v": 1}

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
            if end.records is not None:
                lag = {"bytes": end.bytes, "records": end.records, "seconds": end.seconds}
            groups[group] = GroupOffset(end.end, end.log).to_json() | {"behind": lag}
        return {"groups": groups, "losses": {"entries": self.lost, "events": self.losses}, "v": VERSION}

    @classmethod
    def from_text(cls, text: Any) -> LatestOffset | None:
        """Parse the text of a progress report; None if it is missing or of another source."""
        data = _of_this_source(text)
        if data is None:
            return None
        groups = {}
        for group, fields in _groups(data, "progress report").items():
            lag = fields.get("behind") or {}
            groups[group] = LogEnd(
                fields["next"], fields.get("log"), lag.get("records"), lag.get("bytes"), lag.get("seconds")
            )
        losses = data.get("losses") or {}
        return cls(groups, losses.get("events", 0), losses.get("entries", 0))


def _of_this_source(text: Any) -> dict[str, Any] | None:
    """Return the map in a text (or the map itself) if it has the shape of this source's offsets."""
    try:
        data = json.loads(text) if isinstance(text, (str, bytes)) else text
    except ValueError:
        return None
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
    if version != VERSION or not isinstance(data.get("groups"), dict):
        raise _not_an_offset(data, where)
    return dict(data["groups"])


def _group_offset(fields: Any, where: str) -> GroupOffset:
    if not isinstance(fields, dict) or not set(fields) >= _KEYS:
        raise _not_an_offset(fields, where)
    log, check = fields["log"], fields["check"]
    numbers = [fields["next"], fields["term"], *([] if check is None else [check])]
    if not all(type(number) is int for number in numbers) or not (log is None or isinstance(log, str)):
        raise _not_an_offset(fields, where)
    return GroupOffset(fields["next"], log, fields["term"], check)


def _not_an_offset(data: Any, where: str) -> CheckpointError:
    return CheckpointError(
        f"{str(data)[:200]} is not an offset of this source",
        where,
        "the checkpoint belongs to another source or is damaged: use a new checkpoint directory, or restore this one",
    )
