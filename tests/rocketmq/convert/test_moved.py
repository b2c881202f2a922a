"""Logs whose entries get new indexes and positions: CommitLogs, mixed logs, and native logs for Java."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from dledger_core import control
from dledger_core.config import StorageConfig
from dledger_core.control import column_crc
from dledger_core.errors import ConfigError
from dledger_core.ids import Index, Term
from dledger_core.raft.ready import HardState
from dledger_core.record import Columns, ProposedBatch
from dledger_core.rocketmq import encode_messages
from dledger_core.storage import CommitLog, open_store
from tests.rocketmq.convert.stores import converted, entries, snapshot
from tests.rocketmq.golden import MIXED, REUSED, THREE, extract, messages

PHYSICAL = slice(28, 36)


def rows_of(store: Path) -> list[dict]:
    with open_store(store) as reader:
        assert reader.verify().findings == ()
        return reader.read(reader.first_index, reader.last_index + 1, max_bytes=1 << 30).to_pylist()


def map_of(store: Path) -> list[dict]:
    return json.loads((store / "meta/index-map.json").read_text())["ranges"]


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["A", "B"])
@pytest.mark.parametrize("what", ["commitlog", "mixed", "mixed by option"])
def test_converted_messages_have_new_physical_offsets(tmp_path: Path, what: str, profile: str) -> None:
    classic = extract(MIXED, "n0/commitlog", tmp_path)
    store = extract(MIXED, "n0/dledger-n0", tmp_path)
    before = snapshot(tmp_path / MIXED)
    new = tmp_path / "new"
    options = {"profile": profile, "index_segment_bytes": 4096}
    if what == "commitlog":
        report = converted(classic, new, **options)
    elif what == "mixed":
        report = converted(store.parent, new, **options)
    else:
        report = converted(store, new, commitlog=classic, **options)
    assert snapshot(tmp_path / MIXED) == before
    old = messages(MIXED)
    count = 325 if what == "commitlog" else 588
    wanted = list(old.items())[:count]
    assert (report.entries, report.messages_moved, report.messages_odd) == (count, count, 0)
    assert report.kind == ("classic" if what == "commitlog" else "mixed")
    rows = rows_of(new)
    assert len(rows) == count
    for number, (row, (position, message)) in enumerate(zip(rows, wanted, strict=True)):
        body = row["body"]
        assert (row["index"], row["magic"], row["term"]) == (number, 1, 0)
        assert struct.unpack(">q", message[PHYSICAL])[0] == position
        assert struct.unpack(">q", body[PHYSICAL])[0] == row["position"] + 48
        assert (body[:28], body[36:]) == (message[:28], message[36:])
    runs = map_of(new)
    assert [(run["part"], run["start"], run["end"], run["new_start"]) for run in runs] == [
        ("commitlog", 0, 325, 0),
        ("log", 0, 263, 325),
    ][: 1 if what == "commitlog" else 2]
    assert [run["position"] for run in runs] == [0, 262144][: len(runs)]
    meta = json.loads((new / "meta/log.json").read_text())
    assert (meta["broker_end_index"], meta["first_index"], meta["first_position"]) == (count, 0, 0)


@pytest.mark.parametrize("name", [THREE, REUSED])
def test_broker_log_in_place_keeps_every_byte(tmp_path: Path, name: str) -> None:
    store = extract(name, "n0/dledger-n0", tmp_path)
    report = converted(store.parent, tmp_path / "new", index_segment_bytes=1 << 20)
    assert (report.kind, report.moved, report.renumbered, report.messages) == ("java-a", False, False, 0)
    assert {row["position"] + 48: row["body"] for row in rows_of(tmp_path / "new")} == messages(name)


def test_other_segment_size_moves_messages(tmp_path: Path) -> None:
    store = extract(REUSED, "n0/dledger-n0", tmp_path)
    report = converted(store, tmp_path / "new", data_segment_bytes=50_000, index_segment_bytes=4096)
    assert (report.moved, report.renumbered, report.messages_moved) == (True, False, 229)
    for row, (_, message) in zip(rows_of(tmp_path / "new"), messages(REUSED).items(), strict=True):
        assert struct.unpack(">q", row["body"][PHYSICAL])[0] == row["position"] + 48
        assert (row["body"][:28], row["body"][36:]) == (message[:28], message[36:])
    opaque = converted(store, tmp_path / "opaque", data_segment_bytes=50_000, messages=False)
    assert (opaque.moved, opaque.messages) == (True, 0)
    assert [row["body"] for row in rows_of(tmp_path / "opaque")] == list(messages(REUSED).values())


class OwnLog:
    """A native log, written batch by batch."""

    def __init__(self, path: Path, segment: int = 1 << 16) -> None:
        config = StorageConfig(data_segment_bytes=segment, index_segment_bytes=4096)
        self.path = path
        self.log = CommitLog.open(path, group="g", node_id="n0", config=config)
        self.log.persist(HardState(Term(1), None), None, [])

    def append(self, bodies: list[bytes], **fields: object) -> int:
        columns = Columns.from_bodies(bodies)
        body = None
        if fields:
            body = b"" if fields.get("k") == "noop" else control.pack(fields | {"c": column_crc(columns.crcs)})
        first = self.log.last_index() + 1
        batch = self.log.place(ProposedBatch(columns, control=body), Index(first), Term(1), 5000 + first)
        self.log.persist(None, None, [batch])
        return first

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
    own.append([], k="log", u="0" * 32)
    first = own.append(message_bodies(5))
    own.append([], k="noop")
    lost = own.append(message_bodies(3, "lost"), k="attempt", q="q", b=0, r="r", a="1", n=3)
    won = own.append(message_bodies(4), k="attempt", q="q", b=0, r="r", a="2", n=4)
    opaque = own.append([b"no message", b"", b"x" * 5000])
    own.append([], k="commit", q="q", b=0, r="r", parts=[list(part_of(own, won, 4))])
    pending = own.append(message_bodies(2, "open"), k="attempt", q="q", b=1, r="r", a="3", n=2)
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
        assert struct.unpack_from(">qq", body, 20) == (wanted, row["position"] + 48)
        assert (body[:20], body[36:]) == (was[:20], was[36:])
    covered = [index for run in map_of(tmp_path / "new") for index in range(run["start"], run["end"])]
    assert covered == kept
    assert not {lost + 1, pending + 1} & set(covered)
    checkpoint = (tmp_path / "new/checkpoint").read_text()
    assert checkpoint == f"committedIndex={len(kept) - 1}\nendIndex={len(kept) - 1}\n"


@pytest.mark.parametrize("dry_run", [True, False])
def test_convert_rejects_open_transaction_for_profile_a(tmp_path: Path, dry_run: bool) -> None:
    own = OwnLog(tmp_path / "dledger-n0")
    own.append([b"a"])
    own.append([b"b"], k="attempt", q="query-7", b=3, r="r", a="1", n=1)
    source = own.close()
    with pytest.raises(ConfigError, match="query-7") as caught:
        converted(source, tmp_path / "new", profile="A", dry_run=dry_run)
    assert caught.value.values == {"query_id": "query-7", "batch_id": 3, "index": 1}
    assert converted(source, tmp_path / "kept", profile="B").entries == 3
    assert converted(source, tmp_path / "dropped", profile="A", drop_open=True).entries == 1


def part_of(own: OwnLog, control_index: int, rows: int) -> tuple[int, int, int, int]:
    records = own.log.read(control_index + 1, control_index + 1 + rows, 1 << 20)
    crc = column_crc(np.asarray(records.headers["crc"], np.uint32))
    return control_index + 1, control_index + rows, rows, crc


def test_broker_queue_offsets_survive_native_log(tmp_path: Path) -> None:
    """From a broker to a native log and back: the broker's offsets stay, new ones continue after them."""
    store = extract(REUSED, "n0/dledger-n0", tmp_path)
    converted(store, tmp_path / "ours", index_segment_bytes=4096)
    log = CommitLog.open(tmp_path / "ours", group="g", node_id="n0")
    term = Term(log.hard_state.term + 1)
    log.persist(HardState(term, None), None, [])
    topic, queue = topic_of(messages(REUSED))
    fresh = encode_messages(topic, [queue] * 3, [b"a", b"b", b"c"]).to_pylist()
    for bodies, body in (([], b""), (fresh, None)):
        batch = log.place(
            ProposedBatch(Columns.from_bodies(bodies), control=body), Index(log.last_index() + 1), term, 1
        )
        log.persist(None, None, [batch])
    log.close()
    converted(tmp_path / "ours", tmp_path / "back", profile="A")
    rows = rows_of(tmp_path / "back")
    old = list(messages(REUSED).values())
    assert [row["body"][:28] for row in rows[: len(old)]] == [body[:28] for body in old]
    highest = max(offset_of(body) for body in old if (topic, queue) == queue_of(body))
    assert [offset_of(row["body"]) for row in rows[len(old) :]] == [highest + 1, highest + 2, highest + 3]


