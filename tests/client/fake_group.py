"""A scripted group of nodes that speaks the real protocol over real loopback sockets, in the test's own loop."""

import asyncio
import contextlib
import functools
import inspect
import struct
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np

from dledger_core import control
from dledger_core.checksum import crc32
from dledger_core.client import AsyncLogClient, NodeClient
from dledger_core.client.routing.node_health import NodeHealth
from dledger_core.client.routing.retry import Timeouts
from dledger_core.config import Peer, format_peers, parse_peers
from dledger_core.errors import DLedgerError, IndexOutOfRangeError, NotLeaderError, OtherLogError
from dledger_core.lineage import ancestors_of_rows, follows
from dledger_core.net import codec, messages
from dledger_core.net.hello import FEATURES, Hello
from dledger_core.net.listening import serve
from dledger_core.net.protocol import Type
from dledger_core.record import Columns, encode

SHORT_MS = 500
"""For calls that are to run out of time: soon over, yet long enough to find a leader on a stalled machine."""


def node_client(
    peers, group="default", *, timeout_ms=10_000, retry_timeout_ms=None, connect_timeout_ms=None, health=None
):
    """The implementation behind AsyncClient, which counts its work in flight.

    ``health``: what it knows of the nodes; by default nothing, and a read is asked of a second one after a minute only.
    """
    timeouts = Timeouts.of(timeout_ms, retry_timeout_ms, connect_timeout_ms)
    return NodeClient(
        parse_peers(peers), group, timeouts, prefix=FakeFormat(), health=health or NodeHealth(hedge_delay_s=60.0)
    )


class FakeFormat:
    """Messages of a commitlog prefix: position and CRC (>qI), then the content that the CRC covers."""

    @staticmethod
    def message(position, content):
        return struct.pack(">qI", position, crc32(content)) + content

    def faults(self, batch):
        rows = zip(batch.column("position").to_pylist(), batch.column("body").to_pylist(), strict=True)
        return np.array([body != self.message(position, body[12:]) for position, body in rows], np.uint8)


def answering(payload=b"", **fields):
    """Return a step that responds with these fields."""
    return lambda node, connection, frame: ({"t": frame.header["t"] + 1, **fields}, [payload])


def filled(group):
    """Append entries 0-9: 0 and 5 are control entries, 6 and 7 are orphaned."""
    group.log.append_control()
    group.log.append_bodies(*(f"body {i}".encode() for i in range(1, 5)))
    group.log.append_control()
    group.log.append_bodies(*(f"body {i}".encode() for i in range(6, 10)))
    group.log.skip = [[6, 8], [20, 30]]
    return group


def on_group(*, leader="n1", epoch=0, is_filled=False, **options):
    """Run a test with a group and a client of it; ``log``, if it is a parameter, is the client's implementation."""

    def decorate(test):
        parameters = inspect.signature(test).parameters
        given = [name for name in ("group", "client", "log") if name in parameters]

        @functools.wraps(test)
        async def call(**values):
            async with FakeGroup(leader, epoch) as group:
                if is_filled:
                    filled(group)
                log = node_client(group.peers, **options)
                async with AsyncLogClient(log) as client:
                    named = {"group": group, "client": client, "log": log}
                    await test(**{name: named[name] for name in given}, **values)

        call.__signature__ = inspect.Signature([p for name, p in parameters.items() if name not in given])
        return call

    return decorate


class FakeLog:
    """Entries of a group, all committed at once."""

    def __init__(self):
        self.records, self.position = [], 0
        self.producers = {}
        self.skip = []

    @property
    def end(self):
        return len(self.records)

    def append(self, columns, body_of_control=None):
        first = self.end
        run_of = encode(
            columns,
            first_index=first,
            term=1,
            position=self.position,
            timestamp_ms=1_700_000_000_000 + first,
            segment_bytes=1 << 40,
            control=body_of_control,
        )
        self.position += run_of.nbytes
        self.records += [run_of.slice(i, i + 1) for i in range(run_of.count)]
        return first + (body_of_control is not None), self.end - 1

    def append_bodies(self, *bodies):
        return self.append(Columns.from_bodies(bodies))

    def append_control(self):
        return self.append(Columns.empty(), b"")


