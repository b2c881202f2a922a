"""Check a history of chaos or of the simulation against the logs that the replicas have in the end. Pure.

A log is easy to check, because every append names its indexes. It behaved as one copy if indexes are unique, their
order never contradicts real time, every read equals the final log in its range, and no acknowledged entry is missing.
The names of the anomalies follow Jepsen's workloads for queues and for Kafka. O(n log n).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tests.support.history import Append, Decision, Hashes, Indexes, Operation, Read, ReplicaLog

SHOWN_MAX: Final = 20
"""Violations of one kind that are described; the rest is counted."""

NEVER_CORRECT: Final = frozenset({
    "BAD_REQUEST", "CORRUPT", "FENCED", "INDEX_OUT_OF_RANGE", "INTERNAL", "PRODUCER_UNKNOWN", "PROTOCOL",
    "SEQUENCE_CONFLICT", "SEQUENCE_GAP", "STORE_MISMATCH", "UNKNOWN_GROUP",
})  # fmt: skip
"""Errors that a correct group never returns to the clients of this test, whatever the faults."""
Locations = dict[int, list[int]]
"""The hash of a body → its indexes."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One violated guarantee."""

    kind: str
    detail: str


@dataclass
class Verdict:
    """All violations; ``counts`` also has the number of checked things."""

    violations: list[Violation] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def ok(self) -> bool:
        return not self.violations

    def add(self, kind: str, detail: str) -> None:
        self.counts[f"violation {kind}"] += 1
        if self.counts[f"violation {kind}"] <= SHOWN_MAX:
            self.violations.append(Violation(kind, detail))


def check(history: Sequence[Operation], replicas: dict[str, ReplicaLog]) -> Verdict:
    """Return the violations in a history, given the replicas' logs after all of them stopped."""
    verdict = Verdict()
    log = _agreed_log(replicas, verdict)
    appends = [each for each in history if isinstance(each, Append)]
    reads = [each for each in history if isinstance(each, Read) and each.status == "ok"]
    decisions = [each for each in history if isinstance(each, Decision)]
    for each in history:
        verdict.counts[f"{type(each).__name__.lower()} {each.status}"] += 1
        if each.error in NEVER_CORRECT:
            verdict.add("refused", f"{each.error} for {each}")
    locations: Locations = {}
    for at in np.flatnonzero(log.data).tolist():
        locations.setdefault(int(log.hashes[at]), []).append(log.first_index + at)
    _check_ranges(appends, verdict)
    _check_appends(appends, log, locations, verdict)
    _check_order(appends, reads, log, locations, verdict)
    _check_transactions(appends, decisions, log, locations, verdict)
    indexes = log.first_index + np.arange(len(log.terms), dtype=np.int64)
    shown = {True: _Rows(indexes[log.data], log.hashes[log.data])}
    shown[False] = _Rows(indexes[log.visible], log.hashes[log.visible])
    for read in reads:
        _check_read(read, log, shown[read.uncommitted], verdict)
    _check_monotonic(reads, appends, verdict)
    _check_linearizable(reads, appends, verdict)
    return verdict


def _agreed_log(replicas: dict[str, ReplicaLog], verdict: Verdict) -> ReplicaLog:
    """Return the longest replica; report where another one differs."""
    longest = max(replicas.values(), key=lambda each: each.end)
    for name, each in replicas.items():
        if each.end != longest.end:
            verdict.add("diverged", f"{name} ends at {each.end - 1}, another at {longest.end - 1}")
        start = max(each.first_index, longest.first_index)
        count = max(min(each.end, longest.end) - start, 0)
        mine, theirs = (slice(start - side.first_index, start - side.first_index + count) for side in (each, longest))
        unequal = np.flatnonzero(
            (each.records[mine] != longest.records[theirs]) | (each.visible[mine] != longest.visible[theirs])
        )
        if len(unequal):
            verdict.add("diverged", f"{name} differs at {len(unequal)} indexes, first {start + unequal[0]}")
    steps = np.diff(longest.terms)
    if (steps < 0).any():
        verdict.add("terms", f"the term falls after index {longest.first_index + np.flatnonzero(steps < 0)[0]}")
    verdict.counts["entries"] = len(longest.terms)
    verdict.counts["term ranges"] = 1 + int(np.count_nonzero(steps)) if len(longest.terms) else 0
    return longest


# --- appends ----------------------------------------------------------------------------------------------------------


