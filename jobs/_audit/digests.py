"""First pass: digests of ranges, compared; which ranges differ, how much was compared, and how much was read.

``digest_rows`` runs on executors; the others are pure functions of tables (DIGESTS).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import chain
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from dledger_core import DLedgerError
from dledger_core.record import HEADER_BYTES, merge_ranges

from .model import COVERED, KEY, OTHER, RESULTS, AuditFinding, Class, ReadTask, aligned, result
from .replicas import open_source
from .source import READ_BYTES, Gap, RangeSeen, RateLimiter

_READABLE: Final = pa.array(["", "damaged"])
_SUMS: Final = [("entries", "sum"), ("bytes", "sum"), ("read_at", "min"), ("read_at", "max")]


def digest_rows(
    task: ReadTask, run_id: str, resumes: str = "", limiter: RateLimiter | None = None, read_bytes: int = READ_BYTES
) -> Iterator[dict[str, Any]]:
    """Yield the rows of DIGESTS of one task; needs no Spark."""
    replica = task.replica
    constant = {"run_id": run_id, "group": replica.group, "replica": replica.name}
    constant |= {"log_uuid": replica.log_uuid or "", "source": replica.source, "resumes": resumes}
    for seen in _digests(task, limiter, read_bytes):
        read_at = datetime.now(UTC)
        if isinstance(seen, Gap):
            why = {"problem": seen.kind, "reason": seen.reason, "read_at": read_at}
            nothing = {"bytes": 0, "content": b"", "layout": b"", "damaged": [], "index_wrong": []}
            for start, end in aligned(seen.start, seen.end, task.span):
                yield constant | nothing | why | {"start": start, "end": end}
            continue
        digest = seen.digest
        yield constant | {
            "start": digest.start,
            "end": digest.end,
            "bytes": digest.nbytes,
            "content": digest.content,
            "layout": digest.layout,
            "damaged": list(seen.damaged),
            "index_wrong": list(chain.from_iterable(seen.index_wrong)),
            "problem": "",
            "reason": "",
            "read_at": read_at,
        }


def _digests(task: ReadTask, limiter: RateLimiter | None, read_bytes: int) -> Iterator[RangeSeen | Gap]:
    done = task.start
    try:
        with open_source(task.replica, limiter, read_bytes) as source:
            for seen in source.digests(task.start, task.end, task.span):
                yield seen
                done = seen.end if isinstance(seen, Gap) else seen.digest.end
    except DLedgerError as error:
        yield Gap(done, task.end, "unread", str(error))


def differing_ranges(digests: pa.Table, *more: tuple[str, str]) -> pa.Table:
    """Groups digests by group, start and end.

    Args:
        digests: the columns group, start, end, replica, content, layout, and those of ``more``.
        more: columns to aggregate, and how.

    Returns:
        A row per range; ``differs`` is set if contents differ, or layouts within one cluster.
    """
    side = pc.if_else(pc.starts_with(digests["replica"], OTHER), b"\1", b"\0")
    both = pc.binary_join_element_wise(digests["content"], digests["layout"], side, b"")
    kinds = [("content", "count_distinct"), ("both", "count_distinct"), ("side", "count_distinct")]
    labelled = digests.append_column("side", side).append_column("both", both)
    grouped = labelled.group_by(KEY).aggregate([*kinds, *more])
    layouts = pc.greater(grouped["both_count_distinct"], grouped["side_count_distinct"])
    return grouped.append_column("differs", pc.or_(pc.greater(grouped["content_count_distinct"], 1), layouts))


def of_ranges(digests: pa.Table, ranges: pa.Table) -> pa.Table:
    """Return the rows of the ranges that the columns group, start and end of ``ranges`` name."""
    # Arrow cannot join tables with list columns.
    numbered = digests.select(KEY).append_column("row", pa.array(range(digests.num_rows), pa.int64()))
    rows = numbered.join(ranges.select(KEY), KEY, join_type="left semi")["row"]
    return digests.take(rows.combine_chunks().sort())


def compare_digests(digests: pa.Table) -> pa.Table:
    """Return a row (RESULTS) for each range that is not equal and intact on all its replicas."""
    wrong = pc.add(*(pc.fill_null(pc.list_value_length(digests[name]), 0) for name in ("damaged", "index_wrong")))
    bad = pc.or_(pc.not_equal(digests["problem"], ""), pc.greater(wrong, 0))
    grouped = differing_ranges(digests.append_column("bad", bad), ("bad", "any"))
    mismatched = of_ranges(digests, grouped.filter(pc.or_(grouped["differs"], grouped["bad_any"])))
    by_range: dict[tuple[str, int, int], list[dict[str, Any]]] = defaultdict(list)
    for row in mismatched.sort_by("replica").to_pylist():
        by_range[row["group"], row["start"], row["end"]].append(row)
    return pa.Table.from_pylist([_judge_range(key, rows) for key, rows in by_range.items()], RESULTS)


def _judge_range(key: tuple[str, int, int], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    group, start, end = key
    readable = [row for row in rows if row["problem"] in ("", "damaged")]
    damaged = any(row["problem"] or row["damaged"] for row in readable)
    drill = damaged or len({row["content"] for row in readable}) > 1
    findings = [
        AuditFinding.of(Class.RETENTION_SKEW, group, row["replica"], start, end)
        for row in rows
        if row["problem"] == "deleted"
    ]
    for row in rows:
        bounds = row["index_wrong"] or []
        for low, high in zip(bounds[::2], bounds[1::2], strict=True):
            findings.append(AuditFinding.of(Class.INDEX_MISMATCH, group, row["replica"], low, high))
    if not drill:  # layouts of two clusters always differ
        for side in (False, True):
            names = _other_layouts([row for row in readable if row["replica"].startswith(OTHER) is side])
            findings += [AuditFinding.of(Class.LAYOUT_DIFFERS, group, name, start, end) for name in names]
    unread = [f"{row['replica']}: {row['reason']}" for row in rows if row["problem"] == "unread"]
    return result(key, findings, drill=drill, unread=unread)


def _other_layouts(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the replicas whose layout is not the majority's; without a majority all, joined by commas."""
    layouts = Counter(row["layout"] for row in rows)
    if len(layouts) < 2:
        return []
    layout, count = layouts.most_common(1)[0]
    if 2 * count > len(rows):
        return [row["replica"] for row in rows if row["layout"] != layout]
    return [",".join(row["replica"] for row in rows)]


