"""What a conversion does with the entries of its source: which it keeps, how it numbers them, where it lays them.

Two ways. A log whose entries all stay keeps its indexes and positions, so replicas that were equal stay equal and no
message changes. Where entries go (control entries do not exist in profile A) or come before (a CommitLog in front),
entries are numbered and laid anew, and messages get their new offsets.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from dledger_core.record import MAGIC_DATA
from dledger_core.rocketmq.convert.chunks import PartName, Piece
from dledger_core.rocketmq.convert.source import Source

__all__ = ["IndexMap", "IndexRange", "Plan", "log_uuid_of"]


@dataclass(frozen=True, slots=True)
class IndexRange:
    """Entries that were one behind the other and still are.

    Attributes:
        part: ``commitlog`` or ``log``.
        start: number of the first: its index in a log, counted from 0 in a CommitLog.
        end: number behind the last one.
        new_start: index of the first in the converted log.
        position: where the first one was.
        new_position: where the first one is.
    """

    part: PartName
    start: int
    end: int
    new_start: int
    position: int
    new_position: int


class IndexMap:
    """From old indexes to new ones, as runs; entries in no run were left out."""

    def __init__(self, runs: list[IndexRange] | None = None) -> None:
        self.runs = runs if runs is not None else []

    def add(
        self, part: PartName, numbers: npt.NDArray[np.int64], new_start: int, positions: Any, new_positions: Any
    ) -> None:
        """Adds entries with the old ``numbers``, which are now ``new_start`` and following."""
        if not len(numbers):
            return
        edges = [0, *(np.flatnonzero(np.diff(numbers) != 1) + 1).tolist(), len(numbers)]
        for begin, stop in itertools.pairwise(edges):
            start, end, new = int(numbers[begin]), int(numbers[stop - 1]) + 1, new_start + begin
            last = self.runs[-1] if self.runs else None
            if last is not None and (last.part, last.end) == (part, start):
                self.runs[-1] = IndexRange(part, last.start, end, last.new_start, last.position, last.new_position)
            else:
                self.runs.append(IndexRange(part, start, end, new, int(positions[begin]), int(new_positions[begin])))

    def saved(self) -> list[list[Any]]:
        """Returns the runs for JSON."""
        return [[run.part, run.start, run.end, run.new_start, run.position, run.new_position] for run in self.runs]

    @classmethod
    def restored(cls, saved: list[list[Any]]) -> IndexMap:
        """Returns what ``saved`` gave."""
        return cls([IndexRange(*run) for run in saved])


@dataclass(frozen=True, slots=True)
class Plan:
    """How a source becomes a store.

    Attributes:
        source: what is read.
        profile: of the destination.
        data_segment_bytes: size of its data files.
        index_segment_bytes: size of its index files.
        keeps_positions: records stay where they are.
        drops_control: entries with another magic than 1 are left out.
        assigns_offsets: queue offsets are given out, because the source is a log of ours, which does not.
        hidden: ranges of entries that did not win and are left out.
        messages: bodies that are message records get their offsets right.
        start_position: where the first record may begin; counts only if positions are not kept.
    """

    source: Source
    profile: Literal["A", "B"]
    data_segment_bytes: int
    index_segment_bytes: int
    keeps_positions: bool
    drops_control: bool
    assigns_offsets: bool
    hidden: tuple[tuple[int, int], ...]
    messages: bool
    start_position: int

    @property
    def patches(self) -> bool:
        """Whether messages may change."""
        return self.messages and not self.keeps_positions

    def kept(self, piece: Piece) -> npt.NDArray[np.bool_]:
        """Returns which entries of a piece are kept."""
        keep = np.ones(piece.count, np.bool_)
        if not self.drops_control:
            return keep
        keep &= piece.magics == MAGIC_DATA
        for start, end in self.hidden:
            if start < piece.first + piece.count and end > piece.first:
                keep[max(start - piece.first, 0) : max(end - piece.first, 0)] = False
        return keep

    @property
    def broker_end(self) -> int:
        """Lag the last source index whose message has a queue offset from a broker; 2^62: all have."""
        return 1 << 62 if self.source.broker_end is None else self.source.broker_end


def log_uuid_of(group: str, peers: str, index: int, term: int, crc: int, length: int) -> str:
    """Returns the identity of a converted log: the same on all nodes, another one for other peers.

    Args:
        group: the group's name.
        peers: its peers string.
        index: of the first entry kept.
        term: of that entry.
        crc: CRC-32 of its body.
        length: bytes of its body.
    """
    nodes = sorted(part.strip() for part in peers.split(";") if part.strip())
    return hashlib.sha256(repr((group, nodes, index, term, crc, length)).encode()).hexdigest()[:32]
