"""A classic CommitLog as a replica: of a master, and of the slaves that copied it byte for byte.

There are no indexes in it. What the audit calls one is the number of a block: position = index x block. Everything that
two copies hold counts as committed, because a slave is only ever sent what its master has stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from blake3 import blake3

from dledger_core.digest import RangeDigest
from dledger_core.errors import ConfigError
from dledger_core.rocketmq import ClassicCommitLog, locate
from jobs._audit.model import Class, Finding, Replica, Severity
from jobs._audit.plan import aligned
from jobs._audit.sources import Gap, RangeSeen

if TYPE_CHECKING:
    import pyarrow as pa

    from jobs._audit.limiter import RateLimiter

__all__ = [
    "CLASSIC_GROUP",
    "ClassicSource",
    "alignment",
    "alignment_note",
    "check_kinds",
    "classic_replicas",
    "is_classic",
]

CLASSIC_GROUP: Final = "commitlog"
BLOCK_BYTES: Final = 1024
_BLOCKS_PER_BATCH: Final = 4096


def is_classic(folder: Path) -> bool:
    """Whether a folder holds files named as those of a CommitLog."""
    return folder.is_dir() and locate(folder).is_commitlog


def classic_replicas(folders: Mapping[str, Path]) -> tuple[Replica, ...]:
    """Looks at CommitLogs as they are now; what a broker appends later is left to the next audit.

    Raises:
        ConfigError: a folder holds none, or one with a hole between its files.
    """
    logs = {name: ClassicCommitLog(path) for name, path in folders.items()}
    # Files of a size that is no multiple of a block: smaller blocks, so that each file begins with one.
    block = math.gcd(BLOCK_BYTES, *(file.position for log in logs.values() for file in log.files))
    ends = {name: log.end() for name, log in logs.items()}
    whole = len(set(ends.values())) == 1
    found = []
    for name, log in logs.items():
        first = log.files[0].position // block
        # A block that only one of them has filled would look like a difference.
        end = max(first, -(-ends[name] // block) if whole else ends[name] // block)
        found.append(
            Replica(
                group=CLASSIC_GROUP,
                name=name,
                path=str(folders[name].resolve()),
                first_index=first,
                last_index=end - 1,
                commit_index=end - 1,
                end=end,
                data_bytes=ends[name] - log.files[0].position,
                block_bytes=block,
                end_position=ends[name],
            )
        )
    return tuple(found)


class ClassicSource:
    """Reads one CommitLog; see ``Source``."""

    header_bytes = 0

    def __init__(self, replica: Replica, limiter: RateLimiter | None) -> None:
        self._log = ClassicCommitLog(replica.path)
        self._block = replica.block_bytes
        self._end = replica.end_position
        self._limiter = limiter

    def digests(self, start: int, end: int, span: int) -> Iterator[RangeSeen | Gap]:
        for first, stop in aligned(start, end, span):
            low, high = self._positions(first, stop)
            hasher = blake3()
            for piece in self._log.read(low, high):
                hasher.update(piece)
                self._took(len(piece))
            damaged = tuple(sorted(self._damaged(first, stop)))
            yield RangeSeen(RangeDigest(first, stop, high - low, hasher.digest(), b""), damaged)

    def entries(self, start: int, end: int) -> Iterator[pa.RecordBatch | Gap]:
        damaged = self._damaged(start, end)
        at = start
        for index in [*sorted(damaged), end]:
            for first in range(at, index, _BLOCKS_PER_BATCH):
                yield self._batch(first, min(index, first + _BLOCKS_PER_BATCH))
            if index < end:
                yield Gap(index, index + 1, "damaged", damaged[index])
            at = index + 1

    def place(self, index: int) -> dict[str, Any]:
        """Returns where a block lies, and the message in it."""
        low, high = self._positions(index, index + 1)
        file = self._log.file_at(low)
        shown: dict[str, Any] = {"file": Path(file.path).name, "offset": low - file.position}
        for batch in self._log.messages(low, high):
            shown["message"] = _described(batch)
        return shown

    def _positions(self, start: int, end: int) -> tuple[int, int]:
        return start * self._block, min(end * self._block, self._end)

    def _damaged(self, start: int, end: int) -> dict[int, str]:
        """Returns the blocks of damaged messages, and why."""
        found: dict[int, str] = {}
        for low, high, why in self._log.damage(*self._positions(start, end)):
            for block in range(max(start, low // self._block), min(end, -(-high // self._block))):
                found[block] = why
        return found

    def _batch(self, start: int, end: int) -> pa.RecordBatch:
        import pyarrow as pa

        low, high = self._positions(start, end)
        data = b"".join(self._log.read(low, high))
        self._took(len(data))
        bodies = [data[at : at + self._block] for at in range(0, len(data), self._block)]
        indexes = pa.array(range(start, end), pa.int64())
        nothing = pa.array([0] * len(bodies), pa.int64())
        positions = pa.array([index * self._block for index in range(start, end)], pa.int64())
        columns = {"index": indexes, "term": nothing, "magic": nothing, "position": positions}
        return pa.RecordBatch.from_pydict({**columns, "body": pa.array(bodies, pa.binary())})

    def _took(self, nbytes: int) -> None:
        if self._limiter is not None:
            self._limiter.take(nbytes)


def _described(batch: pa.RecordBatch) -> dict[str, Any]:
    from dledger_core.rocketmq import decode_messages

    names = ["topic", "queue_id", "queue_offset", "msg_id", "error"]
    facts = decode_messages(batch.column("body").slice(0, 1), names).to_pylist()[0]
    return {"position": batch.column("position")[0].as_py(), **{k: v for k, v in facts.items() if v is not None}}


def alignment(replicas: Sequence[Replica], findings: Sequence[Finding]) -> dict[str, Any] | None:
    """Returns whether CommitLogs are equal to their ends, as an upgrade to DLedger needs them; None for other logs."""
    if not replicas or not all(replica.block_bytes for replica in replicas):
        return None
    ends = {replica.name: replica.end_position for replica in replicas}
    differ = any(
        f.severity in (Severity.CRITICAL, Severity.ERROR) or f.kind is Class.DIVERGED_UNKNOWN for f in findings
    )
    return {
        "aligned": len(set(ends.values())) == 1 and not differ,
        "end_positions": ends,
        "first_positions": {replica.name: replica.first_index * replica.block_bytes for replica in replicas},
        "block_bytes": replicas[0].block_bytes,
    }


def alignment_note(found: Mapping[str, Any]) -> str:
    """Says the same for people."""
    block = found["block_bytes"]
    unit = f"in a CommitLog an index counts blocks: position = index x {block:,}"
    ends = found["end_positions"]
    if found["aligned"]:
        return f"aligned: all end at position {max(ends.values()):,} and are equal byte for byte; {unit}"
    if len(set(ends.values())) == 1:
        return f"not aligned: they end alike and differ before; {unit}"
    last = max(ends.values())
    behind = ", ".join(f"{name} by {last - end:,} bytes" for name, end in ends.items() if end < last)
    remedy = "before an upgrade to DLedger forbid writes on the master, let its slaves catch up, and audit again"
    return f"not aligned: {behind} behind the longest; {remedy}; {unit}"


def check_kinds(kinds: Mapping[str, bool]) -> None:
    """Raises ConfigError if some of the directories are CommitLogs and some are not."""
    if len(set(kinds.values())) > 1:
        shown = {name: "CommitLog" if classic else "store" for name, classic in kinds.items()}
        raise ConfigError("a CommitLog can be compared with CommitLogs only", "--replica", "audit each kind", shown)
