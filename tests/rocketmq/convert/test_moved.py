"""Logs whose entries get new indexes and positions: CommitLogs, mixed logs, and native logs for Java."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dledger_core import control
from dledger_core.config import StorageConfig
from dledger_core.control import column_crc
from dledger_core.errors import ConfigError
from dledger_core.ids import Index, Term
from dledger_core.raft.ready import HardState
from dledger_core.record import Columns, ProposedBatch
from dledger_core.rocketmq import decode_messages, encode_messages
from dledger_core.storage import CommitLog
from tests.rocketmq.convert.stores import converted, entries, rows_of, snapshot
from tests.rocketmq.golden import MIXED, REUSED, THREE, extract, messages


def offsets_of(body: bytes) -> tuple[int, int]:
    """Queue offset and physical offset of a message."""
    return struct.unpack_from(">qq", body, 20)


def map_of(store: Path) -> list[dict[str, Any]]:
    return json.loads((store / "meta/index-map.json").read_text())["ranges"]


def assert_moved(rows: list[dict[str, Any]], old: list[bytes]) -> None:
    """The physical offsets are those of the new positions; no other byte has changed."""
    for row, message in zip(rows, old, strict=True):
        assert offsets_of(row["body"]) == (offsets_of(message)[0], row["position"] + 48)
        assert (row["body"][:28], row["body"][36:]) == (message[:28], message[36:])


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["A", "B"])
@pytest.mark.parametrize("what", ["commitlog", "mixed", "mixed by option"])
def test_converted_messages_have_new_physical_offsets(tmp_path: Path, mixed: Path, what: str, profile: str) -> None:
    source, options = {
        "commitlog": (mixed / "commitlog", {}),
        "mixed": (mixed, {}),
        "mixed by option": (mixed / "dledger-n0", {"commitlog": mixed / "commitlog"}),
    }[what]
    before, new, count = snapshot(mixed), tmp_path / "new", 325 if what == "commitlog" else 588
    report = converted(source, new, profile=profile, index_segment_bytes=4096, **options)
    assert snapshot(mixed) == before
    assert (report.entries, report.messages_moved, report.messages_odd) == (count, count, 0)
    assert report.kind == ("classic" if what == "commitlog" else "mixed")
    rows = rows_of(new)
    assert [(row["index"], row["magic"], row["term"]) for row in rows] == [(n, 1, 0) for n in range(count)]
    assert_moved(rows, list(messages(MIXED).values())[:count])
    ranges = [(each["part"], each["start"], each["end"], each["new_start"], each["position"]) for each in map_of(new)]
    assert ranges == [("commitlog", 0, 325, 0, 0), ("log", 0, 263, 325, 262144)][: 1 if what == "commitlog" else 2]
    meta = json.loads((new / "meta/log.json").read_text())
    assert (meta["broker_end_index"], meta["first_index"], meta["first_position"]) == (count, 0, 0)


@pytest.mark.parametrize("name", [THREE, REUSED])
def test_broker_log_in_place_keeps_every_byte(tmp_path: Path, name: str) -> None:
    store = extract(name, "n0/dledger-n0", tmp_path)
    report = converted(store.parent, tmp_path / "new", index_segment_bytes=1 << 20)
    assert (report.kind, report.moved, report.renumbered, report.messages_moved) == ("java-a", False, False, 0)
    assert report.messages == report.entries == len(messages(name))
    assert {row["position"] + 48: row["body"] for row in rows_of(tmp_path / "new")} == messages(name)


def test_other_segment_size_moves_messages(tmp_path: Path) -> None:
    store, old = extract(REUSED, "n0/dledger-n0", tmp_path), list(messages(REUSED).values())
    report = converted(store, tmp_path / "new", data_segment_bytes=50_000, index_segment_bytes=4096)
    assert (report.moved, report.renumbered, report.messages_moved) == (True, False, 229)
    assert_moved(rows_of(tmp_path / "new"), old)
    opaque = converted(store, tmp_path / "opaque", data_segment_bytes=50_000, messages=False)
    assert (opaque.moved, opaque.messages) == (True, 0)
    assert [row["body"] for row in rows_of(tmp_path / "opaque")] == old


class OwnLog:
    """A native log, written batch by batch."""

    def __init__(self, path: Path) -> None:
        self.path = path
        config = StorageConfig(data_segment_bytes=1 << 16, index_segment_bytes=4096)
        self.log = CommitLog.open(path, group="g", node_id="n0", config=config)
        self.term = Term(self.log.hard_state.term + 1)
        self.log.persist(HardState(self.term, None), None, [])

    def append(self, bodies: list[bytes], **fields: object) -> int:
        columns = Columns.from_bodies(bodies)
        body = None
        if fields:
            body = (
                b""
                if fields.get("k") == "noop"
                else control.pack({"c": column_crc(columns.crcs)} | fields if "n" in fields else fields)
            )
        first = self.log.last_index() + 1
        batch = self.log.place(ProposedBatch(columns, control=body), Index(first), self.term, 5000 + first)
        self.log.persist(None, None, [batch])
        return first

    def part_of(self, control_index: int, rows: int) -> list[int]:
        records = self.log.read(control_index + 1, control_index + 1 + rows, 1 << 20)
        crc = column_crc(np.asarray(records.headers["crc"], np.uint32))
        return [control_index + 1, control_index + rows, rows, crc]

    def close(self) -> Path:
        self.log.close(self.log.last_index())
        return self.path


def message_bodies(count: int, topic: str = "t", sys_flag: int = 0) -> list[bytes]:
    queues = [number % 2 for number in range(count)]
    bodies = [b"body %d" % number for number in range(count)]
    return encode_messages(topic, queues, bodies, sys_flag=sys_flag).to_pylist()


def test_native_log_converts_to_broker_log(tmp_path: Path) -> None:
    """Control entries and orphaned attempts are dropped; messages get queue offsets."""
    own = OwnLog(tmp_path / "dledger-n0")
    attempt = {"k": "attempt", "q": "q", "b": 0, "r": "r"}
    own.append([], k="log", u="0" * 32)
    first = own.append(message_bodies(5))
    own.append([], k="noop")
    own.append(message_bodies(3, "lost"), **attempt, a="1", n=3)
    won = own.append(message_bodies(4), **attempt, a="2", n=4)
    opaque = own.append([b"no message", b"", b"x" * 5000])
    own.append([], k="commit", q="q", b=0, r="r", parts=[own.part_of(won, 4)])
    own.append(message_bodies(2, "open"), **attempt | {"b": 1}, a="3", n=2)
    half = own.append(message_bodies(1, sys_flag=4))
    last = own.append(message_bodies(2))
    source = own.close()
    before = snapshot(source)
    report = converted(source, tmp_path / "new", profile="A", drop_open=True)
    assert snapshot(source) == before
    assert (report.control_dropped, report.hidden_dropped, report.entries) == (6, 5, 15)
    assert (report.renumbered, report.messages_moved) == (True, 12)
    old = {row["index"]: row["body"] for row in rows_of(source)}
    kept = [*range(first, first + 5), *range(won + 1, won + 5), *range(opaque, opaque + 3), half, last, last + 1]
    rows = rows_of(tmp_path / "new")
    offsets: dict[int, int] = {}
    for number, (row, index) in enumerate(zip(rows, kept, strict=True)):
        body, was = row["body"], old[index]
        assert (row["index"], row["magic"], row["timestamp"]) == (number, 1, None)
        if opaque <= index < opaque + 3:
            assert body == was
            continue
        queue = struct.unpack_from(">i", was, 12)[0]
        wanted = 0 if index == half else offsets.get(queue, 0)
        if index != half:
            offsets[queue] = wanted + 1
        assert offsets_of(body) == (wanted, row["position"] + 48)
        assert (body[:20], body[36:]) == (was[:20], was[36:])
    assert [index for run in map_of(tmp_path / "new") for index in range(run["start"], run["end"])] == kept
    checkpoint = (tmp_path / "new/checkpoint").read_text()
    assert checkpoint == f"committedIndex={len(kept) - 1}\nendIndex={len(kept) - 1}\n"


@pytest.mark.parametrize("dry_run", [True, False])
def test_convert_rejects_open_transaction_for_profile_a(tmp_path: Path, dry_run: bool) -> None:
    own = OwnLog(tmp_path / "dledger-n0")
    own.append([b"a"])
    own.append([b"b"], k="attempt", q="query-7", b=3, r="r", a="1", n=1)
    source = own.close()
    with pytest.raises(ConfigError) as caught:
        converted(source, tmp_path / "new", profile="A", dry_run=dry_run)
    assert caught.value.values == {"query_id": "query-7", "batch_id": 3, "index": 1}
    assert converted(source, tmp_path / "kept", profile="B").entries == 3
    assert converted(source, tmp_path / "dropped", profile="A", drop_open=True).entries == 1


def test_broker_queue_offsets_survive_native_log(tmp_path: Path) -> None:
    """From a broker to a native log and back: the broker's offsets stay, new ones continue after them."""
    converted(extract(REUSED, "n0/dledger-n0", tmp_path), tmp_path / "ours", index_segment_bytes=4096)
    old = list(messages(REUSED).values())
    queues = [tuple(row.values()) for row in decode_messages(pa.array(old), ["topic", "queue_id"]).to_pylist()]
    topic, queue = queues[0]
    own = OwnLog(tmp_path / "ours")
    own.append([], k="noop")
    own.append(encode_messages(topic, [queue] * 3, [b"a", b"b", b"c"]).to_pylist())
    converted(own.close(), tmp_path / "back", profile="A")
    bodies = [row["body"] for row in rows_of(tmp_path / "back")]
    assert [body[:28] for body in bodies[: len(old)]] == [body[:28] for body in old]
    highest = max(offsets_of(body)[0] for body, each in zip(old, queues, strict=True) if each == queues[0])
    assert [offsets_of(body)[0] for body in bodies[len(old) :]] == [highest + 1, highest + 2, highest + 3]


