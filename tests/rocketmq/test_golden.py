"""The codec against messages and consume queues that RocketMQ itself wrote."""

from __future__ import annotations

import hashlib
import ipaddress

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from dledger_core.rocketmq import consume_queue_columns, decode_messages, encode_messages, encode_units
from tests.rocketmq import golden


@pytest.fixture(scope="module", params=golden.NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def millis(column: pa.Array) -> list[int]:
    return pc.divide(column.cast(pa.int64()), 1000).to_pylist()


def same_host(ours: str, theirs: str) -> bool:
    ours_address, _, ours_port = ours.rpartition(":")
    theirs_address, _, theirs_port = theirs.rpartition("|")
    plain = ours_address.strip("[]")
    return ours_port == theirs_port and ipaddress.ip_address(plain) == ipaddress.ip_address(theirs_address)


def test_golden_fields_equal_oracle(name: str) -> None:
    records = golden.messages(name)
    offsets, batch = list(records), decode_messages(pa.array(list(records.values()), pa.binary()))
    assert batch["error"].null_count == len(offsets) >= 200
    assert batch["physical_offset"].to_pylist() == offsets
    row_of = {offset: row for row, offset in enumerate(offsets)}
    columns = {column: batch[column].to_pylist() for column in batch.schema.names}
    born, stored = millis(batch["born_timestamp"]), millis(batch["store_timestamp"])
    for unit in golden.units(name):
        i = row_of[unit["physicalOffset"]]
        ours = {column: values[i] for column, values in columns.items()}
        assert dict(ours["properties"]) == unit["properties"]
        assert len(dict(ours["properties"])) == len(ours["properties"])
        assert same_host(ours["born_host"], unit["bornHost"])
        assert same_host(ours["store_host"], unit["storeHost"])
        assert (born[i], stored[i]) == (unit["bornTimestamp"], unit["storeTimestamp"])
        assert len(ours["body"]) == unit["bodyLength"]
        assert hashlib.sha256(ours["body"]).hexdigest() == unit["bodySha256"]
        for column, theirs in (
            ("topic", "messageTopic"),
            ("queue_id", "messageQueueId"),
            ("queue_offset", "messageQueueOffset"),
            ("tags", "tags"),
            ("keys", "keys"),
            ("flag", "flag"),
            ("sys_flag", "sysFlag"),
            ("msg_id", "msgId"),
            ("reconsume_times", "reconsumeTimes"),
            ("prepared_transaction_offset", "preparedTransactionOffset"),
            ("physical_offset", "commitLogOffset"),
            ("store_size", "storeSize"),
            ("body_crc", "bodyCRC"),
            ("tags_code", "tagsCode"),
        ):
            assert ours[column] == unit[theirs], column


def test_consume_queue_columns_are_those_of_decode(name: str) -> None:
    bodies = pa.array(list(golden.messages(name).values()), pa.large_binary())
    narrow, wide = consume_queue_columns(bodies), decode_messages(bodies)
    for column in narrow.schema.names:
        assert narrow[column].equals(wide["store_size" if column == "size" else column]), column


@pytest.mark.parametrize(("archive", "node"), [(golden.THREE, "n0"), (golden.THREE, "n2"), (golden.MIXED, "n0")])
def test_units_are_the_brokers_own_bytes(archive: str, node: str) -> None:
    records = golden.messages(archive, node)
    batch = consume_queue_columns(pa.array(list(records.values())))
    table = pa.table(batch).sort_by([("topic", "ascending"), ("queue_id", "ascending"), ("queue_offset", "ascending")])
    on_disk: dict[tuple[str, int], bytes] = {}
    for path, content in golden.members(archive, f"/{node}/consumequeue/").items():
        *_, topic, queue, _ = path.split("/")
        on_disk[topic, int(queue)] = on_disk.get((topic, int(queue)), b"") + content
    queues = set(zip(table["topic"].to_pylist(), table["queue_id"].to_pylist(), strict=True))
    assert queues == set(on_disk)
    for topic, queue in queues:
        rows = table.filter((pc.field("topic") == topic) & (pc.field("queue_id") == queue))
        assert rows["queue_offset"].to_pylist() == list(range(len(rows)))
        ours = encode_units(*(np.asarray(rows[column]) for column in ("physical_offset", "size", "tags_code")))
        theirs = on_disk[topic, queue]
        assert theirs.startswith(ours)
        assert not any(theirs[len(ours) :])


def test_encoding_again_gives_equal_messages(name: str) -> None:
    """All but the bytes of properties (Java's order of a hash map) and stored compression."""
    records = golden.messages(name)
    given = decode_messages(pa.array(list(records.values())))
    plain = pa.array(np.asarray(given["sys_flag"]) & ~0x701)
    computed = {"sys_flag", "msg_id", "store_size", "body_crc", "tags_code", "error", "batch_index"}
    columns = {column: given[column] for column in given.schema.names if column not in computed}
    again = decode_messages(encode_messages(**columns, sys_flag=plain))
    packed = np.asarray(given["sys_flag"]) & 1 == 1
    for column in given.schema.names:
        if column == "properties":
            assert [dict(row) for row in again[column].to_pylist()] == [dict(row) for row in given[column].to_pylist()]
        elif column == "sys_flag":
            assert again[column].equals(plain)
        elif column == "body_crc":
            assert ((np.asarray(again[column]) == np.asarray(given[column])) | packed).all()
        elif column == "store_size":
            continue  # pieces of properties that no reader sees are deleted
        else:
            assert again[column].equals(given[column]), column
