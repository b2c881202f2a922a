"""The record codec: both encoders write the same, Java's bytes, positions, checks, Arrow."""

from __future__ import annotations

import struct
import zlib
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dledger_core import checksum
from dledger_core.errors import BadRequestError, CorruptRecordError, InvariantViolationError
from dledger_core.ids import NUMBER_MAX, Index, Term
from dledger_core.raft import Batch
from dledger_core.record import (
    BATCH_END,
    HEADER,
    MAGIC_MEMBERSHIP,
    MUST_UNDERSTAND,
    READ_SCHEMA,
    RECORD_SCHEMA,
    Columns,
    ProposedBatch,
    Records,
    empty_batch,
    encode,
    index_records,
    place,
    slices_of,
    to_arrow,
)

BODIES = st.lists(st.binary(max_size=40), max_size=40) | st.integers(1, 20).flatmap(
    lambda size: st.lists(st.binary(min_size=size, max_size=size), max_size=40)
)


def encoded(bodies: list[bytes], **given: Any) -> Records:
    """Encode a batch; fields that do not matter have defaults."""
    usual = {"first_index": 0, "term": 1, "position": 0, "timestamp_ms": 5, "segment_bytes": 1 << 30}
    return encode(Columns.from_bodies(bodies), **(usual | given))


def oracle(
    bodies: list[bytes], first: int, term: int, at: int, time: int, segment: int, control: bytes | None, magic: int
) -> bytes:
    """The format in one loop."""
    out = b""
    entries = [(1, body) for body in bodies]
    if control is not None:
        entries.insert(0, (magic, control))
    for i, (kind, body) in enumerate(entries):
        size = 48 + len(body)
        if size + 8 > segment - at % segment:
            at += segment - at % segment
        mark = time | (BATCH_END if i == len(entries) - 1 else 0)
        mark |= MUST_UNDERSTAND if control is not None and magic == 3 else 0
        out += struct.pack(">iiqqqQIi", kind, size, first + i, term, at, mark, zlib.crc32(body), len(body)) + body
        at += size
    return out


@settings(max_examples=200, deadline=None)
@given(
    bodies=BODIES,
    first=st.integers(0, 1 << 55),
    term=st.integers(0, 1 << 40),
    at=st.integers(0, 10_000),
    time=st.integers(0, (1 << 48) - 1),
    control=st.none() | st.binary(max_size=40),
    magic=st.sampled_from([2, 3]),
)
def test_both_encoders_write_the_format(
    bodies: list[bytes], first: int, term: int, at: int, time: int, control: bytes | None, magic: int
) -> None:
    if not bodies and control is None:
        return
    at -= max(0, at % 1024 - 1016)  # a log never ends in the last 7 bytes of a segment
    expected = oracle(bodies, first, term, at, time, 1024, control, magic)
    for few in (0, 1000):
        before, checksum.FEW = checksum.FEW, few
        try:
            place = {"first_index": first, "term": term, "position": at, "timestamp_ms": time, "segment_bytes": 1024}
            records = encoded(bodies, **place, control=control, magic=magic)
        finally:
            checksum.FEW = before
        assert bytes(records.data) == expected
        assert records.nbytes == int(records.sizes.sum()) == len(expected)
        again = Records(records.sizes, expected)
        assert (records.headers == again.headers).all()
        again.check(first, gather=True)
        Records(records.sizes, expected).check(first)
        data = [control, *bodies] if control is not None else bodies
        assert bytes(again.bodies) == b"".join(data)