def offset_of(body: bytes) -> int:
    return struct.unpack_from(">q", body, 20)[0]


def queue_of(body: bytes) -> tuple[str, int]:
    import pyarrow as pa

    from dledger_core.rocketmq import decode_messages

    row = decode_messages(pa.array([body]), ["topic", "queue_id"]).to_pylist()[0]
    return row["topic"], row["queue_id"]


def topic_of(found: dict[int, bytes]) -> tuple[str, int]:
    return queue_of(next(iter(found.values())))


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
    assert (log.commit_index, log.log_uuid, log.last_index()) == (203 + 1, "ab" * 16, 204)
    log.close()


def test_dry_run_reports_the_same_without_writing(tmp_path: Path) -> None:
    classic = extract(MIXED, "n0/commitlog", tmp_path)
    planned = converted(classic, tmp_path / "new", dry_run=True)
    assert not (tmp_path / "new").exists()
    report = converted(classic, tmp_path / "new")
    same = ("entries", "body_bytes", "messages_moved", "log_uuid", "last_index", "renumbered", "moved", "commit_index")
    assert [getattr(planned, name) for name in same] == [getattr(report, name) for name in same]
    assert (planned.digest, planned.dry_run) == ("", True)


def test_empty_store_converts_to_empty_store(tmp_path: Path) -> None:
    config = StorageConfig(data_segment_bytes=4096, index_segment_bytes=1024)
    CommitLog.open(tmp_path / "dledger-n0", group="g", node_id="n0", config=config).close()
    report = converted(tmp_path / "dledger-n0", tmp_path / "new", self_id="n1")
    assert (report.entries, report.last_index) == (0, -1)
    log = CommitLog.open(tmp_path / "new", group="g", node_id="n1")
    assert log.last_index() == -1
    log.close()
    assert entries(tmp_path / "new") == []