TABLES = {table.number: table for table in messages.TABLES}


class FakeNode:
    """One node. ``script[type]`` lists the steps for the next requests of a type, before the normal responses.

    A step is an error to return, ``"ignore"``, ``"drop"`` (close without a response), ``"apply and drop"``, or a
    callable (node, connection, frame) -> header and payload of the response.
    """

    def __init__(self, node_id, group):
        self.node_id, self.group = node_id, group
        self.port, self.server = 0, None
        self.script = {}
        self.requests = []
        self.frozen = False  # it receives requests, and responds to none until ``thaw``
        self.held = []
        self.names = ...  # the leader that this node names; ... = the real one
        self.damaged = False
        self.log_uuid = "uuid"
        self.chain = []  # rows of METADATA
        self.features = FEATURES

    @property
    def address(self):
        return f"127.0.0.1:{self.port}"

    @property
    def leader(self):
        return self.group.leader if self.names is ... else self.names

    async def start(self):
        self.server = await serve(
            "127.0.0.1",
            self.port,
            accept=lambda hello: Hello("peer", self.node_id, features=self.features),
            handler_for=lambda connection: self,
        )
        self.port = self.server.port

    async def stop(self):
        if self.server is not None:
            await self.server.close()
            self.server = None

    def asked(self, kind):
        """The headers of the received requests of a type, with the defaults of missing fields."""
        defaults = {field.key: field.default for field in TABLES[kind].fields}
        return [defaults | frame.header for frame in self.requests if frame.header["t"] == kind]

    def on_close(self, connection, error):
        pass

    def thaw(self):
        self.frozen, held, self.held = False, self.held, []
        for connection, frame in held:
            self.respond(connection, frame)

    def on_frame(self, connection, frame):
        self.requests.append(frame)
        self.group.changed.set()
        if self.frozen:
            self.held.append((connection, frame))
        else:
            self.respond(connection, frame)

    def on_appends(self, connection, frames):
        for frame in frames:
            self.on_frame(connection, frame)
        return True

    def respond(self, connection, frame):
        steps = self.script.get(frame.header["t"])
        step = steps.pop(0) if steps else None
        if step == "ignore":
            return
        answer = None
        if step != "drop":
            try:
                if isinstance(step, DLedgerError):
                    raise step
                answer = step(self, connection, frame) if callable(step) else self.answer(frame)
            except DLedgerError as error:
                answer = {"t": Type.FAILURE, "e": error.to_wire()}, []
        if step in ("drop", "apply and drop"):
            connection.abort()
        elif answer is not None:
            header, payload = answer
            connection.send({"r": frame.header["r"], **header}, *payload)

    # --- the normal responses ---------------------------------------------------------------------------------------

    def answer(self, frame):
        header, kind = frame.header, frame.header["t"]
        if header.get("lu", self.log_uuid) != self.log_uuid:
            raise OtherLogError(f"{self.node_id} has another log", "", "", {"ours": self.log_uuid})
        of_leader = kind in (
            *(Type.APPEND, Type.PRODUCE, Type.PRODUCER, Type.TRANSACTION, Type.TRANSFER, Type.MEMBER),
            *(Type.RANGES, Type.PROVE, Type.ARCHIVE_RANGES, Type.ARCHIVE_END),
        )
        if (of_leader or header.get("cons") == "linearizable") and self.leader != self.node_id:
            raise NotLeaderError(f"{self.node_id} does not lead", "", "", {"leader_id": self.leader})
        defaults = {field.key: field.default for field in TABLES[kind].fields}
        return getattr(self, f"on_{Type(kind).name.lower()}")(defaults | header, frame.payload)

    def on_metadata(self, header, payload):
        log = self.group.log
        role = "leader" if self.leader == self.node_id else "follower"
        me = [self.node_id, role, 1, 0, log.end - 1, log.end - 1, log.end, log.position]
        state = {"leader": self.leader, "term": 1, "log": self.log_uuid, "self": me, "is_recovering": False}
        members = self.group.members or [[node.node_id, "", node.address, "voter"] for node in self.group]
        group = {"peers": "", "groups": [], "preferred": [], "time": None, "members": members}
        group |= {"configuration": self.group.configuration, "chain": self.chain or None}
        uuid, index, entry_term = header.get("seen") or (self.log_uuid, -1, -1)
        if uuid != self.log_uuid:
            group["follows"] = follows(ancestors_of_rows(self.chain), uuid, index) and entry_term in (-1, 1)
        return {"t": Type.METADATA_OK} | state | group, []

    def on_member(self, header, payload):
        rows = [[node.node_id, "", "", "voter", False, "", True, 0, 0, 0, -1] for node in self.group]
        return {"t": Type.MEMBER_OK, "configuration": -1, "pending": False, "members": rows, "before": []}, []

    def on_append(self, header, payload):
        log, columns = self.group.log, codec.parse_columns(payload, header["n"])
        columns.verify()
        done = log.producers.setdefault(header["p"], {}) if header["p"] else {}
        if header["ps"] in done:
            first, last = done[header["ps"]]
        else:
            leads = control.pack({"k": "x"}) if header["p"] or header["x"] else None
            first, last = log.append(columns, leads)
            done[header["ps"]] = first, last
        return {"t": Type.APPEND_OK, "first": first, "last": last, "term": 1}, []

    def on_produce(self, header, payload):
        columns = codec.parse_columns(payload, header["n"])
        parts = zip(columns.split(header["ns"]), header["p"], header["ps"], strict=True)
        found = []
        for part, producer_id, sequence in parts:
            response, _ = self.on_append(
                {"n": part.count, "p": producer_id, "ps": sequence, "x": None}, b"".join(codec.columns_payload(part))
            )
            found.append((response["first"], response["last"], response["term"]))
        firsts, lasts, terms = map(list, zip(*found, strict=True))
        return {"t": Type.PRODUCE_OK, "first": firsts, "last": lasts, "term": terms}, []

    def on_read(self, header, payload):
        log = self.group.log
        if header["start"] < self.group.first:
            raise IndexOutOfRangeError("too old", "", "", {"first_index": self.group.first, "last_index": log.end - 1})
        chosen = log.records[header["start"] : header["end"]]
        sizes, kept = 0, []
        for records in chosen:
            if kept and sizes + records.nbytes > header["max"]:
                break
            sizes, kept = sizes + records.nbytes, [*kept, records]
        fields = {
            "t": Type.READ_OK,
            "n": len(kept),
            "next": header["start"] + len(kept),
            "commit": log.end - 1,
            "visible": log.end,
            "first": self.group.first,
            "skip": log.skip if header["iso"] == "committed" else [],
        }
        payload = b"".join(codec.records_payload(kept))
        if self.damaged and payload:
            payload = payload[:-1] + bytes([payload[-1] ^ 1])
        return fields, [payload]

    def on_time(self, header, payload):
        return {"t": Type.TIME_OK, "index": header["ms"] % 100}, []

    def on_split(self, header, payload):
        starts = np.cumsum([0, *(records.nbytes for records in self.group.log.records)])
        wanted = codec.parse_numbers(payload, header["n"])
        nearest = np.abs(starts[:, None] - wanted[None, :]).argmin(axis=0)
        return {"t": Type.SPLIT_OK}, codec.numbers_payload(np.clip(nearest, header["start"], header["end"]))

    def on_at(self, header, payload):
        starts = np.cumsum([0, *(records.nbytes for records in self.group.log.records)])
        index = int(np.searchsorted(starts, header["position"], side="right")) - 1
        return {"t": Type.AT_OK, "index": min(index, self.group.log.end)}, []

    def on_producer(self, header, payload):
        done = self.group.log.producers.get(header["p"])
        known = {"known": done is not None, "epoch": self.group.epoch, "sequence": len(done or ())}
        return {"t": Type.PRODUCER_OK, **known, "last": list(list(done.values())[-1]) if done else None}, []

    def on_transaction(self, header, payload):
        state = {"state": "open", "commit": "committed", "abort": "aborted"}[header["op"]]
        rows = sum(part.rows for part in codec.parse_parts(payload, header["n"] or 0))
        return {"t": Type.TRANSACTION_OK, "state": state, "rows": rows, "f": 5, "index": 7, "newest": -1}, []

    def on_digest(self, header, payload):
        rows = [[header["start"], header["end"], 4, 100, b"c" * 32, b"l" * 32]]
        response = {"ranges": rows, "next": header["end"], "commit": 9, "damaged": [3], "cut": False}
        return {"t": Type.DIGEST_OK, **response}, []

    def on_ranges(self, header, payload):
        end = self.group.log.end
        return {"t": Type.RANGES_OK, "ranges": [[0, end, 100]] if end else [], "start": 0, "visible": end}, []

    def on_prove(self, header, payload):
        return {"t": Type.PROVE_OK, "equal": header["rows"] == 1, "rows": 1}, []

    def on_archive_ranges(self, header, payload):
        archive = {"start": 0, "end": 1, "table": "file:///archive"}
        row = [0, 1, 1, b"d" * 32, 0, 100, 0, 1, 7]
        return {"t": Type.ARCHIVE_RANGES_OK, "ranges": [row] if header["start"] < 1 else [], "archive": archive}, []

    def on_archive_end(self, header, payload):
        return {"t": Type.ARCHIVE_END_OK}, []

    def on_alive(self, header, payload):
        return {"t": Type.ALIVE_OK}, []

    def on_groups(self, header, payload):
        return {"t": Type.GROUPS_OK, "logs": {"default": self.log_uuid}}, []

    def on_describe(self, header, payload):
        return {"t": Type.DESCRIBE_OK, "rows": [[0, self.group.log.end, 1]], "more": False}, []

    def on_await(self, header, payload):
        seen = codec.parse_seen(payload, header["n"], 4096)
        return {"t": Type.AWAIT_OK, "grown": [g for g, log in seen.items() if self.group.log.end > log.end]}, []

    def on_transfer(self, header, payload):
        self.group.leader = header["node"]
        return {"t": Type.TRANSFER_OK, "leader": header["node"]}, []


