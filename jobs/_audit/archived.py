"""The archive as one more replica: a Delta table that was proved equal to the log, range by range.

The log has recorded a digest of the rows of each range, so a range of the table is compared as a whole, also where all
nodes have deleted its entries. Where a replica still has all entries of a range, its own rows are compared with the
record too; by default those of one replica, because the digests of entries show that the others are equal to it. A
table has neither control entries nor hidden ones, and no entry that is not committed.

A range that differs is read again, from all replicas that have it, and compared row by row. In the comparison entry by
entry the rows of proved ranges count as a further copy of the entries, where two replicas differ and no majority shows
which is right.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from dledger_core import DLedgerError
from dledger_core.archive import range_with
from dledger_core.control import ArchivedRange
from dledger_core.digest import rows_digest
from dledger_core.record import merge_ranges

from .._archive.differences import Difference, Kind, find_differences
from .archives import Archives, RowsSource
from .digests import summed
from .model import ARCHIVE, COVERED, RANGES, RESULTS, AuditedReplica, AuditFinding, Class, Snapshot, result
from .plan import marked, of_replicas, sample
from .replicas import open_source
from .source import Gap, RateLimiter

Part = tuple[tuple[AuditedReplica, ...], ArchivedRange]
"""An archive with replicas of its log, and a range."""
_AMOUNTS: Final = pa.schema(
    [
        *((name, pa.string()) for name in ("group", "replica", "run_id")),
        *((name, pa.int64()) for name in ("entries", "bytes")),
        ("read_at", pa.timestamp("us", tz="UTC")),
    ]
)
_ONE_RANGE: Final = 1 << 62
"""A span above every log: a recorded range is read as a whole."""
_CLASSES: Final = {
    Kind.MISSING: Class.ARCHIVE_MISSING,
    Kind.DOUBLED: Class.ARCHIVE_DOUBLED,
    Kind.CHANGED: Class.ARCHIVE_CHANGED,
    Kind.FOREIGN: Class.ARCHIVE_FOREIGN,
}


# --- plan ---------------------------------------------------------------------------------------------------------


def rows_snapshot(snapshot: Snapshot, archives: Archives) -> Snapshot:
    """Return the archives and the replicas of their logs, as they are read by rows."""
    return {
        group: tuple(
            replace(each, of_rows=True, recorded=()) for each in (archive, *_with_log(snapshot[group], archive))
        )
        for group, archive in archives.items()
    }


def _with_log(replicas: Iterable[AuditedReplica], archive: AuditedReplica) -> list[AuditedReplica]:
    return [one for one in replicas if one.reachable and not one.other and one.log_uuid == archive.log_uuid]


def _shows(replica: AuditedReplica, start: int, end: int) -> bool:
    """Whether a replica has all entries of a recorded range, and knows that they are committed."""
    committed = replica.end if replica.commit_index is None else replica.commit_index + 1
    return replica.first_index <= start and end <= min(replica.end, committed)


def parts_to_compare(results: pa.Table, snapshot: Snapshot, archives: Archives) -> list[Part]:
    """Return the recorded ranges that differ (RESULTS), each with its archive and the replicas that have all of it."""
    parts, of_rows = list[Part](), rows_snapshot(snapshot, archives)
    for row in results.filter(results["drill"]).to_pylist():
        group, start, end = row["group"], row["start"], row["end"]
        one = range_with(archives[group].recorded, start)
        assert one is not None, "the range is recorded"
        archive, *others = of_rows[group]
        parts.append(((archive, *(each for each in others if _shows(each, start, end))), one))
    return parts


def plan_recorded(snapshot: Snapshot, archives: Archives, *, mode: str = "digest", seed: str = "") -> pa.Table:
    """Return the recorded ranges to read (RANGES): from the archive, and from replicas that have all their entries.

    Args:
        snapshot: the replicas.
        archives: the archives.
        mode: ``full`` reads them from all these replicas, others from one of them in turn; ``quick`` takes a share.
        seed: of that share.
    """
    chance, rows = random.Random(seed), list[dict[str, Any]]()
    for group, archive in archives.items():
        bounds = [(one.start, one.end) for one in archive.recorded]
        for number, (start, end) in enumerate(sample(bounds, chance) if mode == "quick" else bounds):
            names = [one.name for one in _with_log(snapshot[group], archive) if _shows(one, start, end)]
            if mode != "full" and names:
                names = [names[number % len(names)]]
            rows.append({"group": group, "start": start, "end": end, "span": _ONE_RANGE, "replicas": [ARCHIVE, *names]})
    return pa.Table.from_pylist(rows, RANGES)


def trust_recorded(
    ranges: pa.Table,
    digests: pa.Table,
    replicas: Iterable[AuditedReplica],
    archives: Archives,
    *,
    age: timedelta,
    now: datetime,
    percent: int | None = None,
) -> pa.Table:
    """Mark recorded ranges that were equal to the log's record within ``age``, except the share to read again.

    Args:
        ranges: the plan (RANGES).
        digests: of earlier runs (DIGESTS).
        replicas: read by rows.
        archives: the archives.
        age: time for which a comparison counts.
        now: when this run began.
        percent: as for ``plan.trust_proven``.
    """
    expected = recorded_digests(archives)
    newest: dict[tuple[str, str, int, int], dict[str, Any]] = {}
    for row in of_replicas(digests, replicas).sort_by("read_at").to_pylist():
        newest[row["group"], row["replica"], row["start"], row["end"]] = row
    trusted = list[tuple[datetime, int, int]]()
    for number, row in enumerate(ranges.to_pylist()):
        key = row["group"], row["start"], row["end"]
        known = [newest.get((row["group"], name, row["start"], row["end"])) for name in row["replicas"]]
        seen = [one for one in known if one is not None and one["content"] == expected[key] and not one["problem"]]
        if len(seen) == len(known) and all(now - age <= one["read_at"] <= now for one in seen):
            trusted.append((min(one["read_at"] for one in seen), number, seen[0]["bytes"]))
    return marked(ranges, trusted, age, now, percent)


def recorded_digests(archives: Archives) -> dict[tuple[str, int, int], bytes]:
    """Return the digest that the log has recorded of each range."""
    return {(group, one.start, one.end): one.digest for group, archive in archives.items() for one in archive.recorded}


def copies_of(archives: Archives, group: str, start: int, end: int) -> tuple[AuditedReplica, ...]:
    """Return the archive as a further copy of entries that differ, with its ranges that have some of them; or none."""
    archive = archives.get(group)
    ranges = () if archive is None else tuple(o for o in archive.recorded if o.start < end and start < o.end)
    return (replace(archive, recorded=ranges),) if archive is not None and ranges else ()


# --- comparison ---------------------------------------------------------------------------------------------------


def compare_recorded(digests: pa.Table, archives: Archives) -> pa.Table:
    """Return a row (RESULTS) for each range that is not equal to the log's record on all replicas that were read."""
    expected = recorded_digests(archives)
    rows: dict[tuple[str, int, int], list[dict[str, Any]]] = defaultdict(list)
    for row in digests.to_pylist():
        key = row["group"], row["start"], row["end"]
        if row["problem"] or row["content"] != expected[key]:
            rows[key].append(row)
    return pa.Table.from_pylist(
        [
            result(
                key,
                # Damage of a replica is a finding of the comparison of entries; what was deleted meanwhile is none.
                drill=any(not row["problem"] for row in found),
                unread=[f"{row['replica']}: {row['reason']}" for row in found if row["problem"] == "unread"],
            )
            for key, found in rows.items()
        ],
        RESULTS,
    )


