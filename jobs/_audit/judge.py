"""Judgement: compares the entries of all replicas at one index, and their ends; merges findings. Pure.

Two replicas with other bytes in the same term are not a divergence, which Raft allows above the commit index: one
leader wrote one entry there (Log Matching, Raft section 5.3), so one of them is corrupt. Only different terms diverge.
The majority of the readable entries is right. Above the recorded commit index the highest term is right, even on a
minority: an entry of a later term exists only if the entry of the earlier term was never committed. Two clusters are
judged apart if all replicas agree within each of them: neither outvotes the other, and their terms are unrelated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, Final, NamedTuple

import pyarrow as pa

from .model import OTHER, AuditedReplica, AuditFinding, Class, Severity, Verdict


class State(IntEnum):
    """Whether a replica has an entry at an index."""

    MISSING = 0
    PRESENT = 1
    DAMAGED = 2
    UNREAD = 3
    ABSENT = 4
    """A row that an archive need not have: of a control entry, or outside of what is proved."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One replica's entry at one index.

    Attributes:
        state: whether it exists and can be read.
        term: its term.
        magic: data, control or membership.
        position: of its record.
        size: bytes of the record.
        crc: CRC-32 of the body, computed now.
        digest: digest of the body.
        irregular: its term is above that of the next entry or below that of the previous one on this replica.
        reason: why it cannot be read.
    """

    state: State
    term: int = -1
    magic: int = 0
    position: int = -1
    size: int = 0
    crc: int = 0
    digest: bytes = b""
    irregular: bool = False
    reason: str = ""

    @property
    def content(self) -> tuple[int, int, int, bytes]:
        """The fields that must be equal on all replicas."""
        return self.term, self.magic, self.size, self.digest

    def to_json(self) -> dict[str, Any]:
        """Return the evidence of this replica."""
        if self.state is not State.PRESENT:
            shown: dict[str, Any] = {"state": self.state.name.lower()}
            return shown | ({"reason": self.reason} if self.reason else {})
        return {"term": self.term, "position": self.position, "size": self.size, "crc": f"{self.crc:08x}"}


NO_TERM: Final = 0
"""The term of a CommitLog's blocks; Raft's terms start at 1."""


class Judgement(NamedTuple):
    """A fault of ``replicas`` at an index; several only if it cannot be decided which of them is right."""

    kind: Class
    replicas: tuple[str, ...]
    right: tuple[str, ...] = ()


def judge(seen: Mapping[str, Seen], *, committed: bool) -> list[Judgement]:
    """Return the faults at one index that all of these replicas should contain.

    Args:
        seen: by replica's name.
        committed: whether the index is at or below the lowest recorded commit index.
    """
    held = {name: entry for name, entry in seen.items() if entry.state is State.PRESENT}
    corrupt = _corrupt(held)
    named = {name for found in corrupt for name in found.replicas}
    present = {name: entry for name, entry in held.items() if name not in named}
    right, wrong = _divide(present, committed=committed)
    here, there = _sides(present)
    apart = bool(wrong and here and there)

    def agreeing(name: str) -> tuple[str, ...]:
        return (there if name.startswith(OTHER) else here) if apart else right

    found = [*corrupt]
    found += [Judgement(Class.CORRUPT, (n,), agreeing(n)) for n, e in seen.items() if e.state is State.DAMAGED]
    found += [Judgement(Class.INDEX_GAP, (n,), agreeing(n)) for n, e in seen.items() if e.state is State.MISSING]
    if not wrong:
        if present and all(entry.irregular for entry in present.values()):
            found += [Judgement(Class.TERM_REGRESSION, (name,)) for name in present]
        return found
    if apart or not right:
        kind = Class.DIVERGED_COMMITTED if committed else Class.DIVERGED_UNKNOWN
        return [*found, Judgement(kind, there, here) if apart else Judgement(kind, tuple(wrong))]
    right_term = present[right[0]].term
    found += [
        Judgement(_class_of(entry, right_term, committed=committed), (name,), right) for name, entry in wrong.items()
    ]
    return found


def _corrupt(present: dict[str, Seen]) -> list[Judgement]:
    """Return the entries with other bytes than another one of the same term and cluster; a CommitLog has no terms."""
    trusted = {name: entry for name, entry in present.items() if not entry.irregular} or present
    found: list[Judgement] = []
    for other in (False, True):
        side = {name: entry for name, entry in trusted.items() if name.startswith(OTHER) is other}
        for term in sorted({entry.term for entry in side.values()} - {NO_TERM}):
            holders = {name: entry for name, entry in side.items() if entry.term == term}
            if len({entry.content for entry in holders.values()}) > 1:
                found += _outvoted(holders, {name: entry for name, entry in trusted.items() if name not in side})
    return found


def _outvoted(holders: dict[str, Seen], beyond: dict[str, Seen]) -> list[Judgement]:
    """Return the holders of a term whose bytes are not the majority's; without a majority all together.

    The other cluster's copies of the same bytes count: its terms are its own.
    """
    bytes_of = {name: entry.content[1:] for name, entry in holders.items()}
    votes = Counter(bytes_of.values())
    votes.update(entry.content[1:] for entry in beyond.values() if entry.content[1:] in bytes_of.values())
    content, count = votes.most_common(1)[0]
    if 2 * count <= votes.total():
        return [Judgement(Class.CORRUPT, tuple(holders))]
    right = tuple(name for name, entry in (holders | beyond).items() if entry.content[1:] == content)
    return [Judgement(Class.CORRUPT, (name,), right) for name in holders if bytes_of[name] != content]


def _sides(present: Mapping[str, Seen]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the replicas of two clusters that differ and agree within themselves; else two empty tuples."""
    here = tuple(name for name in present if not name.startswith(OTHER))
    there = tuple(name for name in present if name.startswith(OTHER))
    agreed = all(len({present[name].content for name in side}) == 1 for side in (here, there))
    return (here, there) if agreed else ((), ())