@pytest.mark.parametrize(
    ("index", "position", "body", "expected", "row"),
    [
        (
            0,
            0,
            b"Hello World",
            "00000001 0000003b 0000000000000000 0000000000000001 0000000000000000 0000000000000000 00000000 0000000b",
            "00000001 0000000000000000 0000003b 0000000000000000 0000000000000001",
        ),
        (
            1,
            59,
            b"\x01",
            "00000001 00000031 0000000000000001 0000000000000001 000000000000003b 0000000000000000 00000000 00000001",
            "00000001 000000000000003b 00000031 0000000000000001 0000000000000001",
        ),
    ],
)
def test_java_vectors(index: int, position: int, body: bytes, expected: str, row: str) -> None:
    records = encoded([body], first_index=index, position=position)
    data = bytearray(records.data)
    data[32:44] = bytes(12)  # Java writes neither mark nor CRC
    assert bytes(data) == bytes.fromhex(expected) + body
    Records(records.sizes, data).check(index)
    assert index_records(records).tobytes() == bytes.fromhex(row)


def test_java_noop_vector() -> None:
    expected = bytes.fromhex(
        "00000002 00000030 0000000000000001 0000000000000001 0000000000000035 0000000000000000 00000000 00000000"
    )
    data = bytearray(encoded([], first_index=1, position=0x35, control=b"").data)
    data[32:40] = bytes(8)
    assert bytes(data) == expected


@settings(max_examples=300, deadline=None)
@given(sizes=st.lists(st.integers(48, 200), max_size=60), position=st.integers(0, 4000), segment=st.integers(208, 700))
def test_place_follows_the_rolling_rule(sizes: list[int], position: int, segment: int) -> None:
    position -= max(0, position % segment - (segment - 8))
    expected, at = [], position
    for size in sizes:
        if size + 8 > segment - at % segment:
            at += segment - at % segment
        expected.append(at)
        at += size
    assert place(np.array(sizes, np.uint32), position, segment).tolist() == expected


@pytest.mark.parametrize(
    ("size", "position", "expected"), [(968, 48, 48), (968, 49, 1024), (1016, 0, 0), (968, 1016, 1024)]
)
def test_place_leaves_eight_bytes_or_more(size: int, position: int, expected: int) -> None:
    assert place(np.array([size], np.uint32), position, 1024).tolist() == [expected]


@pytest.mark.parametrize("sizes", [[1017], [60, 1017], [2048], [60, 5000, 60]])
def test_place_rejects_a_record_that_fits_no_segment(sizes: list[int]) -> None:
    with pytest.raises(InvariantViolationError):
        place(np.array(sizes, np.uint32), 48, 1024)


@given(data=st.data())
def test_slices_of(data: st.DataObject) -> None:
    buffers = data.draw(st.lists(st.binary(max_size=50), min_size=1, max_size=3))
    pieces = []
    for _ in range(data.draw(st.integers(0, 12) | st.integers(13, 30))):  # a few are joined otherwise than many
        which = data.draw(st.integers(0, len(buffers) - 1))
        start = data.draw(st.integers(0, len(buffers[which])))
        pieces.append((which, start, data.draw(st.integers(0, len(buffers[which]) - start))))
    which, starts, lengths = (np.array([piece[i] for piece in pieces], np.int64) for i in range(3))
    joined = slices_of(buffers, lengths, which.astype(np.int32), starts)
    assert bytes(joined) == b"".join(buffers[w][s : s + n] for w, s, n in pieces)


def some_records(count: int = 20) -> Records:
    return encoded([bytes([n]) * (n * 3) for n in range(count)], first_index=7, term=3, position=100)


FIELDS = [
    ("magic", 0),
    ("magic", 4),
    ("magic", -1),
    ("size", 47),
    ("index", 0),
    ("term", 1),
    ("term", 9),
    ("term", NUMBER_MAX + 1),
    ("position", -1),
    ("position", NUMBER_MAX + 1),
    ("position", (1 << 63) - 1),
    ("length", 1),
    ("crc", 1),
]


