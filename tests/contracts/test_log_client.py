"""Contract of LogClient, for each implementation: our nodes with and without asyncio, and Java's protocol."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, ClassVar

import pytest

from dledger_core.checksum import crc32
from dledger_core.client import LogClient, OptionalOperations
from dledger_core.connect import AsyncClient, Client, JavaOptions
from dledger_core.control import TransactionId
from dledger_core.digest import RowsDigest
from dledger_core.errors import (
    BadRequestError,
    ConfigError,
    DLedgerError,
    IndexOutOfRangeError,
    UnreachableError,
    UnsupportedError,
)
from dledger_core.net.protocol import Type
from dledger_core.record import MAGIC_DATA, READ_SCHEMA, RECORD_SCHEMA, Columns
from tests.client.fake_group import FakeGroup
from tests.rocketmq.remoting.fake_nodes import NAME, RunningGroup
from tests.support.server_group import eventually

KEY = TransactionId("query", 0, "run")
CANCELLED = (asyncio.CancelledError, concurrent.futures.CancelledError)
OPTIONAL: dict[str, Callable[[Any], Any]] = {
    "append_columns": lambda c: c.append_columns(Columns.from_bodies([b"x"])),
    "append_attempt": lambda c: c.append_attempt([b"x"], transaction=KEY, attempt="a"),
    "fetch_at": lambda c: c.fetch_at(0),
    "offset_for_time": lambda c: c.offset_for_time(0),
    "split_points": lambda c: c.split_points(0, 1, [0]),
    "pin": lambda c: c.pin("reader", 0, 1.0),
    "digest": lambda c: c.digest(0, 1, span=1),
    "producer": lambda c: c.producer("p"),
    "expire_producer": lambda c: c.expire_producer("p"),
    "transaction": lambda c: c.transaction(KEY),
    "commit_transaction": lambda c: c.commit_transaction(KEY, []),
    "abort_transaction": lambda c: c.abort_transaction(KEY),
    "wait_for_entries": lambda c: c.wait_for_entries({"default": -1}, wait_ms=0),
    "describe": lambda c: c.describe("terms"),
    "role_changes": lambda c: anext(c.role_changes()),
    "archivable_ranges": lambda c: c.archivable_ranges(),
    "prove_archived": lambda c: c.prove_archived(0, 1, RowsDigest(1, b"d" * 32), table="file:///archive"),
    "archived_ranges": lambda c: c.archived_ranges(),
    "end_archive": lambda c: c.end_archive(),
    "members": lambda c: c.members(),
    "add_member": lambda c: c.add_member("n3", "127.0.0.1:1"),
    "remove_member": lambda c: c.remove_member("n0"),
    "promote_member": lambda c: c.promote_member("n0"),
    "replace_member": lambda c: c.replace_member("n0"),
}


class Nodes:
    """Scripted nodes of one protocol."""

    name = "default"
    options: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        self.group: Any = FakeGroup("n1")

    @property
    def peers(self) -> str:
        return str(self.group.peers)

    @property
    def leader(self) -> str:
        return str(self.group.leader)

    def delete(self, first: int) -> None:
        self.group.first = first

    def hang(self) -> None:
        for node in self.group:
            for kind in Type:
                node.script[kind] = ["ignore"] * 100

    @property
    def ignored(self) -> int:
        """Number of requests since ``hang``."""
        return sum(100 - len(node.script[kind]) for node in self.group for kind in Type)

    def resume(self) -> None:
        """Respond to new requests; the ignored ones stay without a response."""
        for node in self.group:
            node.script.clear()

    @property
    def end(self) -> int:
        return int(self.group.log.end)


class JavaNodes(Nodes):
    name = NAME
    options: ClassVar[dict[str, Any]] = {
        "protocol": "dledger-java",
        "java": JavaOptions(safety_lag_ms=0, appends_in_flight=1),
    }

    def __init__(self) -> None:
        self.group = RunningGroup()

    @property
    def leader(self) -> str:
        return str(self.group.group.leader_id)

    def delete(self, first: int) -> None:
        self.group.group.first = first

    def hang(self) -> None:
        self.group.group.gate = asyncio.Event()

    @property
    def ignored(self) -> int:
        return int(self.group.group.at_gate)

    def resume(self) -> None:
        self.group.group.gate = None

    @property
    def end(self) -> int:
        return len(self.group.group.entries)


class Awaited:
    """A blocking client whose methods are awaited, each in a thread."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._client, name)
        if name in ("tail", "role_changes"):
            return lambda *args, **kwargs: self._items(operation(*args, **kwargs))
        return lambda *args, **kwargs: asyncio.to_thread(operation, *args, **kwargs)

    async def _items(self, items: Any) -> AsyncIterator[Any]:
        while (item := await asyncio.to_thread(next, items, None)) is not None:
            yield item