def _divide(present: Mapping[str, Seen], *, committed: bool) -> tuple[tuple[str, ...], dict[str, Seen]]:
    """Return the replicas that are right, and the others; none is right if it cannot be decided."""
    if len({entry.content for entry in present.values()}) <= 1:
        return tuple(present), {}
    votes = {name: entry for name, entry in present.items() if not entry.irregular} or dict(present)
    if not committed:
        highest = max(entry.term for entry in votes.values())
        votes = {name: entry for name, entry in votes.items() if entry.term == highest}
    content, count = Counter(entry.content for entry in votes.values()).most_common(1)[0]
    if 2 * count <= len(votes):
        return (), dict(present)
    right = tuple(name for name, entry in present.items() if entry.content == content)
    return right, {name: entry for name, entry in present.items() if name not in right}


def _class_of(entry: Seen, right_term: int, *, committed: bool) -> Class:
    if entry.irregular and entry.term != right_term:
        return Class.TERM_REGRESSION
    if committed:
        return Class.DIVERGED_COMMITTED
    return Class.DIVERGED_UNCOMMITTED if entry.term < right_term else Class.DIVERGED_UNKNOWN


def committed_end(replicas: Sequence[AuditedReplica]) -> int:
    """Return the end (exclusive) of the entries that are committed on all of these replicas.

    The lowest recorded commit index counts; offline it is a lower bound, and a replica that records none is ignored.
    """
    recorded = [replica.commit_index for replica in replicas if replica.commit_index is not None]
    return min(recorded) + 1 if recorded else 0