def _check_ranges(appends: list[Append], verdict: Verdict) -> None:
    """Check that no two acknowledged appends share an index, except a producer's retry of the same append."""
    acknowledged = sorted((a for a in appends if a.status == "ok"), key=lambda a: (a.first, a.last))
    before: Append | None = None
    for each in acknowledged:
        if each.last - each.first + 1 != len(each.hashes):
            verdict.add("range", f"{each} has {len(each.hashes)} bodies")
        if before is not None and each.first <= before.last:
            same = (each.first, each.last, each.hashes) == (before.first, before.last, before.hashes)
            if not (same and each.producer and each.producer == before.producer):
                verdict.add("duplicate-index", f"{each} and {before} have the same index")
        if before is None or each.last > before.last:
            before = each


def _check_appends(appends: list[Append], log: ReplicaLog, locations: Locations, verdict: Verdict) -> None:
    known = {value for each in appends for value in each.hashes}
    # An attempt that is rejected because its transaction has ended says nothing of its earlier tries, all orphaned.
    uncertain = [each for each in appends if each.status != "fail" or (each.attempt and each.error == "TRANSACTION")]
    may_exist = {value for each in uncertain for value in each.hashes}
    for each in appends:
        if each.status == "ok":
            _check_acknowledged(each, log, locations, verdict)
        elif each.status == "unknown" and not each.attempt:
            # A batch is in the log as a whole and in order, or not at all.
            found = [index for value in each.hashes for index in locations.get(value, ())[:1]]
            if found and found != list(range(found[0], found[0] + len(each.hashes))):
                verdict.add("torn-batch", f"{each} is at {found}")
        for value in each.hashes:
            indexes = locations.get(value, ())
            # A producer's retry may have failed after an earlier attempt of it took effect.
            if each.status == "fail" and indexes and value not in may_exist:
                verdict.add("failed-append-appears", f"{each} failed, yet is at {indexes}")
            # An attempt may be in the log twice: only the copy that the commit lists is visible.
            if len(indexes) > 1 and not each.attempt:
                verdict.add("duplicate", f"a body of {each} is at {indexes}")
    strangers = [indexes[0] for value, indexes in locations.items() if value not in known]
    if strangers:
        verdict.add("from-nowhere", f"{len(strangers)} entries that no client appended, first at {min(strangers)}")


def _check_acknowledged(each: Append, log: ReplicaLog, locations: Locations, verdict: Verdict) -> None:
    start, stop = each.first - log.first_index, each.last + 1 - log.first_index
    if start < 0:
        return
    found = tuple(log.hashes[start:stop].tolist()) if each.last < log.end else ()
    if found != each.hashes or not log.data[start:stop].all():
        elsewhere = [locations.get(value, []) for value in each.hashes]
        verdict.add("moved" if all(elsewhere) else "lost", f"{each} was acknowledged; its bodies are at {elsewhere}")
    elif each.term != -1 and (log.terms[start:stop] != each.term).any():
        verdict.add("term", f"{each} is in term {int(log.terms[start])}")


# --- order ------------------------------------------------------------------------------------------------------------


class _Seen:
    """The highest index that was known to exist at each moment."""

    def __init__(self, appends: Iterable[Append], reads: Iterable[Read]) -> None:
        events = [(a.end, a.last) for a in appends if a.status == "ok"]
        events += [(r.end, max(r.next_index - 1, r.commit_index)) for r in reads]
        self._times: list[float] = []
        self._highest: list[int] = []
        for end, index in sorted(events):
            self._times.append(end)
            self._highest.append(max(index, self._highest[-1]) if self._highest else index)

    def before(self, moment: float) -> int:
        """Return the highest index of the calls that had ended before ``moment``; -1 if none had."""
        count = bisect_left(self._times, moment)
        return self._highest[count - 1] if count else -1


def _check_order(
    appends: list[Append], reads: list[Read], log: ReplicaLog, locations: Locations, verdict: Verdict
) -> None:
    """Check that an append that started after an index had been seen is after that index."""
    seen = _Seen(appends, reads)
    begin: dict[str, float] = {}
    for each in appends:
        if each.producer:
            begin[each.producer] = min(each.start, begin.get(each.producer, each.start))
    for each in appends:
        if each.status == "fail":
            continue
        first = each.first if each.status == "ok" else min(locations.get(each.hashes[0], [-1]))
        highest = seen.before(begin.get(each.producer, each.start))
        if first != -1 and first <= highest:
            verdict.add("order", f"{each} is at {first}; before it started, {highest} had been seen")
    newest = seen.before(float("inf"))
    if newest >= log.end:
        verdict.add("vanished", f"index {newest} was seen as committed; the log ends at {log.end - 1}")


