"""Second pass: one range, read entry by entry from all its replicas and compared; mismatches are read twice.

Bodies are reduced to digests as they are read, so memory depends on the number of entries in a range alone. Runs on
executors, needs no Spark.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dledger_core import DLedgerError, open_store
from dledger_core.checksum import crc32_column

from .judge import Judgement, Seen, State, committed_end, judge
from .model import AuditedReplica, AuditFinding, Class, consecutive, result
from .replicas import open_source
from .source import Gap, RateLimiter, Source

REREAD_DELAY_S: Final = 0.3
WINDOW_BYTES: Final = 32
_DIGEST_BYTES: Final = 16
_ENTRY: Final = np.dtype(
    [
        ("state", "u1"),
        ("irregular", "?"),
        ("term", "i8"),
        ("magic", "i4"),
        ("position", "i8"),
        ("size", "i8"),
        ("crc", "u4"),
        ("digest", f"V{_DIGEST_BYTES}"),
    ]
)
_CONTENT: Final = ("state", "term", "magic", "size", "digest")
_GAP_STATE: Final = {"damaged": State.DAMAGED, "deleted": State.UNREAD, "unread": State.UNREAD}

Rows = npt.NDArray[Any]


@dataclass(slots=True)
class _Table:
    """The entries of a range on one replica."""

    start: int
    rows: Rows
    gaps: list[Gap]
    nbytes: int

    def seen(self, index: int) -> Seen:
        row = self.rows[index - self.start]
        state = State(int(row["state"]))
        if state is not State.PRESENT:
            reason = next((gap.reason for gap in self.gaps if gap.start <= index < gap.end), "")
            return Seen(state, reason=reason)
        term, magic, position, size, crc = (int(row[name]) for name in ("term", "magic", "position", "size", "crc"))
        return Seen(state, term, magic, position, size, crc, bytes(row["digest"]), bool(row["irregular"]))


def compare_entries(
    replicas: Sequence[AuditedReplica],
    start: int,
    end: int,
    *,
    pause_s: float = REREAD_DELAY_S,
    limiters: Mapping[str, RateLimiter] | None = None,
) -> dict[str, Any]:
    """Compare the entries of [start, end) on replicas that all contain it; return a row of RESULTS.

    Args:
        replicas: those with the range.
        start: first index.
        end: end index (exclusive).
        pause_s: wait before mismatches of live nodes are read again.
        limiters: by replica's name, counting all bytes read.
    """
    key = (replicas[0].group, start, end)
    try:
        return _compared(replicas, key, pause_s, limiters or {})
    except DLedgerError as error:
        return result(key, unread=[f"[{start}, {end}): {error}"])


def _compared(
    replicas: Sequence[AuditedReplica], key: tuple[str, int, int], pause_s: float, limiters: Mapping[str, RateLimiter]
) -> dict[str, Any]:
    _, start, end = key
    committed = committed_end(replicas)
    with ExitStack() as stack:
        sources = {r.name: stack.enter_context(open_source(r, limiters.get(r.name))) for r in replicas}
        bounds = {r.name: (start, end) if r.table else (r.first_index, r.end) for r in replicas}
        tables = {n: _read(sources[n], start, end, bounds[n]) for n in sources}
        first_read = _judge_all(tables, _mismatches(tables), committed)
        if first_read and any(replica.live for replica in replicas):
            time.sleep(pause_s)
        second_read: dict[int, list[Judgement]] = {}
        evidence: dict[int, dict[str, Seen]] = {}
        for low, high in consecutive(sorted(first_read)):
            again = {n: _read(sources[n], low, high, bounds[n]) for n in sources}
            second_read |= _judge_all(again, range(low, high), committed)
            evidence |= {i: {n: t.seen(i) for n, t in again.items()} for i in range(low, high)}
        confirmed = {i: found for i, found in second_read.items() if i in first_read}
        findings = [_with_evidence(*found, evidence, sources) for found in _merged(key[0], confirmed)]
    unread = [f"{n}: {gap.reason}" for n, t in tables.items() for gap in t.gaps if gap.kind != "damaged"]
    return result(
        key,
        findings,
        unread=list(dict.fromkeys(unread)),
        cleared=len(first_read) - len(confirmed),
        read_bytes=sum(table.nbytes for table in tables.values()),
    )


def _read(source: Source, start: int, end: int, bounds: tuple[int, int]) -> _Table:
    """Read a range, with one more entry on both sides to detect decreasing terms."""
    low, high = max(bounds[0], start - 1), min(bounds[1], end + 1)
    rows = np.zeros(high - low, _ENTRY)
    rows["state"] = State.ABSENT if source.is_partial else State.MISSING
    gaps, nbytes = [], 0
    for batch in source.entries(low, high):
        if isinstance(batch, Gap):
            rows["state"][batch.start - low : batch.end - low] = _GAP_STATE[batch.kind]
            gaps += [batch] if batch.start < end and batch.end > start else []
            continue
        at = np.asarray(batch.column("index")) - low
        inside = (at >= 0) & (at < len(rows))
        rows[at[inside]] = _fingerprints(batch, source.header_bytes)[inside]
        nbytes += int(pc.sum(pc.binary_length(batch.column("body"))).as_py() or 0)
    present = rows["state"] == State.PRESENT
    falls = np.flatnonzero(present[:-1] & present[1:] & (rows["term"][:-1] > rows["term"][1:]))
    rows["irregular"][falls] = rows["irregular"][falls + 1] = True
    return _Table(start, rows[start - low : end - low], gaps, nbytes)


def _fingerprints(batch: pa.RecordBatch, header_bytes: int) -> Rows:
    rows = np.zeros(batch.num_rows, _ENTRY)
    bodies = batch.column("body").to_pylist()
    lengths = np.fromiter(map(len, bodies), np.int64, len(bodies))
    rows["state"] = State.PRESENT
    for name in ("term", "magic", "position"):
        rows[name] = np.asarray(batch.column(name))
    rows["size"] = lengths + header_bytes
    rows["crc"] = crc32_column(b"".join(bodies), lengths)
    digests = b"".join(hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest() for body in bodies)
    rows["digest"] = np.frombuffer(digests, f"V{_DIGEST_BYTES}")
    return rows


def _mismatches(tables: dict[str, _Table]) -> list[int]:
    """Return the indexes at which the replicas differ, or one of them has a fault."""
    reference, *others = tables.values()
    mismatched = (reference.rows["state"] != State.PRESENT) | reference.rows["irregular"]
    for other in others:
        mismatched |= other.rows["irregular"]
        known = other.rows["state"] != State.ABSENT
        for name in _CONTENT:
            mismatched |= known & (other.rows[name] != reference.rows[name])
    return [reference.start + int(row) for row in np.flatnonzero(mismatched)]


def _judge_all(tables: dict[str, _Table], indexes: Iterable[int], committed: int) -> dict[int, list[Judgement]]:
    found = {}
    for index in indexes:
        seen = {name: table.seen(index) for name, table in tables.items()}
        judgements = judge(seen, committed=index < committed)
        if judgements:
            found[index] = judgements
    return found


def _merged(group: str, judgements: dict[int, list[Judgement]]) -> list[tuple[Judgement, AuditFinding]]:
    """Return one finding for consecutive indexes with the same judgement."""
    indexes_of: dict[Judgement, list[int]] = {}
    for index in sorted(judgements):
        for judgement in judgements[index]:
            indexes_of.setdefault(judgement, []).append(index)
    return [
        (one, AuditFinding.of(one.kind, group, ",".join(one.replicas), start, end))
        for one, indexes in indexes_of.items()
        for start, end in consecutive(indexes)
    ]


def _with_evidence(
    judgement: Judgement, finding: AuditFinding, evidence: dict[int, dict[str, Seen]], sources: dict[str, Source]
) -> AuditFinding:
    """Add the entries at the finding's first index as evidence."""
    index = finding.start
    seen = evidence[index]
    shown: dict[str, Any] = {
        "index": index,
        "replicas": {name: entry.to_json() for name, entry in seen.items()},
        "agree": list(judgement.right),
        "disagree": list(judgement.replicas),
    }
    places = {name: found for name, source in sources.items() if (found := source.locate(index))}
    if places:
        shown["places"] = places
    present = [n for n, e in seen.items() if e.state is State.PRESENT]
    one, other = _pair(judgement, present)
    if one and other and seen[one].digest != seen[other].digest:
        bodies = {name: _body(sources[name], index) for name in (other, one)}
        shown["first_difference"] = difference(bodies)
    return replace(finding, evidence=shown)