class FakeGroup:
    """Three nodes with one log; ``async with``."""

    def __init__(self, leader="n1", epoch=0):
        self.log, self.leader, self.first, self.epoch = FakeLog(), leader, 0, epoch
        self.changed = asyncio.Event()
        self.members, self.configuration = None, -1
        self.nodes = SimpleNamespace(**{name: FakeNode(name, self) for name in ("n0", "n1", "n2")})

    def __iter__(self):
        return iter(vars(self.nodes).values())

    async def __aenter__(self):
        for node in self:
            await node.start()
        return self

    async def until(self, done):
        """Waits for requests until ``done()``."""
        async with asyncio.timeout(60):
            while not done():
                self.changed.clear()
                await self.changed.wait()

    async def __aexit__(self, *error):
        for node in self:
            await node.stop()

    def client(self, **options):
        """Return a client with these limits; ``async with``."""
        return AsyncLogClient(node_client(self.peers, **options))

    def always(self, kind, step, nodes="n0 n1 n2"):
        """Make the nodes take this step for all requests of a kind."""
        for node in nodes.split():
            getattr(self.nodes, node).script[kind] = [step] * 1000

    def asked_by_node(self, kind):
        """The number of requests of a kind at each node."""
        return [len(node.asked(kind)) for node in self]

    @property
    def peers(self):
        return format_peers(tuple(Peer(node.node_id, "127.0.0.1", node.port) for node in self))

    def asked(self, kind):
        return [header for node in self for header in node.asked(kind)]


@contextlib.contextmanager
def running_group():
    """Run a group whose nodes have a thread of their own, for blocking clients.

    On the loop of the standard library: uvloop's was seen to wait forever in ``close``, for a socket that stays open.
    """
    started = Future()

    async def run():
        stop = asyncio.Event()
        async with FakeGroup() as group:
            started.set_result((group, asyncio.get_running_loop(), stop))
            await stop.wait()

    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(asyncio.run, run())
        ended.add_done_callback(lambda _: started.cancel())  # where it fails before it has started
        group, loop, stop = started.result()
        try:
            yield group
        finally:
            loop.call_soon_threadsafe(stop.set)
            ended.result()
