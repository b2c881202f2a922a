"""The rebuild's pure parts: the units of a message, and what the options and the files of a broker mean."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dledger_core import ConfigError, open_store
from dledger_core.rocketmq import encode_messages
from dledger_core.rocketmq.message.layout import DELAY_LEVELS_MS
from dledger_core.storage.files.file_system import OsFiles
from dledger_core.storage.files.layout import LogMeta, save_log_meta
from jobs._rebuild.broker import batch_topics
from jobs._rebuild.compare import check_compared
from jobs._rebuild.plan import RebuildOptions, RebuildPlan, check_assignable, delay_levels_of, plan_for
from jobs._rebuild.units import ALL_ENTRIES, UNIT_ARROW, EntryRules, decoded, ranges_and_units
from tests.jobs.broker_store import (
    DELAY_LEVELS,
    INDEX_BYTES,
    STORED_MS,
    delayed_messages,
    messages,
    write_broker_store,
    write_commitlog,
)
from tests.rocketmq import golden
from tests.spark_connector.store_writer import StoreWriter

# --- units ----------------------------------------------------------------------------------------------------------


def entries(bodies: list[bytes], group: str = "default", first: int = 0) -> pa.RecordBatch:
    indexes = list(range(first, first + len(bodies)))
    columns = {"group": [group] * len(bodies), "index": indexes, "position": [i * 1000 for i in indexes]}
    return pa.RecordBatch.from_pydict({**columns, "body": pa.array(bodies, pa.binary())})


def units_in(batch: pa.RecordBatch, **rules: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = ranges_and_units(batch, EntryRules(**rules))[1].to_pylist()
    return rows


def runs_in(batch: pa.RecordBatch, **rules: Any) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = ranges_and_units(batch, EntryRules(**rules))[0].sort_by("position").to_pylist()
    return runs


def test_units_are_dispatched_messages() -> None:
    bodies = encode_messages("T", [1, 2, 3, 4], [b"a", b"b", b"c", b"d"], "TagA", sys_flag=[0, 4, 8, 12]).to_pylist()
    batch = entries([*bodies, b"no message"], first=7)
    rows = units_in(batch, committed_end=9)
    assert [(row["index"], row["committed"]) for row in rows] == [(7, True), (9, None)]
    assert (rows[0]["position"], rows[0]["size"], rows[0]["tags_code"]) == (7048, len(bodies[0]), 2598919)
    skipped = [(row["position"], row["skipped"]) for row in runs_in(batch) if row["skipped"]]
    assert skipped == [(8048, "prepared_or_rolled_back"), (10048, "prepared_or_rolled_back"), (11048, "not_messages")]


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({}, [(3, 2), (0, 1), (1, 2), (0, 1), (1, 1), (7, 1), (6, 1)]),
        ({"broker_end": 3}, [(3, 2), (0, 1), (0, 6)]),
    ],
)
def test_range_ends_at_gap_in_offsets(rules: dict[str, int], expected: list[tuple[int, int]]) -> None:
    """0 is always a run of its own; what is assigned later makes one run."""
    runs = runs_in(entries(messages([3, 4, 0, 1, 2, 0, 1, 7, 6])), **rules)
    assert [(row["first"], row["units"]) for row in runs] == expected
    assert [row["range_id"] for row in runs] == list(range(len(expected)))


def test_decoded_rows_are_ranges_and_batches_of_units_per_group() -> None:
    """A task may read several logs: the units of each are counted on their own, hidden entries not at all."""
    bodies = messages([0, 0, 0])
    both = pa.Table.from_batches([entries(bodies, "a"), entries(bodies, "b")]).combine_chunks().to_batches()
    rows = pa.Table.from_batches(decoded(both, EntryRules(broker_end=0, hidden=((0, 1),)))).to_pylist()
    assert [(row["group"], row["units"]) for row in rows if row["batch"] is None] == [("a", 2), ("b", 2)]
    kept = [pa.ipc.open_stream(row["batch"]).read_all() for row in rows if row["batch"] is not None]
    assert [table.schema for table in kept] == [UNIT_ARROW] * 2
    assert [table.column("number").to_pylist() for table in kept] == [[0, 1]] * 2


def dispatched(names: str, offsets: str | None = None) -> dict[str, str]:
    """Properties of a message that is in further queues."""
    return {"INNER_MULTI_DISPATCH": names} | ({"INNER_MULTI_QUEUE_OFFSET": offsets} if offsets is not None else {})


LISTS = "%LMQ%a,b,x/y,%LMQ%a,T,,"


@pytest.mark.parametrize(
    ("topic", "lists", "expected"),
    [
        ("T", dispatched(LISTS, "5,6,7,8,9"), [("T", 3, 4), ("%LMQ%a", 0, 5), ("b", 3, 6)]),
        ("%RETRY%T", dispatched(LISTS, "5,6,7,8,9"), []),
        ("rmq_sys_T", dispatched(LISTS, "5,6,7,8,9"), []),
        ("SCHEDULE_TOPIC_XXXX", dispatched(LISTS, "5,6,7,8,9"), []),
        ("T", dispatched(LISTS, "5,6"), []),
        ("T", dispatched(LISTS, "5,6,7,8,nine"), []),
        ("T", dispatched("b"), []),
        ("T", dispatched(",b", "1,2"), [("T", 3, 4), ("b", 3, 2)]),
    ],
)
def test_further_queues_of_message(topic: str, lists: dict[str, str], expected: list[tuple[str, int, int]]) -> None:
    """As RocketMQ's ConsumeQueue.multiDispatchLmqQueue does; a queue that is named twice gets the message once."""
    bodies = messages([4] * 3, topic, 3, tags="TagA", properties=[{}, lists, {}])
    found = units_in(entries(bodies))
    rows = [row for row in found if row["index"] == 1]
    assert [(r["topic"], r["queue_id"], r["queue_offset"]) for r in rows] == (expected or [(topic, 3, 4)])
    assert {(r["position"], r["size"], r["tags_code"]) for r in rows} == {(1048, len(bodies[1]), 2598919)}
    assert [row["index"] for row in found] == [0, *[1] * len(rows), 2]
    assert len(units_in(entries(bodies), multi_dispatch=False)) == 3