def compare_rows(
    replicas: Sequence[AuditedReplica], one: ArchivedRange, limiters: Mapping[str, RateLimiter]
) -> dict[str, Any]:
    """Read a recorded range again from an archive and replicas, and compare it row by row; return a row of RESULTS.

    Args:
        replicas: the archive, and those that have all entries of the range, read by rows.
        one: the range.
        limiters: by replica's name, counting all bytes read.
    """
    key = (replicas[0].group, one.start, one.end)
    rows, unread = dict[str, pa.Table](), list[str]()
    with ExitStack() as stack:
        for replica in replicas:
            try:
                source = stack.enter_context(open_source(replica, limiters.get(replica.name)))
            except DLedgerError as error:
                unread.append(f"{replica.name}: {error}")
                continue
            assert isinstance(source, RowsSource), "it is read by rows"
            found = source.table(one.start, one.end)
            if isinstance(found, Gap):
                unread += [f"{replica.name}: {found.reason}"] if found.kind == "unread" else []
            else:
                rows[replica.name] = found
    right = [name for name, found in rows.items() if rows_digest(found).digest == one.digest]
    findings = [
        finding
        for name in rows.keys() - right
        for finding in _differing(key, name, rows[name], rows[right[0]] if right else None, right)
    ]
    nbytes = sum(found.nbytes for found in rows.values())
    return result(key, findings, unread=unread, cleared=int(not findings and not unread), read_bytes=nbytes)


