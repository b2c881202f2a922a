"""The plan: ranges to compare, verified ranges of earlier runs to trust, and the tasks that read the others. Pure.

Ranges are half-open and, inside a section, end at multiples of the span, a power of two. So the same entries make the
same ranges in every run and on every replica, and their digests can be compared.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from dledger_core import ConfigError

from .digests import differing_ranges
from .model import RANGES, AuditedReplica, ReadTask, Snapshot, aligned

SPAN_MIN: Final = 1024
SPAN_MAX: Final = 1 << 16
RANGES_WANTED: Final = 1 << 9
RANGE_BYTES_MAX: Final = 1 << 26
SAMPLE_SHARE: Final = 64
SAMPLE_MIN: Final = 8
TASK_BYTES_MIN: Final = 1 << 26
TASK_BYTES_MAX: Final = 1 << 29
"""A task costs as much as reading some tens of megabytes; a large one reports no progress for a long time."""
TASK_S: Final = 5
"""With a byte rate: the approximate time that a task reads."""
DUE_PERCENT_MIN: Final = 1
_ROUNDING: Final = 1e-6
_RESUMES_MAX: Final = 100


@dataclass(frozen=True, slots=True)
class Section:
    """Entries [start, end) that the same replicas contain."""

    start: int
    end: int
    replicas: tuple[AuditedReplica, ...]


RecordedRange = tuple[str, str, int, int]
"""Group, replica, start and end of a digest in the table of ranges."""


class VerifiedRange(NamedTuple):
    """A range that was equal on some replicas: the time of its oldest read, and the bytes of its bodies."""

    start: int
    end: int
    holders: frozenset[str]
    read_at: datetime
    nbytes: int


# --- ranges -------------------------------------------------------------------------------------------------------


def common_range(replicas: Sequence[AuditedReplica]) -> tuple[int, int]:
    """Return the range [start, end) on all reachable replicas; empty if there are fewer than two."""
    usable = [replica for replica in replicas if replica.reachable]
    if len(usable) < 2:
        return 0, 0
    start = max(replica.first_index for replica in usable)
    return start, max(start, min(replica.end for replica in usable))


def sections(replicas: Sequence[AuditedReplica], *, holders_min: int = 2) -> list[Section]:
    """Divide the log where its set of replicas changes; leave out parts on fewer replicas.

    A part on one replica cannot be compared, but it is read: damage shows there too.
    """
    usable = [replica for replica in replicas if replica.reachable and replica.end > replica.first_index]
    edges = sorted({edge for replica in usable for edge in (replica.first_index, replica.end)})
    found = []
    for start, end in pairwise(edges):
        holders = tuple(r for r in usable if r.first_index <= start and end <= r.end)
        found += _by_log(start, end, holders) if start == 0 and two_logs(usable) else [Section(start, end, holders)]
    return [part for part in found if len(part.replicas) >= holders_min]


def two_logs(replicas: Sequence[AuditedReplica]) -> bool:
    """Whether the replicas are those of two clusters with independent logs."""
    here, there = ({r.log_uuid for r in replicas if r.other is side} for side in (False, True))
    return bool(here and there) and here != there


def _by_log(start: int, end: int, holders: tuple[AuditedReplica, ...]) -> list[Section]:
    """Compare the first entry, which contains the log's uuid, within one cluster alone."""
    here = tuple(replica for replica in holders if not replica.other)
    return [Section(start, start + 1, here), *([Section(start + 1, end, holders)] if end > start + 1 else [])]


def choose_span(entries: int, entry_bytes: float = 0, rate: int | None = None) -> int:
    """Return entries per range: a power of two that makes neither tiny ranges, nor too many, nor huge ones.

    Args:
        entries: to be compared.
        entry_bytes: of one on the replica where they take most.
        rate: limit of bytes per second; a range is read at once, and takes about a second then.
    """
    span, most = SPAN_MIN, min(rate or RANGE_BYTES_MAX, RANGE_BYTES_MAX)
    while span < SPAN_MAX and entries > span * RANGES_WANTED and 2 * span * entry_bytes <= most:
        span *= 2
    return span


