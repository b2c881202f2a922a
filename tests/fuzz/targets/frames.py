"""Bytes from the network to frames, and a whole connection from its first byte on: preface, hello, messages."""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass, replace
from typing import Any

import msgpack

from dledger_core.checksum import crc32
from dledger_core.errors import ProtocolError
from dledger_core.ids import MemberId
from dledger_core.net import codec, protocol
from dledger_core.net.connection import Connection
from dledger_core.net.dialing import Dialed
from dledger_core.net.frame import RECEIVE_BYTES, Frame, FrameDecoder, encode_frame
from dledger_core.net.hello import Hello, negotiate
from dledger_core.net.protocol import HELLO_BYTES_MAX, PREFACE
from dledger_core.net.session import Session
from tests.fuzz.finding import Finding, expect, memory_below
from tests.support.frames import receive

PER_BYTE = 128
"""Bytes of memory for a byte of a header that was received: msgpack's smallest map becomes a dict."""
FIXED_BYTES = 4 << 20
FRAME_BYTES_MAX = 256 << 10
"""The limit of this target's decoder, so that large payloads are small inputs."""

_PREFIX = struct.Struct(">III")


def with_header_crcs(stream: bytes) -> bytes:
    """Return the stream with the right CRC in each frame, so that damage reaches the code after the check."""
    fixed, at = bytearray(stream), 0
    while at + _PREFIX.size <= len(fixed):
        length, header_bytes, _ = _PREFIX.unpack_from(fixed, at)
        header = bytes(fixed[at + 12 : at + 12 + header_bytes])
        fixed[at + 8 : at + 12] = crc32(header).to_bytes(4, "big")
        at += 4 + max(length, 8)
    return bytes(fixed)


@dataclass(frozen=True)
class Decoded:
    frames: list[tuple[bytes, bytes]]
    error: str | None


def _decode(stream: bytes, bound: int, chunk: int, *, pieces: bool = False) -> Decoded:
    frames: list[tuple[bytes, bytes]] = []
    decoder = FrameDecoder(bound)
    if pieces:
        decoder.raise_limit(bound, takes_pieces=True)
    try:
        for frame in receive(decoder, stream, chunk):
            frames.append((msgpack.packb(frame.header), bytes(frame.payload)))
            expect(len(frames) * 13 <= len(stream), "more frames than bytes")
    except ProtocolError as error:
        return Decoded(frames, error.what)
    return Decoded(frames, None)


def run_frame(data: bytes) -> None:
    """Input: flags (1 = right CRCs, 2 = bound of hello, 4 = pieces), size of a chunk, then the stream."""
    flags, chunk, stream = data[:1] or b"\0", data[1:2] or b"\0", data[2:]
    if flags[0] & 1:
        stream = with_header_crcs(stream)
    bound = HELLO_BYTES_MAX if flags[0] & 2 else FRAME_BYTES_MAX
    pieces = bool(flags[0] & 4)
    with memory_below(FIXED_BYTES + 2 * (bound + RECEIVE_BYTES) + PER_BYTE * len(stream)):
        whole = _decode(stream, bound, len(stream) or 1, pieces=pieces)
    for size in (chunk[0] + 1, 1 << 16):
        other = _decode(stream, bound, size, pieces=pieces)
        expect(other == whole, "chunks change the frames", chunk=chunk[0], whole=whole, other=other)
    for header, payload in whole.frames:
        again = _decode(b"".join(map(bytes, encode_frame(msgpack.unpackb(header), payload))), 2 << 20, 1 << 20)
        expect(again == Decoded([(header, payload)], None), "a frame changes when sent again", header=header)


class _Transport(asyncio.Transport):
    """The other side of a connection that only listens."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = False
        self.sent = 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name == "peername" else default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def write(self, data: Any) -> None:
        self.sent += len(data)

    def writelines(self, list_of_data: Any) -> None:
        for data in list_of_data:
            self.write(data)

    def abort(self) -> None:
        self.closed = True

    def close(self) -> None:
        self.closed = True


class _Handler:
    """Accepts the frames that a node accepts from its peers."""

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        codec.frame_to_messages(frame, lambda number: codec.Ends(str(number), MemberId("n0"), MemberId("n1")))

    def on_close(self, connection: Connection, error: Exception | None) -> None:
        pass


OURS = Hello("peer", "n0", "0" * 32, (1, 2), "127.0.0.1:1")


class _Listening(Dialed):
    """A side that accepts any client and node."""

    def session(self) -> Session:
        return Session()

    def on_hello(self, connection: Connection, hello: Hello) -> None:
        version, features = negotiate(hello, OURS)
        hash(hello.process)  # what a node does with it: compare
        connection.send(replace(OURS, versions=(version,), features=features).to_response())
        connection.accept(_Handler(), replace(hello, versions=(version,), features=features))


async def _converse(stream: bytes, chunk: int, *, dialled: bool) -> None:
    transport = _Transport()
    connection = Connection((Dialed if dialled else _Listening)(OURS, _Handler()))
    connection.connection_made(transport)
    at, bound = 0, FIXED_BYTES + 2 * (HELLO_BYTES_MAX + RECEIVE_BYTES) + PER_BYTE * len(stream)
    while at < len(stream) and not transport.closed:
        room = connection.get_buffer(-1)
        taken = min(chunk, len(room), len(stream) - at)
        room[:taken] = stream[at : at + taken]
        at += taken
        # Once hello was accepted a frame may have a large payload.
        with memory_below(lambda: bound + (protocol.FRAME_BYTES_MAX if connection.accepted.done() else 0)):
            connection.buffer_updated(taken)
    connection.connection_lost(None)
    if not dialled and stream[: len(PREFACE)] != PREFACE[: len(stream)]:
        expect(
            isinstance(connection.closed.result(), ProtocolError), "a wrong preface was not refused", first=stream[:8]
        )
    if connection.accepted.exception() is None:
        versions = connection.peer_hello.versions
        expect(versions == OURS.versions, "a version was chosen that was not offered", it=versions)


def run_connection(data: bytes) -> None:
    """Input: flags (1 = right CRCs, 2 = we dialled), size of a chunk, then what the other side sends."""
    flags, chunk, stream = (data[:1] or b"\0")[0], (data[1:2] or b"\0")[0] + 1, data[2:]
    skip = 0 if flags & 2 else len(PREFACE)
    if flags & 1:
        stream = stream[:skip] + with_header_crcs(stream[skip:])
    loop_errors: list[dict[str, Any]] = []
    with asyncio.Runner() as runner:
        runner.get_loop().set_exception_handler(lambda _, context: loop_errors.append(context))
        runner.run(_converse(stream, chunk, dialled=bool(flags & 2)))
    if loop_errors:
        raise Finding(f"an error without a handler: {loop_errors[0]!r:.300}")
