"""Entries on their way from a source to a destination, in columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from dledger_core.checksum import Buffer
from dledger_core.record import Records, slices_of

__all__ = ["Cursor", "PartName", "Piece", "chunk_of"]

PartName = Literal["commitlog", "log"]
_I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where reading a source goes on.

    Attributes:
        part: which part of the source, counted from 0.
        at: the part's own coordinate: a position in a classic CommitLog, an index in a log.
        number: how many messages of the CommitLog lie before; in a log the index.
    """

    part: int = 0
    at: int = 0
    number: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive entries of a source; all columns have shape (n,).

    Attributes:
        name: the part they come from.
        first: number of the first one: counted from 0 in a CommitLog, the index in a log.
        after: where reading goes on.
        magics: int32.
        terms: int64.
        marks: uint64, 0 in what Java wrote.
        crcs: uint32, CRC-32 of each body.
        positions: int64: where the writer says that the record lies.
        lengths: int64, bytes of each body.
        bodies: the concatenated bodies.
    """

    name: PartName
    first: int
    after: Cursor
    magics: npt.NDArray[Any]
    terms: _I64
    marks: npt.NDArray[Any]
    crcs: npt.NDArray[Any]
    positions: _I64
    lengths: _I64
    bodies: Buffer

    @property
    def count(self) -> int:
        """Number of entries."""
        return len(self.lengths)

    @property
    def starts(self) -> _I64:
        """int64, shape (n,): where each body begins in ``bodies``."""
        return np.cumsum(self.lengths) - self.lengths

    @property
    def numbers(self) -> _I64:
        """int64, shape (n,): the entries' numbers."""
        return np.arange(self.first, self.first + self.count, dtype=np.int64)

    def only(self, keep: npt.NDArray[np.bool_]) -> Piece:
        """Returns the entries that ``keep`` says; their numbers are the caller's business then."""
        if bool(keep.all()):
            return self
        lengths, starts = self.lengths[keep], self.starts[keep]
        bodies = slices_of([self.bodies], lengths, 0, starts) if len(lengths) else b""
        columns = (self.magics, self.terms, self.marks, self.crcs, self.positions)
        magics, terms, marks, crcs, positions = (column[keep] for column in columns)
        return Piece(self.name, self.first, self.after, magics, terms, marks, crcs, positions, lengths, bodies)

    def slice(self, start: int, stop: int) -> Piece:
        """Returns entries ``start`` to ``stop``, counted from 0, sharing memory."""
        starts = self.starts
        begin = int(starts[start]) if start < self.count else len(self.bodies)
        end = int(starts[stop]) if stop < self.count else len(self.bodies)
        return Piece(
            self.name,
            self.first + start,
            self.after,
            self.magics[start:stop],
            self.terms[start:stop],
            self.marks[start:stop],
            self.crcs[start:stop],
            self.positions[start:stop],
            self.lengths[start:stop],
            memoryview(self.bodies)[begin:end],
        )


def chunk_of(records: Records, after: Cursor, crcs: npt.NDArray[Any]) -> Piece:
    """Returns checked records of a log as a piece.

    Args:
        records: at least one.
        after: where reading goes on.
        crcs: of their bodies.
    """
    headers = records.headers
    return Piece(
        "log",
        int(headers["index"][0]),
        after,
        headers["magic"].astype(np.int32),
        headers["term"].astype(np.int64),
        headers["flags"].astype(np.uint64),
        crcs,
        headers["position"].astype(np.int64),
        headers["length"].astype(np.int64),
        records.bodies,
    )
