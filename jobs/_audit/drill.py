"""The second pass: one range, read entry by entry from all its replicas and compared; suspects are read twice.

Bodies are reduced to digests as they are read, so memory depends on the number of entries in a range alone. Runs on
executors, needs no Spark.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dledger_core.checksum import crc32_column
from jobs._audit.limiter import RateLimiter
from jobs._audit.model import Finding, Replica
from jobs._audit.plan import Section, committed_end, runs_of
from jobs._audit.sources import Gap, Source, open_source
from jobs._audit.vote import Judgement, Seen, State, judge

__all__ = ["Drilled", "difference", "drill"]

SECOND_LOOK_S: Final = 0.3
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
_GAP_STATE: Final = {"damaged": State.DAMAGED, "gone": State.UNREAD, "unread": State.UNREAD}

Rows = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Drilled:
    """What a second pass over one range found.

    Attributes:
        findings: neighbours merged.
        cleared: entries that a second look found equal.
        unread: why a replica could not be read, by replica.
        read_bytes: body bytes read.
    """

    findings: tuple[Finding, ...]
    cleared: int
    unread: tuple[str, ...]
    read_bytes: int


@dataclass(slots=True)
class _Table:
    """One replica's entries of a range."""

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
        return Seen(
            state,
            int(row["term"]),
            int(row["magic"]),
            int(row["position"]),
            int(row["size"]),
            int(row["crc"]),
            bytes(row["digest"]),
            bool(row["irregular"]),
        )


def drill(
    section: Section, *, pause_s: float = SECOND_LOOK_S, limiters: Mapping[str, RateLimiter] | None = None
) -> Drilled:
    """Compares the entries of a range on all its replicas.

    Args:
        section: the range and who holds it.
        pause_s: how long to wait before suspects of live nodes are read again.
        limiters: by replica's name, told of all bytes read.
    """
    committed = committed_end(section.replicas)
    with ExitStack() as stack:
        sources = {r.name: stack.enter_context(open_source(r, (limiters or {}).get(r.name))) for r in section.replicas}
        bounds = {r.name: (r.first_index, r.end) for r in section.replicas}
        tables = {n: _read(sources[n], section.start, section.end, bounds[n]) for n in sources}
        first_look = _judged(tables, _suspects(tables), committed)
        if first_look and any(replica.live for replica in section.replicas):
            time.sleep(pause_s)
        second_look: dict[int, list[Judgement]] = {}
        evidence: dict[int, dict[str, Seen]] = {}
        for start, end in runs_of(sorted(first_look)):
            again = {n: _read(sources[n], start, end, bounds[n]) for n in sources}
            second_look |= _judged(again, range(start, end), committed)
            evidence |= {i: {n: t.seen(i) for n, t in again.items()} for i in range(start, end)}
        stayed = {i: found for i, found in second_look.items() if i in first_look}
        findings = [_evident(f, evidence, sources) for f in _merged(section.replicas[0], stayed)]
    unread = [f"{n}: {gap.reason}" for n, t in tables.items() for gap in t.gaps if gap.kind != "damaged"]
    return Drilled(
        tuple(findings),
        len(first_look) - len(stayed),
        tuple(dict.fromkeys(unread)),
        sum(t.nbytes for t in tables.values()),
    )


def _read(source: Source, start: int, end: int, bounds: tuple[int, int]) -> _Table:
    """Reads a range, with one entry more on both sides to see whether terms rise."""
    low, high = max(bounds[0], start - 1), min(bounds[1], end + 1)
    rows = np.zeros(high - low, _ENTRY)
    gaps, nbytes = [], 0
    for piece in source.entries(low, high):
        if isinstance(piece, Gap):
            rows["state"][piece.start - low : piece.end - low] = _GAP_STATE[piece.kind]
            gaps += [piece] if piece.start < end and piece.end > start else []
            continue
        at = np.asarray(piece.column("index")) - low
        inside = (at >= 0) & (at < len(rows))
        rows[at[inside]] = _fingerprints(piece, source.header_bytes)[inside]
        nbytes += int(pc.sum(pc.binary_length(piece.column("body"))).as_py() or 0)
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


