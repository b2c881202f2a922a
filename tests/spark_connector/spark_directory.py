"""Checkpoint directories as Spark 4.2 writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

QUERY_ID = "0b6b5ad6-6d3e-4d0c-9c5e-1f6a2f0c7a11"


def offset(**next_indexes: int) -> str:
    """An offset of this source: per group the next index, in log-1, after an entry of term 1."""
    groups = {
        group: {"check": None if index == 0 else 7, "log": "log-1", "next": index, "term": 1 if index else -1}
        for group, index in next_indexes.items()
    }
    return json.dumps({"groups": groups, "v": 1}, sort_keys=True)


def write_checkpoint(directory: Path, *offsets: str, committed: int, first: int = 0) -> Path:
    """A checkpoint with a planned micro-batch per offset, of which ``committed`` are done; lines are one per source."""
    (directory / "offsets").mkdir(parents=True)
    (directory / "commits").mkdir()
    (directory / "metadata").write_text(json.dumps({"id": QUERY_ID}))
    for number, lines in enumerate(offsets, first):
        about = {"batchWatermarkMs": 0, "batchTimestampMs": 1_700_000_000_000 + number, "conf": {}}
        _write(directory / "offsets", number, f"v1\n{json.dumps(about)}\n{lines}")
        if number < first + committed:
            _write(directory / "commits", number, 'v1\n{"nextBatchWatermarkMs":0}')
    return directory


def _write(directory: Path, number: int, text: str) -> None:
    (directory / str(number)).write_text(text)
    (directory / f".{number}.crc").write_bytes(b"crc\0")


def tree(directory: Path) -> dict[str, Any]:
    """Everything below a directory, to see that nothing was changed."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(directory.rglob("*"))}
