"""The messages: field tables, and the codec of those between replicas."""

import struct
from dataclasses import replace
from operator import is_

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dledger_core.checksum import crc32
from dledger_core.errors import BadRequestError, ProtocolError
from dledger_core.ids import NUMBER_MAX
from dledger_core.net import codec
from dledger_core.net.attach import ATTACH_TABLES
from dledger_core.net.codec import PEER_TABLES
from dledger_core.net.fields import REQUIRED
from dledger_core.net.frame import ARRAY_LENGTH_MAX, Frame, encode_frame
from dledger_core.net.messages import TABLES
from dledger_core.net.protocol import Type
from dledger_core.raft.batch import BATCHES_MAX, Batch
from dledger_core.raft.messages import AppendEntries, Condition, Heartbeat, HeartbeatResponse, InstallSnapshot
from dledger_core.record import Columns, encode
from tests.support.field_values import MISSING, good_value, header_of, wrong_values
from tests.support.frames import frames_of

# --- field tables -------------------------------------------------------------------------------------------------


def by_name(tables):
    return pytest.mark.parametrize("table", [pytest.param(table, id=table.number.name) for table in tables])


@by_name(TABLES)
def test_message_survives_encoding_with_all_fields_and_with_required_ones(table):
    required = {"t": table.number} | {f.key: good_value(f) for f in table.fields if f.default is REQUIRED}
    for header in (header_of(table), required | {"unknown": 5}):
        message = table.decode(header)
        [frame] = frames_of(encode_frame(table.encode(message, r=3)))
        assert (frame.header["t"], frame.header["r"]) == (table.number, 3)
        assert table.decode(frame.header) == message


@by_name((*TABLES, *PEER_TABLES))
def test_every_wrong_value_of_every_field_is_rejected_by_tables_error(table):
    table.read(header_of(table))
    for field in table.fields:
        assert wrong_values(field) or field.kind == "any"
        for value in wrong_values(field):
            header = header_of(table) | {field.key: value}
            if value is MISSING:
                del header[field.key]
            with pytest.raises(table.error) as caught:
                table.read(header)
            assert field.key in caught.value.what


def test_every_message_number_has_one_documented_table():
    numbers = [table.number for table in (*TABLES, *PEER_TABLES, *ATTACH_TABLES)]
    of_frames = {Type.HELLO, Type.HELLO_OK, Type.FAILURE, Type.GOAWAY, Type.PIECE}
    reserved = {Type.RECOVER, Type.RECOVER_OK}  # of 0.2.0: refused whatever is in it
    assert sorted(numbers) == sorted(set(Type) - of_frames - reserved)
    for table in (*TABLES, *PEER_TABLES, *ATTACH_TABLES):
        text, keys = str(table), [field.key for field in table.fields]
        assert all(f"    {field.key} (" in text and field.meaning for field in table.fields)
        assert table.message.__doc__
        assert len({"t", "r", "a", *keys}) == 3 + len(keys), "keys are distinct and none is reserved"
        is_request = table in TABLES and not table.number.name.endswith("_OK")
        assert table.error is (BadRequestError if is_request else ProtocolError)


# --- messages between replicas --------------------------------------------------------------------------------------

terms, indexes, rounds = st.integers(-1, 1 << 40), st.integers(-1, NUMBER_MAX), st.integers(0, 1 << 40)
KINDS = {"int": None, "bool": st.booleans(), "str": st.text(min_size=1, max_size=9)}


def messages_of(table):
    """Messages with every value that the table allows."""
    fields = {
        f.name: st.integers(f.low, f.high) if f.kind == "int" else KINDS[f.kind]
        for f in table.fields
        if f.name != "crc"
    }
    more = {"data": st.binary(max_size=50)} if table is codec.INSTALL_SNAPSHOT else {}
    return st.builds(table.message, sender=st.just("n0"), target=st.just("n1"), **fields, **more)


WITHOUT_ROWS = [t for t in PEER_TABLES if not any(f.kind == "list" for f in t.fields)]


def received(buffers):
    [frame] = frames_of(buffers)
    return frame


def ends_of(number):
    """Return the ends that number 7 stands for; another one is unknown."""
    return codec.Ends("g", "n0", "n1") if number == 7 else None


def messages_in(frame):
    return codec.frame_to_messages(frame, ends_of)


def resent(message):
    """Return the one message that arrives."""
    [(group, received_message)] = messages_in(received(codec.message_to_frame(7, message)))
    assert group == "g"
    return received_message


