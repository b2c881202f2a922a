"""The audit without Spark: what the job does, in one process."""

from __future__ import annotations

from pathlib import Path

from jobs._audit.drill import drill
from jobs._audit.judged import judge_suspects
from jobs._audit.model import Finding, Replica
from jobs._audit.passes import _digest_rows
from jobs._audit.plan import DigestTask, Section, end_findings, sections
from jobs._audit.ranges import RangeRow
from jobs._audit.report import merge_findings
from jobs._audit.snapshot import store_replicas

SPAN = 128


def digests(replicas: tuple[Replica, ...]) -> dict[tuple[int, int], list[RangeRow]]:
    found: dict[tuple[int, int], list[RangeRow]] = {}
    for part in sections(replicas):
        for replica in part.replicas:
            for row in _digest_rows(DigestTask(replica, part.start, part.end, SPAN), "run"):
                found.setdefault((row["start"], row["end"]), []).append(
                    RangeRow(
                        replica=row["replica"],
                        content=row["content"],
                        layout=row["layout"],
                        damaged=len(row["damaged"]),
                        problem=row["problem"],
                        reason=row["reason"],
                        index_wrong=tuple(zip(row["index_wrong"][::2], row["index_wrong"][1::2], strict=True)),
                    )
                )
    return found


def audit(stores: dict[str, Path]) -> list[Finding]:
    """What the job does, in one process."""
    replicas = store_replicas(stores)
    found = end_findings(replicas)
    group = replicas[0].group
    judged = judge_suspects({(group, start, end): rows for (start, end), rows in digests(replicas).items()})
    assert not judged.reasons[group]
    for _, start, end in judged.doubtful:
        holders = tuple(r for r in replicas if r.first_index <= start and end <= r.end)
        drilled = drill(Section(start, end, holders))
        assert not drilled.unread
        judged.add_drilled(group, drilled)
    return merge_findings([*found, *judged.found(group)])


def overwrite(file: Path, offset: int, data: bytes) -> None:
    with file.open("r+b") as opened:
        opened.seek(offset)
        opened.write(data)