def plan_ranges(snapshot: Snapshot, *, mode: str = "digest", seed: str = "", rate: int | None = None) -> pa.Table:
    """Return the ranges to read, in order (RANGES); those on one replica are only checked for damage.

    Args:
        snapshot: the replicas.
        mode: ``quick`` takes the first and last range of each section and a random share of the others.
        seed: of that share; the same seed gives the same ranges.
        rate: as for ``choose_span``.
    """
    chance = random.Random(seed)
    rows: list[dict[str, Any]] = []
    for group, replicas in snapshot.items():
        parts = sections(replicas, holders_min=1)
        heaviest = max((replica.entry_bytes for replica in replicas), default=0)
        span = choose_span(sum(part.end - part.start for part in parts), heaviest, rate)
        for part in parts:
            chosen = list(aligned(part.start, part.end, span))
            names = [replica.name for replica in part.replicas]
            for start, end in sample(chosen, chance) if mode == "quick" else chosen:
                rows.append({"group": group, "start": start, "end": end, "span": span, "replicas": names})
    return pa.Table.from_pylist(rows, RANGES)


def sample(ranges: list[tuple[int, int]], chance: random.Random) -> list[tuple[int, int]]:
    """Return the first and last range, and a random share of the others."""
    inner = ranges[1:-1]
    count = min(len(inner), max(SAMPLE_MIN, len(inner) // SAMPLE_SHARE))
    return sorted({*ranges[:1], *ranges[-1:], *chance.sample(inner, count)})


# --- earlier runs -------------------------------------------------------------------------------------------------


def of_replicas(digests: pa.Table, replicas: Iterable[AuditedReplica]) -> pa.Table:
    """Return the digests of these very replicas, with the column ``known``: their identities."""
    logs = pc.fill_null(digests["log_uuid"], "")
    known = pc.binary_join_element_wise(digests["replica"], logs, digests["source"], "|")
    wanted = pa.array([replica.identity for replica in replicas if replica.reachable], pa.string())
    return digests.append_column("known", known).filter(pc.is_in(known, wanted))


def trust_proven(
    ranges: pa.Table,
    digests: pa.Table,
    snapshot: Snapshot,
    *,
    age: timedelta,
    now: datetime,
    percent: int | None = None,
) -> pa.Table:
    """Mark ranges as proven that were equal on all their replicas within ``age``, except the share to read again.

    Entries above every recorded commit index may still be replaced, so they are never trusted.

    Args:
        ranges: the plan (RANGES).
        digests: of earlier runs (DIGESTS).
        snapshot: the replicas.
        age: time for which a verified range counts.
        now: when this run began.
        percent: share of the trusted ranges that is read again, the longest unread first; None: as ``due_count`` says.
    """
    by_name = {(r.group, r.name): r for replicas in snapshot.values() for r in replicas}
    verified = _verified_ranges(digests, by_name.values(), now - age, now)
    trusted: list[tuple[datetime, int, int]] = []
    for number, row in enumerate(ranges.to_pylist()):
        replicas = [by_name[row["group"], name] for name in row["replicas"]]
        recorded = [r.commit_index for r in replicas if r.commit_index is not None]
        if recorded and row["end"] > max(recorded) + 1:
            continue
        holders = frozenset(replica.identity for replica in replicas)
        one = _covering(verified.get(row["group"], []), row["start"], row["end"], holders)
        if one is not None:
            trusted.append((one[0], number, one[1]))
    return marked(ranges, trusted, age, now, percent)


def marked(
    ranges: pa.Table, trusted: Iterable[tuple[datetime, int, int]], age: timedelta, now: datetime, percent: int | None
) -> pa.Table:
    """Mark trusted ranges as proven, except the share to read again: those that were not read for the longest time.

    Args:
        ranges: the plan (RANGES).
        trusted: when a range was read, its row in the plan, and its bytes.
        age: time for which that counts.
        now: when this run began.
        percent: as for ``trust_proven``.
    """
    rows, oldest_first = ranges.to_pylist(), sorted(trusted)
    moments = [read_at for read_at, _, _ in oldest_first]
    due = due_count(moments, age, now) if percent is None else -(-len(oldest_first) * percent // 100)
    for read_at, number, nbytes in oldest_first[due:]:
        rows[number] |= {"proven_at": read_at, "proven_bytes": nbytes}
    return pa.Table.from_pylist(rows, RANGES)


def _verified_ranges(
    digests: pa.Table, replicas: Iterable[AuditedReplica], oldest: datetime, now: datetime
) -> dict[str, list[VerifiedRange]]:
    """Return the verified ranges of each group, by start: the newest digests of at least two replicas are equal.

    A range that differed since, or overlaps one that did, is not verified. Neither is a digest from the future: a clock
    was wrong, so it cannot be decided which digest is newer.
    """
    rows = of_replicas(digests, replicas)
    wrong = pc.add(*(pc.fill_null(pc.list_value_length(rows[name]), 0) for name in ("damaged", "index_wrong")))
    read_at = rows["read_at"].cast(pa.timestamp("us", tz="UTC"))
    early = pc.greater(read_at, pa.scalar(now, read_at.type))
    bad = pc.or_(pc.or_(pc.not_equal(rows["problem"], ""), pc.greater(wrong, 0)), early)
    whose, seen = ["group", "replica", "known", "start", "end"], ["content", "layout", "bytes"]
    rows = rows.select([*whose, *seen]).append_column("read_at", read_at).append_column("bad", bad).sort_by("read_at")
    last = [(name, "last") for name in (*seen, "read_at", "bad")]
    newest = rows.group_by(whose, use_threads=False).aggregate(last)
    newest = newest.rename_columns([name.removesuffix("_last") for name in newest.column_names])
    columns = [("known", "list"), ("bad", "any"), ("bytes", "max"), ("read_at", "min"), ("read_at", "max")]
    refuted: dict[str, list[tuple[int, int, datetime]]] = defaultdict(list)
    verified: dict[str, list[VerifiedRange]] = defaultdict(list)
    for row in differing_ranges(newest, *columns).sort_by("start").to_pylist():
        if row["differs"] or row["bad_any"]:
            refuted[row["group"]].append((row["start"], row["end"], row["read_at_max"]))
        elif len(holders := frozenset(row["known_list"])) > 1 and row["read_at_min"] >= oldest:
            one = VerifiedRange(row["start"], row["end"], holders, row["read_at_min"], row["bytes_max"])
            verified[row["group"]].append(one)
    return {
        group: [p for p in found if not any(s < p.end and p.start < e and t >= p.read_at for s, e, t in refuted[group])]
        for group, found in verified.items()
    }


def _covering(
    verified: list[VerifiedRange], start: int, end: int, holders: frozenset[str]
) -> tuple[datetime, int] | None:
    """Return (time of the oldest read, bytes) if verified ranges cover [start, end), else None.

    Where several ranges cover an index, the newest one counts.
    """
    used: list[tuple[VerifiedRange, int]] = []
    at = start
    while at < end:
        low = bisect_left(verified, at - SPAN_MAX, key=lambda known: known.start)
        high = bisect_right(verified, at, key=lambda known: known.start)
        fitting = [one for one in verified[low:high] if one.end > at and holders <= one.holders]
        if not fitting:
            return None
        best = max(fitting, key=lambda one: (one.read_at, one.end))
        used.append((best, min(best.end, end) - at))
        at = best.end
    nbytes = sum(one.nbytes * count / (one.end - one.start) for one, count in used)
    return min(one.read_at for one, _ in used), round(nbytes)


def due_count(moments: Sequence[datetime], age: timedelta, now: datetime) -> int:
    """Return the number of trusted ranges to read again, oldest first, so that all stay within ``age``.

    The i-th oldest of n (from 1) may be as old as n - i + 1 of n parts of ``age``. If none is older, the same number is
    due in each part, however often the audit runs. Otherwise all ranges that one run verified would be due at once.

    Args:
        moments: when each range was read, oldest first.
        age: time for which a verified range counts.
        now: when this run began.
    """
    n = len(moments)
    late = max((i + 1 - n * (1 - (now - read_at) / age) for i, read_at in enumerate(moments)), default=0.0)
    return min(n, math.ceil(max(late - _ROUNDING, n * DUE_PERCENT_MIN / 100)))


def chain_of(resumes: Mapping[str, str], run_id: str) -> list[str]:
    """Return the run, the one that it resumed, and so on.

    Raises:
        ConfigError: the run is not recorded.
    """
    if run_id not in resumes:
        remedy = "name a run that was killed while it wrote to this table, or leave --resume out"
        raise ConfigError(f"--table has no record of run {run_id}", "", remedy)
    chain = [run_id]
    while resumes.get(chain[-1]) and len(chain) < _RESUMES_MAX:
        chain.append(resumes[chain[-1]])
    return chain


# --- tasks --------------------------------------------------------------------------------------------------------


def reading_tasks(
    ranges: pa.Table,
    snapshot: Snapshot,
    *,
    cores: int,
    rate: int | None = None,
    recorded: Container[RecordedRange] = frozenset(),
) -> list[ReadTask]:
    """Return the tasks of the first pass, alternating between replicas so that all nodes work in parallel.

    Args:
        ranges: the plan (RANGES); proven ranges are not read.
        snapshot: the replicas.
        cores: number of parallel tasks.
        rate: limit of bytes per second read from one node.
        recorded: ranges with an existing digest.
    """
    rows = ranges.filter(pc.is_null(ranges["proven_at"])).to_pylist()
    found: list[ReadTask] = []
    for group, replicas in snapshot.items():
        group_rows = [row for row in rows if row["group"] == group]
        entries = sum(row["end"] - row["start"] for row in group_rows)
        size = entries * max((replica.entry_bytes for replica in replicas), default=0)
        most = rate * TASK_S if rate else TASK_BYTES_MAX
        wanted = max(min(cores, int(size / TASK_BYTES_MIN)), int(size / most), 1)
        for replica in replicas:
            name = replica.name
            own = [
                r for r in group_rows if name in r["replicas"] and (group, name, r["start"], r["end"]) not in recorded
            ]
            found += _joined(replica, own, entries / wanted)
    return sorted(found, key=lambda task: (task.start, task.replica.name))


def _joined(replica: AuditedReplica, rows: Iterable[Mapping[str, Any]], length: float) -> list[ReadTask]:
    """Join adjacent ranges up to a length, at multiples of the span, where the reader divides them again."""
    tasks: list[ReadTask] = []
    for row in rows:
        start, end, span = row["start"], row["end"], row["span"]
        last = tasks[-1] if tasks else None
        if last is not None and last.end == start and start % span == 0 and start - last.start < length:
            tasks[-1] = last._replace(end=end)
        else:
            tasks.append(ReadTask(replica, start, end, span))
    return tasks


def steps(tasks: Sequence[ReadTask], step_bytes: float) -> Iterator[list[ReadTask]]:
    """Divide the work into steps of about that many bytes, at least one task each."""
    step: list[ReadTask] = []
    size = 0.0
    for task in tasks:
        nbytes = (task.end - task.start) * task.replica.entry_bytes
        if step and size + nbytes > step_bytes:
            yield step
            step, size = [], 0.0
        step.append(task)
        size += nbytes
    if step:
        yield step


def bundles(tasks: Sequence[ReadTask], *, one_per_node: bool) -> list[tuple[ReadTask, ...]]:
    """Return the reads of each Spark task; with ``one_per_node`` no two of them read the same node in parallel."""
    if not one_per_node:
        return [(task,) for task in tasks]
    by_node: dict[str, list[ReadTask]] = {}
    for task in tasks:
        by_node.setdefault(task.replica.name, []).append(task)
    return [tuple(mine) for mine in by_node.values()]
