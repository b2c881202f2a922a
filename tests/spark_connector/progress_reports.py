"""Progress reports as PySpark 4.2 hands them to listeners."""

from __future__ import annotations

import json
import uuid
from typing import Any

QUERY_ID = uuid.UUID("fd71ea2d-fd54-45c0-a396-24b68d750fc4")
RUN_ID = uuid.UUID("0a562d20-3b4e-46ea-9ad3-0a5a3215d868")


def offset(**next_indexes: int) -> str:
    groups = {group: {"check": 7, "log": "log-1", "next": index, "term": 1} for group, index in next_indexes.items()}
    return json.dumps({"groups": groups, "v": 1}, sort_keys=True)


def latest(losses: tuple[int, int] = (0, 0), **groups: tuple[int, tuple[int, int, float | None] | None]) -> str:
    """A latest offset: per group its end and the lag of the micro-batch."""
    told = {}
    for group, (end, behind) in groups.items():
        names = ("records", "bytes", "seconds")
        lag = None if behind is None else dict(zip(names, behind, strict=True))
        told[group] = {"check": None, "log": "log-1", "next": end, "term": -1, "behind": lag}
    return json.dumps({"groups": told, "losses": {"events": losses[0], "entries": losses[1]}, "v": 1})


def source(start: str | None, end: str, last: str, rows: int = 0, rate: float = 0.0) -> dict[str, Any]:
    return {
        "description": "PythonMicroBatchStream@1",
        "startOffset": str(start),
        "endOffset": end,
        "latestOffset": last,
        "numInputRows": rows,
        "inputRowsPerSecond": rate,
        "processedRowsPerSecond": rate,
    }


def progress(*sources: dict[str, Any], batch: int = 3, name: str | None = "q", **fields: Any) -> dict[str, Any]:
    return {
        "id": QUERY_ID,
        "runId": RUN_ID,
        "name": name,
        "timestamp": "2026-11-21T10:39:55.781Z",
        "batchId": batch,
        "durationMs": {"addBatch": 100, "triggerExecution": 250},
        "sources": list(sources),
        **fields,
    }