HUGE = 1 << 62


class LogClientContract:
    """A subclass says what makes the client, and which nodes it asks."""

    nodes: ClassVar[type[Nodes]] = Nodes
    make: ClassVar[Callable[..., Any]]

    @contextlib.asynccontextmanager
    async def opened(self, **options: Any) -> AsyncIterator[tuple[Nodes, Any]]:
        """Run nodes and a client of this kind."""
        nodes = self.nodes()
        async with asyncio.timeout(60), nodes.group:
            client = self.make(nodes.peers, nodes.name, **nodes.options, **options)
            try:
                yield nodes, client
            finally:
                with contextlib.suppress(asyncio.CancelledError):
                    await client.close()

    async def test_append_returns_indexes_that_read_returns(self) -> None:
        async with self.opened() as (_nodes, client):
            first = await client.append([b"a", b"", b"c" * 1000])
            assert (first.last_index - first.first_index, first.indexes) == (2, ())
            second = await client.append([b"d"])
            assert second.first_index == second.last_index == first.last_index + 1
            batch = await client.read(first.first_index, second.last_index + 1)
            assert batch.schema == READ_SCHEMA
            assert batch.column("body").to_pylist() == [b"a", b"", b"c" * 1000, b"d"]
            assert batch.column("term").to_pylist() == [first.term] * 4
            records = await client.records(first.first_index, second.last_index + 1)
            assert records.batch.schema == RECORD_SCHEMA
            assert records.batch.column("magic").to_pylist() == [MAGIC_DATA] * 4

    async def test_fetch_continues_at_next_index_below_max_bytes(self) -> None:
        async with self.opened() as (_nodes, client):
            end = (await client.append([b"%d" % i for i in range(50)])).last_index + 1
            start, seen = end - 50, []
            while start < end:
                found = await client.fetch(start, end, max_bytes=500)
                assert start < found.next_index <= end
                start = found.next_index
                seen += found.batch.column("body").to_pylist()
            assert seen == [b"%d" % i for i in range(50)]
            after = await client.fetch(end, end + 10)
            assert (after.batch.num_rows, after.next_index) == (0, end)

    async def test_read_has_the_columns_that_were_named(self) -> None:
        async with self.opened() as (_nodes, client):
            start = (await client.append([b"a", b"", b"c" * 100])).first_index
            found = await client.read(start, start + 3, columns=["length", "index", "crc"])
            assert found.to_pydict() == {
                "length": [1, 0, 100],
                "index": [start, start + 1, start + 2],
                "crc": [crc32(body) for body in (b"a", b"", b"c" * 100)],
            }
            record = await client.records(start, start + 1, columns=["magic", "body"])
            assert record.batch.to_pylist() == [{"magic": MAGIC_DATA, "body": b"a"}]
            for columns in ([], ["topic of nothing"]):
                with pytest.raises(BadRequestError):
                    await client.read(start, start + 1, columns=columns)

    async def test_tail_yields_entries_as_they_arrive(self) -> None:
        async with self.opened() as (_nodes, client):
            start = (await client.append([b"a", b"b"])).first_index
            seen: list[bytes] = []
            async for batch in client.tail(start):
                assert batch.num_rows
                seen += batch.column("body").to_pylist()
                if len(seen) == 2:
                    await client.append([b"c"])
                if len(seen) == 3:
                    break
            assert seen == [b"a", b"b", b"c"]

    async def test_tail_stops_at_end_if_one_is_given(self) -> None:
        async with self.opened() as (_nodes, client):
            start = (await client.append([b"%d" % i for i in range(20)])).first_index
            seen: list[bytes] = []
            async for batch in client.tail(start, start + 15, max_bytes=500):
                seen += batch.column("body").to_pylist()
            assert seen == [b"%d" % i for i in range(15)]

    async def test_get_returns_entry_or_range_of_log(self) -> None:
        async with self.opened() as (_nodes, client):
            index = (await client.append([b"a", b"b"])).first_index
            entry = await client.get(index + 1)
            assert (entry.index, entry.body) == (index + 1, b"b")
            with pytest.raises(IndexOutOfRangeError) as caught:
                await client.get(index + 2)
            assert caught.value.values == {"index": index + 2, "first_index": 0, "last_index": index + 1}

    async def test_read_of_deleted_entries_names_first_index(self) -> None:
        async with self.opened() as (nodes, client):
            start = (await client.append([b"%d" % i for i in range(20)])).first_index
            nodes.delete(start + 7)
            for call in (client.fetch(start, start + 20), client.read(start + 6, start + 20), client.get(start)):
                with pytest.raises(IndexOutOfRangeError) as caught:
                    await call
                assert caught.value.values["first_index"] == start + 7
            assert (await client.fetch(start + 7, start + 20)).batch.num_rows == 13

    async def test_range_without_entries_is_empty(self) -> None:
        async with self.opened() as (_nodes, client):
            end = (await client.append([b"a", b"b"])).last_index + 1
            for start, stop in ((0, 0), (1, 0), (end, end), (end, end + 5)):
                found = await client.fetch(start, stop)
                assert (found.batch.num_rows, found.batch.schema, found.next_index) == (0, READ_SCHEMA, start)
                assert (await client.read(start, stop)).num_rows == 0
            assert (await client.read(0, HUGE)).column("body").to_pylist() == [b"a", b"b"]

    async def test_one_entry_is_read_whatever_the_limit(self) -> None:
        async with self.opened() as (_nodes, client):
            await client.append([bytes(1000)] * 3)
            for max_bytes, count in ((1, 1), (1048, 1), (2095, 1), (2096, 2), (1 << 20, 3)):
                found = await client.fetch(0, 3, max_bytes=max_bytes)
                assert (found.batch.num_rows, found.next_index) == (count, count)

    async def test_concurrent_calls_share_one_client(self) -> None:
        async with self.opened() as (nodes, client):

            async def work(number: int) -> None:
                body = b"%d" % number
                index = (await client.append([body])).first_index
                await client.bounds(min_end=index + 1, wait_ms=10_000)
                assert (await client.get(index)).body == body

            await asyncio.gather(*(work(number) for number in range(50)))
            assert nodes.end == 50

    async def test_bounds_wait_for_min_end(self) -> None:
        async with self.opened() as (_nodes, client):
            end = (await client.append([b"a"])).last_index + 1
            assert (await client.bounds(min_end=end, wait_ms=10_000)).end == end
            waiting = asyncio.ensure_future(client.bounds(min_end=end + 1, wait_ms=30_000))
            await asyncio.sleep(0.2)
            assert not waiting.done()
            await client.append([b"b"])
            assert (await waiting).end == end + 1
            assert (await client.bounds(min_end=end + 99, wait_ms=1)).end == end + 1

    async def test_metadata_and_groups_describe_nodes(self) -> None:
        async with self.opened() as (nodes, client):
            await client.append([b"a"])
            found = await client.metadata()
            assert found.leader_id == nodes.leader
            assert [node.node_id for node in found.nodes] == ["n0", "n1", "n2"]
            assert all(node.reachable for node in found.nodes)
            assert next(node for node in found.nodes if node.role == "leader").last_index == nodes.end - 1
            assert list(await client.groups()) == [nodes.name]

    async def test_append_follows_transferred_leadership(self) -> None:
        async with self.opened() as (nodes, client):
            await client.append([b"a"])
            target = "n2"
            await client.transfer_leadership(target)
            assert nodes.leader == target
            await client.append([b"b"])
            with pytest.raises(BadRequestError):
                await client.transfer_leadership("n7")

    @pytest.mark.parametrize(
        "call",
        [
            lambda c: c.append([]),
            lambda c: c.append(b"one"),
            lambda c: c.append([b"x", None]),
            lambda c: c.append([bytes(4 << 20)]),
            lambda c: c.fetch(-1, 1),
            lambda c: c.fetch(0, 1, max_bytes=0),
            lambda c: c.fetch(0, 1, wait_ms=-1),
            lambda c: c.fetch(0, 1, node="n7"),
            lambda c: c.fetch(0, 1, consistency="eventual"),
            lambda c: c.fetch(0, 1, isolation="serializable"),
        ],
        ids=["empty", "one body", "null", "large", "index", "bytes", "wait", "node", "consistency", "isolation"],
    )
    async def test_bad_input_is_rejected_before_sending(self, call: Callable[[Any], Any]) -> None:
        async with self.opened() as (nodes, client):
            with pytest.raises(BadRequestError):
                await call(client)
            assert nodes.end == 0

    async def test_timeout_ends_call_of_hanging_nodes(self) -> None:
        async with self.opened(timeout_ms=500) as (nodes, client):
            await client.append([b"a"])
            nodes.hang()
            for call, is_unknown in ((client.append([b"x"]), True), (client.fetch(0, 1), None)):
                began = time.monotonic()
                with pytest.raises(DLedgerError) as caught:
                    await call
                assert time.monotonic() - began < 10
                assert is_unknown is None or caught.value.outcome_unknown is is_unknown

    async def test_unreachable_nodes_are_named(self) -> None:
        async with self.opened() as (nodes, _client):
            other = self.make("n0-127.0.0.1:1", nodes.name, timeout_ms=500, **nodes.options)
            for call in (other.append([b"x"]), other.metadata()):
                with pytest.raises(UnreachableError) as caught:
                    await call
                assert "127.0.0.1:1" in caught.value.where
            await other.close()

    async def test_closed_client_rejects_calls(self) -> None:
        async with self.opened() as (nodes, client):
            await client.append([b"a"])
            await client.close()
            await client.close()
            for name in ("metadata", "groups", "bounds"):
                with pytest.raises(ConfigError):
                    await getattr(client, name)()
            with pytest.raises(ConfigError):
                await client.append([b"x"])
            assert nodes.end == 1

    async def test_close_ends_calls_in_progress_without_retry(self) -> None:
        async with self.opened(timeout_ms=20_000) as (nodes, client):
            await client.append([b"a"])
            nodes.hang()
            calls, is_java = [client.fetch(0, 1), client.append([b"x"])], isinstance(nodes, JavaNodes)
            if not is_java:
                calls.append(client.append([b"y"], producer_id="p", sequence=0))
            running = [asyncio.ensure_future(call) for call in calls]
            await eventually(lambda: nodes.ignored >= len(calls))
            await client.close()
            nodes.resume()
            errors = await asyncio.gather(*running, return_exceptions=True)
            assert all(isinstance(error, (DLedgerError, *CANCELLED)) for error in errors), errors
            assert all(isinstance(error, CANCELLED) or error.outcome_unknown for error in errors[1:]), errors
            assert is_java or isinstance(errors[1], CANCELLED)
            assert nodes.end == 1

    @pytest.mark.parametrize("name", OPTIONAL)
    async def test_optional_operation_works_or_is_unsupported(self, name: str) -> None:
        async with self.opened() as (nodes, client):
            if name == "append_columns" and isinstance(client, Awaited):  # the blocking client takes bodies only
                return
            await client.append([b"a"])
            if isinstance(nodes, JavaNodes):
                with pytest.raises(UnsupportedError) as caught:
                    await OPTIONAL[name](client)
                assert (caught.value.code, caught.value.values["operation"]) == (641, name)
            else:
                await OPTIONAL[name](client)


def blocking(*args: Any, **options: Any) -> Awaited:
    return Awaited(Client(*args, **options))


class TestAsyncClient(LogClientContract):
    make = AsyncClient


class TestClient(LogClientContract):
    make = staticmethod(blocking)


class TestAsyncClientOfJavaNodes(LogClientContract):
    nodes, make = JavaNodes, AsyncClient


class TestClientOfJavaNodes(LogClientContract):
    nodes, make = JavaNodes, staticmethod(blocking)


def test_optional_operations_are_all_tested() -> None:
    assert {name for name in vars(OptionalOperations) if not name.startswith("_")} == set(OPTIONAL)


@pytest.mark.parametrize("protocol", [LogClient, OptionalOperations])
@pytest.mark.parametrize("face", [AsyncClient, Client])
def test_clients_take_signatures_and_docstrings_from_protocols(face: type, protocol: type) -> None:
    for name, method in vars(protocol).items():
        if callable(method) and not name.startswith("_") and (face, name) != (Client, "append_columns"):
            assert getattr(face, name).__doc__, name
            if name not in ("close", "role_changes"):
                assert getattr(face, name).__doc__ == method.__doc__
