"""One client connection to one real node: responses, errors, and limits on memory and work."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from dledger_core.config import Limits
from dledger_core.control import PARTS_MAX, Part
from dledger_core.errors import (
    BadRequestError,
    BusyError,
    FencedError,
    TransactionError,
    UnknownGroupError,
)
from dledger_core.net.frame import Frame
from dledger_core.net.hello import Hello
from dledger_core.net.protocol import Type
from dledger_core.net.transport import connect
from tests.support.server_group import RawClient, ServerGroup, eventually, run

KEY = {"q": "query", "b": 1, "r": "run"}


def serve_one(tmp_path, work, **options):
    """Runs ``work(group, client)`` against a group of one node."""

    async def all_of_it():
        async with ServerGroup(tmp_path, 1, **options) as group:
            await work(group, await group.client())

    run(all_of_it())


def stall(hosted):
    """Stall the group's disk until the returned event is set; return once it waits."""
    waiting, free = threading.Event(), threading.Event()

    def wait():
        waiting.set()
        free.wait(120)

    hosted.replica.run_on_disk(wait)
    assert waiting.wait(60)
    return free


class Client:
    """A bare connection that may stop reading."""

    def __init__(self):
        self.frames: list[Frame] = []

    @classmethod
    async def open(cls, group):
        self = cls()
        peer = group.peers[0]
        self.connection = await connect(peer.host, peer.port, Hello(), self, timeout_s=60)
        return self

    def on_frame(self, _, frame):
        self.frames.append(frame)

    def on_close(self, *_):
        pass


def server_side(group, known=()):
    """Return the server's connection that is not among ``known``, and its flow."""
    flows = group.nodes["n0"].service.flows
    return next((connection, flow) for connection, flow in flows.items() if connection not in known)


# --- answers -----------------------------------------------------------------------------------------------------


def test_metadata_has_time_of_last_entry(tmp_path):
    async def work(_, client):
        before = int(time.time() * 1000)
        await client.append([b"a"])
        header = (await client.ask(Type.METADATA)).header
        assert before - 1000 <= header["time"] <= int(time.time() * 1000) + 1000

    serve_one(tmp_path, work)


def test_transaction_parts_are_limited_both_ways(tmp_path):
    async def work(_, client):
        parts = [await client.attempt([b"a"], KEY), await client.attempt([b"b"], KEY)]
        state = (await client.ask(Type.TRANSACTION, op="state", x=KEY)).header
        assert (state["state"], state["parts"]) == ("open", []), "an open one may have any number of parts"
        too_many = [list(Part(1, 1, 1, 1))] * (PARTS_MAX + 1)
        with pytest.raises(BadRequestError):
            await client.ask(Type.TRANSACTION, op="commit", x=KEY, parts=too_many)
        with pytest.raises(TransactionError):
            await client.ask(Type.TRANSACTION, op="commit", x=KEY, parts=too_many[1:])
        await client.ask(Type.TRANSACTION, op="commit", x=KEY, parts=[list(part) for part in parts])
        state = (await client.ask(Type.TRANSACTION, op="state", x=KEY)).header
        assert (state["state"], state["parts"]) == ("committed", [list(part) for part in parts])

    serve_one(tmp_path, work)


def test_error_too_long_for_frame_is_shortened(tmp_path):
    async def work(group, client):
        stranger = RawClient(client.channel, "g" * ((1 << 20) - 100))
        with pytest.raises(UnknownGroupError):
            await stranger.ask(Type.METADATA)
        await client.append([b"continues"])

    serve_one(tmp_path, work)


def test_digest_lists_damaged_entries_up_to_limit(tmp_path):
    async def work(group, client):
        first, last, _ = await client.append([b"body"] * 20_000)
        path = next((tmp_path / "default" / "dledger-n0" / "data").iterdir())
        data = bytearray(path.read_bytes())
        assert data.count(b"body") == 20_000
        path.write_bytes(data.replace(b"body", b"BODY"))
        fine = (await client.ask(Type.DIGEST, start=0, end=last + 1, span=1024)).header
        assert (fine["next"], len(fine["ranges"]), fine["cut"]) == (1024, 1, False)
        assert fine["damaged"] == list(range(first, 1024))
        coarse = (await client.ask(Type.DIGEST, start=0, end=last + 1, span=16384)).header
        assert (coarse["next"], coarse["cut"]) == (16384, True)
        assert coarse["damaged"] == list(range(first, first + 8192))

    serve_one(tmp_path, work)


# --- bounds ------------------------------------------------------------------------------------------------------


def test_waiting_requests_end_with_their_connection(tmp_path):
    async def work(group, client):
        replica = group.hosted("n0").replica
        other = RawClient(await group.channel("n0"))
        asked = [asyncio.create_task(other.read(1 << 30, 1 << 31, wait=30_000)) for _ in range(50)]
        await eventually(lambda: len(replica.changes) == 50)
        _, flow = server_side(group)
        await other.channel.close()
        await eventually(lambda: not flow.tasks)
        assert len(replica.changes) == 0
        assert not group.nodes["n0"].service.flows
        await asyncio.gather(*asked, return_exceptions=True)

    serve_one(tmp_path, work)


def test_requests_of_one_connection_are_limited_in_number(tmp_path):
    async def work(group, client):
        asked = [asyncio.create_task(client.read(1 << 30, 1 << 31, wait=30_000)) for _ in range(8)]
        await eventually(lambda: len(group.hosted("n0").replica.changes) == 8)
        with pytest.raises(BusyError) as refused:
            await client.read(0, 1)
        assert refused.value.values["retry_after_ms"] == 50
        other = RawClient(await group.channel("n0"))
        assert (await other.read(0, 1))[0]["n"] == 1
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)

    serve_one(tmp_path, work, limits=Limits(connection_requests=8))


