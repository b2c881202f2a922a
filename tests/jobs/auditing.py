"""The audit without Spark: what the job does, in one process."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from jobs._audit.compare import compare_entries
from jobs._audit.digests import compare_digests, digest_rows
from jobs._audit.judge import end_findings, findings_of, merge_findings
from jobs._audit.model import DIGESTS, RESULTS, AuditedReplica, AuditFinding, Class
from jobs._audit.plan import ReadTask, sections
from jobs._audit.replicas import store_replicas

SPAN = 128
NOW = datetime(2026, 5, 1, tzinfo=UTC)


def replica(name: str, first: int = 0, end: int = 100, commit: int | None = None, **more: Any) -> AuditedReplica:
    """A replica of the entries [first, end) of group g."""
    usual = {"path": f"/stores/{name}", "first_index": first, "last_index": end - 1, "end": end}
    return AuditedReplica(group="g", name=name, commit_index=commit, **(usual | more))


def finding(kind: Class, name: str, start: int, end: int, group: str = "g", **evidence: Any) -> AuditFinding:
    found = {"index": start} | evidence
    return AuditFinding(kind=kind, group=group, replica=name, start=start, end=end, count=end - start, evidence=found)


def digests(replicas: tuple[AuditedReplica, ...], **limits: int) -> pa.Table:
    tasks = [
        ReadTask(r, part.start, part.end, SPAN) for part in sections(replicas, holders_min=1) for r in part.replicas
    ]
    return pa.Table.from_pylist([row for task in tasks for row in digest_rows(task, "run", **limits)], DIGESTS)


def audit(stores: dict[str, Path]) -> list[AuditFinding]:
    """Audit stores in one process; that changes none of their files."""
    before = [content(path) for path in stores.values()]
    found = audit_replicas(store_replicas(stores))
    assert [content(path) for path in stores.values()] == before
    return found


def audit_replicas(replicas: tuple[AuditedReplica, ...]) -> list[AuditFinding]:
    """Audit the replicas of one group."""
    results = compare_digests(digests(replicas)).to_pylist()
    for row in [row for row in results if row["drill"]]:
        holders = tuple(r for r in replicas if r.first_index <= row["start"] and row["end"] <= r.end)
        results.append(compare_entries(holders, row["start"], row["end"]))
    assert not [reason for row in results for reason in row["unread"]]
    found = findings_of(pa.Table.from_pylist(results, RESULTS))
    return merge_findings([*end_findings(replicas), *found])


def brief(findings: list[AuditFinding]) -> list[tuple[str, str, int, int]]:
    """Kind, replica, start and end of each finding."""
    return [(found.kind.value, found.replica, found.start, found.end) for found in findings]


def content(path: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}


def digest_row(replica: str, start: int = 0, **more: Any) -> dict[str, Any]:
    """A digest of 100 entries of 10 bytes."""
    usual = {"run_id": "run", "group": "g", "replica": replica, "start": start, "end": start + 100, "bytes": 1000}
    seen = {"content": b"c", "layout": b"l", "damaged": [], "index_wrong": [], "problem": "", "reason": ""}
    return usual | seen | {"read_at": NOW, "log_uuid": "", "source": "", "resumes": ""} | more


def digest_table(*rows: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), DIGESTS)
