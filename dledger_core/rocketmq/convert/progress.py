"""``meta/converting.json``: how far a conversion has come. While it is there nobody else opens the store."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from dledger_core.errors import StoreMismatchError
from dledger_core.rocketmq.convert.chunks import Cursor
from dledger_core.rocketmq.convert.messages import QueueCounters
from dledger_core.rocketmq.convert.plan import IndexMap
from dledger_core.storage.files.file_system import Files
from dledger_core.storage.files.layout import Layout

__all__ = ["Progress", "load_progress", "save_progress"]

_VERSION = 1


@dataclass(slots=True)
class Progress:
    """State of one conversion; everything up to it is durable.

    Attributes:
        request: what was asked for; another request does not go on with it.
        fingerprint: of the source.
        keeps_positions: whether records stay where they are.
        phase: ``copy``, ``verify`` or ``publish``.
        cursor: where reading goes on.
        next_index: index of the next entry written.
        position: where the last record written ends; None = nothing is written.
        index_map: of what is written.
        queues: the next queue offsets, if they are given out.
        first: position, index, term, CRC, body length of the first entry written; empty = nothing is.
        body_bytes: bytes of the bodies written.
        control_dropped: control entries left out.
        hidden_dropped: entries of transactions that did not win, left out.
        messages: bodies that are message records.
        moved: messages with new offsets.
        odd: messages left as they are, because their offset is not where they were.
        repositioned: an entry lies at another position than before.
        notes: what the owner of the source should know.
        digest: of the finished log.
    """

    request: dict[str, Any]
    fingerprint: str
    keeps_positions: bool
    phase: Literal["copy", "verify", "publish"] = "copy"
    cursor: Cursor = field(default_factory=Cursor)
    next_index: int = 0
    position: int | None = None
    index_map: IndexMap = field(default_factory=IndexMap)
    queues: QueueCounters = field(default_factory=QueueCounters)
    first: tuple[int, ...] = ()
    body_bytes: int = 0
    control_dropped: int = 0
    hidden_dropped: int = 0
    messages: int = 0
    moved: int = 0
    odd: int = 0
    repositioned: bool = False
    notes: list[str] = field(default_factory=list)
    digest: str = ""

    def encode(self) -> bytes:
        """Returns the file's content."""
        plain = {name: getattr(self, name) for name in _PLAIN}
        special = {
            "version": _VERSION,
            "cursor": asdict(self.cursor),
            "index_map": self.index_map.saved(),
            "queues": self.queues.saved(),
            "first": list(self.first),
        }
        return (json.dumps(plain | special) + "\n").encode()

    @classmethod
    def decode(cls, data: bytes) -> Progress:
        """Returns what ``encode`` gave."""
        found = json.loads(data)
        if found["version"] != _VERSION:
            raise ValueError(f"version {found['version']}")
        return cls(
            **{name: found[name] for name in _PLAIN},
            cursor=Cursor(**found["cursor"]),
            index_map=IndexMap.restored(found["index_map"]),
            queues=QueueCounters.restored(found["queues"]),
            first=tuple(found["first"]),
        )


_PLAIN = (
    "request",
    "fingerprint",
    "keeps_positions",
    "phase",
    "next_index",
    "position",
    "body_bytes",
    "control_dropped",
    "hidden_dropped",
    "messages",
    "moved",
    "odd",
    "repositioned",
    "notes",
    "digest",
)


def load_progress(files: Files, layout: Layout) -> Progress | None:
    """Returns the state of an interrupted conversion, or None.

    Raises:
        StoreMismatchError: the file cannot be understood.
    """
    data = files.read(layout.converting)
    if data is None:
        return None
    try:
        return Progress.decode(data)
    except (ValueError, KeyError, TypeError) as error:
        raise StoreMismatchError(
            f"the state of a conversion is malformed: {error}",
            str(layout.converting),
            f"remove {layout.root} and convert again",
        ) from error


def save_progress(files: Files, layout: Layout, progress: Progress) -> None:
    """Replaces the state, atomically and durably."""
    files.replace(layout.converting, progress.encode())
