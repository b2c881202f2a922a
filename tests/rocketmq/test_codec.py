"""Properties of the codec: round trips, garbage, and agreement with a plain reading of the format."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dledger_core.errors import BadRequestError
from dledger_core.rocketmq import (
    CONSUME_QUEUE_SCHEMA,
    MESSAGE_SCHEMA,
    consume_queue_columns,
    decode_messages,
    encode_messages,
    java_hash,
    tags_code,
)
from dledger_core.rocketmq.message.columns import pack_host
from dledger_core.rocketmq.message.layout import QUEUE_FIELDS_SCHEMA

TESTDATA = Path(__file__).parent / "testdata"
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x00\x01\x02"), min_size=1, max_size=20)
VALUE = st.text(st.characters(codec="utf-8", exclude_characters="\x02"), min_size=1, max_size=20)
PROPERTIES = st.dictionaries(TEXT.filter(lambda name: name not in {"TAGS", "KEYS"}), VALUE, max_size=4)
HOST = st.sampled_from(["127.0.0.1:10911", "0.0.0.0:0", "255.1.2.3:65535", "[::1]:7", "[2001:db8::ff]:31221"])
INT64 = st.integers(-(2**63), 2**63 - 1)
INT32 = st.integers(-(2**31), 2**31 - 1)
MESSAGE = st.fixed_dictionaries(
    {
        "topic": st.one_of(TEXT, st.just("t" * 127), st.just("t" * 128), st.just("主题" * 40)),
        "queue_id": INT32,
        "body": st.binary(max_size=60),
        "tags": st.none() | VALUE,
        "keys": st.none() | VALUE,
        "properties": PROPERTIES,
        "flag": INT32,
        "sys_flag": st.sampled_from([0, 2, 4, 8, 12, 0x40]),
        "queue_offset": INT64,
        "physical_offset": INT64,
        "born_timestamp": st.integers(0, 4_000_000_000_000),
        "born_host": HOST,
        "store_timestamp": st.integers(0, 4_000_000_000_000),
        "store_host": HOST,
        "reconsume_times": INT32,
        "prepared_transaction_offset": INT64,
    }
)


def columns_of(rows: list[dict]) -> dict:
    return {name: [row[name] for row in rows] for name in rows[0]}


def java_hash_of(text: str) -> int:
    value = 0
    units = text.encode("utf-16-be")
    for (unit,) in struct.iter_unpack(">H", units):
        value = (31 * value + unit) & 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def parsed(text: str) -> dict[str, str]:
    """RocketMQ's parser, read off its source."""
    found, at = {}, 0
    while at < len(text):
        end = text.find("\x02", at)
        end = len(text) if end < 0 else end
        if end - at >= 3:
            middle = text.find("\x01", at)
            if at < middle < end - 1:
                found[text[at:middle]] = text[middle + 1 : end]
        at = end + 1
    return found


def with_properties(text: bytes, body: bytes = b"b", sys_flag: int = 0, topic: bytes = b"T") -> bytes:
    """A record made by hand, field by field."""
    content = struct.pack(">iiiqqiq", zlib.crc32(body) & 0x7FFFFFFF, 1, 0, 0, 0, sys_flag, 0)
    content += bytes([127, 0, 0, 1, 0, 0, 0, 9]) + struct.pack(">q", 1000) + bytes([127, 0, 0, 1, 0, 0, 0, 9])
    content += struct.pack(">iqi", 0, 0, len(body)) + body + bytes([len(topic)]) + topic
    content += struct.pack(">h", len(text)) + text
    return struct.pack(">ii", len(content) + 8, -626843481) + content


@settings(max_examples=60, deadline=None)
@given(st.lists(MESSAGE, min_size=1, max_size=8))
def test_encoded_messages_decode(rows: list[dict]) -> None:
    bodies = encode_messages(**columns_of(rows))
    batch = decode_messages(bodies)
    assert batch.schema.equals(MESSAGE_SCHEMA)
    for row, record, back in zip(rows, bodies.to_pylist(), batch.to_pylist(), strict=True):
        assert back["error"] is None
        for name in ("topic", "queue_id", "body", "tags", "keys", "flag", "queue_offset", "physical_offset"):
            assert back[name] == row[name]
        for name in ("born_host", "store_host", "reconsume_times", "prepared_transaction_offset"):
            assert back[name] == row[name]
        offset = struct.pack(">q", row["physical_offset"])
        assert back["msg_id"] == (pack_host(row["store_host"]) + offset).hex().upper()
        assert back["sys_flag"] & 0xF == row["sys_flag"] & 0xF
        assert back["body_crc"] == zlib.crc32(row["body"]) & 0x7FFFFFFF
        assert back["store_size"] == len(record)
        named = {"KEYS": row["keys"], "TAGS": row["tags"]}
        assert dict(back["properties"]) == row["properties"] | {k: v for k, v in named.items() if v is not None}
        wide = len(row["topic"].encode()) > 127
        assert struct.unpack_from(">i", record, 4)[0] == (-626843477 if wide else -626843481)


