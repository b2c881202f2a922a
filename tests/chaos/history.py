"""What clients did and saw, one record per call; kept in memory for the checker and written to a JSON lines file.

`ok` = the answer says it happened, `fail` = the answer says it did not, `unknown` = nobody can say; times are of one
monotonic clock. An entry is known by the hash of its body; bodies are unique in a run.
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
    """Returns the 64 bits by which an entry's body is known."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True, kw_only=True)
class Append:
    """One call of ``append`` or ``append_attempt``.

    Attributes:
        hashes: of the bodies, in order.
        producer: ``id/sequence`` if repeats are recognised; a repeat has the same.
        attempt: ``transaction/attempt`` if it is part of a transaction.
    """

    client: str
    start: float
    end: float
    status: Status
    hashes: tuple[int, ...]
    first: int = -1
    last: int = -1
    term: int = -1
    producer: str = ""
    attempt: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One call that ends a transaction.

    Attributes:
        attempts: whose entries a commit makes visible.
    """

    client: str
    start: float
    end: float
    status: Status
    transaction: str
    commit: bool
    attempts: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """One read of everything visible in [from_index, next_index).

    Attributes:
        node: the replica named by the client; empty if it may choose.
        full: nothing but the end of the log (or of what is visible) bounded it.
    """

    client: str
    start: float
    end: float
    status: Status
    from_index: int
    next_index: int = -1
    commit_index: int = -1
    node: str = ""
    linearizable: bool = False
    uncommitted: bool = False
    full: bool = False
    indexes: Indexes = field(default_factory=lambda: NO_INDEXES)
    hashes: Hashes = field(default_factory=lambda: NO_HASHES)
    error: str = ""


Operation = Append | Decision | Read


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

    def note(self, what: str, at: float, **values: Any) -> None:
        """Writes a line that is no operation: a fault, its end."""
        with self._lock:
            self._file.write(json.dumps({"note": what, "at": at, **values}) + "\n")
            self._file.flush()

    def close(self) -> None:
        self._file.close()


def as_row(operation: Operation) -> dict[str, Any]:
    """Returns the operation as it is written to the file; fields with their default are left out."""
    row: dict[str, Any] = {"op": type(operation).__name__.lower()}
    for name in operation.__dataclass_fields__:
        value = getattr(operation, name)
        if isinstance(value, np.ndarray):
            value = value.tolist()
        if name in _ALWAYS or value not in (-1, "", False, [], ()):
            row[name] = value
    return row


def from_row(row: dict[str, Any]) -> Operation:
    """Returns the operation that `as_row` wrote."""
    values = dict(row)
    match values.pop("op"):
        case "append":
            return Append(**values | {"hashes": tuple(values["hashes"])})
        case "decision":
            return Decision(**{"commit": False} | values | {"attempts": tuple(values.get("attempts", ()))})
        case _:
            values["indexes"] = np.array(values.get("indexes", ()), np.int64)
            values["hashes"] = np.array(values.get("hashes", ()), np.uint64)
            return Read(**values)


def load_history(path: Path) -> list[Operation]:
    """Reads a history file; notes are left out."""
    with path.open(encoding="utf-8") as lines:
        rows = (json.loads(line) for line in lines)
        return [from_row(row) for row in rows if "op" in row]
