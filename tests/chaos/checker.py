"""Judges a history against the logs that the replicas hold in the end. Pure: no clock, no files, no processes.

A log is easy to judge, because every append says where it lies: it behaved as one copy if indexes are unique, their
order never contradicts real time, every read is what the final log says of its range, and nothing acknowledged is
missing. The names of the anomalies follow Jepsen's workloads for queues and for Kafka. O(n log n).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from tests.chaos.history import Append, Decision, Hashes, Indexes, Operation, Read

SHOWN_MAX: Final = 20
"""Violations of one kind that are described; the rest is counted."""

NEVER_RIGHT: Final = frozenset({
    "BAD_REQUEST", "CORRUPT", "FENCED", "INDEX_OUT_OF_RANGE", "INTERNAL", "PRODUCER_UNKNOWN", "PROTOCOL",
    "SEQUENCE_CONFLICT", "SEQUENCE_GAP", "STORE_MISMATCH", "UNKNOWN_GROUP",
})  # fmt: skip
"""Refusals that a correct group never gives to the clients of this test, whatever the faults."""


@dataclass(frozen=True, slots=True)
class ReplicaLog:
    """A replica's log at rest.

    Attributes:
        first_index: index of the first row.
        terms, data: term of each entry, and whether it is a client's (not a control entry).
        hashes: of the bodies.
        records: of the records' bytes as they lie on disk.
    """

    first_index: int
    terms: Indexes
    data: npt.NDArray[np.bool_]
    hashes: Hashes
    records: Hashes

    @property
    def end(self) -> int:
        return self.first_index + len(self.terms)


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken promise."""

    kind: str
    what: str


@dataclass
class Verdict:
    """Everything that was found; ``counts`` also holds what was looked at."""

    violations: list[Violation] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def ok(self) -> bool:
        return not self.violations

    def add(self, kind: str, what: str) -> None:
        self.counts[f"violation {kind}"] += 1
        if self.counts[f"violation {kind}"] <= SHOWN_MAX:
            self.violations.append(Violation(kind, what))


def check(history: Sequence[Operation], replicas: dict[str, ReplicaLog]) -> Verdict:
    """Returns what is wrong with a history, given the replicas' logs after everything came to rest."""
    verdict = Verdict()
    log = _agreed_log(replicas, verdict)
    appends = [each for each in history if isinstance(each, Append)]
    reads = [each for each in history if isinstance(each, Read)]
    decisions = [each for each in history if isinstance(each, Decision)]
    for each in history:
        verdict.counts[f"{type(each).__name__.lower()} {each.status}"] += 1
        if each.error in NEVER_RIGHT:
            verdict.add("refused", f"{each.client} was answered {each.error}: {_short(each)}")
    places = _places(log)
    _check_ranges(appends, verdict)
    _check_appends(appends, log, places, verdict)
    _check_order(appends, reads, log, places, verdict)
    visible = _visible_rows(appends, decisions, log, verdict)
    for read in reads:
        if read.status == "ok":
            _check_read(read, log, visible[read.uncommitted], verdict)
    _check_monotonic(reads, appends, verdict)
    _check_linearizable(reads, appends, verdict)
    return verdict


# --- replicas ---------------------------------------------------------------------------------------------------------


def _agreed_log(replicas: dict[str, ReplicaLog], verdict: Verdict) -> ReplicaLog:
    """Returns the longest replica; tells where others differ."""
    longest = max(replicas.values(), key=lambda each: each.end)
    for name, each in replicas.items():
        if each.end != longest.end:
            verdict.add("diverged", f"{name} ends at {each.end - 1}, another at {longest.end - 1}")
        start = max(each.first_index, longest.first_index)
        mine, theirs = (side.records[start - side.first_index :] for side in (each, longest))
        both = min(len(mine), len(theirs))
        unequal = np.flatnonzero(mine[:both] != theirs[:both])
        if len(unequal):
            verdict.add("diverged", f"{name} holds other bytes at {len(unequal)} indexes, first {start + unequal[0]}")
    back = np.flatnonzero(np.diff(longest.terms) < 0)
    if len(back):
        verdict.add("terms", f"the term goes back behind index {longest.first_index + back[0]}")
    verdict.counts["entries"] = len(longest.terms)
    verdict.counts["term runs"] = 1 + int(np.count_nonzero(np.diff(longest.terms))) if len(longest.terms) else 0
    return longest


def _places(log: ReplicaLog) -> dict[int, list[int]]:
    """Returns where each body lies."""
    places: dict[int, list[int]] = {}
    for at in np.flatnonzero(log.data).tolist():
        places.setdefault(int(log.hashes[at]), []).append(log.first_index + at)
    return places


# --- appends ----------------------------------------------------------------------------------------------------------