def test_queue_that_is_named_again() -> None:
    """The message has no second unit there; other queues and other offsets are not affected."""
    lists = dispatched("%LMQ%a,b,%LMQ%a,%LMQ%a,b,%LMQ%c,%LMQ%c", "5,6,5,5,6,7,8")
    batch = entries(messages([0], "T", 3, properties=[lists]))
    rows = [(row["topic"], row["queue_offset"]) for row in units_in(batch)]
    assert rows == [("T", 0), ("%LMQ%a", 5), ("b", 6), ("%LMQ%c", 7)]
    (again,) = [row for row in runs_in(batch) if row["skipped"]]
    assert (again["topic"], again["first"], again["units"], again["skipped"]) == ("%LMQ%a", 5, 2, "named_again")
    assert [row["topic"] for row in units_in(batch, broker_end=0)] == ["T", "%LMQ%a", "b", "%LMQ%c"]


def test_further_queues_in_native_logs_need_no_offsets() -> None:
    rows = units_in(entries(messages([0], "T", 3, properties=[dispatched("%LMQ%a,b")])), broker_end=0)
    assert [(row["topic"], row["queue_id"]) for row in rows] == [("T", 3), ("%LMQ%a", 0), ("b", 3)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h", DELAY_LEVELS_MS),
        (DELAY_LEVELS, (1000, 2000, 3000, 7000)),
        (" 0s  2d ", (0, 2 * 86_400_000)),
        ("90m", (90 * 60_000,)),
    ],
)
def test_delay_levels_are_in_rocketmqs_notation(text: str, expected: tuple[int, ...]) -> None:
    assert delay_levels_of(text) == expected


@pytest.mark.parametrize(
    "text", ["", " ", "1s 5", "1s,5s", "s", "1S", "-1s", "1.5s", "1s 5w", "9999999999d", "\u0661s"]
)
def test_wrong_delay_levels_are_rejected(text: str) -> None:
    with pytest.raises(ConfigError):
        delay_levels_of(text)


