"""Statistics of queues against RocketMQ's own queues, and against counting message by message."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger_core.errors import ConfigError
from dledger_core.rocketmq import decode_messages, encode_messages
from dledger_core.rocketmq.store.consume_queue import consumer_lag, queue_statistics
from tests.rocketmq.golden import MIXED, REUSED, THREE, extract, messages, oracle


def batches(bodies: list[bytes], size: int) -> Iterator[pa.RecordBatch]:
    for at in range(0, len(bodies), size):
        part = bodies[at : at + size]
        yield pa.RecordBatch.from_pydict(
            {"index": pa.array(range(at, at + len(part))), "body": pa.array(part, pa.binary())}
        )


def rows(table: pa.Table) -> list[dict[str, Any]]:
    return list(table.to_pylist())


@pytest.mark.parametrize("name", [MIXED, THREE])
def test_queues_equal_those_of_broker(name: str) -> None:
    found = queue_statistics(batches(list(messages(name).values()), 100))
    wanted = {
        (q["topic"], q["queueId"]): (q["min"], q["max"]) for q in oracle(name) if q["kind"] == "queue" and q["max"]
    }
    assert {(r["topic"], r["queue_id"]): (r["first_offset"], r["end_offset"]) for r in rows(found.queues)} == wanted
    assert all(r["messages"] == r["end_offset"] - r["first_offset"] for r in rows(found.queues))
    assert set(found.queues["spare"].to_pylist()) == {0}
    assert found.not_messages == 0


def test_duplicate_queue_offsets_are_counted() -> None:
    found = queue_statistics(batches(list(messages(REUSED).values()), 64))
    assert (sum(found.queues["messages"].to_pylist()), sum(found.queues["spare"].to_pylist())) == (229, 9)


def test_native_log_continues_broker_offsets() -> None:
    old = encode_messages(topic="t", queue_id=0, body=[b"x"] * 3, queue_offset=pa.array([5, 6, 7])).to_pylist()
    new = encode_messages(topic=pa.array(["t", "t", "u"]), queue_id=0, body=[b"x"] * 3).to_pylist()
    found = queue_statistics(batches([*old, *new], 2), broker_end=3)
    facts = [(r["topic"], r["messages"], r["first_offset"], r["end_offset"], r["spare"]) for r in rows(found.queues)]
    assert facts == [("t", 5, 5, 10, 0), ("u", 1, 0, 1, 0)]


MESSAGES = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        st.integers(0, 3),
        st.none() | st.sampled_from("xyz"),
        st.integers(0, 5_000),
        st.sampled_from([0, 4, 8, 12]),
    ),
    min_size=1,
    max_size=60,
)


@pytest.mark.slow
@given(MESSAGES, st.integers(1, 20))
def test_statistics_equal_naive_count(given_: list[tuple[str, int, str | None, int, int]], size: int) -> None:
    topics, queues, tags, times, flags = (list(column) for column in zip(*given_, strict=True))
    encoded = encode_messages(
        topic=pa.array(topics),
        queue_id=pa.array(queues, pa.int32()),
        body=[b"body"] * len(topics),
        tags=pa.array(tags, pa.string()),
        store_timestamp=pa.array(times, pa.int64()).cast(pa.timestamp("ms", tz="UTC")),
        sys_flag=pa.array(flags, pa.int32()),
    ).to_pylist()
    found = queue_statistics(batches([b"none", *encoded], size), bucket_seconds=0.5, broker_end=0)
    kept = [row for row in given_ if row[4] in (0, 8)]
    assert (found.not_messages, found.in_no_queue) == (1, len(given_) - len(kept))
    counted = Counter((topic, queue) for topic, queue, *_ in kept)
    assert {(r["topic"], r["queue_id"]): r["messages"] for r in rows(found.queues)} == counted
    by_tag = Counter((topic, tag) for topic, _, tag, *_ in kept)
    assert {(r["topic"], r["tags"]): r["messages"] for r in rows(found.tags)} == by_tag
    by_time = Counter((topic, queue, ms // 500 * 500) for topic, queue, _, ms, _ in kept)
    shown = {(r["topic"], r["queue_id"], round(r["time"].timestamp() * 1000)): r["messages"] for r in rows(found.rates)}
    assert shown == by_time
    for row in rows(found.skew()):
        mine = [count for (topic, _), count in counted.items() if topic == row["topic"]]
        assert (row["queues"], row["messages"], row["largest"]) == (len(mine), sum(mine), max(mine))
        assert row["skew"] == pytest.approx(max(mine) * len(mine) / sum(mine))


def test_partial_results_are_merged_before_they_grow() -> None:
    at_once = queue_statistics(batches(list(messages(THREE).values()), 1000))
    small = queue_statistics(batches(list(messages(THREE).values()), 3), merge_rows=10)
    assert (small.queues, small.rates, small.tags) == (at_once.queues, at_once.rates, at_once.tags)


def test_system_topics_can_be_excluded() -> None:
    found = queue_statistics(batches(list(messages(THREE).values()), 1000))
    topics = set(found.of_users().queues["topic"].to_pylist())
    excluded = set(found.queues["topic"].to_pylist()) - topics
    assert {"Clicks", "%RETRY%CG_workers", "%DLQ%CG_workers"} <= topics
    assert "SCHEDULE_TOPIC_XXXX" in excluded
    assert {name for name in excluded if not name.startswith(("RMQ_SYS_", "rmq_sys_", "SCHEDULE_", "TRANS_"))} == set()


def test_consumer_lag_counts_waiting_messages(tmp_path: Path) -> None:
    broker = extract(THREE, "n0/config", tmp_path).parent
    found = queue_statistics(batches(list(messages(THREE).values()), 1000))
    lag = {
        (r["consumer"][:10], r["topic"][:8], r["queue_id"]): r["waiting"]
        for r in rows(consumer_lag(broker, found.queues))
    }
    assert lag["CG_workers", "Jobs", 0] == 2
    assert lag["CG_workers", "%RETRY%C", 0] == 0
    assert consumer_lag(tmp_path, found.queues).num_rows == 0
    for name in ("consumerOffset.json", "consumerOffset.json.bak"):
        (broker / "config" / name).write_text("{")
    with pytest.raises(ConfigError, match=r"consumerOffset\.json\.bak"):
        consumer_lag(broker, found.queues)


def test_compressed_garbage_is_counted_and_empty_log_has_empty_tables() -> None:
    """A body that cannot be decompressed is a message all the same: only its outside is counted."""
    found = queue_statistics([])
    assert (found.queues.num_rows, found.rates.num_rows, found.tags.num_rows, found.skew().num_rows) == (0, 0, 0, 0)
    broken = encode_messages(topic="t", queue_id=0, body=[b"no zlib"], sys_flag=1)
    assert decode_messages(broken, ["error", "body"]).column("body").null_count == 1
    found = queue_statistics([pa.RecordBatch.from_pydict({"body": broken})])
    assert found.queues["messages"].to_pylist() == [1]