@given(message=st.one_of(*map(messages_of, WITHOUT_ROWS)))
def test_message_survives_encoding(message):
    assert resent(message) == message


@given(message=st.one_of(*map(messages_of, WITHOUT_ROWS)))
def test_message_with_unknown_number_is_dropped(message):
    assert messages_in(received(codec.message_to_frame(8, message))) == []


def beats_of(rows):
    """Return heartbeats and their responses for rows of (number, term, index, round)."""
    ends = {"sender": "n0", "target": "n1"}
    beats = [
        (a, Heartbeat(**ends, term=term, commit_index=at, round=number, log_time_ms=number // 2))
        for a, term, at, number in rows
    ]
    # One number is one group, which has one condition.
    return beats, [
        (
            a,
            HeartbeatResponse(
                **ends, term=term, last_index=at, round=n, condition=Condition(a % 8 if a % 32 == 6 else 0)
            ),
        )
        for a, term, at, n in rows
    ]


@settings(deadline=None)
@given(rows=st.lists(st.tuples(rounds, terms, indexes, rounds), min_size=1, max_size=20))
@example([(1 << 40, 1 << 40, NUMBER_MAX, 1 << 40) for _ in range(ARRAY_LENGTH_MAX + 5)])
def test_heartbeats_of_many_groups_share_frames(rows):
    beats, responses = beats_of(rows)
    for sent, buffers in (
        (beats, codec.heartbeats_frames(beats)),
        (responses, codec.heartbeat_responses_frames(responses)),
        ([], codec.alive_frame()),
    ):
        frames = frames_of(buffers)
        assert len(frames) == max(1, -(-len(sent) // codec.HEARTBEATS_MAX))
        found = [
            found
            for frame in frames
            for found in codec.frame_to_messages(frame, lambda number: codec.Ends(number, "n0", "n1"))
        ]
        assert found == sent


def test_row_that_repeats_is_the_same_message_and_one_that_changes_is_not():
    beats, responses = beats_of([(number, 12, 1_000_000, 500_000) for number in range(5)])
    known = {}

    def ends(number):
        return codec.Ends(number, "n0", "n1")

    def found(buffers):
        return [message for _, message in codec.frame_to_messages(received(buffers), ends, known)]

    for rows, frames_for, change in (
        (beats, codec.heartbeats_frames, {"commit_index": 1_000_001}),
        (beats, codec.heartbeats_frames, {"log_time_ms": 7}),
        (responses, codec.heartbeat_responses_frames, {"round": 500_001}),
        (responses, codec.heartbeat_responses_frames, {"condition": Condition.DISK_FULL}),
    ):
        assert all(map(is_, found(frames_for(rows)), found(frames_for(rows))))
        changed = [(number, replace(message, **change)) for number, message in rows]
        assert found(frames_for(changed)) == [message for _, message in changed]
        assert found(frames_for(rows)) == [message for _, message in rows]


@pytest.mark.parametrize("row", [[], [7], ["7", 1, 2, 3, 4], [7, 1, 2, 3], [7, 1, 2, 3, -2], 7, [[7], 1, 2, 3, 4]])
def test_malformed_row_is_refused_after_a_good_one(row):
    known = {}
    header = {"t": 44, "h": [[7, 1, 2, 3, 4]]}
    for expected in (1, 1):
        assert len(codec.frame_to_messages(Frame(header, b""), ends_of, known)) == expected
    with pytest.raises(ProtocolError):
        codec.frame_to_messages(Frame(header | {"h": [row]}, b""), ends_of, known)


def test_heartbeats_of_256_groups_fit_few_bytes():
    """With names of groups and members in place of numbers it was above 10 KB."""
    beats, responses = beats_of([(number, 12, 1_000_000, 500_000) for number in range(256)])
    for buffers, limit in (
        (codec.heartbeats_frames(beats), 5_000),
        (codec.heartbeat_responses_frames(responses), 4_000),
    ):
        assert sum(map(len, buffers)) < limit


def test_append_entries_with_most_batches_fit_frame():
    message = make_append([1] * BATCHES_MAX, first=1 << 40, body=b"")
    got = resent(message)
    assert [(b.first_index, b.count, b.term) for b in got.batches] == [
        (b.first_index, b.count, b.term) for b in message.batches
    ]


def make_append(counts, first=5, term=3, body=b"some body"):
    batches, index = [], first
    for number, count in enumerate(counts):
        columns = Columns.from_bodies([body + bytes([number % 256, i % 256]) for i in range(count)])
        batch_term = term - 1 if number == 0 else term
        run = encode(
            columns,
            first_index=index,
            term=batch_term,
            position=index * 100,
            timestamp_ms=1_700_000_000_000,
            segment_bytes=1 << 30,
        )
        batches.append(Batch(index, count, batch_term, run.nbytes, run))
        index += count
    return AppendEntries(
        sender="n0",
        target="n1",
        term=term,
        prev_index=first - 1,
        prev_term=1,
        commit_index=first - 1,
        batches=tuple(batches),
    )


@settings(deadline=None)
@given(counts=st.lists(st.integers(1, 40), max_size=5), first=st.integers(0, 1000))
def test_append_entries_survive_encoding(counts, first):
    message = make_append(counts, first)
    got = resent(message)
    assert replace(got, batches=()) == replace(message, batches=())
    assert len(got.batches) == len(message.batches)
    for sent, decoded in zip(message.batches, got.batches, strict=True):
        assert replace(sent, payload=None) == replace(decoded, payload=None)
        assert bytes(sent.payload.data) == bytes(decoded.payload.data)
        assert sent.payload.sizes.tolist() == decoded.payload.sizes.tolist()
        decoded.payload.check(sent.first_index)


def test_append_entries_with_flipped_payload_byte_are_rejected():
    frame = received(codec.message_to_frame(7, make_append([3, 20])))
    for at in range(0, len(frame.payload), 7):
        damaged = bytearray(frame.payload)
        damaged[at] ^= 4
        with pytest.raises(ProtocolError):
            messages_in(Frame(frame.header, memoryview(damaged)))


@pytest.mark.parametrize(
    "change",
    [
        {"b": [[5, 3, 2], [9, 20, 3]]},
        {"b": [[5, 0, 2], [5, 23, 3]]},
        {"b": [[5, 3, 2], [8, 20, 9]]},
        {"b": [[5, 3, 3], [8, 20, 2]]},
        {"b": [[5, 3, 2]]},
        {"b": [[5, 3, 3], [8, 20, 3]]},
        {"b": [[5, 3], [8, 20]]},
        {"b": [5, 3]},
        {"b": {}},
        {"n": 24},
        {"n": 22},
        {"pi": 3},
        {"k": 1},
        {"a": "g"},
        {"t": 999},
        {"t": Type.READ},
    ],
    ids=str,
)
def test_inconsistent_append_entries_are_rejected(change):
    frame = received(codec.message_to_frame(7, make_append([3, 20])))
    with pytest.raises(ProtocolError):
        messages_in(Frame(frame.header | change, frame.payload))


@pytest.mark.parametrize(
    "rows", [[[7, 1, 1]], [["g", 1, 1, 1, 1]], [[7, 1.5, 1, 1, 1]], [[7, -2, 1, 1, 1]], [5], 5], ids=str
)
@pytest.mark.parametrize("kind", [Type.HEARTBEATS, Type.HEARTBEATS_OK])
def test_malformed_heartbeats_are_rejected(kind, rows):
    with pytest.raises(ProtocolError):
        messages_in(Frame({"t": kind, "h": rows}, memoryview(b"")))


@given(st.lists(st.binary(max_size=40), max_size=30))
def test_columns_survive_encoding(items):
    columns = Columns.from_bodies(items)
    got = codec.parse_columns(memoryview(b"".join(codec.columns_payload(columns))), len(items))
    assert got.lengths.tolist() == columns.lengths.tolist()
    assert got.crcs.tolist() == columns.crcs.tolist()
    assert bytes(got.bodies) == b"".join(items)
    got.verify()


def append_frames(*appends):
    columns = [Columns.from_bodies(bodies) for bodies in appends]
    return [Frame({"n": each.count}, memoryview(b"".join(codec.columns_payload(each)))) for each in columns]


@pytest.mark.parametrize("appends", [[[b"one"]], [[b""], [b"a", b"", b"ccc"], [b"dd"]]], ids=repr)
def test_appends_become_one_column(appends):
    found = codec.parse_appends(append_frames(*appends))
    found.verify()
    assert [bytes(each.bodies) for each in found.split([1] * found.count)] == [
        body for each in appends for body in each
    ]


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("damage", ["short", "long", "no columns", "wrong length"])
def test_malformed_append_among_others_is_refused(at, damage):
    frames = append_frames([b"one"], [b"two", b"three"], [b"four"])
    header, payload = frames[at]
    data = bytes(payload)
    damaged = {"short": data[:-1], "long": data + b"x", "no columns": data[:6], "wrong length": b"\xff" + data[1:]}
    frames[at] = Frame(header, memoryview(damaged[damage]))
    with pytest.raises(ProtocolError):
        codec.parse_appends(frames)


def test_lengths_of_one_append_are_not_counted_for_another():
    """Together they are as long as two appends should be."""
    frames = append_frames([b"one", b"two"], [b"three"])
    (first, one), (second, two) = frames
    frames = [Frame(first, one[:-3]), Frame(second, memoryview(bytes(two) + b"two"))]
    with pytest.raises(ProtocolError):
        codec.parse_appends(frames)
    with pytest.raises(ProtocolError):
        codec.parse_appends([Frame({"n": 1 << 40}, one), Frame(second, two)])


@pytest.mark.parametrize("parse", [codec.parse_columns, codec.parse_records])
@pytest.mark.parametrize(
    ("payload", "n"),
    [
        *((bytes(16), n) for n in (None, True, "1", 1.0, 1 << 40, -1)),
        pytest.param(struct.pack("<II", 0xFFFFFFFF, 1) + bytes(8), 2, id="columns overflow"),
        pytest.param(struct.pack("<II", 0xFFFFFFFF, 49) + bytes(48), 2, id="records overflow"),
    ],
)
def test_payload_with_wrong_count_or_lengths_is_rejected(parse, payload, n):
    with pytest.raises(ProtocolError):
        parse(payload, n)


@pytest.mark.parametrize("changes", [{"k": 1}, {"n": codec.SNAPSHOT_BYTES_MAX + 1}, {"n": 0}, {"fi": 0}], ids=str)
def test_malformed_snapshot_chunk_is_rejected(changes):
    message = InstallSnapshot(
        sender="n0", target="n1", term=3, number=1, first_index=5, previous_term=2, offset=0, total=3, data=b"abc"
    )
    frame = received(codec.message_to_frame(7, message))
    with pytest.raises(ProtocolError):
        messages_in(Frame(frame.header | changes, frame.payload))


NUMBERS = [(t, f) for t in WITHOUT_ROWS for f in t.fields if f.kind == "int" and f.name not in ("crc", "total")]


@pytest.mark.parametrize(("table", "field"), NUMBERS, ids=lambda part: getattr(part, "key", None) or part.number.name)
def test_number_that_no_file_could_hold_is_rejected(table, field):
    rest = {f.name: 1 if f.kind == "int" else f.kind == "bool" or "n0" for f in table.fields if f.name != "crc"}
    more = {"sender": "n0", "target": "n1"} | ({"data": b""} if table is codec.INSTALL_SNAPSHOT else {})
    for number, accepted in ((NUMBER_MAX, True), (NUMBER_MAX + 1, False), ((1 << 63) - 1, False)):
        header = received(codec.message_to_frame(7, table.message(**(rest | more)))).header | {field.key: number}
        if accepted:
            messages_in(Frame(header, memoryview(b"")))
        else:
            with pytest.raises(ProtocolError):
                messages_in(Frame(header, memoryview(b"")))


@pytest.mark.parametrize("number", [NUMBER_MAX + 1, (1 << 63) - 1])
@pytest.mark.parametrize("at", range(5))
def test_heartbeat_with_impossible_number_is_rejected(at, number):
    row = [7, 1, 1, 1, 1]
    row[at] = number
    with pytest.raises(ProtocolError):
        messages_in(Frame({"t": Type.HEARTBEATS, "h": [row]}, memoryview(b"")))


@pytest.mark.parametrize(("offset", "what"), [(8, "index"), (16, "term"), (24, "position")])
@pytest.mark.parametrize("number", [-1, NUMBER_MAX + 1, (1 << 63) - 9])
def test_record_with_impossible_number_is_rejected(offset, what, number):
    frame = received(codec.message_to_frame(7, make_append([1], first=5, term=3)))
    payload = bytearray(frame.payload)
    struct.pack_into(">q", payload, 4 + offset, number)
    changes = {
        "index": {"pi": number - 1, "b": [[number, 1, 2]]},
        "term": {"term": number, "b": [[5, 1, number]]},
        "position": {},
    }
    header = frame.header | {"k": crc32(payload)} | changes[what]
    with pytest.raises(ProtocolError):
        messages_in(Frame(header, memoryview(payload)))


def test_crc_of_payload_covers_sizes_and_records():
    message = make_append([2])
    frame = received(codec.message_to_frame(7, message))
    assert frame.header["k"] == crc32(frame.payload)
    assert np.frombuffer(frame.payload, "<u4", 2).tolist() == message.batches[0].payload.sizes.tolist()