def _suspects(tables: dict[str, _Table]) -> list[int]:
    """Returns the indexes at which the replicas differ, or have something wrong by themselves."""
    reference, *others = tables.values()
    doubtful = (reference.rows["state"] != State.PRESENT) | reference.rows["irregular"]
    for other in others:
        doubtful |= other.rows["irregular"]
        for name in _CONTENT:
            doubtful |= other.rows[name] != reference.rows[name]
    return [reference.start + int(place) for place in np.flatnonzero(doubtful)]


def _judged(tables: dict[str, _Table], indexes: Iterable[int], committed: int) -> dict[int, list[Judgement]]:
    found = {}
    for index in indexes:
        seen = {name: table.seen(index) for name, table in tables.items()}
        judgements = judge(seen, committed=index < committed)
        if judgements:
            found[index] = judgements
    return found


def _merged(replica: Replica, judged: dict[int, list[Judgement]]) -> list[tuple[Judgement, Finding]]:
    """Returns one finding for consecutive indexes with the same judgement."""
    found: list[tuple[Judgement, Finding]] = []
    places: dict[Judgement, list[int]] = {}
    for index in sorted(judged):
        for judgement in judged[index]:
            places.setdefault(judgement, []).append(index)
    for judgement, indexes in places.items():
        for start, end in runs_of(indexes):
            names = ",".join(judgement.replicas)
            finding = Finding(
                kind=judgement.kind, group=replica.group, replica=names, start=start, end=end, count=end - start
            )
            found.append((judgement, finding))
    return found


def _evident(
    found: tuple[Judgement, Finding], evidence: dict[int, dict[str, Seen]], sources: dict[str, Source]
) -> Finding:
    """Adds what was seen at the finding's first index."""
    judgement, finding = found
    index = finding.start
    seen = evidence[index]
    shown: dict[str, Any] = {
        "index": index,
        "replicas": {name: entry.to_json() for name, entry in seen.items()},
        "agree": list(judgement.right),
        "disagree": list(judgement.replicas),
    }
    places = {name: place for name, source in sources.items() if (place := source.place(index))}
    if places:
        shown["places"] = places
    present = [n for n, e in seen.items() if e.state is State.PRESENT]
    one, other = _pair(judgement, present)
    if one and other and seen[one].digest != seen[other].digest:
        bodies = {name: _body(sources[name], index) for name in (other, one)}
        shown["first_difference"] = difference(bodies)
    return Finding(
        kind=finding.kind,
        group=finding.group,
        replica=finding.replica,
        start=finding.start,
        end=finding.end,
        count=finding.count,
        evidence=shown,
    )


def _pair(judgement: Judgement, present: list[str]) -> tuple[str, str]:
    """Returns one who disagrees and one to compare it with."""
    wrong = [name for name in judgement.replicas if name in present]
    right = [name for name in judgement.right if name in present] or wrong[1:]
    return (wrong[0], right[0]) if wrong and right else ("", "")


def _body(source: Source, index: int) -> bytes:
    for piece in source.entries(index, index + 1):
        if not isinstance(piece, Gap) and piece.num_rows:
            return bytes(piece.column("body")[0].as_py())
    return b""


def difference(bodies: dict[str, bytes]) -> dict[str, Any] | None:
    """Returns the offset of the first byte at which two bodies differ, and 32 bytes of each around it, in hex."""
    one, other = bodies.values()
    common = min(len(one), len(other))
    unequal = np.flatnonzero(np.frombuffer(one, np.uint8, common) != np.frombuffer(other, np.uint8, common))
    if not len(unequal) and len(one) == len(other):
        return None
    offset = int(unequal[0]) if len(unequal) else common
    start = max(0, offset - WINDOW_BYTES // 2)
    window = {name: body[start : start + WINDOW_BYTES].hex() for name, body in bodies.items()}
    return {"offset": offset, "window_start": start, "window": window}
