import struct
import tracemalloc

import msgpack
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dledger_core.checksum import crc32
from dledger_core.errors import ProtocolError
from dledger_core.net.frame import (
    LARGE_PAYLOAD_BYTES,
    LARGE_TYPES,
    RECEIVE_BYTES,
    FrameDecoder,
    encode_frame,
)
from dledger_core.net.protocol import FRAME_BYTES_MAX, HEADER_BYTES_MAX, HELLO_BYTES_MAX, Type
from tests.support.frames import frames_of, receive

FRAMES = [
    ({"t": 10}, b""),
    ({"t": 12, "r": 1, "g": "flüge", "n": None}, b"x"),
    ({"t": 14, "h": [["g", 1, -1, 2]] * 300}, b"y" * 5000),
    ({"t": 15, "r": 2}, bytes(range(256)) * 256),
    ({"t": 15, "r": 3}, b"z" * (LARGE_PAYLOAD_BYTES + 1)),
    ({"t": 15, "r": 4}, b"w" * 300_000),
    ({"t": 12, "pad": "p" * 200_000}, b"after a header larger than the receive buffer"),
    ({"t": 11}, b""),
]


def joined(frames):
    return b"".join(b"".join(encode_frame(header, payload)) for header, payload in frames)


def raw_frame(header: bytes, payload: bytes = b"", crc: int | None = None) -> bytes:
    length = 8 + len(header) + len(payload)
    return struct.pack(">III", length, len(header), crc32(header) if crc is None else crc) + header + payload


@pytest.mark.parametrize("size", [1, 2, 7, 11, 12, 13, 4096, RECEIVE_BYTES - 1, RECEIVE_BYTES, 1 << 24])
def test_frames_do_not_depend_on_how_bytes_arrive(size):
    few = FRAMES if size > 1 else FRAMES[:4]
    decoder = FrameDecoder(FRAME_BYTES_MAX)
    assert [(frame.header, bytes(frame.payload)) for frame in receive(decoder, joined(few), size)] == few
    assert not decoder.buffered


def test_payloads_are_not_overwritten_by_later_frames():
    data = b"".join(joined([({"t": 1}, bytes([i]) * 100)]) for i in range(200)) * 20
    frames = list(receive(FrameDecoder(FRAME_BYTES_MAX), data, 50_000))
    assert all(bytes(f.payload) == bytes([n % 200]) * 100 for n, f in enumerate(frames))


def test_every_truncation_gives_only_complete_frames():
    frames = FRAMES[:3]
    data = joined(frames)
    ends = [len(joined(frames[: n + 1])) for n in range(len(frames))]
    for cut in range(len(data)):
        decoder = FrameDecoder(FRAME_BYTES_MAX)
        assert len(list(receive(decoder, data[:cut]))) == sum(end <= cut for end in ends)
        assert bool(decoder.buffered) is (cut > 0 and cut not in ends)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(struct.pack(">III", 7, 1, 0), id="length below the fixed part"),
        pytest.param(struct.pack(">III", FRAME_BYTES_MAX + 1, 1, 0), id="length above the limit"),
        pytest.param(struct.pack(">III", 100, 93, 0), id="header longer than the frame"),
        pytest.param(struct.pack(">III", 100, 0, 0), id="no header"),
        pytest.param(struct.pack(">III", 2 << 20, HEADER_BYTES_MAX + 1, 0), id="header above the limit"),
        pytest.param(raw_frame(b"\x81\xa1t\x01", crc=1), id="damaged header"),
        pytest.param(raw_frame(b"\xc1"), id="not msgpack"),
        pytest.param(raw_frame(b"\x81\xa1t"), id="short msgpack"),
        pytest.param(raw_frame(b"\x81\xa1t\x01\x00"), id="bytes after the map"),
        pytest.param(raw_frame(b"\x93\x01\x02\x03"), id="a list"),
        pytest.param(raw_frame(msgpack.packb({"t": "1"})), id="number is a string"),
        pytest.param(raw_frame(msgpack.packb({"r": 1})), id="no number"),
        pytest.param(raw_frame(msgpack.packb({1: 1})), id="integer key"),
        pytest.param(raw_frame(msgpack.packb({"t": msgpack.ExtType(5, b"x")})), id="extension type"),
        pytest.param(raw_frame(b"\x91" * 2000), id="deep nesting"),
    ],
)
def test_malformed_input_is_protocol_error(data):
    with pytest.raises(ProtocolError):
        frames_of([data])


def test_hello_limit_holds_until_it_is_raised():
    data = joined([({"t": 12}, b"x" * (HELLO_BYTES_MAX + 1000))])
    with pytest.raises(ProtocolError):
        list(receive(FrameDecoder(HELLO_BYTES_MAX), data, 1))
    decoder = FrameDecoder(HELLO_BYTES_MAX)
    assert not list(receive(decoder, data[:3]))
    decoder.raise_limit(FRAME_BYTES_MAX)
    assert len(list(receive(decoder, data[3:]))) == 1


@pytest.mark.parametrize(
    ("header", "payload"),
    [({"t": 1}, bytes(FRAME_BYTES_MAX)), ({"t": 1, "x": "y" * HEADER_BYTES_MAX}, b""), ({"t": object()}, b"")],
    ids=["frame too large", "header too large", "not msgpack"],
)
def test_encode_frame_rejects_what_cannot_be_sent(header, payload):
    with pytest.raises(ProtocolError):
        encode_frame(header, payload)


HOSTILE = st.one_of(
    st.binary(max_size=64).map(lambda tail: b"\xdd\xff\xff\xff\xff" + tail),
    st.integers(1, 700).map(lambda n: b"\xdc\x0f\xff" * n),
    st.integers(1, 700).map(lambda n: b"\xdf\x00\x00\x0f\xff\xa1t" * n),
    st.binary(max_size=2000),
)


def peak_of(data, max_bytes):
    """Return the error of these bytes, if any, and the bytes of memory that they took."""
    tracemalloc.start()
    try:
        list(receive(FrameDecoder(max_bytes), data))
        error = None
    except ProtocolError as caught:
        error = caught
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return error, peak


@settings(max_examples=200, deadline=None)
@given(header=HOSTILE)
def test_hostile_header_takes_limited_memory(header):
    assert peak_of(raw_frame(b"\x81\xa1t" + header), HELLO_BYTES_MAX)[1] < 32 << 20


@pytest.mark.parametrize("number", [*(t for t in Type if t not in LARGE_TYPES), 0, 99])
def test_only_messages_with_bodies_may_claim_much_memory(number):
    header = msgpack.packb({"t": int(number)})
    claimed = struct.pack(">III", 8 + len(header) + (20 << 20), len(header), crc32(header)) + header
    error, peak = peak_of(claimed, FRAME_BYTES_MAX)
    assert error is not None
    assert peak < 1 << 20


def test_idle_decoders_take_little_memory():
    process = psutil.Process()
    before = process.memory_info().rss
    decoders = [FrameDecoder(100) for _ in range(1000)]
    for decoder in decoders:
        decoder.raise_limit(FRAME_BYTES_MAX)
    assert process.memory_info().rss - before < 1000 * (32 << 10)
