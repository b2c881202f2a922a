"""The audit without Spark: what the job does, in one process."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from jobs._audit.compared import suspect_ranges
from jobs._audit.drill import drill
from jobs._audit.judged import judge_suspects
from jobs._audit.model import Finding, Replica
from jobs._audit.passes import _ARROW_SCHEMA, _digest_rows
from jobs._audit.plan import DigestTask, Section, end_findings, sections
from jobs._audit.report import merge_findings
from jobs._audit.snapshot import store_replicas

SPAN = 128


def digests(replicas: tuple[Replica, ...]) -> pa.Table:
    tasks = [DigestTask(r, part.start, part.end, SPAN) for part in sections(replicas) for r in part.replicas]
    rows = [row for task in tasks for row in _digest_rows(task, "run")]
    return pa.Table.from_pylist(rows, _ARROW_SCHEMA)


def audit(stores: dict[str, Path]) -> list[Finding]:
    """What the job does, in one process."""
    replicas = store_replicas(stores)
    found = end_findings(replicas)
    group = replicas[0].group
    judged = judge_suspects(suspect_ranges(digests(replicas)))
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
