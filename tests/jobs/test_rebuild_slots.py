"""The slot of each message, against a model that reads the log one by one as RocketMQ's dispatcher does."""

from __future__ import annotations

import hashlib
import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pytest

from dledger_core.rocketmq import UNIT, encode_messages
from jobs._rebuild.files import write_files
from jobs._rebuild.slots import count_units, kept_in, place, queues_of, summary_of
from jobs._rebuild.table import Table
from jobs._rebuild.units import DECODED_SCHEMA, EntryRules, decoded, units_of
from tests.jobs.broker_store import PREFILL, BrokersQueue, write_broker_store
from tests.jobs.conftest import Rebuild

pytestmark = pytest.mark.spark

_Queue = tuple[str, int]
_UNITS_PER_FILE = 7
_LONG_TOPIC = "%RETRY%" + "长" * 60
_LISTS = pa.map_(pa.string(), pa.string())


_Fate = Literal["", "lost", "cut"]
"""Before the message: messages were lost from the log; the broker lost the end of its queue."""


def offsets_of_a_broker(chance: random.Random, count: int) -> Iterator[tuple[int, _Fate]]:
    """Offsets in the order of the log.

    First some messages are missing in the log. Then two producers sometimes send at once. Last the broker sometimes
    loses units and assigns their offsets again, sometimes from 0 on.
    """
    following = end = chance.choice([0, 0, 5])  # of the broker's counter, and of its queue
    fate: _Fate = ""
    for number in range(count):
        unlucky = number > 0 and chance.random() < 0.1
        if unlucky and number < count // 8:
            following = end = following + chance.randrange(1, 3)
            fate = "lost"
        elif unlucky and number < count // 4:
            one, other = chance.randrange(1, 4), chance.randrange(1, 4)
            yield from ((following + at, "") for size in (one, other) for at in range(size))
            following, end = following + one + other, end + max(one, other)
        elif unlucky:
            following = end = chance.choice([0, max(0, end - chance.randrange(1, 6))])
            fate = "cut"
        yield following, fate
        following, end, fate = following + 1, end + 1, ""


