"""Stream offsets: how far a query has read each group, as JSON that Spark keeps in its checkpoint.

::

    {"groups": {"default": {"check": 305419896, "log": "<uuid>", "next": 1200, "term": 7}}, "v": 1}

``next`` is the next index to read. ``term`` and ``check`` describe the record before it, ``log`` the log's
identity; together they show a re-created, rolled-back or rewritten log. ``check`` is the CRC-32 of that record's
index, term and position (three big-endian 64-bit integers) and its body's CRC-32 (big-endian, 32 bits). Where
nothing precedes ``next``, ``term`` is -1 and ``check`` is null; a Java store has no identity: ``log`` is null.

Spark compares offsets as strings, so the keys are always sorted and the same offset always gives the same text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from dledger_core import EntryCheck, LogPosition
from spark_connector.errors import CheckpointError

__all__ = ["VERSION", "GroupOffset", "StreamOffset"]

VERSION: Final = 1
_KEYS = {"check", "log", "next", "term"}


@dataclass(frozen=True, slots=True)
class GroupOffset:
    """How far one group is read.

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
    def mark(self) -> EntryCheck | None:
        """The record before ``next``, None if unknown."""
        return None if self.check is None else EntryCheck(self.term, self.check)

    @property
    def position(self) -> LogPosition:
        """The position in the log, for ``find_loss``."""
        return LogPosition(self.next, self.log, self.term, self.check)

    def to_json(self) -> dict[str, Any]:
        """Returns the sorted map that is stored."""
        return {"check": self.check, "log": self.log, "next": self.next, "term": self.term}

    @classmethod
    def at(cls, index: int, log: str | None, mark: EntryCheck | None) -> GroupOffset:
        """Makes the offset before ``index``; ``mark`` describes the record before it."""
        return cls(index, log) if mark is None else cls(index, log, mark.term, mark.check)


@dataclass(frozen=True, slots=True)
class StreamOffset:
    """The offsets of all groups of a query."""

    groups: Mapping[str, GroupOffset]

    def to_json(self) -> dict[str, Any]:
        """Returns what Spark stores; the same offset always gives the same text."""
        return {"groups": {group: self.groups[group].to_json() for group in sorted(self.groups)}, "v": VERSION}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StreamOffset:
        """Reads what ``to_json`` made.

        Raises:
            CheckpointError: made by a newer version, or not an offset of this source.
        """
        if not isinstance(data, Mapping):  # another source's offset may be a bare number
            raise _foreign(data)
        version = data.get("v")
        if isinstance(version, int) and version > VERSION:
            raise CheckpointError(
                f"the checkpoint's offset has version {version}, this connector reads up to {VERSION}",
                "checkpoint",
                "use the connector that wrote it, or a newer one",
            )
        groups = data.get("groups")
        if version != VERSION or not isinstance(groups, dict):
            raise _foreign(data)
        return cls({group: _group_offset(group, fields) for group, fields in groups.items()})


def _group_offset(group: str, fields: Any) -> GroupOffset:
    if not isinstance(fields, dict) or set(fields) != _KEYS:
        raise _foreign({group: fields})
    log, check = fields["log"], fields["check"]
    numbers = [fields["next"], fields["term"], *([] if check is None else [check])]
    if not all(type(number) is int for number in numbers) or not (log is None or isinstance(log, str)):
        raise _foreign({group: fields})
    return GroupOffset(fields["next"], log, fields["term"], check)


def _foreign(data: Any) -> CheckpointError:
    return CheckpointError(
        f"{str(data)[:200]} is not an offset of this source",
        "checkpoint",
        "the checkpoint is of another source: use a new checkpoint directory",
    )
