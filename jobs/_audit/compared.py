"""What the digests of one run say: which ranges differ, how much was compared, and how much was read. Pure.

A table of digests has the columns of ``passes.RANGES_SCHEMA``, a row per replica and range.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from dledger_core.record import HEADER_BYTES
from jobs._audit.model import OTHER
from jobs._audit.ranges import RangeRow

__all__ = ["Compared", "RangeKey", "by_range", "bytes_read", "compared_by_replica", "of_ranges", "suspect_ranges"]

RangeKey = tuple[str, int, int]
"""(group, start, end)."""
_KEY: Final = ["group", "start", "end"]


@dataclass(frozen=True, slots=True)
class Compared:
    """How much of a replica was compared with another one; which run read it, from when to when."""

    group: str
    replica: str
    entries: int
    nbytes: int
    run_id: str = ""
    first: datetime | None = None
    last: datetime | None = None


def by_range(digests: pa.Table, *more: tuple[str, str]) -> pa.Table:
    """Groups digests by group, start and end.

    Args:
        digests: the columns group, start, end, replica, content, layout, and those of ``more``.
        more: columns to aggregate, and how.

    Returns:
        A row per range; ``differs`` tells whether contents do, or layouts within one cluster.
    """
    side = pc.if_else(pc.starts_with(digests["replica"], OTHER), b"\1", b"\0")
    whole = pc.binary_join_element_wise(digests["content"], digests["layout"], side, b"")
    kinds = [("content", "count_distinct"), ("whole", "count_distinct"), ("side", "count_distinct")]
    marked = digests.append_column("side", side).append_column("whole", whole)
    grouped = marked.group_by(_KEY).aggregate([*kinds, *more])
    layouts = pc.greater(grouped["whole_count_distinct"], grouped["side_count_distinct"])
    return grouped.append_column("differs", pc.or_(pc.greater(grouped["content_count_distinct"], 1), layouts))


def suspect_ranges(digests: pa.Table) -> dict[RangeKey, list[RangeRow]]:
    """Returns the rows of those ranges that are not simply equal on all replicas."""
    wrong = pc.add(*(pc.fill_null(pc.list_value_length(digests[name]), 0) for name in ("damaged", "index_wrong")))
    bad = pc.or_(pc.not_equal(digests["problem"], ""), pc.greater(wrong, 0))
    grouped = by_range(digests.append_column("bad", bad), ("bad", "any"))
    keys = grouped.filter(pc.or_(grouped["differs"], grouped["bad_any"]))
    found: dict[RangeKey, list[RangeRow]] = defaultdict(list)
    for row in of_ranges(digests, keys).sort_by("replica").to_pylist():
        found[row["group"], row["start"], row["end"]].append(_range_row(row))
    return dict(found)


def compared_by_replica(digests: pa.Table) -> list[Compared]:
    """Returns how much of each replica was compared: ranges that at least two could read."""
    readable = digests.filter(pc.is_in(digests["problem"], pa.array(["", "damaged"])))
    holders = readable.group_by(_KEY).aggregate([([], "count_all")])
    shared = of_ranges(readable, holders.filter(pc.greater(holders["count_all"], 1)))
    shared = shared.append_column("entries", pc.subtract(shared["end"], shared["start"]))
    sums = shared.group_by(["group", "replica", "run_id"]).aggregate(
        [("entries", "sum"), ("bytes", "sum"), ("read_at", "min"), ("read_at", "max")]
    )
    return [
        Compared(
            row["group"],
            row["replica"],
            row["entries_sum"],
            row["bytes_sum"],
            row["run_id"],
            row["read_at_min"].astimezone(UTC),
            row["read_at_max"].astimezone(UTC),
        )
        for row in sums.to_pylist()
    ]


def of_ranges(digests: pa.Table, ranges: pa.Table) -> pa.Table:
    """Returns the rows of some ranges only, which are given by the columns group, start and end."""
    # Arrow joins no tables with columns of lists.
    numbered = digests.select(_KEY).append_column("row", pa.array(range(digests.num_rows), pa.int64()))
    rows = numbered.join(ranges.select(_KEY), _KEY, join_type="left semi")["row"]
    return digests.take(rows.combine_chunks().sort())


def bytes_read(digests: pa.Table, run_id: str) -> dict[str, int]:
    """Returns how many bytes of records this run's first pass read, by replica."""
    read = digests.filter(pc.and_(pc.equal(digests["run_id"], run_id), pc.equal(digests["problem"], "")))
    headers = pc.multiply(pc.subtract(read["end"], read["start"]), HEADER_BYTES)
    sizes = pa.table({"replica": read["replica"], "size": pc.add(read["bytes"], headers)})
    sums = sizes.group_by("replica").aggregate([("size", "sum")]).sort_by("replica")
    return {row["replica"]: row["size_sum"] for row in sums.to_pylist()}


def _range_row(row: dict[str, Any]) -> RangeRow:
    wrong = row["index_wrong"] or []
    return RangeRow(
        replica=row["replica"],
        content=row["content"],
        layout=row["layout"],
        damaged=len(row["damaged"] or []),
        problem=row["problem"],
        reason=row["reason"],
        index_wrong=tuple(zip(wrong[::2], wrong[1::2], strict=True)),
    )
