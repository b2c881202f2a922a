"""What earlier runs read: which ranges need not be read again. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from dledger_core.errors import ConfigError
from jobs._audit.compared import by_range
from jobs._audit.model import Replica
from jobs._audit.plan import SPAN_MAX, SPAN_MIN, Section

__all__ = [
    "Held",
    "History",
    "Proof",
    "chain_of",
    "due_count",
    "held",
    "histories",
    "identity",
    "to_reread",
    "trusted",
]

_OF_REPLICA: Final = ["group", "replica", "known", "start", "end"]
_SEEN: Final = ["content", "layout", "bytes", "read_at"]
_RESUMES_MAX: Final = 100
DUE_PERCENT_MIN: Final = 1
_ROUNDING: Final = 1e-6
Key = tuple[str, int, int]
Held = tuple[str, str, int, int]
"""(group, replica, start, end)."""


@dataclass(frozen=True, slots=True)
class Proof:
    """A range that was equal on some replicas.

    Attributes:
        start: first index.
        end: the index behind the last one.
        holders: identities of the replicas.
        read_at: when the first of them was read.
        nbytes: bytes of bodies on each of them.
    """

    start: int
    end: int
    holders: frozenset[str]
    read_at: datetime
    nbytes: int


@dataclass(frozen=True, slots=True)
class History:
    """What is known about a group's log: ranges proven equal, and ranges that were seen to differ."""

    proofs: tuple[Proof, ...] = ()
    refuted: tuple[tuple[int, int, datetime], ...] = ()
    _by_start: dict[int, list[Proof]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        by_start: dict[int, list[Proof]] = {}
        for proof in self.proofs:
            by_start.setdefault(proof.start, []).append(proof)
        object.__setattr__(self, "_by_start", by_start)

    def cover(self, start: int, end: int, holders: frozenset[str], oldest: datetime) -> Proof | None:
        """Returns a proof of [start, end), also one that is made of smaller ones or part of a larger one."""
        span = SPAN_MIN
        while span <= SPAN_MAX:
            low = start - start % span
            for proof in self._good(low, holders, oldest):
                if proof.end >= end:
                    share = (end - start) / (proof.end - proof.start)
                    return Proof(start, end, proof.holders, proof.read_at, round(proof.nbytes * share))
            span *= 2
        return self._joined(start, end, holders, oldest)

    def _joined(self, start: int, end: int, holders: frozenset[str], oldest: datetime) -> Proof | None:
        pieces: list[Proof] = []
        at = start
        while at < end:
            fitting = [proof for proof in self._good(at, holders, oldest) if proof.end <= end]
            if not fitting:
                return None
            pieces.append(max(fitting, key=lambda proof: proof.end))
            at = pieces[-1].end
        read_at = min(proof.read_at for proof in pieces)
        return Proof(start, end, holders, read_at, sum(proof.nbytes for proof in pieces))

    def _good(self, start: int, holders: frozenset[str], oldest: datetime) -> list[Proof]:
        found = [p for p in self._by_start.get(start, ()) if p.read_at >= oldest and holders <= p.holders]
        return [
            proof
            for proof in found
            if not any(s < proof.end and proof.start < e and at >= proof.read_at for s, e, at in self.refuted)
        ]


def identity(replica: Replica) -> str:
    """Returns what a replica is known by from run to run: its name, its log, and where a store lies."""
    return f"{replica.name}|{replica.log_uuid or ''}|{replica.source}"


def trusted(wanted: Mapping[Key, Section], history: Mapping[str, History], oldest: datetime) -> dict[Key, Proof]:
    """Returns the ranges that were proven equal on all their replicas since ``oldest``.

    Entries above every recorded commit index may still be replaced, so they are never trusted.
    """
    found = {}
    for key, part in wanted.items():
        recorded = [r.commit_index for r in part.replicas if r.commit_index is not None]
        if key[0] not in history or (recorded and part.end > max(recorded) + 1):
            continue
        holders = frozenset(identity(replica) for replica in part.replicas)
        proof = history[key[0]].cover(part.start, part.end, holders, oldest)
        if proof is not None:
            found[key] = proof
    return found


def due_count(proofs: Mapping[Key, Proof], age: timedelta, now: datetime) -> int:
    """Returns how many trusted ranges to read again, the longest unread first, so that all are within ``age``.

    The i-th oldest of n (from 1) may be as old as n - i + 1 of n parts of ``age``: if none is older, as many are due in
    each part, however often one runs. Without that, all that one run had proven would be due at once.
    """
    n = len(proofs)
    oldest = sorted(proof.read_at for proof in proofs.values())
    late = max((i + 1 - n * (1 - (now - read_at) / age) for i, read_at in enumerate(oldest)), default=0.0)
    return min(n, math.ceil(max(late - _ROUNDING, n * DUE_PERCENT_MIN / 100)))


def to_reread(proofs: Mapping[Key, Proof], count: int) -> set[Key]:
    """Returns so many trusted ranges, the longest unread first."""
    return set(sorted(proofs, key=lambda key: (proofs[key].read_at, key))[:count])


def chain_of(resumes: Mapping[str, str], run_id: str) -> list[str]:
    """Returns the run, the one that it resumed, and so on.

    Raises:
        ConfigError: nothing was recorded of the run.
    """
    if run_id not in resumes:
        remedy = "name a run that was killed while it wrote to this table, or leave it out"
        raise ConfigError(f"nothing is recorded of run {run_id}", "--resume", remedy)
    chain = [run_id]
    while resumes.get(chain[-1]) and len(chain) < _RESUMES_MAX:
        chain.append(resumes[chain[-1]])
    return chain


def held(digests: pa.Table, replicas: Iterable[Replica]) -> tuple[pa.Table, set[Held]]:
    """Returns which of the digests are of these very replicas and could be read, and their keys."""
    mine = _of_replicas(digests, replicas)
    mine = mine.filter(pc.is_in(mine["problem"], pa.array(["", "damaged"]))).drop_columns("known")
    keys = mine.select(["group", "replica", "start", "end"]).to_pydict().values()
    return mine, set(zip(*keys, strict=True))


def histories(digests: pa.Table, replicas: Iterable[Replica], now: datetime) -> dict[str, History]:
    """Returns by group what the newest digests of these replicas say about each range.

    Nobody knows what is newest where a clock was wrong, so a digest from after ``now`` counts as a range that differs.
    """
    rows = _of_replicas(digests, replicas)
    wrong = pc.add(*(pc.fill_null(pc.list_value_length(rows[name]), 0) for name in ("damaged", "index_wrong")))
    early = pc.greater(rows["read_at"], pa.scalar(now, rows.schema.field("read_at").type))
    bad = pc.or_(pc.or_(pc.not_equal(rows["problem"], ""), pc.greater(wrong, 0)), early)
    rows = rows.select([*_OF_REPLICA, *_SEEN]).append_column("bad", bad).sort_by("read_at")
    at = rows.schema.get_field_index("read_at")
    rows = rows.set_column(at, "read_at", rows["read_at"].cast(pa.timestamp("us", tz="UTC")))
    newest = rows.group_by(_OF_REPLICA, use_threads=False).aggregate([(name, "last") for name in (*_SEEN, "bad")])
    return _histories(newest.rename_columns([name.removesuffix("_last") for name in newest.column_names]))


def _histories(newest: pa.Table) -> dict[str, History]:
    more = [("known", "list"), ("bad", "any"), ("bytes", "max"), ("read_at", "min"), ("read_at", "max")]
    proofs: dict[str, list[Proof]] = {}
    refuted: dict[str, list[tuple[int, int, datetime]]] = {}
    ranges = by_range(newest, *more)
    names = ("group", "start", "end", "known_list", "bytes_max", "read_at_min", "read_at_max", "differs", "bad_any")
    for group, start, end, known, nbytes, first, last, differs, bad in zip(  # of ten thousands: no dict for each
        *(ranges[name].to_pylist() for name in names), strict=True
    ):
        if differs or bad:
            refuted.setdefault(group, []).append((start, end, last))
        elif len(holders := frozenset(known)) > 1:
            proofs.setdefault(group, []).append(Proof(start, end, holders, first, nbytes))
    return {group: History(tuple(found), tuple(refuted.get(group, ()))) for group, found in proofs.items()}


def _of_replicas(digests: pa.Table, replicas: Iterable[Replica]) -> pa.Table:
    """Returns the rows of replicas that can be reached, with the column ``known``: their identities."""
    logs = pc.fill_null(digests["log_uuid"], "")
    known = pc.binary_join_element_wise(digests["replica"], logs, digests["source"], "|")
    wanted = pa.array([identity(replica) for replica in replicas if replica.reachable], pa.string())
    return digests.append_column("known", known).filter(pc.is_in(known, wanted))
