"""The calls of all clients and their results, one record per call, for ``checker``.

`ok` = the response says it happened, `fail` = the response says it did not, `unknown` = no client can say; times are
of one monotonic clock. An entry is identified by the hash of its body; bodies are unique in a run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from dledger_core.record import MAGIC_DATA
from dledger_core.storage.read.visibility import Visibility
from tests.support.logs import Row

Status = Literal["ok", "fail", "unknown"]
Hashes = npt.NDArray[np.uint64]
Indexes = npt.NDArray[np.int64]

NO_HASHES: Final[Hashes] = np.empty(0, np.uint64)
NO_INDEXES: Final[Indexes] = np.empty(0, np.int64)


def hash_of(data: bytes | memoryview) -> int:
    """Return the 64 bits that identify an entry's body."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One call of a client."""

    client: str
    start: float
    end: float
    status: Status
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Append(Operation):
    """One call of ``append`` or ``append_attempt``.

    Attributes:
        hashes: of the bodies, in order.
        producer: ``id/sequence`` of an idempotent append; a retry has the same.
        attempt: ``transaction/name`` if it is an attempt of a transaction.
    """

    hashes: tuple[int, ...]
    first: int = -1
    last: int = -1
    term: int = -1
    producer: str = ""
    attempt: str = ""

    def __str__(self) -> str:
        return (
            f"{_call(self, self.producer or self.attempt or 'append')} at [{self.first}, {self.last}] term {self.term}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision(Operation):
    """One call that ends a transaction.

    Attributes:
        attempts: the ones whose entries a commit makes visible.
    """

    transaction: str
    commit: bool
    attempts: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{_call(self, 'commit' if self.commit else 'abort')} of {self.transaction}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Read(Operation):
    """One read of the visible entries in [from_index, next_index).

    Attributes:
        node: the replica that the client named; empty if any may respond.
        full: only the end of the log (or of the visible entries) limited it.
    """

    from_index: int
    next_index: int = -1
    commit_index: int = -1
    node: str = ""
    linearizable: bool = False
    uncommitted: bool = False
    full: bool = False
    indexes: Indexes = field(default_factory=lambda: NO_INDEXES)
    hashes: Hashes = field(default_factory=lambda: NO_HASHES)

    def __str__(self) -> str:
        node = self.node or "any"
        return f"{_call(self, 'read')} [{self.from_index}, {self.next_index}) of {node}, commit {self.commit_index}"


def _call(each: Operation, name: str) -> str:
    return f"{each.client} [{each.start:.4f}, {each.end:.4f}] {name}"


@dataclass(frozen=True, slots=True)
class ReplicaLog:
    """The log of a replica in the end.

    Attributes:
        first_index: index of the first row.
        terms, data: term of each entry, and whether it is a client's (not a control entry).
        visible: the entries that ``read_committed`` shows.
        hashes: of the bodies.
        records: what must be equal on all replicas.
    """

    first_index: int
    terms: Indexes
    data: npt.NDArray[np.bool_]
    visible: npt.NDArray[np.bool_]
    hashes: Hashes
    records: Hashes

    @property
    def end(self) -> int:
        return self.first_index + len(self.terms)

    @classmethod
    def of(cls, first: int, rows: Iterable[Row], visibility: Visibility, records: Sequence[int] = ()) -> ReplicaLog:
        """Return the log that begins at ``first`` and has these entries; ``records``: see the class, default hashes."""
        kept = list(rows)
        data = np.array([row.magic == MAGIC_DATA for row in kept], np.bool_)
        visible = data & (np.arange(first, first + len(kept)) < visibility.end)
        for start, stop in visibility.orphaned(first, first + len(kept)):
            visible[max(start - first, 0) : stop - first] = False
        terms = np.array([row.term for row in kept], np.int64)
        hashes = np.array([hash_of(row.body) for row in kept], np.uint64)
        return cls(first, terms, data, visible, hashes, np.array([*records], np.uint64) if records else hashes)
