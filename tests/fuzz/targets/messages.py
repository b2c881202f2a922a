"""Frames to what they say: messages between replicas, requests of clients, errors."""

from __future__ import annotations

import struct
from typing import Any

import msgpack
import numpy as np

from dledger_core.checksum import crc32
from dledger_core.config import StorageConfig
from dledger_core.errors import DLedgerError, ProtocolError, error_from_wire
from dledger_core.ids import MemberId
from dledger_core.net import codec
from dledger_core.net.frame import Frame, FrameDecoder
from dledger_core.net.messages import TABLES, AppendRequest, AwaitRequest, TransactionRequest
from dledger_core.raft.messages import AppendEntries
from dledger_core.record import Columns, encode, to_arrow
from dledger_core.storage.write.staging import StagedEnd, Staging
from tests.fuzz.finding import expect, memory_below
from tests.fuzz.targets.frames import FIXED_BYTES, PER_BYTE
from tests.support.frames import receive

_FRAME_BYTES_MAX = 4 << 20


def packed(header: bytes | dict[str, Any], payload: bytes, flags: int = 0) -> bytes:
    """Returns the input that says: this header, this payload."""
    raw = header if isinstance(header, bytes) else msgpack.packb(header)
    return bytes([flags]) + struct.pack(">H", len(raw)) + raw + payload


def frame_of(data: bytes) -> Frame | None:
    """Input: flags (1 = the right CRC of the payload), u16 length of the header, header, payload."""
    if len(data) < 3:
        return None
    size = int.from_bytes(data[1:3], "big")
    header, payload = data[3 : 3 + size], data[3 + size :]
    if data[0] & 1:
        try:
            header = msgpack.packb(msgpack.unpackb(header) | {"k": crc32(payload)})
        except (ValueError, TypeError, OverflowError, msgpack.UnpackException):
            return None
    stream = struct.pack(">III", 8 + len(header) + len(payload), len(header), crc32(header)) + header + payload
    try:
        [frame] = receive(FrameDecoder(_FRAME_BYTES_MAX), stream)
    except ProtocolError:
        return None
    expect(bytes(frame.payload) == payload, "the frame is another one")
    return frame


def ends_of(number: int) -> codec.Ends:
    return codec.Ends(str(number), MemberId("n0"), MemberId("n1"))


def _resent(group: str, message: Any) -> tuple[bytes, str, Any]:
    sent = b"".join(map(bytes, codec.message_to_frame(int(group), message)))
    [frame] = receive(FrameDecoder(_FRAME_BYTES_MAX), sent)
    [(received_group, received)] = codec.frame_to_messages(frame, ends_of)
    return sent, received_group, received


def _stage(message: AppendEntries) -> None:
    """Stage a valid message: the log may reject it, but not crash."""
    first = message.batches[0].payload
    expect(first is not None, "a batch without records")
    position = int(first.headers["position"][0])
    end = StagedEnd(message.prev_index + 1, position, 0)
    staging = Staging(StorageConfig(data_segment_bytes=4096), end, lambda _: end)
    for batch in message.batches:
        records = batch.payload
        expect(records.count == batch.count, "a batch's count is wrong")
        expect(bool((records.headers["term"] == batch.term).all()), "a batch's term is wrong")
        staging.stage(batch)
    staging.truncate(message.batches[-1].last_index)


def run_message(data: bytes) -> None:
    """A message between replicas; input as ``_frame`` says."""
    with memory_below(FIXED_BYTES + PER_BYTE * len(data)):
        frame = frame_of(data)
        if frame is None:
            return
        try:
            messages = codec.frame_to_messages(frame, ends_of)
        except ProtocolError:
            return
    expect(len(messages) <= len(data), "more messages than bytes")
    for group, message in messages:
        sent, same_group, same = _resent(group, message)
        expect(same_group == group and _resent(group, same)[0] == sent, "a message changes when sent again", it=message)
        if isinstance(message, AppendEntries) and message.batches:
            try:
                _stage(message)
            except DLedgerError:
                continue


