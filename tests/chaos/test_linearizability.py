"""Porcupine, the second checker of histories, accepts what one log explains and rejects histories with one fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.linearizability import PROGRAM, linearizable

pytestmark = pytest.mark.skipif(not PROGRAM.exists(), reason=f"{PROGRAM.name} was not built: run .ci/porcupine")

Line = dict[str, Any]


def append(start: float, first: int, *hashes: int, **fields: Any) -> Line:
    place = {"first": first, "last": first + len(hashes) - 1, "status": "ok"}
    return {"op": "append", "start": start, "end": start + 1, "hashes": hashes} | place | fields


def pending(start: float, *hashes: int, **fields: Any) -> Line:
    return append(start, -1, *hashes) | {"first": -1, "last": -1, "status": "unknown"} | fields


def read(start: float, from_index: int, rows: dict[int, int], next_index: int, **fields: Any) -> Line:
    """A linearizable read."""
    shown = {"from_index": from_index, "next_index": next_index, "indexes": [*rows], "hashes": [*rows.values()]}
    kind = {"linearizable": True, "uncommitted": True, "full": True, "status": "ok"}
    return {"op": "read", "start": start, "end": start + 1} | shown | kind | fields


LATE = {"linearizable": False}
COMMITTED = {"linearizable": False, "uncommitted": False}
ABC = [append(0, 1, 11), append(2, 2, 12), append(4, 3, 13)]
ALL = {1: 11, 2: 12, 3: 13}

RIGHT: dict[str, list[Line]] = {
    "nothing": [],
    "appends and reads in turn": [*ABC, read(6, 0, ALL, 4), read(8, 3, {3: 13}, 4)],
    "concurrent appends in either order": [append(0, 2, 12), append(0.5, 1, 11), read(3, 0, {1: 11, 2: 12}, 3)],
    "a control entry between": [append(0, 1, 11), append(2, 3, 13), read(4, 0, {1: 11, 3: 13}, 5)],
    "an unknown append that took effect late": [
        pending(0, 13),
        *ABC[:2],
        read(4, 0, {1: 11, 2: 12}, 3),
        read(6, 0, ALL, 4),
    ],
    "an unknown append that no read shows": [pending(0, 99), *ABC, read(6, 0, ALL, 4)],
    "a failed append": [append(0, 1, 99) | {"status": "fail"}, *ABC, read(6, 0, ALL, 4)],
    "a late read": [*ABC, read(6, 0, {1: 11}, 2, **LATE)],
    "a read at the time of an append": [*ABC, read(4.5, 0, {1: 11, 2: 12}, 3)],
    "a retry with the first result": [
        append(0, 1, 11, producer="a/0"),
        append(2, 2, 12),
        append(4, 1, 11, producer="a/0"),
        read(6, 0, {1: 11, 2: 12}, 3),
    ],
    "an orphaned attempt that is hidden": [
        append(0, 1, 11, 12, attempt="t/a"),
        append(2, 3, 13),
        read(4, 0, {3: 13}, 4, **COMMITTED),
        read(6, 0, ALL, 4),
    ],
    "an attempt that was appended twice": [
        append(0, 2, 11, attempt="t/a"),
        read(4, 0, {1: 11, 2: 11}, 3),
    ],
}

WRONG: dict[str, list[Line]] = {
    "a lost acknowledgement": [*ABC, read(6, 0, {1: 11, 2: 12}, 4)],
    "a lost acknowledgement at the end": [*ABC, read(6, 0, {1: 11, 2: 12}, 3)],
    "a stale read after a newer one": [pending(0, 13), *ABC[:2], read(4, 3, {3: 13}, 4), read(6, 0, {1: 11, 2: 12}, 3)],
    "a late read that leaves a row out": [*ABC, read(6, 0, {1: 11, 3: 13}, 4, **LATE)],
    "a row of no attempt that is hidden": [*ABC, read(6, 0, {1: 11, 3: 13}, 4, **COMMITTED)],
    "reordered appends": [append(0, 2, 12), append(2, 1, 11), read(4, 0, {1: 11, 2: 12}, 3)],
    "two appends at one index": [append(0, 1, 11), append(0, 1, 12), read(2, 0, {1: 11}, 2)],
    "overlapping ranges": [append(0, 1, 11, 12), append(0, 2, 13)],
    "a duplicate": [*ABC, read(6, 0, ALL | {4: 13}, 5)],
    "a retry that is appended again": [append(0, 1, 11, producer="a/0"), append(2, 2, 11, producer="a/0")],
    "another body": [*ABC, read(6, 0, ALL | {2: 99}, 4)],
    "a failed append that appears": [append(0, 1, 99) | {"status": "fail"}, read(2, 0, {1: 99}, 2)],
    "half of a batch": [pending(0, 11, 12), append(0, 2, 13), read(2, 0, {1: 11, 2: 13}, 3)],
    "an entry before its append": [read(0, 0, {1: 11}, 2), append(3, 1, 11)],
    "an index below one that was read": [append(0, 3, 13), read(2, 3, {3: 13}, 4), append(4, 1, 11)],
    "an append below an end that was read": [read(0, 0, {}, 4), append(2, 1, 11)],
}


def check(tmp_path: Path, history: list[Line]) -> tuple[bool, str]:
    path = tmp_path / "history.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*history, {"note": "kill n0", "at": 1.0}]))
    return linearizable(path)


@pytest.mark.parametrize("name", RIGHT)
def test_porcupine_accepts_what_one_log_explains(tmp_path: Path, name: str) -> None:
    right, words = check(tmp_path, RIGHT[name])
    assert right, words


@pytest.mark.parametrize("name", WRONG)
def test_porcupine_rejects_history_with_a_fault(tmp_path: Path, name: str) -> None:
    right, words = check(tmp_path, WRONG[name])
    assert not right, words
