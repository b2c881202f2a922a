"""Slots that RocketMQ's own ConsumeQueue gave to units, and of random queues, without Spark."""

from __future__ import annotations

import random

import pyarrow as pa
import pytest

from dledger_core.rocketmq import Move, moves_of, replay
from jobs._rebuild.slots import file_slots_of
from tests.jobs.broker_store import BrokersQueue
from tests.jobs.test_rebuild_slots import offsets_of_a_broker
from tests.rocketmq.golden import TESTDATA

_LINES = (TESTDATA / "consume-queue-slots.txt").read_text().splitlines()
RUNS = [line.split(" = ") for line in _LINES if not line.startswith("#")]
UNDECIDED = ("0 1 2 5 3 4", "0 1 2 0 1 2 3 4", "3 4 5 0 6 7 8", "0 1 2 5 6", "0 1 2 4 5 5 6", "17 18 18 20")
"""No offset is skipped after repeated ones, or some are missing in the log for another reason."""


def ranges_of(offsets: list[int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for offset in offsets:
        if found and offset == sum(found[-1]) and offset and found[-1][0]:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((offset, 1))
    return found


def slots_of(offsets: list[int], moves: list[Move]) -> dict[int, int]:
    """The number of the last message that each slot got."""
    slots, number = {}, 0
    for (first, units), (floor, shift) in zip(ranges_of(offsets), replay(ranges_of(offsets), moves), strict=True):
        for offset in range(first, first + units):
            if offset >= floor:
                slots[offset - shift] = number
            number += 1
    return slots


@pytest.mark.parametrize(("run", "found"), RUNS, ids=[run for run, _ in RUNS])
def test_replay_gives_the_slots_of_rocketmqs_consume_queue(run: str, found: str) -> None:
    words = run.split()
    cuts = [at for at, word in enumerate(words) if word == "cut"]
    offsets = [int(word) for at, word in enumerate(words) if at not in cuts and at - 1 not in cuts]
    expected = {int(slot): int(number) for slot, number in (pair.split(":") for pair in found.split())}
    if not cuts:
        assert slots_of(offsets, [Move()] * len(ranges_of(offsets))) == expected
    if run not in UNDECIDED:
        assert slots_of(offsets, moves_of(ranges_of(offsets))) == expected


@pytest.mark.parametrize("seed", range(40))
def test_files_have_the_slots_of_a_broker_whatever_happened_to_its_queue(seed: int) -> None:
    log = list(offsets_of_a_broker(random.Random(seed), 80))
    filled, served = BrokersQueue(), BrokersQueue()
    for number, (offset, fate) in enumerate(log):
        for queue in (filled, served):
            if fate == "lost" or (fate == "cut" and queue is served):
                queue.end = offset
            queue.put(offset, (number, 0, 0))
    rows = {"position": list(range(len(log))), "queue_offset": [offset for offset, _ in log]}
    key = {"group": ["g"] * len(log), "topic": ["t"] * len(log), "queue_id": pa.array([0] * len(log), pa.int32())}
    for last, queue in ((False, filled), (True, served)):
        placed = file_slots_of(pa.table(key | rows), last=last).select(["slot", "position"]).to_pylist()
        found = {row["slot"]: row["position"] for row in placed if row["slot"] is not None}
        assert found == {slot: unit[0] for slot, unit in queue.slots.items()}