@st.composite
def changed_bodies(draw: st.DrawFn) -> bytes:
    """A message record with some other bytes, perhaps truncated."""
    body = bytearray(encode_messages(**columns_of([draw(MESSAGE)]))[0].as_py())
    for _ in range(draw(st.integers(0, 4))):
        body[draw(st.integers(0, len(body) - 1))] = draw(st.integers(0, 255))
    return bytes(body[: draw(st.integers(0, len(body)))] if draw(st.booleans()) else body)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.lists(st.none() | st.binary(max_size=200) | changed_bodies(), max_size=6))
def test_damaged_records_are_rows_with_an_error(bodies: list[bytes | None]) -> None:
    column = pa.array(bodies, pa.binary())
    for batch in (decode_messages(column), consume_queue_columns(column)):
        assert batch.num_rows == len(bodies)
        batch.validate(full=True)
        for body, row in zip(bodies, batch.to_pylist(), strict=True):
            assert row["error"] is not None or (body is not None and row["topic"] is not None)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.text("abTAGSé\x01\x02", max_size=40), min_size=1, max_size=5))
def test_properties_are_parsed_as_rocketmq_does(texts: list[str]) -> None:
    batch = decode_messages(pa.array([with_properties(text.encode()) for text in texts]))
    for text, row in zip(texts, batch.to_pylist(), strict=True):
        expected = parsed(text)
        assert dict(row["properties"]) == expected
        assert len(row["properties"]) == len(expected)
        assert row["tags"] == expected.get("TAGS")


@pytest.mark.parametrize("kinds", [1, 2, 31, 32, 33, 40])
@pytest.mark.parametrize("again", [0, 1, 2])
def test_last_of_equal_property_names_is_used(kinds: int, again: int) -> None:
    pairs = [(f"n{number}", f"v{number}") for number in range(kinds)]
    pairs += [(f"n{kinds - 1}", f"later{number}") for number in range(again)]
    text = "".join(f"{name}\x01{value}\x02" for name, value in pairs).encode()
    rows = [b"", text, b"n0\x01alone\x02", text]
    found = decode_messages(pa.array([with_properties(row) for row in rows]), ["properties"]).column(0).to_pylist()
    assert [dict(row) for row in found] == [{}, dict(pairs), {"n0": "alone"}, dict(pairs)]
    assert [len(row) for row in found] == [0, kinds, 1, kinds]


@pytest.mark.parametrize(
    ("text", "tags", "keys"),
    [
        (b"TAGS\x01a\x02TAGS\x01b\x02", "b", None),
        (b"TAGS\x01a\x02KEYS\x01k", "a", "k"),
        (b"TAGS\x01\x02KEYS\x01", None, None),
        (b"XTAGS\x01a\x02TAGSX\x01b\x02", None, None),
        (b"\x02\x02TAGS\x01\x01\x02", "\x01", None),
        (b"TAGS", None, None),
        (b"TAGS\x01\xff\x02", "�", None),
    ],
)
def test_tags_and_keys(text: bytes, tags: str | None, keys: str | None) -> None:
    (row,) = decode_messages(pa.array([with_properties(text)]), ["tags", "keys"]).to_pylist()
    assert (row["tags"], row["keys"]) == (tags, keys)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.none() | st.text(max_size=30), max_size=8))
def test_java_hash(texts: list[str | None]) -> None:
    column = pa.array(["padding", *texts], pa.string())[1:]
    assert java_hash(column).tolist() == [0 if text is None else java_hash_of(text) for text in texts]


def test_tags_codes_seen_in_java() -> None:
    texts = pa.array(["TagA", "TagB", "a", "中文", "polygenelubricants", None, ""])
    assert tags_code(texts).to_pylist() == [2598919, 2598920, 97, 646394, -2147483648, 0, 0]


