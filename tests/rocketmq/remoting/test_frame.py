"""Frames: those that Java's own classes made, whole and byte by byte, round trips, and everything that is wrong."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger_core.errors import ProtocolError
from dledger_core.rocketmq.remoting.frame import (
    BINARY,
    FRAME_BYTES_MAX,
    HEADER_BYTES_MAX,
    JSON,
    FrameDecoder,
    RemotingFrame,
    encode_frame,
)
from tests.rocketmq.remoting.record_frames import CODES, VERSIONS, recorded

RECORDED = [(version, name, data) for version in VERSIONS for name, data in recorded(version).items()]
IDS = [f"{version}/{name}" for version, name, _ in RECORDED]


def decoded(data: bytes, piece: int | None = None) -> list[RemotingFrame]:
    decoder, frames = FrameDecoder(), []
    for at in range(0, len(data), piece or len(data) or 1):
        decoder.receive_data(data[at : at + (piece or len(data))])
        while (frame := decoder.next_frame()) is not None:
            frames.append(frame)
    assert decoder.buffered_bytes == 0
    return frames


@pytest.mark.parametrize(("version", "name", "data"), RECORDED, ids=IDS)
def test_java_frames_decode(version: str, name: str, data: bytes) -> None:
    [frame] = decoded(data)
    kind, _, what = name.partition("/")
    assert frame.is_response == kind.startswith("response")
    assert frame.serialize_type == (BINARY if kind.endswith("binary") else JSON)
    assert (frame.language, frame.version, frame.is_oneway) == ("JAVA", 0, False)
    if what == "user-define":
        assert (frame.code, frame.fields) == (59999, {"requestTypeCode": "17", "café": "x" * 70})
    elif what == "not-supported":
        assert (frame.code, frame.opaque, frame.remark) == (3, 300, " request type 10 not supported")
    else:
        name = "append" if what.startswith("append") else what.replace("transfer", "leadership-transfer")
        assert frame.code == (200 if frame.is_response else CODES[name])
    assert decoded(data, 1) == [frame]
    assert encode_frame(frame) == data  # names and order of the header's fields are Java's, too


numbers = st.integers(-(1 << 31), (1 << 31) - 1)
texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)
frames = st.builds(
    RemotingFrame,
    code=st.integers(0, 0xFFFF),
    opaque=numbers,
    flag=st.integers(0, 3),
    body=st.binary(max_size=300),
    remark=st.none() | texts.filter(bool),
    fields=st.dictionaries(texts, texts, max_size=5),
    language=st.sampled_from(["JAVA", "PYTHON", "GO", "OTHER"]),
    version=st.integers(0, 0x7FFF),
    serialize_type=st.sampled_from([JSON, BINARY]),
)


@given(st.lists(frames, max_size=4), st.integers(1, 50))
def test_frame_round_trip(sent: list[RemotingFrame], piece: int) -> None:
    assert decoded(b"".join(map(encode_frame, sent)), piece) == sent


def framed(header: bytes, body: bytes = b"", kind: int = JSON) -> bytes:
    return struct.pack(">iI", 4 + len(header) + len(body), kind << 24 | len(header)) + header + body


WRONG = {
    "a negative length": struct.pack(">i", -1),
    "a length below its own header's": struct.pack(">i", 3),
    "a length above the limit": struct.pack(">i", FRAME_BYTES_MAX + 1),
    "an HTTP request": b"GET / HTTP/1.1\r\n\r\n",
    "TLS": bytes.fromhex("16030100c8010000c4"),
    "an unknown header type": struct.pack(">iI", 100, 2 << 24 | 10),
    "a header longer than the frame": struct.pack(">iI", 100, 97),
    "a header above its limit": struct.pack(">iI", 1 << 20, HEADER_BYTES_MAX + 1),
    "no JSON": framed(b"{"),
    "JSON that is not an object": framed(b"[1]"),
    "JSON that is not UTF-8": framed(b'{"code":"\xff"}'),
    "JSON inside JSON inside JSON": framed(b"[" * 60_000),
    "no code": framed(b"{}"),
    "a code that is a text": framed(b'{"code":"200"}'),
    "a code that is true": framed(b'{"code":true}'),
    "a code of 33 bits": framed(b'{"code":4294967296}'),
    "a number without end": framed(b'{"code":' + b"1" * 60_000 + b"}"),
    "an opaque that is a fraction": framed(b'{"code":1,"opaque":1.5}'),
    "fields that are a list": framed(b'{"code":1,"extFields":[1]}'),
    "too many fields": framed(b'{"code":1,"extFields":{' + b",".join(b'"%d":""' % i for i in range(2000)) + b"}}"),
    "a short binary header": framed(b"\0" * 10, kind=BINARY),
    "a binary remark that is too long": framed(struct.pack(">hbhiii", 1, 0, 0, 0, 0, 5), kind=BINARY),
    "a negative binary remark": framed(struct.pack(">hbhiii", 1, 0, 0, 0, 0, -1), kind=BINARY),
    "a remark that is not UTF-8": framed(struct.pack(">hbhiii", 1, 0, 0, 0, 0, 1) + b"\xff\0\0\0\0", kind=BINARY),
    "a field that ends early": framed(struct.pack(">hbhiiii", 1, 0, 0, 0, 0, 0, 3) + b"\0\1x", kind=BINARY),
    "a negative field": framed(struct.pack(">hbhiiii", 1, 0, 0, 0, 0, 0, 2) + b"\xff\xff", kind=BINARY),
}


@pytest.mark.parametrize("data", WRONG.values(), ids=WRONG)
def test_wrong_input_is_a_protocol_error(data: bytes) -> None:
    decoder = FrameDecoder()
    decoder.receive_data(data)
    with pytest.raises(ProtocolError):
        decoder.next_frame()


@st.composite
def changed_frames(draw: st.DrawFn) -> bytes:
    changed = bytearray(draw(st.sampled_from(RECORDED))[2])
    for place in draw(st.lists(st.integers(0, len(changed) - 1), min_size=1, max_size=4)):
        changed[place] = draw(st.integers(0, 255))
    return bytes(changed)


@given(st.binary(max_size=200) | changed_frames())
def test_garbage_is_decoded_waited_for_or_a_protocol_error(data: bytes) -> None:
    decoder = FrameDecoder()
    decoder.receive_data(data)
    with contextlib.suppress(ProtocolError):
        while decoder.next_frame() is not None:
            pass


def test_claimed_length_takes_no_memory() -> None:
    decoder = FrameDecoder()
    tracemalloc.start()
    try:
        decoder.receive_data(struct.pack(">iI", FRAME_BYTES_MAX, 20) + b"x")
        assert decoder.next_frame() is None
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_frame_is_encoded_up_to_its_limits() -> None:
    header = len(encode_frame(RemotingFrame(code=1, opaque=1))) - 8
    frame = RemotingFrame(code=1, opaque=1, body=bytes(FRAME_BYTES_MAX - 4 - header))
    assert decoded(encode_frame(frame)) == [frame]
    for large in (replace(frame, body=frame.body + b"x"), replace(frame, body=b"", remark="x" * HEADER_BYTES_MAX)):
        with pytest.raises(ProtocolError):
            encode_frame(large)