def end_findings(replicas: Sequence[AuditedReplica]) -> list[AuditFinding]:
    """Return the findings of the snapshot alone: lost ends, lag, and entries deleted on some replicas only."""
    # An archive lacks the newest entries by design, and nodes delete older ones because it has them.
    usable = [replica for replica in replicas if replica.reachable and not replica.table]
    first = min((r.first_index for r in usable), default=0)
    end = max((r.end for r in usable), default=0)
    found = []
    for replica in usable:
        group, name = replica.group, replica.name
        stored = max(replica.last_index + 1, replica.first_index)
        known = stored if replica.commit_index is None else max(stored, replica.commit_index + 1)
        evidence = {"last_index": replica.last_index, "commit_index": replica.commit_index}
        if replica.damaged is not None:  # the number of entries lost after them is unknown
            found.append(AuditFinding.of(Class.CORRUPT, group, name, *replica.damaged, evidence))
        elif known > stored:
            found.append(AuditFinding.of(Class.MISSING_COMMITTED, group, name, stored, known, evidence))
        last_end = max(known, replica.end, replica.damaged[1] if replica.damaged is not None else 0)
        if replica.missing is not None and last_end < replica.missing[1]:
            found.append(AuditFinding.of(Class.MISSING, group, name, last_end, replica.missing[1], evidence))
            last_end = replica.missing[1]
        if last_end < end and replica.first_index <= last_end and replica.damaged is None:
            found.append(AuditFinding.of(Class.LAGGING, group, name, last_end, end, evidence))
        if replica.first_index > first:
            evidence = {"first_index": replica.first_index}
            found.append(AuditFinding.of(Class.RETENTION_SKEW, group, name, first, replica.first_index, evidence))
    return found


def findings_of(results: pa.Table) -> list[AuditFinding]:
    """Return the findings of all comparisons (RESULTS), merged; worst first.

    A mismatched index row is left out if its entry has a finding of its own, and so is a difference from the record
    of the archive if the comparison of the replicas has found it.
    """
    rows = [row for found in results["findings"].to_pylist() for row in found]
    findings = merge_findings(AuditFinding.from_row(row) for row in rows)
    explained = [
        f
        for f in findings
        if f.severity in (Severity.CRITICAL, Severity.WARNING) and f.kind is not Class.LAYOUT_DIFFERS
    ]
    compared = [f for f in explained if not f.evidence.get("proved")]
    kept: list[AuditFinding] = []
    for finding in findings:
        if finding.kind is Class.INDEX_MISMATCH:
            kept += _outside(finding, explained)
        elif finding.evidence.get("proved"):
            kept += _outside(finding, compared)
        else:
            kept.append(finding)
    return merge_findings(kept)


def _outside(finding: AuditFinding, others: Sequence[AuditFinding]) -> list[AuditFinding]:
    """Return the parts of a finding outside those of others on the same replica."""
    left = [(finding.start, finding.end)]
    for other in others:
        if finding.group == other.group and finding.replica in other.replica.split(","):
            left = [part for s, e in left for part in ((s, min(e, other.start)), (max(s, other.end), e))]
            left = [(s, e) for s, e in left if s < e]
    if left == [(finding.start, finding.end)]:
        return [finding]
    return [
        AuditFinding.of(finding.kind, finding.group, finding.replica, start, end, dict(finding.evidence))
        for start, end in left
    ]


def merge_findings(findings: Iterable[AuditFinding]) -> list[AuditFinding]:
    """Join adjacent ranges of the same class and replica, with the evidence of the first; worst first."""
    merged: list[AuditFinding] = []
    for finding in sorted(findings, key=lambda f: (f.group, f.kind, f.replica, f.start, f.end)):
        last = merged[-1] if merged else None
        whose = (finding.group, finding.kind, finding.replica)
        if last is None or (last.group, last.kind, last.replica) != whose or finding.start > last.end:
            merged.append(finding)
        elif finding.end > last.end:
            more = finding.end - max(finding.start, last.end)
            merged[-1] = replace(last, end=finding.end, count=last.count + more)
    order = list(Severity)
    return sorted(merged, key=lambda f: (order.index(f.severity), f.group, f.start, f.kind, f.replica))


def verdict_of(findings: Iterable[AuditFinding], incomplete: Sequence[str]) -> Verdict:
    """Return the verdict: a difference outweighs parts that were not compared, and those outweigh equality."""
    found = list(findings)
    if any(finding.severity in (Severity.CRITICAL, Severity.ERROR) for finding in found):
        return Verdict.INCONSISTENT
    if incomplete or any(finding.kind is Class.DIVERGED_UNKNOWN for finding in found):
        return Verdict.INCOMPLETE
    return Verdict.CONSISTENT
