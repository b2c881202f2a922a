"""``decode = message``: filters before decompression, compressed bodies, other bodies, and bounded memory."""

from __future__ import annotations

import zlib
from typing import Any

import pyarrow as pa
import pytest

from dledger_core.rocketmq import encode_messages
from spark_connector.columns import decoded
from spark_connector.errors import DecodeError
from tests.spark_connector.engine import make_batch_reader
from tests.spark_connector.store_writer import StoreWriter

COMPRESSED, LZ4, ZSTD = 0x1, 0x100, 0x200


def rows(store: StoreWriter, **options: Any) -> list[dict[str, Any]]:
    reader = make_batch_reader(store, decode="message", **options)
    return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]


def fill(store: StoreWriter) -> None:
    """Entries 0-7: topics a, b, a, b, ...; tags x, y, none, z; and 8 is not a message."""
    tags = ["x", "y", None, "z"] * 2
    bodies = [f"body-{number}".encode() for number in range(8)]
    store.append(encode_messages(["a", "b"] * 4, 0, bodies, tags=tags).to_pylist())
    store.append([b"other"])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"topics": "a"}, [0, 2, 4, 6]),
        ({"topics": "a, b"}, range(8)),
        ({"topics": '["b"]', "tags": "y"}, [1, 5]),
        ({"tags": "x || y"}, [0, 1, 4, 5]),
        ({"tags": "x,z"}, [0, 3, 4, 7]),
        ({"tags": '["x","z"]', "topics": "b"}, [3, 7]),
        ({"tags": "*"}, range(8)),
        ({"topics": "A"}, []),
        ({"tags": "none such"}, []),
    ],
)
def test_topics_and_tags_filter_messages(store: StoreWriter, options: dict[str, str], expected: Any) -> None:
    fill(store)
    found = rows(store, **options)
    assert [row["index"] for row in found] == [*expected, 8]  # a body that is not a message stays
    assert all(row["body"] == f"body-{row['index']}".encode() for row in found[:-1])
    assert found[-1]["error"]


def test_filtered_message_is_not_decompressed(store: StoreWriter) -> None:
    good = zlib.compress(b"wanted" * 100)
    bodies = [good, b"not zlib at all", good]
    store.append(encode_messages(["a", "b", "a"], 0, bodies, sys_flag=COMPRESSED).to_pylist())
    assert [(row["topic"], row["body"], row["error"]) for row in rows(store, topics="a", onDecodeError="fail")] == [
        ("a", b"wanted" * 100, None)
    ] * 2


def compressed(kind: str, body: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, kind) as stream:
        stream.write(body)
    return sink.getvalue().to_pybytes()


def test_columns_of_messages_with_every_compression(store: StoreWriter) -> None:
    body = b"the same text " * 1000
    stored = [zlib.compress(body), compressed("lz4", body), compressed("zstd", body), body]
    flags = [COMPRESSED, COMPRESSED | LZ4, COMPRESSED | ZSTD, 0]
    encoded = encode_messages(
        "t", 0, stored, keys="k1 k2", properties={"p": "v"}, sys_flag=flags, born_host="10.0.0.1:5",
        store_host="10.0.0.2:10911", physical_offset=4660, queue_offset=9,
    )  # fmt: skip
    store.append(encoded.to_pylist())
    found = rows(store)
    assert [row["body"] for row in found] == [body] * 4
    assert [row["error"] for row in found] == [None] * 4
    for row in found:
        assert dict(row["properties"]) == {"KEYS": "k1 k2", "p": "v"}
        assert (row["born_host"], row["store_host"]) == ("10.0.0.1:5", "10.0.0.2:10911")
        assert row["msg_id"] == "0A00000200002A9F0000000000001234"
        assert (row["keys"], row["queue_offset"]) == ("k1 k2", None)


def test_other_body_fails_query_on_request(store: StoreWriter) -> None:
    fill(store)
    assert len(rows(store, onDecodeError="column")) == 9
    with pytest.raises(DecodeError) as caught:
        rows(store, onDecodeError="fail")
    assert str(caught.value).startswith("[DLEDGER_DECODE] entry 8 ")
    assert caught.value.values["index"] == 8


def test_damaged_compressed_body_is_reported(store: StoreWriter) -> None:
    store.append(encode_messages("t", 3, [b"not zlib"], sys_flag=COMPRESSED).to_pylist())
    [row] = rows(store)
    assert (row["topic"], row["queue_id"], row["body"]) == ("t", 3, None)
    assert "zlib" in row["error"]
    with pytest.raises(DecodeError, match="entry 0 "):
        rows(store, onDecodeError="fail")


def test_compressed_bodies_are_decompressed_in_chunks() -> None:
    body = bytes(300_000)
    messages = encode_messages("t", 0, [zlib.compress(body)] * 40, sys_flag=COMPRESSED)
    batch = pa.RecordBatch.from_pydict({"index": list(range(40)), "body": messages.cast(pa.binary())})
    indexes, before = [], pa.total_allocated_bytes()
    for columns in decoded(batch, ["body"], fail=True, group="g", opened_bytes_max=1 << 20):
        assert pa.total_allocated_bytes() - before < 8 << 20, "not all 12 MB at once"
        assert set(columns["body"].to_pylist()) == {body}
        indexes += columns["index"].to_pylist()
        del columns
    assert indexes == list(range(40))