@pytest.mark.parametrize(("name", "value"), FIELDS)
@pytest.mark.parametrize(
    ("at", "count"),
    [(0, 20), (9, 20), (19, 20), (0, checksum.FEW + 1), (9, checksum.FEW + 1), (checksum.FEW, checksum.FEW + 1)],
)
def test_check_rejects_a_damaged_header(name: str, value: int, at: int, count: int) -> None:
    records = some_records(count)
    data = bytearray(records.data)
    start = int(records.starts[at])
    header = np.frombuffer(bytes(data[start : start + 48]), HEADER).copy()
    header[name] = value
    data[start : start + 48] = header.tobytes()
    damaged = Records(records.sizes, data)
    if name == "term" and ((value == 1 and at == 0) or (value == 9 and at == count - 1)):
        damaged.check(7)  # terms may rise
        return
    with pytest.raises(CorruptRecordError) as caught:
        damaged.check(7)
    blamed = at + 1 if name == "term" and value == 9 else at
    assert caught.value.values == {"index": 7 + blamed}
    if name == "crc":
        damaged.check(7, body_crc=False)


def test_check_rejects_sizes_that_do_not_add_up() -> None:
    records = some_records()
    for sizes, data in (
        (records.sizes[:-1], records.data),
        (records.sizes, bytes(records.data)[:-1]),
        (np.array([records.nbytes - 40, 40], np.uint32), records.data),
    ):
        with pytest.raises(CorruptRecordError):
            Records(sizes, data).check(7)
    with pytest.raises(CorruptRecordError):
        records.check(8)
    Records(np.empty(0, np.uint32), b"").check(7)
    assert Records(np.empty(0, np.uint32), b"").headers.shape == (0,)


@pytest.mark.parametrize("count", [2, 5, 100])
@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("control", [None, b"c"])
@pytest.mark.parametrize("gather", [False, True])
def test_check_finds_each_flipped_body(count: int, uniform: bool, control: bytes | None, gather: bool) -> None:
    bodies = [bytes([n % 250]) * (9 if uniform else n % 7 + 1) for n in range(count)]
    records = encoded(bodies, control=control)
    for at in range(records.count):
        data = bytearray(records.data)
        data[int(records.starts[at]) + 48] ^= 0x10
        with pytest.raises(CorruptRecordError) as caught:
            Records(records.sizes, data).check(0, gather=gather)
        assert caught.value.values == {"index": at}


def test_check_accepts_java_records_without_a_crc() -> None:
    records = some_records()
    data = bytearray(records.data)
    for start in records.starts.tolist():
        data[start + 32 : start + 44] = bytes(12)
    data[-1] ^= 1
    Records(records.sizes, data).check(7)
    data[int(records.starts[4]) + 43] = 1
    with pytest.raises(CorruptRecordError) as caught:
        Records(records.sizes, data).check(7)
    assert caught.value.values == {"index": 11}


def test_slicing_shares_and_keeps_meaning() -> None:
    records = some_records()
    for start in range(21):
        for stop in range(start, 21):
            piece = records.slice(start, stop)
            assert piece.count == stop - start
            piece.check(7 + start)
            assert bytes(piece.data) == bytes(records.data)[int(records.sizes[:start].sum()) :][: piece.nbytes]


@pytest.mark.parametrize("name", HEADER.names or ())
def test_column_is_a_field_of_all_headers_converted_once(name: str) -> None:
    records = encoded([bytes(n) for n in range(40)], first_index=7, term=3)
    column = records.column(name)
    assert column.tolist() == records.headers[name].tolist()
    assert column.dtype.isnative
    assert records.column(name) is column


def test_to_arrow() -> None:
    bodies = [b"", b"a", bytes(300)]
    records = encoded(bodies, first_index=5, term=2, timestamp_ms=1234, control=b"c")
    batch = to_arrow(records, schema=RECORD_SCHEMA)
    assert batch.schema == RECORD_SCHEMA
    batch.validate(full=True)
    time = datetime.fromtimestamp(1.234, UTC)
    assert batch.to_pylist() == [
        {"index": 5 + i, "term": 2, "position": p, "timestamp": time, "body": body, "magic": 2 if i == 0 else 1}
        for i, (p, body) in enumerate(zip([0, 49, 97, 146], [b"c", *bodies], strict=True))
    ]
    kept = to_arrow(records, np.array([False, True, False, True]))
    kept.validate(full=True)
    assert kept.schema == READ_SCHEMA
    assert kept.column("body").to_pylist() == [b"", bytes(300)]