def test_tags_that_are_not_utf8_are_read_and_hashed_as_in_java() -> None:
    lines = (TESTDATA / "java-strings.txt").read_text(encoding="ascii").splitlines()[1:]
    rows = [line.split(" ") for line in lines]
    tags = [bytes.fromhex(row[0]) for row in rows]
    records = pa.array(
        [with_properties(b"KEYS\x01k\x02TAGS\x01" + tag + end) for tag in tags for end in (b"", b"\x02")]
    )
    found = decode_messages(records, ["tags", "tags_code"])
    texts = [bytes.fromhex(row[1]).decode("utf-16-be") for row in rows for _ in range(2)]
    assert found["tags"].to_pylist() == texts
    assert found["tags_code"].to_pylist() == [int(row[2]) for row in rows for _ in range(2)]
    assert consume_queue_columns(records)["tags_code"] == found["tags_code"]


@pytest.mark.parametrize(
    ("level", "topic", "expected"),
    [
        ("1", "SCHEDULE_TOPIC_XXXX", 1000 + 1000),
        ("18", "SCHEDULE_TOPIC_XXXX", 1000 + 7_200_000),
        ("25", "SCHEDULE_TOPIC_XXXX", 1000 + 7_200_000),
        ("0", "SCHEDULE_TOPIC_XXXX", 97),
        ("-3", "SCHEDULE_TOPIC_XXXX", 97),
        ("x", "SCHEDULE_TOPIC_XXXX", 97),
        ("1", "SCHEDULE_TOPIC_XXXY", 97),
    ],
)
def test_delayed_messages(level: str, topic: str, expected: int) -> None:
    record = encode_messages(topic, 0, [b""], "a", properties={"DELAY": level}, store_timestamp=1000)
    assert consume_queue_columns(record)["tags_code"].to_pylist() == [expected]


