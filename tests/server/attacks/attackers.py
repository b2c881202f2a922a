"""Attacks on a node as a stranger or a principal with few permissions can run them, each a function with a count.

A function returns when its attack is built up; what it opened, and the tasks that go on, belong to its ``Enemy`` until
that is closed. It asserts what the node itself must do, such as to close the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import ssl
import struct
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, NamedTuple

import msgpack
import pytest

from dledger_core.checksum import crc32
from dledger_core.config import LIMITS, Peer
from dledger_core.errors import DLedgerError, UnauthenticatedError, UnreachableError, error_from_wire
from dledger_core.net import codec, messages
from dledger_core.net.connection import Connection
from dledger_core.net.credentials import PLAINTEXT, Credentials
from dledger_core.net.dialing import Dialed
from dledger_core.net.frame import Frame, encode_frame
from dledger_core.net.hello import Hello
from dledger_core.net.protocol import CLIENT_CONTAINERS_MAX, CLIENT_FRAME_BYTES_MAX, PREFACE, Type
from dledger_core.raft import AppendEntries, InstallSnapshot, Message, RequestVote, TimeoutNow
from dledger_core.record import Columns
from tests.support.field_values import header_of
from tests.support.server_group import eventually

TIMEOUT_S = 120.0
AT_ONCE = 50
"""Connections that are opened side by side."""
WAITING = 1000
"""Requests that wait on one connection; a node allows 1024."""
FORGED = "FORGED"
"""A line of a node's log that begins with it was written by a stranger."""
_ADDRESSES: Iterator[str] = (f"127.{a}.{b}.{c}" for a, b, c in itertools.product(range(8, 250), range(250), (1, 77)))
"""Loopback addresses, so that an attack looks as if many machines ran it."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """The knowledge of an attacker.

    Attributes:
        node: the node that is attacked.
        credentials: the attacker's own.
        group: the group of all clients, which the attacker may read.
        own: a group to which the attacker may append.
    """

    node: Peer
    credentials: Credentials = PLAINTEXT
    group: str = "default"
    own: str = "tenant"

    @property
    def is_secure(self) -> bool:
        """Whether the port speaks TLS."""
        return self.credentials.context() is not None


class Session:
    """A connection after hello: counts what the node answers."""

    def __init__(self) -> None:
        self.sent = 0
        self.connection: Connection | None = None
        self.answers: Counter[int] = Counter()
        self.errors: Counter[str] = Counter()
        self.newest: Frame | None = None

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        del connection
        self.newest = frame
        self.answers[frame.header["t"]] += 1
        if frame.header["t"] == Type.FAILURE:
            self.errors[error_from_wire(frame.header["e"]).name] += 1

    def on_close(self, connection: Connection, error: Exception | None) -> None:
        pass

    def send(self, *parts: bytes) -> None:
        assert self.connection is not None
        self.connection.send_buffers([b"".join(parts)])

    @property
    def answered(self) -> int:
        return self.answers.total()


class Enemy:
    """All that one attack has opened; a context manager that ends the attack."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._connections: list[Connection] = []
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Enemy:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        failed = [task for task in self._tasks if task.done()]
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for connection in self._connections:
            connection.abort()
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.gather(*(connection.closed for connection in self._connections))
        for task in failed:
            task.result()

    def keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` until the attack ends."""
        self._tasks.append(asyncio.create_task(work))

    async def socket(self, tls: ssl.SSLContext | None = None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a socket, and send nothing."""
        node, own = self.target.node, (next(_ADDRESSES), 0)
        reader, writer = await asyncio.open_connection(node.host, node.port, ssl=tls, local_addr=own)
        self._writers.append(writer)
        return reader, writer

    async def session(self, hello: Hello | None = None) -> Session:
        """Connect and introduce this side."""
        node, found, credentials = self.target.node, Session(), self.target.credentials
        introduction = replace(hello or Hello(), token=credentials.token())
        loop = asyncio.get_running_loop()
        found.connection = connection = Connection(Dialed(introduction, found, node.node_id))
        await loop.create_connection(
            lambda: connection, node.host, node.port, ssl=credentials.context(), local_addr=(next(_ADDRESSES), 0)
        )
        self._connections.append(connection)
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.shield(connection.accepted)
        return found

    async def sessions(self, count: int) -> list[Session]:
        """Connect ``count`` times; the node may close a connection whose handshake takes too long."""

        async def one() -> Session:
            async with asyncio.timeout(TIMEOUT_S):
                while True:
                    with contextlib.suppress(OSError, UnreachableError):
                        return await self.session()

        return await at_once(one, count)


async def at_once(open_one: Callable[[], Awaitable[Any]], count: int) -> list[Any]:
    """Open ``count`` connections, some of them side by side."""
    opened: list[Any] = []
    places = iter(range(count))

    async def some() -> None:
        opened.extend([await open_one() for _ in places])

    await asyncio.gather(*(some() for _ in range(min(AT_ONCE, count))))
    return opened


def frame(header: dict[str, Any], *payload: Any) -> bytes:
    return b"".join(map(bytes, encode_frame(header, *payload)))


def request(kind: Type, number: int, group: str, **fields: Any) -> dict[str, Any]:
    return {"t": kind, "r": number, "g": group, **fields}


async def all_arrived(sessions: list[Session]) -> None:
    """Wait until the nodes have read everything that was sent: a node reads a connection's requests in order."""
    for session in sessions:
        session.send(frame({"t": Type.ALIVE, "r": 1 << 30}))
    await eventually(lambda: all(session.answers[Type.ALIVE_OK] for session in sessions))


# --- connections ------------------------------------------------------------------------------------------------------


async def half_open_connections(enemy: Enemy, count: int) -> None:
    """TCP connections that send nothing; the node closes each after a few seconds."""
    await at_once(enemy.socket, count)


async def idle_connections(enemy: Enemy, count: int) -> None:
    """Connections that have introduced themselves and send nothing more."""
    await enemy.sessions(count)


async def connection_flood(enemy: Enemy, count: int) -> None:
    """Connections that are closed at once, or send half of a hello or garbage first."""
    contents = itertools.cycle((b"", PREFACE, b"\x16\x03\x01", PREFACE + b"\0\0\0\x40", bytes(64)))
    left = iter(range(count))

    async def flood() -> None:
        for _ in left:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(10):
                    _, writer = await enemy.socket()
                    writer.write(next(contents))
                    writer.close()

    flooding = [asyncio.ensure_future(flood()) for _ in range(AT_ONCE)]
    await asyncio.gather(*flooding)


async def broken_hellos(enemy: Enemy, count: int) -> None:
    """First bytes other than a hello, half of one, and one that is too long: the node closes each connection."""
    contents = (bytes(100), PREFACE + b"\xff" * 20, b"\x16\x03\x01\xff\xff" + bytes(range(200)), PREFACE + b"\0\0")
    under_tls = {None, enemy.target.credentials.context()}
    cases = itertools.cycle(itertools.product(contents, under_tls))

    async def one() -> None:
        content, tls = next(cases)
        reader, writer = await enemy.socket(tls)
        writer.write(content)
        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(reader.read(), TIMEOUT_S)

    await at_once(one, count)
    with pytest.raises((DLedgerError, OSError)):
        await enemy.session(Hello(features=frozenset({"x" * 8000})))


# --- frames -----------------------------------------------------------------------------------------------------------


async def slow_frames(enemy: Enemy, count: int) -> None:
    """Connections that send one byte of a request at a time."""
    sessions = await enemy.sessions(count)
    columns = Columns.from_bodies([bytes(32 << 10)])
    whole = frame(request(Type.APPEND, 1, enemy.target.own, n=1), *codec.columns_payload(columns))

    async def dribble() -> None:
        for byte in whole:
            for session in sessions:
                session.send(bytes([byte]))
            await asyncio.sleep(0.1)

    enemy.keep(dribble())


async def giant_lengths(enemy: Enemy, count: int) -> None:
    """Frames whose lengths no node accepts; each ends its connection."""
    lengths = [(0xFFFFFFFF, 16), (0x7FFFFFFF, 16), (100, 0xFFFFFFFF), (8, 1), (1 << 24, 1 << 23), (30 << 20, 64)]
    for (length, header), session in zip(itertools.cycle(lengths), await enemy.sessions(count), strict=False):
        session.send(struct.pack(">III", length, header, 0), bytes(64))
        await eventually(lambda session=session: not session.connection.is_open)


async def empty_lists(enemy: Enemy, count: int) -> None:
    """``count`` empty lists in a header, and 300: both end their connections; then in allowed headers."""
    for lists in (count, CLIENT_CONTAINERS_MAX + 44):
        session = await enemy.session()
        packed = msgpack.packb(request(Type.METADATA, 1, enemy.target.group, x=[[]] * lists))
        session.send(struct.pack(">III", 8 + len(packed), len(packed), crc32(packed)), packed)
        await eventually(lambda session=session: not session.connection.is_open)
    each = CLIENT_CONTAINERS_MAX - 6
    session = await enemy.session()
    for number in range(1, count // each + 1):
        session.send(frame(request(Type.METADATA, number, enemy.target.group, x=[[]] * each)))
    await all_arrived([session])
    assert session.answers[Type.METADATA_OK] == count // each


async def unfinished_frames(enemy: Enemy, count: int) -> None:
    """Appends that lack their last byte, each as large as a node accepts."""
    body = bytes(CLIENT_FRAME_BYTES_MAX - (1 << 16))
    payload = struct.pack("<II", len(body), 0)
    sessions = await enemy.sessions(count)
    for session in sessions:
        header = msgpack.packb(request(Type.APPEND, 1, enemy.target.own, n=1))
        length = 8 + len(header) + len(payload) + len(body)
        session.send(struct.pack(">III", length, len(header), crc32(header)), header, payload, body[:-1])
    await eventually(lambda: all(not session.connection.write_buffer_bytes for session in sessions))


async def nested_peer_pieces(enemy: Enemy, count: int) -> None:
    """Pieces, which only nodes may send: each ends its connection, and takes no memory."""
    for session in await enemy.sessions(count):
        session.send(frame({"t": Type.PIECE, "n": 30 << 20}, bytes(4096)))
        await eventually(lambda session=session: not session.connection.is_open)


# --- requests ---------------------------------------------------------------------------------------------------------


async def readers_that_take_nothing(enemy: Enemy, count: int) -> None:
    """Readers that ask for much and never receive it."""
    for session in await enemy.sessions(count):
        session.connection.pause_reading()
        read = messages.READ.encode(messages.ReadRequest(start=0, end=1 << 40, max_bytes=16 << 20))
        for number in range(1, 9):
            session.send(frame({**read, "r": number, "g": enemy.target.group}))


async def unread_metadata(enemy: Enemy, count: int) -> None:
    """``count`` MiB of requests for metadata, whose responses are never received."""
    one = frame(request(Type.METADATA, 1, enemy.target.group))
    for session in await enemy.sessions(max(1, count // 8)):
        session.connection.pause_reading()
        session.send(one * ((8 << 20) // len(one)))


async def awaits(enemy: Enemy, count: int) -> None:
    """Requests that wait for entries far ahead of its end; with security a principal has a share of them."""
    sessions = await enemy.sessions(-(-count // WAITING))
    payload = b"".join(map(bytes, codec.seen_payload({enemy.target.group: codec.SeenLog(1 << 40, None)})))
    for session in sessions:
        header = {"t": Type.AWAIT, "n": 1, "wait": 30_000}
        session.send(*(frame({**header, "r": number}, payload) for number in range(1, WAITING + 1)))
    await all_arrived(sessions)
    errors = sum((session.errors for session in sessions), Counter())
    assert set(errors) <= {"QUOTA_EXCEEDED"}
    assert not enemy.target.is_secure or errors.total() == count - LIMITS.principal_awaited_groups // 8


async def long_polls(enemy: Enemy, count: int) -> None:
    """Reads that wait for an entry far ahead of its end."""
    sessions = await enemy.sessions(-(-count // WAITING))
    read = messages.READ.encode(messages.ReadRequest(start=1 << 40, end=1 << 41, wait_ms=30_000))
    for session in sessions:
        session.send(*(frame({**read, "r": number, "g": enemy.target.group}) for number in range(1, WAITING + 1)))
    await all_arrived(sessions)


async def watches(enemy: Enemy, count: int) -> None:
    """Requests that wait for a change of roles."""
    sessions = await enemy.sessions(-(-count // WAITING))
    first = sessions[0]
    first.send(frame(request(Type.WATCH, 1, enemy.target.group, wait=0)))
    await eventually(lambda: first.newest)
    found = messages.WATCH_OK.decode(first.newest.header)
    wait = {"wait": 60_000, "seen": [found.role, found.leader, found.term]}
    for session in sessions:
        asked = (request(Type.WATCH, number, enemy.target.group, **wait) for number in range(2, WAITING + 2))
        session.send(*map(frame, asked))
    await all_arrived(sessions)


async def pins(enemy: Enemy, count: int) -> None:
    """Readers that pin the log; with security a principal has a share of the pins."""
    session = await enemy.session()
    for number in range(1, count + 1):
        session.send(frame(request(Type.METADATA, number, enemy.target.group, pin=[f"p{number}", 60_000])))
    await all_arrived([session])
    kept = session.answers[Type.METADATA_OK]
    assert kept + session.answers[Type.FAILURE] == count
    assert set(session.errors) <= {"QUOTA_EXCEEDED", "BUSY"}
    assert kept == min(count, 500) or not enemy.target.is_secure
    for number in range(1, count + 1):
        session.send(frame(request(Type.METADATA, number, enemy.target.group, pin=[f"p{number}", 0])))
    await eventually(lambda: session.answers[Type.METADATA_OK] == kept + count)


async def _appends(enemy: Enemy, headers: Iterator[dict[str, Any]]) -> Counter[str]:
    """Append one entry with each header, many at once; return the errors by code."""
    payload = b"".join(map(bytes, codec.columns_payload(Columns.from_bodies([b"x"]))))
    sessions, sent = await enemy.sessions(4), 0
    for number, some in enumerate(iter(lambda: list(itertools.islice(headers, 500)), [])):
        session = sessions[number % len(sessions)]
        await eventually(lambda session=session: session.answered == session.sent)
        session.send(*(frame({**header, "r": at + 1, "n": 1}, payload) for at, header in enumerate(some)))
        session.sent += len(some)
        sent += len(some)
    await eventually(lambda: sum(session.answered for session in sessions) == sent)
    return sum((session.errors for session in sessions), Counter())


async def producer_ids(enemy: Enemy, count: int) -> None:
    """Appends of one principal, each with a new producer id."""
    own = enemy.target.own
    errors = await _appends(
        enemy, (request(Type.APPEND, 1, own, p=f"attack {number}", pe=0, ps=0) for number in range(count))
    )
    assert set(errors) <= {"QUOTA_EXCEEDED"}  # a principal has a share of the table


async def open_transactions(enemy: Enemy, count: int) -> None:
    """Appends, each of a new transaction that is never ended; above the limit they are refused."""
    own = enemy.target.own
    key = {"b": 0, "r": "run", "a": "attempt"}
    errors = await _appends(
        enemy, (request(Type.APPEND, 1, own, x={**key, "q": f"attack {number}"}) for number in range(count))
    )
    assert errors.total() >= count - 10_000
    assert set(errors) <= {"OPEN_TRANSACTIONS", "QUOTA_EXCEEDED"}


# --- lies -------------------------------------------------------------------------------------------------------------


async def forged_log_lines(enemy: Enemy, count: int) -> None:
    """Names with line ends and control characters, wherever a request has a name."""
    forged = f"x\n{FORGED} line\r\n{FORGED}\x1b[2J\u2028{FORGED} "
    session = await enemy.session()
    for number in range(1, count + 1):
        session.send(frame(request(Type.METADATA, number, f"{forged}{number}")))
        session.send(frame(request(Type.TRANSFER, number, enemy.target.group, node=forged)))
        session.send(frame(request(Type.PRODUCER, number, enemy.target.own, op="state", p=forged)))
        session.send(frame(request(Type.METADATA, number, enemy.target.group, pin=[forged, 1])))
        with pytest.raises(DLedgerError):
            await enemy.session(Hello("peer", forged, forged, (1, 1), forged))
    await eventually(lambda: session.answered == 4 * count)


async def fake_peer(enemy: Enemy, count: int) -> None:
    """Votes, entries and snapshots of an impostor: by a client, and by one that claims to be a node."""
    if enemy.target.is_secure:
        for name in ("n0", "n1", "n2", "n9"):
            with pytest.raises(UnauthenticatedError):
                await enemy.session(Hello("peer", name, "directory", (1 << 40, 7), "127.0.0.1:1"))
    kinds: list[type[Message]] = [RequestVote, AppendEntries, InstallSnapshot, TimeoutNow]
    headers = [header_of(table) for table in codec.PEER_TABLES if table.message in kinds]
    assert len(headers) == len(kinds)
    for number in range(count):
        session = await enemy.session()
        session.send(frame({**headers[number % len(headers)], "a": 1, "term": 1 << 40}))
        await eventually(lambda session=session: not session.connection.is_open)


# --- all --------------------------------------------------------------------------------------------------------------


Run = Callable[[Enemy, int], Awaitable[None]]


class Attack(NamedTuple):
    """A row.

    Attributes:
        run: the attack.
        count: how many of it ``make test`` runs.
        full: how many ``make soak`` and the benchmark run.
        secure: whether the nodes have security.
        lasts: whether it weighs on the node once it is built up.
    """

    run: Run
    count: int
    full: int
    secure: bool = True
    lasts: bool = True


ATTACKS = (
    Attack(half_open_connections, 2000, 2000, secure=False),
    Attack(half_open_connections, 300, 2000),
    Attack(idle_connections, 2000, 2000, secure=False),
    Attack(idle_connections, 150, 2000),
    Attack(connection_flood, 3000, 10_000, secure=False, lasts=False),
    Attack(connection_flood, 500, 10_000, lasts=False),
    Attack(broken_hellos, 40, 400, secure=False, lasts=False),
    Attack(broken_hellos, 40, 400, lasts=False),
    Attack(slow_frames, 100, 1000),
    Attack(giant_lengths, 12, 120, lasts=False),
    Attack(empty_lists, 1_000_000, 1_000_000, lasts=False),
    Attack(unfinished_frames, 20, 48),
    Attack(nested_peer_pieces, 4, 40, lasts=False),
    Attack(readers_that_take_nothing, 40, 40),
    Attack(unread_metadata, 56, 56),
    Attack(awaits, 10_000, 10_000),
    Attack(long_polls, 2000, 2000),
    Attack(watches, 22_000, 22_000),
    Attack(pins, 1000, 1000, lasts=False),
    Attack(producer_ids, 1000, 100_000, lasts=False),
    Attack(open_transactions, 1000, 24_000, lasts=False),
    Attack(forged_log_lines, 10, 100, lasts=False),
    Attack(fake_peer, 8, 80, lasts=False),
)