def test_native_log_is_copied_for_another_node(tmp_path: Path) -> None:
    own = OwnLog(tmp_path / "dledger-n0")
    own.append([b"a"] * 3, k="log", u="ab" * 16)
    own.log.adopt_uuid("ab" * 16)
    own.append([b"x" * 700] * 200, k="producer", p="p", e=0, s=0, n=200)
    source = own.close()
    report = converted(source, tmp_path / "new", self_id="n2")
    assert (report.moved, report.renumbered, report.log_uuid) == (False, False, "ab" * 16)
    assert rows_of(tmp_path / "new") == rows_of(source)
    other = converted(source, tmp_path / "other", group="h")
    assert other.log_uuid not in {None, "ab" * 16}
    log = CommitLog.open(tmp_path / "new", group="g", node_id="n2")
    assert (log.commit_index, log.log_uuid, log.last_index()) == (204, "ab" * 16, 204)
    log.close()


def test_dry_run_reports_the_same_without_writing(tmp_path: Path, classic: Path) -> None:
    planned = converted(classic, tmp_path / "new", dry_run=True)
    assert not (tmp_path / "new").exists()
    report = converted(classic, tmp_path / "new")
    same = ("entries", "body_bytes", "messages_moved", "log_uuid", "last_index", "renumbered", "moved", "commit_index")
    assert [getattr(planned, name) for name in same] == [getattr(report, name) for name in same]
    assert (planned.digest, planned.dry_run) == ("", True)


def test_empty_store_converts_to_empty_store(tmp_path: Path) -> None:
    CommitLog.open(tmp_path / "dledger-n0", group="g", node_id="n0").close()
    report = converted(tmp_path / "dledger-n0", tmp_path / "new", self_id="n1")
    assert (report.entries, report.last_index) == (0, -1)
    CommitLog.open(tmp_path / "new", group="g", node_id="n1").close()
    assert entries(tmp_path / "new") == []