@pytest.mark.parametrize(
    ("rules", "delays"),
    [
        (EntryRules(delay_levels_ms=delay_levels_of(DELAY_LEVELS)), [1000, 2000, 7000, 7000]),
        (EntryRules(), [1000, 5000, 30_000, 300_000]),
    ],
)
def test_tags_codes_of_delayed_messages_are_delivery_times(rules: EntryRules, delays: list[int]) -> None:
    """A level above the highest counts as the highest."""
    _, units = ranges_and_units(entries(delayed_messages([1, 2, 4, 9])), rules)
    assert [code - STORED_MS for code in units.column("tags_code").to_pylist()] == delays


# --- plans ----------------------------------------------------------------------------------------------------------


def plan(tmp_path: Path, **given: Any) -> RebuildPlan:
    return plan_for(RebuildOptions.parse({"table": str(tmp_path / "t")} | {k: str(v) for k, v in given.items()}))


def test_plan_has_given_delay_levels_for_stores_and_commitlogs(tmp_path: Path) -> None:
    write_broker_store(tmp_path / "store", messages([0]))
    write_commitlog(tmp_path / "commitlog", messages([0]))
    for kind in ("store", "commitlog"):
        source = {kind: tmp_path / kind}
        assert plan(tmp_path, **source).rules.delay_levels_ms == DELAY_LEVELS_MS
        given = plan(tmp_path, **source, delay_levels=DELAY_LEVELS)
        assert given.rules.delay_levels_ms == (1000, 2000, 3000, 7000)


def test_recorded_commit_index_marks_rows_or_limits_them(tmp_path: Path) -> None:
    """It is a lower bound, and beyond the end of the files it shows a loss."""
    store, bare = tmp_path / "a" / "dledger-n0", tmp_path / "b" / "dledger-n0"
    write_broker_store(store, messages(range(9)), committed=4)
    write_broker_store(bare, messages(range(9)))
    for path, until, ranges, committed_end in (
        (store, "end", {"a": (0, 9)}, 5),
        (store, "committed", {"a": (0, 5)}, 5),
        (bare, "end", {"b": (0, 9)}, 0),
        (bare, "committed", {"b": (0, 9)}, 0),
    ):
        found = plan(tmp_path, store=path, until=until)
        assert (found.ranges, found.lost) == (ranges, None)
        assert found.rules.committed_end == committed_end
    (store / "checkpoint").write_text("committedIndex=4\nendIndex=11\n")
    assert plan(tmp_path, store=store).lost == (9, 12)


def test_broker_end_is_read_from_converted_store(tmp_path: Path) -> None:
    with StoreWriter(tmp_path) as writer:
        writer.append(messages([0] * 4))
    meta = writer.path / "meta" / "log.json"
    fields = json.loads(meta.read_text()) | {"broker_end_index": 3}
    meta.write_text(json.dumps({name: value for name, value in fields.items() if "crc" not in name}))
    assert plan(tmp_path, store=writer.path).rules.broker_end == 3


@pytest.mark.parametrize(("written", "expected"), [(3, 3), (9, ALL_ENTRIES)], ids=["converted", "a broker continued"])
def test_broker_end_after_broker_continued_converted_log(tmp_path: Path, written: int, expected: int) -> None:
    """It assigns queue offsets as usual; native messages do not contain their position."""
    store = tmp_path / "dledger-n0"
    write_broker_store(store, messages(range(written)))
    meta = LogMeta(
        profile="A", group="g", node_id="n0", data_segment_bytes=1 << 14, index_segment_bytes=INDEX_BYTES,
        log_uuid="0" * 32, foreign_end=3, broker_end_index=3,
    )  # fmt: skip
    (store / "meta").mkdir()
    save_log_meta(OsFiles(), store / "meta" / "log.json", meta)
    assert plan(tmp_path, store=store).rules.broker_end == expected


def test_log_starting_with_broker_messages_is_rejected(tmp_path: Path) -> None:
    store = golden.extract(golden.REUSED, "n0/dledger-n0", tmp_path)
    with pytest.raises(ConfigError, match="--broker-end-index"):
        check_assignable(open_store(store).read(0, 1), "n0")
    with StoreWriter(tmp_path) as writer:
        writer.append(messages([0] * 4))
    check_assignable(open_store(writer.path).read(0, 1), "default")


def test_broker_store_with_checkpoint_is_rejected(tmp_path: Path) -> None:
    """A broker's served messages depend on all of its offsets."""
    write_broker_store(tmp_path / "dledger-n0", messages(range(4)))
    with pytest.raises(ConfigError, match="--checkpoint"):
        plan(tmp_path, store=tmp_path / "dledger-n0", checkpoint=tmp_path / "c")