def _shared(digests: pa.Table) -> pa.Table:
    """Return the digests of ranges that at least two replicas could read."""
    readable = digests.filter(pc.is_in(digests["problem"], _READABLE))
    holders = readable.group_by(KEY).aggregate([([], "count_all")])
    return of_ranges(readable, holders.filter(pc.greater(holders["count_all"], 1)))


def compared_by_replica(digests: pa.Table) -> pa.Table:
    """Return the compared amount of each replica: ranges that at least two of them could read.

    Returns:
        The columns group, replica, run_id, entries, bytes, first and last: a row per replica and run that read it.
    """
    shared = _shared(digests)
    entries = pc.subtract(shared["end"], shared["start"])
    return summed(shared.append_column("entries", entries), ["group", "replica", "run_id"])


def covered_ranges(digests: pa.Table, ranges: pa.Table) -> pa.Table:
    """Return the compared ranges of each replica: those that at least two of them could read, now or before.

    Args:
        digests: of this run and of the runs that it resumes (DIGESTS).
        ranges: the plan (RANGES).

    Returns:
        The columns group, replica, start, end and state (``read now`` or ``proven before``), adjacent ranges joined.
    """
    shared = _shared(digests)
    found: dict[tuple[str, str, str], list[tuple[int, int]]] = defaultdict(list)
    for row in shared.select([*KEY, "replica"]).to_pylist():
        found[row["group"], row["replica"], "read now"].append((row["start"], row["end"]))
    for row in ranges.filter(pc.is_valid(ranges["proven_at"])).to_pylist():
        for name in row["replicas"]:
            found[row["group"], name, "proven before"].append((row["start"], row["end"]))
    rows = [
        {"group": group, "replica": name, "start": start, "end": end, "state": state}
        for (group, name, state), bounds in found.items()
        for start, end in merge_ranges(bounds)
    ]
    return pa.Table.from_pylist(rows, COVERED)


def proven_by_replica(ranges: pa.Table) -> pa.Table:
    """Return the same of the proven ranges of a plan, by replica and day; ``run_id`` is empty."""
    proven = ranges.filter(pc.is_valid(ranges["proven_at"]))
    parents = pc.list_parent_indices(proven["replicas"])
    rows = proven.take(parents)
    days = pc.strftime(rows["proven_at"], "%Y-%m-%d")
    columns = {
        "group": rows["group"],
        "replica": pc.list_flatten(proven["replicas"]),
        "run_id": pa.array([""] * len(rows), pa.string()),
        "day": days,
        "entries": pc.subtract(rows["end"], rows["start"]),
        "bytes": rows["proven_bytes"],
        "read_at": rows["proven_at"],
    }
    return summed(pa.table(columns), ["group", "replica", "run_id", "day"]).drop_columns("day")


def summed(rows: pa.Table, whose: list[str]) -> pa.Table:
    """Return entries, bytes, first and last time of rows with the columns entries, bytes and read_at."""
    sums = rows.group_by(whose).aggregate(_SUMS).sort_by([(name, "ascending") for name in whose])
    names = {"entries_sum": "entries", "bytes_sum": "bytes", "read_at_min": "first", "read_at_max": "last"}
    return sums.rename_columns([names.get(name, name) for name in sums.column_names])


def bytes_read(digests: pa.Table, run_id: str) -> dict[str, int]:
    """Return the bytes of records that the first pass of this run read, by replica."""
    read = digests.filter(pc.and_(pc.equal(digests["run_id"], run_id), pc.equal(digests["problem"], "")))
    headers = pc.multiply(pc.subtract(read["end"], read["start"]), HEADER_BYTES)
    sizes = pa.table({"replica": read["replica"], "size": pc.add(read["bytes"], headers)})
    sums = sizes.group_by("replica").aggregate([("size", "sum")]).sort_by("replica")
    return {row["replica"]: row["size_sum"] for row in sums.to_pylist()}
