"""Recorded sessions on the wire: a client with a node, and the links between two nodes, frame by frame.

A session is recorded once, before its version is released, and tests compare every later version with it: each frame
must decode to the recorded values, and a live node must answer the recorded client. A frame is recorded as its bytes
and, so that people can read it, as the header that any msgpack library finds in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import struct
from collections import Counter
from collections.abc import Coroutine, Generator, Sequence
from pathlib import Path
from typing import Any, cast

import msgpack

from dledger_core.config import StorageConfig
from dledger_core.control import Part, column_crc
from dledger_core.net import codec, messages
from dledger_core.net.attach import ATTACH_TABLES
from dledger_core.net.codec import PEER_TABLES, SeenLog
from dledger_core.net.fields import REQUIRED, Table
from dledger_core.net.frame import Frame, encode_frame
from dledger_core.net.hello import HELLO, HELLO_OK, Hello
from dledger_core.net.protocol import PREFACE, Type
from dledger_core.record import Columns
from tests.support.field_values import good_value, header_of
from tests.support.frames import frames_of
from tests.support.links import Link, LinkedGroup, Streams
from tests.support.server_group import run

TABLES: dict[int, Table[Any]] = {
    table.number: table for table in (*messages.TABLES, *PEER_TABLES, *ATTACH_TABLES, HELLO, HELLO_OK)
}
ROUTING = ("t", "r", "g", "a", "lu", "cv", "hl")
"""Keys of headers that no table has."""
TIMEOUT_S = 60.0
LARGE_BODY = bytes(150_000)
OF_EACH = 3
"""Recorded frames of a kind and direction; a link has heartbeats without end."""


def jsonable(value: Any) -> Any:
    """Return a value of msgpack as one of JSON; bytes become a map with their hex."""
    match value:
        case bytes() | bytearray() | memoryview():
            return {"hex": bytes(value).hex()}
        case list() | tuple():
            return [jsonable(each) for each in value]
        case dict():
            return {str(key): jsonable(each) for key, each in value.items()}
        case set() | frozenset():
            return sorted(value)
    return value


def recorded(way: str, data: bytes) -> dict[str, Any]:
    """Return the record of one frame; ``way`` is ``>`` from the side that connected, ``<`` from the other one."""
    header_bytes = struct.unpack_from(">I", data, 4)[0]
    header = msgpack.unpackb(data[12 : 12 + header_bytes])
    return {"way": way, "type": Type(header["t"]).name, "header": jsonable(header), "bytes": data.hex()}


def split(data: bytes) -> list[bytes]:
    """Return the complete frames at the start of ``data``, by the lengths that they begin with."""
    found, at = [], 0
    while at + 4 <= len(data) and at + 4 + (size := struct.unpack_from(">I", data, at)[0]) <= len(data):
        found.append(data[at : at + 4 + size])
        at += 4 + size
    return found


def frame_of(row: dict[str, Any]) -> Frame:
    """Return a recorded frame as this version decodes it."""
    [frame] = frames_of([bytes.fromhex(row["bytes"])])
    return frame


# --- one message of each kind -----------------------------------------------------------------------------------------


def samples() -> list[dict[str, Any]]:
    """Return a frame of each message with all its fields, and one with the required fields alone."""
    found = []
    for table in TABLES.values():
        required = {"t": table.number} | {f.key: good_value(f) for f in table.fields if f.default is REQUIRED}
        found += [recorded(">", _bytes_of(header)) for header in (header_of(table), required)]
    return found


# --- a client with a node ---------------------------------------------------------------------------------------------


class Socket:
    """The client's side of a connection; it sends bytes as they are."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._socket = socket.create_connection(address, timeout=TIMEOUT_S)
        self._received = b""

    def __enter__(self) -> Socket:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def receive(self) -> bytes:
        """Return the bytes of the next frame."""
        while not (frames := split(self._received)):
            data = self._socket.recv(1 << 16)
            assert data, "the node has closed the connection"
            self._received += data
        self._received = self._received[len(frames[0]) :]
        return frames[0]


Request = tuple[dict[str, Any], list[Any]]
QUERY = {"q": "recorded-query", "b": 0, "r": "run"}
OPEN = QUERY | {"b": 1}


def _append(bodies: list[bytes], **fields: Any) -> Request:
    columns = Columns.from_bodies(bodies)
    return {"t": Type.APPEND, "n": columns.count, **fields}, codec.columns_payload(columns)


def _part(first: int, bodies: list[bytes]) -> Part:
    return Part(first, first + len(bodies) - 1, len(bodies), column_crc(Columns.from_bodies(bodies).crcs))