@pytest.mark.parametrize(
    ("codec", "kind"), [("zlib", 0x000), ("zlib", 0x300), ("lz4", 0x100), ("zstd", 0x200)], ids=str
)
def test_compressed_bodies(codec: str, kind: int) -> None:
    body = b"some text, " * 500
    if codec == "zlib":
        packed = zlib.compress(body)
    else:
        sink = pa.BufferOutputStream()
        with pa.CompressedOutputStream(sink, codec) as stream:
            stream.write(body)
        packed = sink.getvalue().to_pybytes()
    good = with_properties(b"", packed, 1 | kind)
    cut = with_properties(b"", packed[: len(packed) // 2], 1 | kind)
    wrong = with_properties(b"", b"not compressed", 1 | kind)
    rows = decode_messages(pa.array([with_properties(b"", b"plain"), wrong, good, cut])).to_pylist()
    assert [row["body"] for row in rows] == [b"plain", None, body, None]
    assert [row["error"] is None for row in rows] == [True, False, True, False]
    assert rows[1]["topic"] == "T"


@pytest.mark.parametrize("decode", [decode_messages, consume_queue_columns])
def test_error_names_a_damaged_body_where_the_body_is_not_read(decode: Callable[..., pa.RecordBatch]) -> None:
    good = with_properties(b"", b"plain")
    rows = decode(pa.array([good, good.replace(b"plain", b"plein"), b"other"]), ["topic", "error"]).to_pylist()
    assert [(row["topic"], row["error"] is None) for row in rows] == [("T", True), ("T", False), (None, False)]


def test_unknown_compression_and_bombs_are_errors() -> None:
    bomb = zlib.compress(bytes(70 << 20))
    column = pa.array([with_properties(b"", b"x", 0x701), with_properties(b"", bomb, 1)])
    batch = decode_messages(column, ["body", "error"])
    assert (batch["body"].null_count, batch["error"].null_count) == (2, 0)


def test_columns_sliced_chunked_large_and_empty() -> None:
    bodies = encode_messages("T", [0, 1, 2], [b"a", b"b", b"c"], ["x", None, "z"])
    whole = decode_messages(bodies)
    assert decode_messages(bodies[1:]).equals(whole.slice(1))
    assert decode_messages(bodies.cast(pa.large_binary())).equals(whole)
    assert decode_messages(pa.chunked_array([bodies[:1], bodies[1:]])).equals(whole)
    assert decode_messages(bodies[:0]).num_rows == 0
    assert consume_queue_columns(pa.array([], pa.binary())).schema.equals(CONSUME_QUEUE_SCHEMA)
    some = decode_messages(bodies, ["tags", "queue_id"])
    assert some.schema.names == ["tags", "queue_id"]
    assert len(encode_messages("T", 0, [])) == 0


@pytest.mark.parametrize("others", [[], ["topic"], ["keys", "tags_code"]], ids=",".join)
def test_further_queues_are_found_whatever_else_is_read(others: list[str]) -> None:
    lists = [("INNER_MULTI_DISPATCH", "%LMQ%a,b"), ("INNER_MULTI_QUEUE_OFFSET", "5,6")]
    properties = [[("a", "INNER_MULTI")], lists, [*lists[:1], ("z", "y")], None]
    bodies = encode_messages("T", 0, [b"INNER_MULTI_DISPATCH"] * 4, "tag", "key", properties)
    names = ["dispatch_queues", "dispatch_offsets"]
    found = consume_queue_columns(bodies, [*others, *names])
    assert found.column(names[0]).to_pylist() == [None, "%LMQ%a,b", "%LMQ%a,b", None]
    assert found.column(names[1]).to_pylist() == [None, "5,6", None, None]
    none = consume_queue_columns(bodies.take(pa.array([0, 3])), [*others, *names])
    assert [none.column(name).null_count for name in names] == [2, 2]


@given(st.lists(st.one_of(MESSAGE, st.binary(max_size=100)), max_size=6), st.integers(0, 60))
def test_decode_skips_bytes_before_message(given_rows: list[dict | bytes], skip: int) -> None:
    bodies = [row if isinstance(row, bytes) else encode_messages(**columns_of([row]))[0].as_py() for row in given_rows]
    shifted = pa.array([*(b"\xff" * skip + body for body in bodies), b"s" * max(0, skip - 1), None], pa.binary())
    expected = consume_queue_columns(pa.array([*bodies, b"", None], pa.binary()), QUEUE_FIELDS_SCHEMA.names)
    assert consume_queue_columns(shifted, QUEUE_FIELDS_SCHEMA.names, skip_bytes=skip).equals(expected)


@pytest.mark.parametrize("born", [2**62, -(2**63), 253_402_300_800_000])  # the second's absolute value is not a number
def test_timestamps_out_of_range_are_null(born: int) -> None:
    record = encode_messages("T", 0, [b""], born_timestamp=born, store_timestamp=-1)
    (row,) = decode_messages(record, ["born_timestamp", "store_timestamp"]).to_pylist()
    assert row["born_timestamp"] is None
    assert row["store_timestamp"].timestamp() == -0.001


@pytest.mark.parametrize(
    "given_wrong",
    [
        {"topic": ""},
        {"topic": None},
        {"topic": "t" * 32768},
        {"topic": "a\0b"},
        {"queue_id": 2**31},
        {"sys_flag": 0x800},
        {"queue_id": [1, 2]},
        {"queue_id": "one"},
        {"tags": "a\x02b"},
        {"tags": ""},
        {"properties": {"a\x01b": "c"}},
        {"properties": {"a\0": "b"}},
        {"properties": {"a": "c\x02"}},
        {"properties": {"a": ""}},
        {"properties": {"": "b"}},
        {"properties": {"a": None}},
        {"properties": {"a": "b" * 32767}},
        {"born_host": "localhost:1"},
        {"born_host": "127.0.0.1"},
        {"store_host": "127.0.0.1:65536"},
        {"body": [1.5]},
        {"body": pa.array([1])},
    ],
    ids=lambda wrong: str({name: repr(value)[:30].partition(" object at")[0] for name, value in wrong.items()}),
)
def test_encode_rejects_bad_values(given_wrong: dict) -> None:
    arguments = {"topic": "T", "queue_id": 0, "body": [b"b"]} | given_wrong
    with pytest.raises(BadRequestError):
        encode_messages(**arguments)


@pytest.mark.parametrize(("bodies", "columns"), [(pa.array([1]), None), ([b"x"], None), (pa.array([b"x"]), ["nope"])])
def test_decode_rejects_bad_arguments(bodies: object, columns: list[str] | None) -> None:
    with pytest.raises(BadRequestError):
        decode_messages(bodies, columns)