def _append(count: int, payload: memoryview) -> None:
    columns = codec.parse_columns(payload, count)
    columns.verify()
    segment = 64 << 20
    records = encode(columns, first_index=3, term=1, position=100, timestamp_ms=1, segment_bytes=segment)
    records.check(3)
    expect(columns_of(records.data, records.sizes) == bytes(columns.bodies), "an append changed the bodies")
    expect(to_arrow(records).num_rows == columns.count, "an append lost rows")


def columns_of(data: Any, sizes: Any) -> bytes:
    """The bodies of records, one by one."""
    view, at, bodies = memoryview(data), 0, []
    for size in np.asarray(sizes).tolist():
        bodies.append(bytes(view[at + 48 : at + size]))
        at += size
    return b"".join(bodies)


def run_request(data: bytes) -> None:
    """A request of a client, as far as it is taken apart before a replica decides; input as ``_frame`` says."""
    with memory_below(FIXED_BYTES + PER_BYTE * len(data)):
        frame = frame_of(data)
        if frame is None:
            return
        header = frame.header
        for table in TABLES:
            try:
                message = table.decode(header)
                same = table.decode(msgpack.unpackb(msgpack.packb(table.encode(message))))
                expect(same == message, "a message changes when sent again", it=message)
                if isinstance(message, AppendRequest):
                    _append(message.count, frame.payload)
                elif isinstance(message, TransactionRequest) and message.count is not None:
                    expect(len(codec.parse_parts(frame.payload, message.count)) == message.count, "parts were lost")
                elif isinstance(message, AwaitRequest):
                    seen = codec.parse_seen(frame.payload, message.count, 4096)
                    expect(len(seen) <= message.count, "groups were invented")
            except DLedgerError as error:
                expect(type(error_from_wire(error.to_wire())) is type(error), "an error changes on the wire", it=error)
        if isinstance(header.get("e"), dict):
            str(error_from_wire(header["e"]))


def run_records(data: bytes) -> None:
    """Records as they travel and as readers get them. Input: flags (1 = right CRCs), u8 count, sizes, records."""
    if len(data) < 2:
        return
    flags, count, payload = data[0], data[1], bytearray(data[2:])
    try:
        records = codec.parse_records(payload, count)
    except ProtocolError:
        return
    if flags & 1:
        for start, size in zip(records.starts.tolist(), records.sizes.tolist(), strict=True):
            at = 4 * count + start
            payload[at + 40 : at + 44] = crc32(bytes(payload[at + 48 : at + size])).to_bytes(4, "big")
    first = int.from_bytes(payload[4 * count + 8 : 4 * count + 16], "big", signed=True) if count else 0
    slow = _slow_check(bytes(payload[4 * count :]), records.sizes.tolist(), first)
    try:
        records.check(first)
    except DLedgerError as error:
        expect(error.values["index"] - first == slow, "another record is called bad", slow=slow, it=error)
        return
    expect(slow is None, "a bad record passed", index=slow)
    table = to_arrow(records)
    table.validate(full=True)
    expect(table.num_rows == count, "rows were lost")
    expect(b"".join(table.column("body").to_pylist()) == columns_of(records.data, records.sizes), "bodies differ")
    records.slice(0, count // 2)
    expect(Columns.from_bodies(table.column("body").to_pylist()).count == count, "columns were lost")


def _slow_check(data: bytes, sizes: list[int], first: int) -> int | None:
    """Return the row of the first bad record, by a scan one at a time that checks headers before bodies."""
    at, term, bad_body = 0, None, None
    for place, size in enumerate(sizes):
        magic, own, index, own_term, position, mark, crc, length = struct.unpack_from(">iiqqqQIi", data, at)
        whole = own == size and length == size - 48 and 1 <= magic <= 3 and index == first + place
        whole = whole and min(index, own_term, position) >= 0
        if not whole or (term is not None and own_term < term):
            return place
        foreign = mark == 0 and crc == 0
        if bad_body is None and not foreign and crc32(data[at + 48 : at + size]) != crc:
            bad_body = place
        at, term = at + size, own_term
    return bad_body