# --- reads ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Rows:
    indexes: Indexes
    hashes: Hashes

    def between(self, start: int, end: int) -> tuple[Indexes, Hashes]:
        a, b = np.searchsorted(self.indexes, [start, end])
        return self.indexes[a:b], self.hashes[a:b]


def _check_transactions(
    appends: list[Append], decisions: list[Decision], log: ReplicaLog, locations: Locations, verdict: Verdict
) -> None:
    """Check that of each transaction exactly the rows are visible that one commit listed."""
    visible: dict[str, set[int]] = defaultdict(set)
    ranges: dict[str, range] = {}
    for each in appends:
        if each.attempt:
            found = {index for value in each.hashes for index in locations.get(value, ())}
            visible[each.attempt.rpartition("/")[0]] |= {at for at in found if log.visible[at - log.first_index]}
            if each.status == "ok":
                ranges[each.attempt] = range(each.first, each.last + 1)
    commits: dict[str, list[tuple[bool, set[int]]]] = defaultdict(list)
    for end in decisions:
        if end.commit and end.status != "fail":
            listed = {index for name in end.attempts for index in ranges[name] if index >= log.first_index}
            commits[end.transaction].append((end.status == "ok", listed))
    for name in sorted(visible.keys() | commits.keys()):
        known = [listed for certain, listed in commits[name] if certain]
        maybe = [set[int](), *(listed for certain, listed in commits[name] if not certain)]
        right = all(rows == visible[name] for rows in known) if known else visible[name] in maybe
        if not right:
            verdict.add("transaction", f"{name} shows {sorted(visible[name])}; its commits listed {known or maybe}")
    for name in sorted({end.transaction for end in decisions if end.status == "ok" and not end.commit}):
        if visible[name] or any(certain for certain, _ in commits[name]):
            verdict.add("transaction", f"{name} was reported as aborted and shows {sorted(visible[name])}")


def _check_read(read: Read, log: ReplicaLog, truth: _Rows, verdict: Verdict) -> None:
    verdict.counts["rows read"] += len(read.indexes)
    if len(read.indexes) and int(read.indexes[-1]) > read.commit_index:
        verdict.add("read-uncommitted", f"{read} shows index {read.indexes[-1]}")
    indexes, hashes = truth.between(max(read.from_index, log.first_index), read.next_index)
    if np.array_equal(read.indexes, indexes) and np.array_equal(read.hashes, hashes):
        return
    shown = dict(zip(read.indexes.tolist(), read.hashes.tolist(), strict=True))
    expected = dict(zip(indexes.tolist(), hashes.tolist(), strict=True))
    for index, value in shown.items():
        if index not in expected:
            at = index - log.first_index
            same = 0 <= at < len(log.hashes) and bool(log.data[at]) and int(log.hashes[at]) == value
            kind = "vanished" if index >= log.end else "aborted-read" if same else "changed"
            verdict.add(kind, f"{read} shows index {index}, which is not visible in the end")
            return
        if expected[index] != value:
            verdict.add("changed", f"{read} shows another body at index {index} than the final log")
            return
    missing = sorted(expected.keys() - shown.keys())
    if missing:
        verdict.add("skipped", f"{read} leaves out {len(missing)} entries, first {missing[0]}")
    else:
        verdict.add("unordered", f"{read} shows the entries in another order")


def _check_monotonic(reads: list[Read], appends: list[Append], verdict: Verdict) -> None:
    """Check that a read from any replica never shows less than an earlier response to the same client proved."""
    for client in sorted({read.client for read in reads if not read.node}):
        mine = [read for read in reads if read.client == client]
        seen = _Seen([each for each in appends if each.client == client], mine)
        for read in mine:
            if not read.node and read.commit_index < seen.before(read.start):
                verdict.add("back-in-time", f"{read}; before it, {seen.before(read.start)} had been seen")


def _check_linearizable(reads: list[Read], appends: list[Append], verdict: Verdict) -> None:
    seen = _Seen(appends, reads)
    for read in reads:
        if not read.linearizable:
            continue
        verdict.counts["linearizable reads"] += 1
        highest = seen.before(read.start)
        short = read.full and read.uncommitted and read.next_index <= highest and read.from_index <= highest
        if read.commit_index < highest or short:
            verdict.add("stale", f"{read} ends at {read.next_index}; before it started, {highest} had been seen")