def _pair(judgement: Judgement, present: list[str]) -> tuple[str, str]:
    """Return a replica that is wrong and one to compare it with."""
    wrong = [name for name in judgement.replicas if name in present]
    right = [name for name in judgement.right if name in present] or wrong[1:]
    return (wrong[0], right[0]) if wrong and right else ("", "")


def _body(source: Source, index: int) -> bytes:
    for batch in source.entries(index, index + 1):
        if not isinstance(batch, Gap) and batch.num_rows:
            return bytes(batch.column("body")[0].as_py())
    return b""


def difference(bodies: dict[str, bytes]) -> dict[str, Any] | None:
    """Return the offset of the first byte at which two bodies differ, and 32 bytes of each around it, in hex."""
    one, other = bodies.values()
    common = min(len(one), len(other))
    unequal = np.flatnonzero(np.frombuffer(one, np.uint8, common) != np.frombuffer(other, np.uint8, common))
    if not len(unequal) and len(one) == len(other):
        return None
    offset = int(unequal[0]) if len(unequal) else common
    start = max(0, offset - WINDOW_BYTES // 2)
    window = {name: body[start : start + WINDOW_BYTES].hex() for name, body in bodies.items()}
    return {"offset": offset, "window_start": start, "window": window}


def index_findings(replica: AuditedReplica) -> list[AuditFinding]:
    """Return the ranges of a store whose index rows do not match the data; needs no Spark."""
    with open_store(replica.path) as reader:
        return [
            AuditFinding.of(Class.INDEX_MISMATCH, replica.group, replica.name, found.start, found.end)
            for found in reader.verify().findings
            if found.kind == "INDEX_MISMATCH"
        ]