def test_impossible_append_time_is_unknown() -> None:
    """A header has no CRC: a damaged time must not make the entry unreadable as Python's datetime ends with 9999."""
    year_10000_ms = 253_402_300_800_000
    for millis, known in ((0, False), (year_10000_ms - 1, True), (year_10000_ms, False), ((1 << 48) - 1, False)):
        batch = to_arrow(encoded([b"x", b"y"], timestamp_ms=millis))
        batch.validate(full=True)
        assert [time is not None for time in batch["timestamp"].to_pylist()] == [known] * 2
    assert to_arrow(Records(np.empty(0, np.uint32), b"")).num_rows == 0


@pytest.mark.parametrize("schema", [READ_SCHEMA, RECORD_SCHEMA])
def test_empty_batch_has_all_columns(schema: pa.Schema) -> None:
    batch = empty_batch(schema)
    batch.validate(full=True)
    assert (batch.num_rows, batch.schema) == (0, schema)


@pytest.mark.parametrize(
    "array",
    [
        pa.array([b"a", b"", b"ccc"], pa.binary()),
        pa.array([b"x", b"a", b"", b"ccc"], pa.binary())[1:],
        pa.array([b"a", b"", b"ccc"], pa.large_binary()),
        pa.array(["a", "", "ccc"], pa.string()),
        pa.chunked_array([pa.array([b"a"]), pa.array([b"", b"ccc"])]),
        [b"a", b"", b"ccc"],
        (bytearray(b"a"), memoryview(b""), b"ccc"),
    ],
)
def test_columns_from_bodies(array: object) -> None:
    columns = Columns.from_bodies(array)
    assert columns.lengths.tolist() == [1, 0, 3]
    assert columns.crcs.tolist() == [zlib.crc32(b) for b in (b"a", b"", b"ccc")]
    assert bytes(columns.bodies) == b"accc"
    columns.verify()
    assert columns.record_bytes == 4 + 3 * 48


@pytest.mark.parametrize("array", [pa.array([b"a", None]), pa.array([1, 2]), ["text"], [None], 7 * [1]])
def test_columns_reject_bodies_that_are_not_bytes(array: object) -> None:
    with pytest.raises(BadRequestError):
        Columns.from_bodies(array)


def test_columns_and_proposal_have_sizes() -> None:
    assert Columns.from_bodies(pa.array([], pa.binary())).count == 0
    columns = Columns.from_bodies([b"ab", b"c"])
    with pytest.raises(CorruptRecordError):
        Columns(columns.lengths, columns.crcs[::-1], columns.bodies).verify()
    proposal = ProposedBatch(columns, control=b"xyz")
    assert (proposal.count, proposal.nbytes, proposal.largest_body) == (3, 3 * 48 + 6, 3)
    assert (ProposedBatch(columns).count, ProposedBatch(control=b"").nbytes) == (2, 48)


def test_batch_shows_its_configuration_before_and_after_placement() -> None:
    proposal = ProposedBatch(configuration=b"xyz")
    records = encoded([], control=proposal.leading, magic=proposal.magic)
    assert (proposal.count, proposal.nbytes, proposal.largest_body, proposal.last_body) == (1, 51, 3, 3)
    assert Batch(Index(0), 1, Term(1), records.nbytes, records).configuration == proposal.configuration == b"xyz"
    assert records.first.magic == MAGIC_MEMBERSHIP
    assert records.first.flags == BATCH_END | MUST_UNDERSTAND | 5
    other = encoded([b"a"], control=b"xyz")
    assert Batch(Index(0), 2, Term(1), other.nbytes, other).configuration is None


@pytest.mark.parametrize("others", [{"control": b""}, {"columns": Columns.from_bodies([b"a"])}])
def test_configuration_entry_is_alone_in_its_batch(others: dict[str, Any]) -> None:
    with pytest.raises(InvariantViolationError):
        ProposedBatch(configuration=b"xyz", **others)