def _check_ranges(appends: list[Append], verdict: Verdict) -> None:
    """Indexes are unique: no two acknowledged appends share one, except a producer's repeat of the same append."""
    acknowledged = sorted((a for a in appends if a.status == "ok"), key=lambda a: (a.first, a.last))
    before: Append | None = None
    for each in acknowledged:
        if each.last - each.first + 1 != len(each.hashes):
            verdict.add("range", f"{_short(each)} has {len(each.hashes)} bodies")
        if before is not None and each.first <= before.last:
            same = (each.first, each.last, each.hashes) == (before.first, before.last, before.hashes)
            if not (same and each.producer and each.producer == before.producer):
                verdict.add("duplicate-index", f"{_short(each)} and {_short(before)} were given the same index")
        if before is None or each.last > before.last:
            before = each


def _check_appends(appends: list[Append], log: ReplicaLog, places: dict[int, list[int]], verdict: Verdict) -> None:
    known: set[int] = set()
    # An attempt that is refused because its transaction has ended tells nothing of its earlier tries; all of them lost.
    uncertain = [each for each in appends if each.status != "fail" or (each.attempt and each.error == "TRANSACTION")]
    may_exist = {value for each in uncertain for value in each.hashes}
    for each in appends:
        known.update(each.hashes)
        if each.status == "ok":
            _check_acknowledged(each, log, places, verdict)
        elif each.status == "unknown":
            _check_unknown(each, places, verdict)
        else:
            for value in each.hashes:
                # A producer's repeat may have failed after an earlier try of it took effect.
                if value in places and value not in may_exist:
                    verdict.add("failed-append-appears", f"{_short(each)} failed, yet lies at {places[value]}")
        if not each.attempt:  # an attempt may lie twice: only the copy that the commit lists is visible
            for value in each.hashes:
                if len(places.get(value, ())) > 1:
                    verdict.add("duplicate", f"a body of {_short(each)} lies at {places[value]}")
    strangers = [spots[0] for value, spots in places.items() if value not in known]
    if strangers:
        verdict.add("from-nowhere", f"{len(strangers)} entries that nobody appended, first at {min(strangers)}")


def _check_acknowledged(each: Append, log: ReplicaLog, places: dict[int, list[int]], verdict: Verdict) -> None:
    start, stop = each.first - log.first_index, each.last + 1 - log.first_index
    if start < 0:
        return
    found = tuple(log.hashes[start:stop].tolist()) if each.last < log.end else ()
    if found != each.hashes or not log.data[start:stop].all():
        elsewhere = [places.get(value, []) for value in each.hashes]
        kind = "moved" if all(elsewhere) else "lost"
        verdict.add(kind, f"{_short(each)} was acknowledged; its bodies lie at {elsewhere}")
    elif (log.terms[start:stop] != each.term).any():
        verdict.add("term", f"{_short(each)} lies in term {int(log.terms[start])}")


def _check_unknown(each: Append, places: dict[int, list[int]], verdict: Verdict) -> None:
    """A batch is all or nothing, and lies together."""
    spots = [places.get(value, []) for value in each.hashes]
    present = [spot for spot in spots if spot]
    if not present or each.attempt:
        return
    firsts = [spot[0] for spot in present]
    if len(present) != len(spots) or firsts != list(range(firsts[0], firsts[0] + len(firsts))):
        verdict.add("torn-batch", f"{_short(each)} lies at {spots}")


# --- order ------------------------------------------------------------------------------------------------------------


class _Completions:
    """The highest index that was known to exist at each moment."""

    def __init__(self, events: Iterable[tuple[float, int]]) -> None:
        self._times: list[float] = []
        self._highest: list[int] = []
        for end, index in sorted(events):
            self._times.append(end)
            self._highest.append(max(index, self._highest[-1]) if self._highest else index)

    def before(self, moment: float) -> int:
        """Returns the highest index of what had ended before ``moment``; -1 if nothing had."""
        count = bisect_left(self._times, moment)
        return self._highest[count - 1] if count else -1


def _seen(appends: list[Append], reads: list[Read]) -> _Completions:
    acknowledged = [(a.end, a.last) for a in appends if a.status == "ok"]
    read = [(r.end, max(r.next_index - 1, r.commit_index)) for r in reads if r.status == "ok"]
    return _Completions(acknowledged + read)


def _check_order(
    appends: list[Append],
    reads: list[Read],
    log: ReplicaLog,
    places: dict[int, list[int]],
    verdict: Verdict,
) -> None:
    """What began after something had been seen lies behind it."""
    seen = _seen(appends, reads)
    begin: dict[str, float] = {}
    for each in appends:
        if each.producer:
            begin[each.producer] = min(each.start, begin.get(each.producer, each.start))
    for each in appends:
        if each.status == "fail":
            continue
        first = each.first if each.status == "ok" else min(places.get(each.hashes[0], [-1]))
        highest = seen.before(begin.get(each.producer, each.start))
        if first != -1 and first <= highest:
            verdict.add("order", f"{_short(each)} lies at {first}; before it began, {highest} had been seen")
    last = log.end - 1
    beyond = seen.before(float("inf"))
    if beyond > last:
        verdict.add("vanished", f"index {beyond} was seen as committed; the log ends at {last}")


# --- reads ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Rows:
    indexes: Indexes
    hashes: Hashes

    def between(self, start: int, end: int) -> tuple[Indexes, Hashes]:
        a, b = np.searchsorted(self.indexes, [start, end])
        return self.indexes[a:b], self.hashes[a:b]


