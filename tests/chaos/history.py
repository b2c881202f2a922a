"""The calls of all clients and their results, one record per call: for the checker, and as a JSON lines file.

`ok` = the response says it happened, `fail` = the response says it did not, `unknown` = no client can say; times are
of one monotonic clock. An entry is identified by the hash of its body; bodies are unique in a run.
"""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

Status = Literal["ok", "fail", "unknown"]
Hashes = npt.NDArray[np.uint64]
Indexes = npt.NDArray[np.int64]

_ALWAYS: Final = {"from_index", "start", "end"}
"""Fields without a default; 0 == False would leave them out."""
NO_HASHES: Final[Hashes] = np.empty(0, np.uint64)
NO_INDEXES: Final[Indexes] = np.empty(0, np.int64)


def hash_of(data: bytes) -> int:
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
        attempt: ``transaction/attempt`` if it is part of a transaction.
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


class Recorder:
    """Collects operations from any thread."""

    def __init__(self, path: Path) -> None:
        self.operations: list[Operation] = []
        self.last_ack = 0.0
        self._file = path.open("w", encoding="utf-8")
        self._lock = threading.Lock()

    def add(self, operation: Operation) -> None:
        line = json.dumps(as_row(operation), separators=(",", ":"))
        with self._lock:
            self.operations.append(operation)
            if isinstance(operation, Append) and operation.status == "ok":
                self.last_ack = max(self.last_ack, operation.end)
            self._file.write(line + "\n")

    def note(self, event: str, at: float, **values: Any) -> None:
        """Write a line for an event that is not a call, such as a fault."""
        with self._lock:
            self._file.write(json.dumps({"note": event, "at": at, **values}) + "\n")
            self._file.flush()

    def close(self) -> None:
        self._file.close()


def as_row(operation: Operation) -> dict[str, Any]:
    """Return the operation as it is written to the file, without the fields that have their default."""
    row: dict[str, Any] = {"op": type(operation).__name__.lower()}
    for name in operation.__dataclass_fields__:
        value = getattr(operation, name)
        if isinstance(value, np.ndarray):
            value = value.tolist()
        if name in _ALWAYS or value not in (-1, "", False, [], ()):
            row[name] = value
    return row