def _differing(
    key: tuple[str, int, int], name: str, rows: pa.Table, expected: pa.Table | None, right: list[str]
) -> Iterator[AuditFinding]:
    """Yield the findings of a replica whose rows are not those that were proved.

    Args:
        key: group, start and end.
        name: the replica.
        rows: its rows.
        expected: the rows that were proved; None if no replica has them.
        right: the replicas that have them.
    """
    group, start, end = key
    differences = [] if expected is None else find_differences(expected, rows)
    for one in differences:
        evidence = {"agree": right, "disagree": [name], "rows": one.rows, "columns": list(one.columns), "proved": True}
        kind = _CLASSES[one.kind] if name == ARCHIVE else _class_of(one)
        yield AuditFinding.of(kind, group, name, one.start, one.end, evidence)
    if not differences:
        kind = Class.ARCHIVE_LOST if name == ARCHIVE else Class.DIVERGED_COMMITTED
        evidence = {"agree": right, "disagree": [name], "rows": rows.num_rows, "proved": True}
        yield AuditFinding.of(kind, group, name, start, end, evidence)


def _class_of(one: Difference) -> Class:
    """Return the class of a difference between a replica and the proved rows."""
    if one.kind is Kind.CHANGED and "term" not in one.columns:
        return Class.CORRUPT if "body" in one.columns else Class.LAYOUT_DIFFERS
    return Class.DIVERGED_COMMITTED


# --- coverage -----------------------------------------------------------------------------------------------------


def compared_rows(digests: pa.Table, ranges: pa.Table, covered: pa.Table) -> tuple[pa.Table, pa.Table]:
    """Return the amounts that were compared with the record, as ``compared_by_replica`` does, and where (COVERED).

    Entries of a replica that were compared with those of others too are not counted again.

    Args:
        digests: of recorded ranges (DIGESTS), of this run and of the runs that it resumes.
        ranges: the recorded ranges (RANGES).
        covered: the ranges that were compared with other replicas (COVERED).
    """
    seen = [
        (
            row["group"],
            row["replica"],
            row["run_id"],
            row["start"],
            row["end"],
            row["bytes"],
            row["read_at"],
            "read now",
        )
        for row in digests.filter(pc.equal(digests["problem"], "")).to_pylist()
    ]
    with_archive = {(group, start, end) for group, name, _, start, end, *_ in seen if name == ARCHIVE}
    seen = [one for one in seen if (one[0], one[3], one[4]) in with_archive]
    for row in ranges.filter(pc.is_valid(ranges["proven_at"])).to_pylist():
        where = row["start"], row["end"], row["proven_bytes"], row["proven_at"], "proven before"
        seen += [(row["group"], name, "", *where) for name in row["replicas"]]
    known: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for row in covered.to_pylist():
        known[row["group"], row["replica"]].append((row["start"], row["end"]))
    amounts: list[dict[str, Any]] = []
    places: dict[tuple[str, str, str], list[tuple[int, int]]] = defaultdict(list)
    for group, name, run_id, start, end, nbytes, read_at, state in seen:
        parts = list(_outside(start, end, merge_ranges(known[group, name])))
        entries = sum(high - low for low, high in parts)
        if entries:
            share = nbytes * entries // (end - start)
            amount = {"entries": entries, "bytes": share, "read_at": read_at}
            amounts.append({"group": group, "replica": name, "run_id": run_id} | amount)
            places[group, name, state] += parts
    rows = [
        {"group": group, "replica": name, "start": low, "end": high, "state": state}
        for (group, name, state), bounds in places.items()
        for low, high in merge_ranges(bounds)
    ]
    sums = summed(pa.Table.from_pylist(amounts, _AMOUNTS), ["group", "replica", "run_id"])
    return sums, pa.Table.from_pylist(rows, COVERED)


def _outside(start: int, end: int, known: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    for low, high in known:
        if start < min(low, end):
            yield start, min(low, end)
        start = max(start, high)
    if start < end:
        yield start, end
