"""Large frames in pieces: what the queue of one side sends, the decoder of the other puts together."""

import asyncio
import struct

import pytest

from dledger_core.checksum import crc32
from dledger_core.errors import ProtocolError
from dledger_core.net.dialing import connect
from dledger_core.net.frame import PIECE_BYTES, FrameDecoder, encode_frame
from dledger_core.net.hello import Hello
from dledger_core.net.listening import serve
from dledger_core.net.pieces import BulkQueue
from dledger_core.net.protocol import FRAME_BYTES_MAX, Type
from tests.support.frames import receive

LARGE = ({"t": int(Type.APPEND_ENTRIES), "pad": "p" * 100}, bytes(range(256)) * 1200)
SMALL = ({"t": int(Type.HEARTBEATS), "h": []}, b"")


def peer_decoder():
    decoder = FrameDecoder(FRAME_BYTES_MAX)
    decoder.raise_limit(FRAME_BYTES_MAX, takes_pieces=True)
    return decoder


def joined(frame):
    return b"".join(encode_frame(*frame))


def pieces_of(*frames):
    queue = BulkQueue()
    for header, payload in frames:
        queue.add(encode_frame(header, payload[:5000], payload[5000:]))
    found = []
    while queue:
        found.append(b"".join(queue.take()))
    assert queue.nbytes == 0
    return found


@pytest.mark.parametrize("chunk_bytes", [1, 13, PIECE_BYTES - 1, PIECE_BYTES, 1 << 24])
def test_frames_in_pieces_arrive_complete_with_others_between_them(chunk_bytes):
    large = LARGE if chunk_bytes > 1 else (LARGE[0], LARGE[1][:PIECE_BYTES])
    pieces = pieces_of(large, SMALL, large)
    assert max(map(len, pieces)) < PIECE_BYTES + 100
    data = b"".join(piece + joined(SMALL) for piece in pieces)
    found = [(frame.header, bytes(frame.payload)) for frame in receive(peer_decoder(), data, chunk_bytes)]
    assert [frame for frame in found if frame != SMALL] == [large, large]
    assert found.count(SMALL) == len(pieces) + 1


def piece(payload, **fields):
    return b"".join(encode_frame({"t": int(Type.PIECE), **fields}, payload))


def cut(data):
    return piece(data[:PIECE_BYTES], n=len(data)) + piece(data[PIECE_BYTES:])


def framed(header, payload=b"x" * PIECE_BYTES, crc=None, length=None):
    body = 8 + len(header) + len(payload) if length is None else length
    return struct.pack(">III", body, len(header), crc32(header) if crc is None else crc) + header + payload


NO_FRAME = {
    "no size": piece(b"x"),
    "size too small": piece(b"x", n=PIECE_BYTES),
    "size too large": piece(b"x", n=FRAME_BYTES_MAX + 1),
    "size no number": piece(b"x", n="1000000"),
    "empty": piece(b"", n=100_000),
    "longer than its frame": piece(b"x" * 60_000, n=PIECE_BYTES + 1) + piece(b"x" * 60_000),
    "longer than a piece": piece(b"x" * (PIECE_BYTES + 1), n=1_000_000),
    "wrong length": cut(framed(b"\x81\xa1t\x2a", length=9)),
    "wrong crc": cut(framed(b"\x81\xa1t\x2a", crc=1)),
    "header longer than its frame": cut(struct.pack(">III", PIECE_BYTES + 8, PIECE_BYTES + 9, 0) + b"x" * PIECE_BYTES),
    "type without pieces": cut(joined(({"t": 12}, b"x" * PIECE_BYTES)).replace(b"\x0c", b"\x2c", 1)),
    "piece of pieces": cut(joined(({"t": int(Type.PIECE), "n": 1 << 20}, b"x" * PIECE_BYTES))),
}


@pytest.mark.parametrize("data", NO_FRAME.values(), ids=NO_FRAME)
def test_malformed_pieces_are_refused(data):
    with pytest.raises(ProtocolError):
        list(receive(peer_decoder(), data))


def test_client_connections_take_no_pieces():
    (frame,) = receive(FrameDecoder(FRAME_BYTES_MAX), piece(b"x" * 100, n=1 << 20))
    assert frame.header["t"] == Type.PIECE


class Keep:
    def __init__(self):
        self.frames, self.changed = [], asyncio.Event()

    def on_frame(self, connection, frame):
        self.frames.append(frame)
        self.changed.set()

    def on_close(self, connection, error):
        self.changed.set()


async def test_small_frame_overtakes_bulk_that_the_network_has_not_taken():
    node, keep = Hello("peer", "n0", "uuid-0", (1, 1), "127.0.0.1:1"), Keep()
    server = await serve("127.0.0.1", 0, accept=lambda _: node, handler_for=lambda _: keep)
    hello = Hello("peer", "n1", "uuid-1", (1, 1), "127.0.0.1:2")
    connection = await connect("127.0.0.1", server.port, hello, Keep(), timeout_s=60)
    (far,) = server.connections
    far.pause_reading()
    for number in range(2):
        connection.send_bulk(encode_frame({"t": int(Type.APPEND_ENTRIES), "i": number}, b"x" * (30 << 20)))
    connection.send_bulk(encode_frame({"t": int(Type.APPEND_ENTRIES), "i": 2}))
    connection.send(*SMALL[:1])
    assert connection.write_buffer_bytes > 30 << 20
    far.resume_reading()
    async with asyncio.timeout(60):
        while len(keep.frames) < 4:
            keep.changed.clear()
            await keep.changed.wait()
    assert [frame.header.get("i") for frame in keep.frames] == [None, 0, 1, 2]
    assert connection.write_buffer_bytes == 0
    connection.close()
    await server.close()