def requests(log_uuid: str, end: int) -> Generator[Request, dict[str, Any], None]:
    """Yield the requests of the session, to a group with this log and end; gets the header of each response."""
    rows = [b"row-1", b"row-2"]
    yield {"t": Type.ALIVE}, []
    yield {"t": Type.GROUPS}, []
    yield {"t": Type.METADATA, "space": True}, []
    yield {"t": Type.METADATA, "lu": log_uuid, "seen": [log_uuid, -1, -1], "pin": ["reader", 60_000], "start": 0}, []
    yield _append([b"", b"one", b"two"])
    yield _append([b"p0"], p="recorded", pe=0, ps=0, lu=log_uuid)
    yield _append([b"p0"], p="recorded", pe=0, ps=0, lu=log_uuid)
    yield _append([b"other"], p="recorded", pe=0, ps=0)
    yield _append([b"gap"], p="recorded", pe=0, ps=5)
    yield _append([b"unknown"], p="unknown", pe=0, ps=5)
    yield _append([b"once"], p="recorded-once", pe=0, ps=0, po=True)
    yield _append([b"orphaned"], x=QUERY | {"a": "attempt-1"})
    appended = yield _append(rows, x=QUERY | {"a": "attempt-2"})
    yield {"t": Type.TRANSACTION, "op": "state", "x": QUERY}, []
    parts = [_part(appended["first"], rows)]
    yield {"t": Type.TRANSACTION, "op": "commit", "x": QUERY, "n": 1}, codec.parts_payload(parts)
    yield {"t": Type.TRANSACTION, "op": "state", "x": QUERY}, []
    yield _append([b"open"], x=OPEN | {"a": "attempt-1"})
    yield {"t": Type.DESCRIBE, "table": "transactions"}, []
    yield {"t": Type.READ, "start": 0, "end": 1000}, []
    yield {"t": Type.READ, "start": end, "end": 1000, "iso": "uncommitted", "cons": "linearizable"}, []
    yield {"t": Type.READ, "start": 0, "end": 1000, "iso": "records", "max": 1, "min_commit": 1}, []
    yield {"t": Type.READ, "start": 500, "end": 1000, "wait": 1}, []
    yield {"t": Type.TRANSACTION, "op": "abort", "x": OPEN}, []
    yield {"t": Type.READ, "start": end, "end": 1000}, []
    yield {"t": Type.PRODUCER, "p": "recorded"}, []
    yield {"t": Type.PRODUCER, "p": "recorded-once", "op": "expire"}, []
    yield {"t": Type.TIME, "ms": 0}, []
    yield {"t": Type.DIGEST, "start": 0, "end": 32, "span": 16}, []
    for table in ("terms", "segments", "producers", "nothing"):
        yield {"t": Type.DESCRIBE, "table": table}, []
    seen = {"default": SeenLog(1, log_uuid)}
    yield {"t": Type.AWAIT, "n": 1, "wait": 1000}, codec.seen_payload(seen)
    yield {"t": Type.AT, "position": 0, "max": 1000}, []
    yield {"t": Type.WATCH, "wait": 0}, []
    yield {"t": Type.RECOVER}, []
    yield {"t": Type.FOUND, "op": "look"}, []
    yield {"t": Type.CONTINUE, "op": "ask"}, []
    yield {"t": Type.MEMBER, "op": "list"}, []
    yield {"t": Type.MEMBER, "op": "remove", "node": "n0"}, []
    yield {"t": Type.METADATA, "g": "no-such-group"}, []
    yield {"t": Type.METADATA, "lu": "another-log"}, []
    yield {"t": Type.READ, "start": -5}, []


def record_client(address: tuple[str, int], log_uuid: str, end: int) -> list[dict[str, Any]]:
    """Hold the session with a node; return its frames."""
    frames = []
    with Socket(address) as node:

        def exchange(request: bytes, preface: bytes = b"") -> dict[str, Any]:
            node.send(preface + request)
            response = recorded("<", node.receive())
            frames.extend([recorded(">", request), response])
            return dict(response["header"])

        exchange(_bytes_of(Hello().to_header()), PREFACE)
        script, response = requests(log_uuid, end), None
        for number in itertools.count(1):
            try:
                header, payload = script.send(response) if response else next(script)
            except StopIteration:
                break
            response = exchange(_bytes_of({"g": "default"} | header | {"r": number}, *payload))
    return frames


def _bytes_of(header: dict[str, Any], *payload: Any) -> bytes:
    return b"".join(map(bytes, encode_frame(header, *payload)))


# --- links between nodes ----------------------------------------------------------------------------------------------


class RecordingLink(Link):
    """Forwards a port to an address, and keeps the frames of both sides of each connection."""

    def __init__(self, target: tuple[str, int]) -> None:
        super().__init__(target)
        self.connections: list[list[tuple[str, bytes]]] = []

    def ways(self, near: Streams, far: Streams) -> Sequence[Coroutine[Any, Any, None]]:
        frames: list[tuple[str, bytes]] = []
        self.connections.append(frames)
        return self._forward(">", near[0], far[1], frames), self._forward("<", far[0], near[1], frames)

    async def _forward(
        self, way: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, frames: list[tuple[str, bytes]]
    ) -> None:
        rest, begun = b"", way == "<"
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                rest += data
                if not begun and len(rest) >= len(PREFACE):
                    assert rest.startswith(PREFACE)
                    begun, rest = True, rest[len(PREFACE) :]
                for frame in split(rest) if begun else ():
                    frames.append((way, frame))
                    rest = rest[len(frame) :]


class RecordedGroup(LinkedGroup):
    """Two nodes that reach each other through recording links only."""

    def __init__(self, directory: Path) -> None:
        storage = StorageConfig(data_segment_bytes=1 << 20, index_segment_bytes=1 << 16)
        super().__init__(directory, RecordingLink, {}, nodes=2, storage=storage)

    @property
    def connections(self) -> list[list[tuple[str, bytes]]]:
        """The frames of each connection."""
        return [frames for link in self.links for frames in cast("RecordingLink", link).connections if frames]


def record_links(directory: Path) -> list[list[dict[str, Any]]]:
    """Bootstrap a group of two nodes, append and transfer leadership; return the frames of each connection."""

    async def record() -> list[list[tuple[str, bytes]]]:
        async with RecordedGroup(directory) as group:
            client = await group.client()
            await client.append([b"one", b"two"])
            await client.append([LARGE_BODY])
            await client.append([b"last"], p="recorded", pe=0, ps=0)
            await client.ask(Type.TRANSFER, node=(await group.followers())[0])
            return group.connections

    found = []
    for frames in run(record()):
        seen, kept = Counter[tuple[str, str]](), []
        for way, data in frames:
            row = recorded(way, data)
            key = (way, row["type"])
            seen[key] += 1
            if seen[key] <= OF_EACH:
                kept.append(row)
        found.append(kept)
    return found