@pytest.mark.parametrize("large", [False, True], ids=["small responses", "large responses"])
def test_client_that_reads_no_responses_occupies_little_memory(tmp_path, large):
    """The node stops reading its requests; others are served meanwhile, and later it gets every response."""
    limits = Limits(connection_unsent_bytes=1 << 20, large_responses_max=2)
    count, body = (40, bytes(1 << 20)) if large else (2000, b"")
    request = {"t": Type.READ, "g": "default", "start": 1, "end": 3, "max": 4 << 20}
    if not large:  # the error repeats the name of the group twice: 80 MB in all
        request = {"t": Type.METADATA, "g": "g" * 20_000}

    async def work(group, client):
        await client.append([body])
        await client.append([body])
        known = server_side(group)[0]
        stuck = await Client.open(group)
        stuck.connection.pause_reading()
        for number in range(1, count + 1):
            stuck.connection.send(request | {"r": number})
        await eventually(lambda: len(group.nodes["n0"].service.flows) == 2)
        connection, _ = server_side(group, known=[known])
        await eventually(lambda: connection.write_buffer_bytes > limits.connection_unsent_bytes / 2)
        for _ in range(20):
            assert (await client.read(1, 2))[0]["n"] == 1
            assert connection.write_buffer_bytes <= (limits.large_responses_max + 1) * (3 << 20)
        await client.append([b"others continue"])
        stuck.connection.resume_reading()
        await eventually(lambda: len(stuck.frames) == count)
        assert {frame.header["t"] for frame in stuck.frames} <= {Type.READ_OK, Type.FAILURE}
        stuck.connection.abort()

    serve_one(tmp_path, work, limits=limits)


def test_cancelled_append_gives_its_bytes_back(tmp_path):
    async def work(group, client):
        node, hosted = group.nodes["n0"], group.hosted("n0")
        free = stall(hosted)
        other = RawClient(await group.channel("n0"))
        asked = asyncio.create_task(other.append([b"abandoned"], p="p", pe=0, ps=0))
        await eventually(lambda: node.budget.taken_bytes > 0)
        asked.cancel()
        await other.channel.close()
        await eventually(lambda: len(node.service.flows) <= 1)
        free.set()
        await eventually(lambda: node.budget.taken_bytes == 0)
        assert (await client.append([b"abandoned"], p="p", pe=0, ps=0))[:2] == (2, 2)
        assert len(hosted.appends._producers) == 0

    serve_one(tmp_path, work)


def test_busy_reaches_client_and_ends(tmp_path):
    async def work(group, client):
        free = stall(group.hosted("n0"))
        first = asyncio.create_task(client.append([bytes(700 << 10)]))
        await eventually(lambda: group.nodes["n0"].budget.taken_bytes > 0)
        with pytest.raises(BusyError) as refused:
            await client.append([bytes(700 << 10)])
        assert refused.value.retriable
        assert refused.value.values["retry_after_ms"] == 50
        free.set()
        await first
        await client.append([bytes(700 << 10)])

    serve_one(tmp_path, work, inflight_bytes_max=1 << 20)


# --- transactions --------------------------------------------------------------------------------------------------


def test_transaction_state_has_its_input_and_fences_old_runs(tmp_path):
    async def work(_, client):
        lost = await client.attempt([b"old"], KEY)
        newer = KEY | {"r": "run2"}
        won = await client.attempt([b"new"], newer)
        parts = [list(won)]
        with pytest.raises(FencedError):
            await client.ask(Type.TRANSACTION, op="state", x=KEY)
        with pytest.raises(FencedError):
            await client.ask(Type.TRANSACTION, op="commit", x=KEY, parts=[list(lost)])
        await client.ask(Type.TRANSACTION, op="commit", x=newer, parts=parts, i="digest of its offsets")
        header = (await client.ask(Type.TRANSACTION, op="state", x=newer)).header
        assert (header["state"], header["parts"]) == ("committed", parts)
        assert (header["i"], header["newest"]) == ("digest of its offsets", 1)
        with pytest.raises(FencedError):
            await client.ask(Type.TRANSACTION, op="commit", x=KEY, parts=[list(lost)])
        with pytest.raises(FencedError):
            await client.attempt([b"another query"], {"q": "query", "b": 0, "r": "copy"})

    serve_one(tmp_path, work)


def test_commit_overtaken_by_newer_run_is_fenced(tmp_path):
    async def work(group, client):
        part = await client.attempt([b"old"], KEY)
        free, replica = stall(group.hosted("n0")), group.hosted("n0").replica
        last = replica.raft.last_index
        newer = asyncio.create_task(client.attempt([b"new"], KEY | {"r": "run2"}))
        commit = asyncio.create_task(client.ask(Type.TRANSACTION, op="commit", x=KEY, parts=[list(part)]))
        try:
            await eventually(lambda: replica.raft.last_index == last + 3)
        finally:
            free.set()
        await newer
        with pytest.raises(FencedError):
            await commit

    serve_one(tmp_path, work)


def test_metadata_has_orphaned_space_on_request(tmp_path):
    async def work(_, client):
        assert "orphaned" not in (await client.ask(Type.METADATA)).header
        assert (await client.ask(Type.METADATA, space=True)).header["orphaned"] == [0, 0]
        won = await client.attempt([b"won"], KEY)
        await client.attempt([b"lost", b"too"], KEY, "b")
        assert (await client.ask(Type.METADATA, space=True)).header["orphaned"] == [0, 0]
        await client.ask(Type.TRANSACTION, op="commit", x=KEY, parts=[list(won)])
        assert (await client.ask(Type.METADATA, space=True)).header["orphaned"] == [2, 2 * 48 + 7]

    serve_one(tmp_path, work)