class Log:
    """Messages of a broker, with the queues and offsets that each of them is in."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.told: list[list[tuple[_Queue, int]]] = []
        self.fates: list[list[_Fate]] = []
        self.tags: list[int] = []

    def add(
        self, queues: list[tuple[_Queue, int]], code: int = 0, fates: list[_Fate] | None = None, **fields: Any
    ) -> None:
        ((topic, queue_id), offset) = fields.pop("own", queues[0] if queues else (("T", 0), 0))
        given = pa.array([[(name, text) for name, text in fields.pop("properties", {}).items()]], _LISTS)
        body = encode_messages(topic, queue_id, [b"x"], properties=given, queue_offset=offset, **fields)
        self.bodies.append(body[0].as_py())
        self.told.append(queues)
        self.fates.append(fates or [""] * len(queues))
        self.tags.append(code)


def brokers_log(seed: int) -> Log:
    """All kinds of topics; queues ``twice`` 0-3 have offsets that were given out twice."""
    chance, log = random.Random(seed), Log()
    monotonic = ["T", "%DLQ%g", "RMQ_SYS_TRANS_HALF_TOPIC", "RMQ_SYS_TRANS_OP_HALF_TOPIC", _LONG_TOPIC]
    feeds: dict[_Queue, Iterator[tuple[int, _Fate]]] = {
        (topic, 0): ((at, "") for at in range(9, 999)) for topic in monotonic
    }
    feeds |= {("twice", i): offsets_of_a_broker(chance, 80) for i in range(4)}
    lmq = offsets_of_a_broker(chance, 120)
    delayed: dict[int, Iterator[int]] = {level: iter(range(99)) for level in (1, 3, 18)}
    for number in range(400):
        kind = chance.random()
        if kind < 0.05:
            own = (("T", 0), 0)
            log.add([], own=own, sys_flag=chance.choice([4, 12]))
        elif kind < 0.1:
            level, at = chance.choice([1, 3, 18]), 1_700_000_000_000 + number
            delay = {1: 1_000, 3: 10_000, 18: 7_200_000}[level]
            properties = {"DELAY": str(level), "REAL_TOPIC": "T"}
            properties |= {"INNER_MULTI_DISPATCH": "b", "INNER_MULTI_QUEUE_OFFSET": "0"}
            queue = [(("SCHEDULE_TOPIC_XXXX", level - 1), next(delayed[level]))]
            log.add(queue, at + delay, properties=properties, store_timestamp=at, tags="TagA")
        elif kind < 0.3:
            (own_offset, _), (offset, fate) = next(feeds["T", 0]), next(lmq)
            queue = [(("T", 0), own_offset), (("%LMQ%a", 0), offset)]
            lists = {"INNER_MULTI_DISPATCH": "%LMQ%a", "INNER_MULTI_QUEUE_OFFSET": str(offset)}
            log.add(queue, 2598919, ["", fate], properties=lists, sys_flag=8, tags="TagA")
        else:
            chosen = chance.choice(list(feeds))
            offset, fate = next(feeds[chosen])
            log.add([(chosen, offset)], fates=[fate], keys=f"k{number}")
    return log


def modelled(log: Log, places: list[int]) -> tuple[set[tuple[Any, ...]], dict[str, dict[_Queue, dict[int, Any]]]]:
    """Return the rows of the table, and the slots of each queue for ``first`` and ``last``."""
    rebuilt: dict[_Queue, BrokersQueue] = defaultdict(BrokersQueue)
    filled: dict[_Queue, BrokersQueue] = defaultdict(BrokersQueue)  # with holes where the log has lost messages
    served: dict[_Queue, BrokersQueue] = defaultdict(BrokersQueue)
    rows = []
    for body, queues, fates, tags, position in zip(log.bodies, log.told, log.fates, log.tags, places, strict=True):
        for (queue, offset), fate in zip(queues, fates, strict=True):
            unit = (position, len(body), tags)
            for model in (filled[queue], served[queue]):
                model.end = offset if fate == "lost" or (fate == "cut" and model is served[queue]) else model.end
                model.put(offset, unit)
            rows.append((queue, offset, unit, rebuilt[queue].put(offset, unit)))
    found = {(*queue, at, *unit, unit in served[queue].slots.values(), slot) for queue, at, unit, slot in rows}
    first = {queue: model.slots for queue, model in filled.items()}
    return found, {"first": first, "last": {queue: model.slots for queue, model in served.items()}}


def files_of(queues: dict[_Queue, dict[int, Any]]) -> dict[str, bytes]:
    """The files of queues as a broker lays them out."""
    found = {}
    for (topic, queue_id), slots in queues.items():
        low, high = min(slots), max(slots)
        for base in range(low - low % _UNITS_PER_FILE, high + 1, _UNITS_PER_FILE):
            full = np.zeros(_UNITS_PER_FILE, UNIT)
            for at in range(base, min(base + _UNITS_PER_FILE, high + 1)):
                full[at - base] = slots.get(at, PREFILL)
            found[f"{topic}/{queue_id}/{base * UNIT.itemsize:020d}"] = full.tobytes()
    return found


def content(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def state(directory: Path) -> dict[str, tuple[int, int, str]]:
    """All that writing could change."""
    paths = [directory, *directory.rglob("*")]
    digests = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths if path.is_file()}
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size, digests.get(path, "")) for path in paths}


def test_log_with_all_that_occurs(spark: Any, tmp_path: Path, run_rebuild: Rebuild) -> None:
    """Table and files follow RocketMQ's rules; the input, with a comparison of it, is left as it was."""
    log, store = brokers_log(4), tmp_path / "in" / "dledger-n0"
    places = write_broker_store(store, log.bodies, committed=250)
    rows, slots = modelled(log, places)
    own = tmp_path / "in" / "consumequeue"
    for name, data in files_of(slots["last"]).items():
        (own / name).parent.mkdir(parents=True, exist_ok=True)
        (own / name).write_bytes(data)
    (tmp_path / "in" / "config").mkdir()
    offsets = '{"offsetTable": {"twice@readers": {"0": 900, "1": 900, "2": 900, "3": 900}}}'
    (tmp_path / "in" / "config" / "consumerOffset.json").write_text(offsets)
    before = state(tmp_path / "in")
    code, summary = run_rebuild(
        store=store, table=tmp_path / "t", files=tmp_path / "first", compare=own,
        consume_queue_file_size=_UNITS_PER_FILE * 20,
    )  # fmt: skip
    assert state(tmp_path / "in") == before
    table = Table(spark, str(tmp_path / "t")).rows()
    names = ["topic", "queue_id", "queue_offset", "position", "size", "tags_code", "broker_serves", "rebuild_slot"]
    found = [tuple(row) for row in table.select(*names).collect()]
    assert len(found) == len(rows)
    assert set(found) == rows
    assert content(tmp_path / "first" / "consumequeue") == files_of(slots["first"])
    write_files(kept_in(table, "last"), str(tmp_path / "last"), _UNITS_PER_FILE * 20)
    assert content(tmp_path / "last" / "consumequeue") == files_of(slots["last"]) == content(own)
    committed = table.selectExpr("index <= 250", "committed").distinct().collect()
    assert {tuple(row) for row in committed} == {(True, True), (False, None)}
    lost = [row for row in rows if not row[6]]
    assert code == 1
    assert summary["duplicate_slots"] == len(rows) - len({row[:3] for row in rows})
    assert summary["duplicates"]["not_served_by_broker"] == len(lost)
    counted = summary_of(Table(spark, str(tmp_path / "t")).queues(), ())
    assert counted == {name: summary[name] for name in counted}
    ranges = summary["duplicates"]["ranges"]
    reported = {(r["topic"], r["queue_id"], slot) for r in ranges for slot in range(r["start"], r["end"])}
    assert reported == {row[:3] for row in lost}
    assert {r["consumers"]["readers"]["offset"] for r in ranges if r["topic"] == "twice"} == {900}
    assert summary["skipped"]["prepared_or_rolled_back"] == log.told.count([])
    assert summary["compare"]["differences"] == {"CQ_DUPLICATE_OFFSET": len({row[:3] for row in lost})}