def _visible_rows(
    appends: list[Append], decisions: list[Decision], log: ReplicaLog, verdict: Verdict
) -> dict[bool, _Rows]:
    """Returns what reads must show: without (False) and with (True) losing attempts."""
    of_attempts = {value for each in appends if each.attempt for value in each.hashes}
    winners = _winners(appends, decisions, verdict)
    indexes = log.first_index + np.arange(len(log.terms), dtype=np.int64)
    every = _Rows(indexes[log.data], log.hashes[log.data])
    keep = [
        int(value) not in of_attempts or int(index) in winners
        for index, value in zip(every.indexes, every.hashes, strict=True)
    ]
    mask = np.array(keep, np.bool_)
    return {True: every, False: _Rows(every.indexes[mask], every.hashes[mask])}


def _winners(appends: list[Append], decisions: list[Decision], verdict: Verdict) -> set[int]:
    """Returns the indexes of the entries of committed transactions."""
    commits: dict[str, Decision] = {}
    aborts: set[str] = set()
    unresolved: set[str] = set()
    for each in decisions:
        if each.status == "ok" and each.commit:
            commits[each.transaction] = each
        elif each.status == "ok" or each.error == "TRANSACTION":  # refused, because the leader has aborted it
            aborts.add(each.transaction)
        elif each.status == "unknown":
            unresolved.add(each.transaction)
    for transaction in commits.keys() & aborts:
        verdict.add("transaction", f"{transaction} was told to be committed and to be aborted")
    for transaction in unresolved - commits.keys() - aborts:
        verdict.add("unresolved", f"nobody could find out how {transaction} ended")
    ranges = {each.attempt: each for each in appends if each.attempt and each.status == "ok"}
    return {
        index
        for commit in commits.values()
        for name in commit.attempts
        for index in range(ranges[name].first, ranges[name].last + 1)
    }


def _check_read(read: Read, log: ReplicaLog, truth: _Rows, verdict: Verdict) -> None:
    verdict.counts["rows read"] += len(read.indexes)
    if len(read.indexes) and int(read.indexes[-1]) > read.commit_index:
        verdict.add("read-uncommitted", f"{_short(read)} shows index {read.indexes[-1]}")
    indexes, hashes = truth.between(max(read.from_index, log.first_index), read.next_index)
    if np.array_equal(read.indexes, indexes) and np.array_equal(read.hashes, hashes):
        return
    shown = dict(zip(read.indexes.tolist(), read.hashes.tolist(), strict=True))
    right = dict(zip(indexes.tolist(), hashes.tolist(), strict=True))
    for index, value in shown.items():
        if index not in right:
            at = index - log.first_index
            same = 0 <= at < len(log.hashes) and bool(log.data[at]) and int(log.hashes[at]) == value
            kind = "vanished" if index >= log.end else "aborted-read" if same else "changed"
            verdict.add(kind, f"{_short(read)} shows index {index}, which in the end is not to be seen")
            return
        if right[index] != value:
            verdict.add("changed", f"{_short(read)} shows another body at index {index} than the final log")
            return
    missing = sorted(right.keys() - shown.keys())
    if missing:
        verdict.add("skipped", f"{_short(read)} leaves out {len(missing)} entries, first {missing[0]}")
    else:
        verdict.add("unordered", f"{_short(read)} shows the entries in another order")


def _check_monotonic(reads: list[Read], appends: list[Append], verdict: Verdict) -> None:
    """A read that any replica may answer never shows less than an earlier answer to the same client proved."""
    clients = {read.client for read in reads if not read.node}
    for client in sorted(clients):
        mine = [read for read in reads if read.client == client and read.status == "ok"]
        seen = _seen([each for each in appends if each.client == client], mine)
        for read in mine:
            if not read.node and read.commit_index < seen.before(read.start):
                verdict.add("back-in-time", f"{_short(read)}; before it, {seen.before(read.start)} had been seen")


def _check_linearizable(reads: list[Read], appends: list[Append], verdict: Verdict) -> None:
    seen = _seen(appends, reads)
    for read in reads:
        if read.status != "ok" or not read.linearizable:
            continue
        verdict.counts["linearizable reads"] += 1
        highest = seen.before(read.start)
        if read.commit_index < highest:
            verdict.add("stale", f"{_short(read)}; before it began, {highest} had been seen")
        elif read.full and read.uncommitted and read.next_index <= highest and read.from_index <= highest:
            verdict.add("stale", f"{_short(read)} ends at {read.next_index}; before it began, {highest} had been seen")


def _short(each: Operation) -> str:
    head = f"{each.client} [{each.start:.4f}, {each.end:.4f}]"
    if isinstance(each, Append):
        name = each.producer or each.attempt or "append"
        return f"{head} {name} at [{each.first}, {each.last}] term {each.term}"
    if isinstance(each, Decision):
        return f"{head} {'commit' if each.commit else 'abort'} of {each.transaction}"
    return f"{head} read [{each.from_index}, {each.next_index}) of {each.node or 'any'}, commit {each.commit_index}"