def test_queues_in_rocksdb_are_not_compared_without_binding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else all messages would be called missing, and the broker's database a folder to replace."""
    monkeypatch.setitem(sys.modules, "rocksdict", None)
    folder = tmp_path / "consumequeue"
    folder.mkdir()
    for name in ("000004.log", "CURRENT", "IDENTITY", "LOCK", "MANIFEST-000005", "OPTIONS-000007"):
        (folder / name).write_text("MANIFEST-000005")
    for named in (tmp_path, folder):
        with pytest.raises(ConfigError):
            check_compared(str(named))
    write_broker_store(tmp_path / "dledger-n0", messages(range(4)))
    assert [note for note in plan(tmp_path, store=tmp_path / "dledger-n0").notes if "RocksDB" in note]
    (folder / "CURRENT").unlink()
    (folder / "CURRENT").mkdir()
    assert check_compared(str(tmp_path)) == str(folder)


def test_topics_with_batch_queues_are_read_from_files_of_broker(tmp_path: Path) -> None:
    assert batch_topics(None) == batch_topics(str(tmp_path)) == ()
    config = tmp_path / "config" / "topics.json"
    config.parent.mkdir()
    config.write_text("")
    assert batch_topics(str(tmp_path)) == ()
    kinds = {"a": {"attributes": {"queue.type": "BatchCQ"}}, "b": {"attributes": {"queue.type": "SimpleCQ"}}, "c": {}}
    config.write_text(json.dumps({"topicConfigTable": kinds}))
    (tmp_path / "batchconsumequeue" / "d" / "0").mkdir(parents=True)
    assert batch_topics(str(tmp_path)) == ("a", "d")
    config.rename(config.with_name("topics.json.bak"))
    for text in (None, "", "[]", '{"topicConfigTable": {"a": null}}', '{"topicConfigTable": []}', "\x00"):
        if text is not None:  # killed while it wrote the file
            config.write_text(text)
        assert batch_topics(str(tmp_path)) == ("a", "d"), "the broker loads the copy"


def test_files_are_refused_if_topics_with_batch_queues_are_unknown(tmp_path: Path) -> None:
    """A broker does not start with files of such a topic below ``consumequeue``."""
    store = tmp_path / "dledger-n0"
    write_broker_store(store, messages(range(3)))
    (tmp_path / "config").mkdir()
    for name in ("topics.json", "topics.json.bak", "consumerOffset.json"):
        (tmp_path / "config" / name).write_text('{"topicConfigTable":{"a"')
    given = {"store": str(store), "table": str(tmp_path / "t")}
    with pytest.raises(ConfigError, match=r"topics\.json"):
        plan_for(RebuildOptions.parse(given | {"files": str(tmp_path / "f")}))
    plan = plan_for(RebuildOptions.parse(given))
    assert (len(plan.notes), plan.batch_topics, plan.consumers) == (2, (), {})


def test_options_of_index_files_that_have_no_effect_are_rejected(tmp_path: Path) -> None:
    for given in ({"peers": "n0-127.0.0.1:1", "indexes": tmp_path}, {"store": tmp_path, "broker_conf": tmp_path}):
        with pytest.raises(ConfigError):
            plan(tmp_path, **given)


def test_index_files_of_other_size_need_configuration(tmp_path: Path) -> None:
    write_broker_store(tmp_path / "dledger-n0", messages(range(4)))
    index = tmp_path / "index" / "20261121015425127"
    index.parent.mkdir()
    index.write_bytes(bytes(84040))
    with pytest.raises(ConfigError, match="--broker-conf"):
        plan(tmp_path, store=tmp_path / "dledger-n0", indexes=tmp_path / "out")
    conf = tmp_path / "broker.conf"
    conf.write_text("maxHashSlotNum=1000\nmaxIndexNum=4000\n")
    found = plan(tmp_path, store=tmp_path / "dledger-n0", indexes=tmp_path / "out", broker_conf=conf)
    assert found.index_size is not None
    assert found.index_size.bytes == 84040
    with pytest.raises(ConfigError, match="contains files"):
        plan(tmp_path, store=tmp_path / "dledger-n0", indexes=tmp_path, broker_conf=conf)