def test_offsets_are_assigned_in_index_order(spark: Any) -> None:
    """Whatever the batches are; behind those that a broker gave, and behind what the table holds already."""
    chance = random.Random(5)
    queues = [("U" if chance.random() < 0.3 else "T", chance.randrange(3)) for _ in range(600)]
    given: dict[_Queue, int] = defaultdict(int)
    broker_end, expected, offsets = 100, [], []
    for number, queue in enumerate(queues):
        offsets.append(given[queue] if number < broker_end else 0)
        expected.append(given[queue])
        given[queue] += 1
    topics, ids = zip(*queues, strict=True)
    bodies = encode_messages(list(topics), list(ids), [b"x"] * 600, queue_offset=offsets)
    rows: list[tuple[Any, ...]] = []
    at = 0
    while at < 600:
        end = min(600, at + chance.randrange(1, 90))
        columns = {"group": ["g"] * (end - at), "index": range(at, end), "position": [i * 200 for i in range(at, end)]}
        batch = pa.RecordBatch.from_pydict({**{k: list(v) for k, v in columns.items()}, "body": bodies[at:end]})
        for found in decoded([batch], EntryRules(broker_end=broker_end)):
            rows += [tuple(row.values()) for row in found.to_pylist()]
        at = end
    chance.shuffle(rows)
    decoded_rows = spark.createDataFrame(rows, DECODED_SCHEMA)
    units, runs = units_of(decoded_rows), decoded_rows.where("batch is null").drop("batch")
    counts = count_units(row.asDict() for row in queues_of(runs).collect())
    assert (counts.given, counts.assigned, counts.odd) == (100, 500, 0)
    placed = place(units, runs, queues_of(runs), counts).select("index", "queue_offset", "rebuild_slot").collect()
    assert {row["index"]: row["queue_offset"] for row in placed} == dict(enumerate(expected))
    assert all(row["queue_offset"] == row["rebuild_slot"] for row in placed)
    known = spark.createDataFrame([("g", "T", 0, 5000)], "`group` string, topic string, queue_id int, base bigint")
    later = "part >= 60000 and topic = 'T' and queue_id = 0"
    units, runs = units.where(later), runs.where(later)
    counts = count_units(row.asDict() for row in queues_of(runs).collect())
    placed = place(units, runs, queues_of(runs), counts, known).orderBy("index").collect()
    assert [row["queue_offset"] for row in placed] == list(range(5000, 5000 + len(placed)))
    assert placed
