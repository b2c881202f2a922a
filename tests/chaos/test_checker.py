"""The checker accepts correct histories and finds every kind of violation, each in a history of a few lines."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chaos.recorder import Recorder
from tests.support.checker import check
from tests.support.history import Append, Decision, Operation, Read, ReplicaLog

CONTROL = -1


def log_of(*bodies: int, terms: list[int] | None = None, first: int = 0, hidden: tuple[int, ...] = ()) -> ReplicaLog:
    """A replica whose entries have these hashes; CONTROL is a control entry, ``hidden`` are indexes of orphans."""
    values = np.array([0 if body == CONTROL else body for body in bodies], np.uint64)
    known_terms = np.array(terms or [1] * len(bodies), np.int64)
    data = np.array([body != CONTROL for body in bodies], np.bool_)
    visible = data & ~np.isin(np.arange(first, first + len(bodies)), hidden)
    return ReplicaLog(first, known_terms, data, visible, values, values * np.uint64(7) + known_terms.astype(np.uint64))


def ok(start: float, first: int, *hashes: int, client: str = "p", **fields: Any) -> Append:
    last = first + len(hashes) - 1
    given = {"end": start + 1, "term": 1, **fields}
    return Append(client=client, start=start, status="ok", hashes=hashes, first=first, last=last, **given)


def lost(start: float, status: Any, *hashes: int, client: str = "p", **fields: Any) -> Append:
    return Append(client=client, start=start, end=start + 1, status=status, hashes=hashes, **fields)


def read(start: float, from_index: int, rows: dict[int, int], next_index: int, **fields: Any) -> Read:
    indexes, hashes = np.array(list(rows), np.int64), np.array(list(rows.values()), np.uint64)
    given = {"client": "r", "end": start + 1, "commit_index": next_index - 1, "full": True, **fields}
    return Read(
        start=start, status="ok", from_index=from_index, next_index=next_index, indexes=indexes, hashes=hashes, **given
    )


def kinds(history: list[Operation], *logs: ReplicaLog) -> set[str]:
    verdict = check(history, {f"n{i}": log for i, log in enumerate(logs)})
    assert verdict.ok == (not verdict.violations)
    return {violation.kind for violation in verdict.violations}


LOG = log_of(CONTROL, 11, 12, 13)

RIGHT: dict[str, list[Operation]] = {
    "nothing": [],
    "consecutive appends": [ok(0, 1, 11), ok(2, 2, 12), ok(4, 3, 13)],
    "concurrent appends in either order": [ok(0, 3, 13), ok(0.5, 1, 11, 12)],
    "an unknown append that took effect late": [lost(0, "unknown", 13), ok(5, 1, 11), ok(7, 2, 12)],
    "an unknown append that did not": [lost(0, "unknown", 99), ok(0, 1, 11, 12, 13)],
    "a failed append": [lost(0, "fail", 99, error="NO_LEADER"), ok(0, 1, 11, 12, 13)],
    "a producer's retry gets the first result": [
        lost(0, "unknown", 11, producer="a/0"),
        ok(1, 2, 12, 13, client="q"),
        ok(5, 1, 11, producer="a/0"),
        ok(7, 1, 11, producer="a/0"),
    ],
    "a producer's retry fails after its first attempt took effect": [
        lost(0, "unknown", 11, producer="a/0"),
        lost(2, "fail", 11, producer="a/0", error="NO_LEADER"),
        ok(4, 2, 12, 13),
    ],
    "reads of parts": [
        ok(0, 1, 11, 12, 13),
        read(2, 0, {1: 11}, 2, commit_index=3),
        read(4, 2, {2: 12, 3: 13}, 4),
        read(6, 4, {}, 4, commit_index=3),
    ],
    "a named replica may lag, and go back": [
        ok(0, 1, 11, 12, 13),
        read(2, 0, {1: 11, 2: 12, 3: 13}, 4, node="n0"),
        read(4, 0, {1: 11}, 2, node="n1"),
    ],
    "a linearizable read with a lower commit at the same time": [
        lost(0, "unknown", 11, 12, 13),
        read(0, 0, {1: 11, 2: 12, 3: 13}, 4, end=9.0),
        read(1, 0, {1: 11}, 2, linearizable=True, end=9.0, client="s"),
    ],
}


@pytest.mark.parametrize("name", RIGHT)
def test_checker_accepts_correct_history(name: str) -> None:
    known = [value for each in RIGHT[name] if isinstance(each, Append) for value in each.hashes]
    rest = [lost(0, "unknown", value, client="rest") for value in (11, 12, 13) if value not in known]
    assert kinds([*RIGHT[name], *rest], LOG, LOG, LOG) == set()


ALL = ok(0, 1, 11, 12, 13)

WRONG: dict[str, tuple[str, list[Operation]]] = {
    "two appends share an index": ("duplicate-index", [ok(0, 1, 11, 12), ok(0, 2, 12, 13)]),
    "two producers share a range": (
        "duplicate-index",
        [ok(0, 1, 11, producer="a/0"), ok(0, 1, 11, producer="b/0"), ok(0, 2, 12, 13)],
    ),
    "a range of another length": ("range", [replace(ALL, last=2)]),
    "a later append is at a lower index": ("order", [ok(0, 2, 12), ok(2, 1, 11), ok(0, 3, 13)]),
    "an append is below an index that was read": (
        "order",
        [ok(0, 2, 12, 13), read(3, 2, {2: 12, 3: 13}, 4), ok(5, 1, 11)],
    ),
    "an unknown append is below an earlier one": ("order", [ok(0, 2, 12, 13), lost(3, "unknown", 11)]),
    "an acknowledged append is missing": ("lost", [ALL, ok(3, 4, 14)]),
    "an acknowledged append is at another index": ("moved", [ok(0, 1, 12), ok(0, 2, 11), ok(0, 3, 13)]),
    "an acknowledged append is in another term": ("term", [replace(ALL, term=2)]),
    "a failed append appears": ("failed-append-appears", [ok(0, 1, 11, 12), lost(0, "fail", 13)]),
    "an entry without an append": ("from-nowhere", [ok(0, 1, 11, 12)]),
    "half of an unknown batch": ("torn-batch", [ok(0, 1, 11, 12), lost(0, "unknown", 13, 14)]),
    "an unknown batch that is split": ("torn-batch", [ok(0, 2, 12), lost(0, "unknown", 11, 13)]),
    "a read shows another body": ("changed", [ALL, read(2, 1, {1: 11, 2: 99, 3: 13}, 4)]),
    "a read shows a control entry's place": ("changed", [ALL, read(2, 0, {0: 5, 1: 11}, 2)]),
    "a read shows a missing entry": ("vanished", [ALL, read(2, 1, {1: 11, 2: 12, 3: 13, 4: 14}, 5)]),
    "a commit index after the end": ("vanished", [ALL, read(2, 1, {1: 11}, 2, commit_index=7)]),
    "a read leaves something out": ("skipped", [ALL, read(2, 1, {1: 11, 3: 13}, 4)]),
    "a read jumps": ("skipped", [ALL, read(2, 1, {}, 4)]),
    "a read in another order": ("unordered", [ALL, read(2, 1, {2: 12, 1: 11, 3: 13}, 4)]),
    "a read before commit": ("read-uncommitted", [ALL, read(2, 1, {1: 11, 2: 12}, 3, commit_index=1)]),
    "a client goes back in time": (
        "back-in-time",
        [ALL, read(2, 1, {1: 11, 2: 12, 3: 13}, 4), read(4, 1, {1: 11}, 2)],
    ),
    "a client sees less than a named replica has shown it": (
        "back-in-time",
        [ALL, read(2, 1, {1: 11, 2: 12, 3: 13}, 4, node="n0"), read(4, 1, {1: 11}, 2)],
    ),
    "a client does not see its own append": ("back-in-time", [ALL, read(2, 1, {1: 11}, 2, client="p")]),
    "a linearizable read misses an ack": ("stale", [ALL, read(2, 1, {1: 11}, 2, linearizable=True)]),
    "a linearizable read misses what another read saw": (
        "stale",
        [
            lost(0, "unknown", 11, 12, 13),
            read(2, 1, {1: 11, 2: 12, 3: 13}, 4, client="s"),
            read(4, 1, {1: 11}, 2, linearizable=True),
        ],
    ),
    "a linearizable read stops too early": (
        "stale",
        [ALL, read(2, 1, {1: 11}, 2, linearizable=True, uncommitted=True, commit_index=3)],
    ),
    "a refusal that is never right": ("refused", [ALL, lost(2, "fail", 99, error="SEQUENCE_GAP")]),
}


@pytest.mark.parametrize("name", WRONG)
def test_checker_finds_violation(name: str) -> None:
    kind, history = WRONG[name]
    assert kind in kinds(history, LOG, LOG, LOG)


def test_checker_finds_idempotent_append_in_log_twice() -> None:
    log = log_of(CONTROL, 11, 11)
    history: list[Operation] = [lost(0, "unknown", 11, producer="a/0"), ok(2, 2, 11, producer="a/0")]
    assert kinds(history, log) == {"duplicate"}


@pytest.mark.parametrize(
    "other",
    [
        log_of(CONTROL, 11, 12),
        log_of(CONTROL, 11, 12, 14),
        log_of(CONTROL, 11, 12, 13, terms=[1, 1, 1, 2]),
        log_of(12, 13, 14, first=2),
        log_of(CONTROL, 11, 12, 13, hidden=(2,)),
    ],
    ids=["shorter", "other body", "other term", "other part", "other orphans"],
)
def test_checker_finds_replica_that_differs(other: ReplicaLog) -> None:
    assert "diverged" in kinds([ALL], LOG, LOG, other)


def test_checker_compares_replicas_where_they_overlap() -> None:
    assert kinds([ALL], LOG, log_of(12, 13, first=2)) == set()


def test_checker_finds_term_that_falls() -> None:
    log = log_of(CONTROL, 11, terms=[2, 1])
    assert "terms" in kinds([ok(0, 1, 11)], log)


def attempt(name: str, *hashes: int, first: int) -> Append:
    return ok(0, first, *hashes, attempt=name, client="t")


def decision(commit: bool, *attempts: str, status: Any = "ok") -> Decision:
    return Decision(
        client="t", start=5, end=6, status=status, transaction="t/1", commit=commit, attempts=attempts, error=""
    )


ATTEMPTS = [attempt("t/1/a", 11, 12, first=1), attempt("t/1/b", 13, first=3)]


COMMIT_B, ABORT = decision(True, "t/1/b"), decision(False)
UNKNOWN_B = decision(True, "t/1/b", status="unknown")
REFUSED = lost(0, "fail", 13, attempt="t/1/b", client="t", error="TRANSACTION")


@pytest.mark.parametrize(
    ("history", "hidden", "found"),
    [
        ([*ATTEMPTS, COMMIT_B], (1, 2), set()),
        ([*ATTEMPTS, COMMIT_B, read(8, 0, {3: 13}, 4)], (1, 2), set()),
        ([*ATTEMPTS, COMMIT_B, read(8, 0, {1: 11, 2: 12, 3: 13}, 4, uncommitted=True)], (1, 2), set()),
        ([*ATTEMPTS, COMMIT_B, read(8, 0, {1: 11, 2: 12, 3: 13}, 4)], (1, 2), {"aborted-read"}),
        ([*ATTEMPTS, COMMIT_B, read(8, 0, {}, 4)], (1, 2), {"skipped"}),
        ([*ATTEMPTS, COMMIT_B], (1, 2, 3), {"transaction"}),
        ([*ATTEMPTS, COMMIT_B], (1,), {"transaction"}),
        ([*ATTEMPTS, UNKNOWN_B], (1, 2), set()),
        ([*ATTEMPTS, UNKNOWN_B], (1, 2, 3), set()),
        ([*ATTEMPTS, UNKNOWN_B], (3,), {"transaction"}),
        ([*ATTEMPTS, ABORT, read(8, 0, {}, 4)], (1, 2, 3), set()),
        ([*ATTEMPTS, ABORT, read(8, 0, {3: 13}, 4)], (1, 2, 3), {"aborted-read"}),
        ([*ATTEMPTS, ABORT], (1, 2), {"transaction"}),
        ([*ATTEMPTS], (1, 2), {"transaction"}),
        ([*ATTEMPTS, COMMIT_B, ABORT], (1, 2), {"transaction"}),
        ([ATTEMPTS[0], REFUSED, ABORT], (1, 2, 3), set()),
        ([ATTEMPTS[0], replace(REFUSED, error="NO_LEADER"), ABORT], (1, 2, 3), {"failed-append-appears"}),
    ],
)
def test_checker_expects_exactly_rows_of_one_commit(
    history: list[Operation], hidden: tuple[int, ...], found: set[str]
) -> None:
    assert kinds(history, log_of(CONTROL, 11, 12, 13, hidden=hidden)) == found


def test_checker_allows_orphaned_attempt_twice() -> None:
    log = log_of(CONTROL, 11, 12, 11, 12, hidden=(1, 2))
    history = [attempt("t/1/a", 11, 12, first=3), decision(True, "t/1/a"), read(8, 0, {3: 11, 4: 12}, 5)]
    assert kinds(history, log) == set()


def single_copy(chance: random.Random) -> tuple[list[Operation], ReplicaLog]:
    """A possible history of a single copy: each call takes effect at one moment between its start and end."""
    entries: list[int] = []
    history: list[Operation] = []
    moment = 0.0
    for number in range(chance.randrange(5, 60)):
        moment += 1.0
        times = {"start": moment - chance.uniform(0.1, 5.0), "end": moment + chance.uniform(0.1, 5.0)}
        client = f"c{number}"
        if chance.random() < 0.5:
            bodies = tuple(number * 100 + 1 + i for i in range(chance.randrange(1, 4)))
            status = chance.choice(("ok", "ok", "ok", "unknown", "unknown", "fail"))
            place = {"first": len(entries), "last": len(entries) + len(bodies) - 1, "term": 1} if status == "ok" else {}
            if status == "ok" or (status == "unknown" and chance.random() < 0.5):
                entries += bodies
            history.append(Append(client=client, status=status, hashes=bodies, **times, **place))
        else:
            begin = chance.randrange(len(entries) + 1)
            rows = dict(enumerate(entries[begin:], begin))
            linearizable = chance.random() < 0.5
            about = {"end": times["end"], "client": client, "linearizable": linearizable, "uncommitted": True}
            history.append(read(times["start"], begin, rows, len(entries), **about))
    chance.shuffle(history)
    return history, log_of(*entries)


@given(st.integers(min_value=0))
def test_checker_accepts_any_history_of_single_copy(seed: int) -> None:
    history, log = single_copy(random.Random(seed))
    assert kinds(history, log, log, log) == set()


@given(st.integers(min_value=0))
def test_checker_finds_one_lost_changed_or_swapped_entry(seed: int) -> None:
    chance = random.Random(seed)
    history, log = single_copy(chance)
    acknowledged = [each for each in history if isinstance(each, Append) and each.status == "ok"]
    if not acknowledged:
        return
    at = chance.choice(acknowledged).first
    bodies = log.hashes.tolist()
    match chance.choice(("lose", "change", "swap")):
        case "lose":
            del bodies[at]
        case "change":
            bodies[at] += 1_000_000
        case "swap":
            other = chance.randrange(len(bodies))
            bodies[at], bodies[other] = bodies[other], bodies[at]
    wrong = log_of(*bodies)
    assert bodies == log.hashes.tolist() or kinds(history, wrong, wrong, wrong)


def test_history_file_has_line_for_each_call_and_note(tmp_path: Path) -> None:
    history = [*ATTEMPTS, decision(True, "t/1/a"), lost(0, "unknown", 5), read(8, 0, {3: 13}, 4, linearizable=True)]
    recorder = Recorder(tmp_path / "history.jsonl")
    for each in history:
        recorder.add(each)
    recorder.note("kill n0", 3.0, nodes=["n0"])
    recorder.close()
    *rows, note = map(json.loads, (tmp_path / "history.jsonl").read_text().splitlines())
    assert [row["op"] for row in rows] == ["append", "append", "decision", "append", "read"]
    assert rows[4] | {"from_index": 0, "indexes": [3], "hashes": [13], "linearizable": True} == rows[4]
    assert note == {"note": "kill n0", "at": 3.0, "nodes": ["n0"]}
