"""Contract of a client that follows a log: peers only lead it to the cluster, the log names members and addresses."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from dledger_core.config import format_peers, parse_peers
from dledger_core.connect import AsyncClient, Client
from dledger_core.control import TransactionId
from dledger_core.errors import BadRequestError, OtherLogError
from tests.client.fake_group import FakeGroup
from tests.contracts.test_log_client import Awaited

KEY = TransactionId("query", 0, "run")
KINDS: dict[str, Callable[..., Any]] = {
    "AsyncClient": AsyncClient,
    "Client": lambda *args, **kwargs: Awaited(Client(*args, **kwargs)),
}
CALLS: dict[str, Callable[[Any], Any]] = {
    "append": lambda c: c.append([b"x"]),
    "read": lambda c: c.read(0, 10),
    "read of a node": lambda c: c.read(0, 10, node="n1"),
    "a linearizable read": lambda c: c.read(0, 10, consistency="linearizable"),
    "producer": lambda c: c.producer("p"),
    "append by a producer": lambda c: c.append([b"x"], producer_id="p", sequence=0),
    "append_attempt": lambda c: c.append_attempt([b"x"], transaction=KEY, attempt="a"),
    "transaction": lambda c: c.transaction(KEY),
    "offset_for_time": lambda c: c.offset_for_time(0),
    "digest": lambda c: c.digest(0, 8, span=8),
    "describe": lambda c: c.describe("terms"),
    "transfer": lambda c: c.transfer_leadership("n1"),
}


@contextlib.asynccontextmanager
async def client_of(kind: str, peers: str, **options: Any) -> AsyncIterator[Any]:
    client = KINDS[kind](peers, **options)
    try:
        async with asyncio.timeout(60):
            yield client
    finally:
        await client.close()


def only(group: FakeGroup, *names: str) -> str:
    """Return the peers string of some nodes."""
    return format_peers(tuple(peer for peer in parse_peers(group.peers) if peer.node_id in names))


async def move(group: FakeGroup, name: str) -> None:
    """Give a node another port, and record it as an entry of the log would."""
    node = getattr(group.nodes, name)
    await node.stop()
    node.port = 0
    await node.start()
    group.configuration += 1


@pytest.mark.parametrize("kind", KINDS)
class TestMembers:
    async def test_leader_outside_list_is_found(self, kind: str) -> None:
        async with FakeGroup("n2") as group, client_of(kind, only(group, "n0", "n1")) as client:
            assert (await client.append([b"x"])).first_index == 0
            assert [node.node_id for node in (await client.metadata()).nodes] == ["n0", "n1", "n2"]
            assert (await client.read(0, 10, node="n2")).num_rows == 1
            with pytest.raises(BadRequestError):
                await client.read(0, 10, node="n7")

    async def test_metadata_asks_members_outside_list(self, kind: str) -> None:
        async with FakeGroup("n2") as group, client_of(kind, only(group, "n0")) as client:
            found = await client.metadata()
            assert [(node.node_id, node.reachable) for node in found.nodes] == [(f"n{i}", True) for i in range(3)]

    async def test_node_of_list_that_is_no_member_is_asked(self, kind: str) -> None:
        async with FakeGroup("n1") as group, client_of(kind, group.peers) as client:
            group.members = [[node.node_id, "", node.address, "voter"] for node in group if node.node_id != "n0"]
            await client.append([b"x"])
            assert [node.node_id for node in (await client.metadata()).nodes] == ["n0", "n1", "n2"]

    async def test_moved_nodes_are_followed_by_reads_and_appends(self, kind: str) -> None:
        async with FakeGroup("n1") as group, client_of(kind, group.peers) as client:
            start = (await client.append([b"x"])).first_index
            for name in ("n0", "n1", "n2"):
                await move(group, name)
                await client.read(start, start + 1)
                await client.append([b"y"], producer_id=name, sequence=0)
            assert (await client.read(start, start + 9)).num_rows == 4

    async def test_list_is_way_in_again_once_no_member_answers(self, kind: str) -> None:
        async with FakeGroup("n1") as group, client_of(kind, group.peers) as client:
            listed = [node.port for node in group]
            await client.append([b"x"])
            for name in ("n0", "n1", "n2"):
                await move(group, name)
                await client.append([b"x"], producer_id=name, sequence=0)
            for node, port in zip(group, listed, strict=True):
                await node.stop()
                node.port = port
                await node.start()
            await client.append([b"y"], producer_id="p", sequence=0)

    @pytest.mark.parametrize("name", CALLS)
    async def test_other_cluster_at_old_addresses_is_refused(self, kind: str, name: str) -> None:
        async with FakeGroup("n1") as group, client_of(kind, group.peers, timeout_ms=2_000) as client:
            await client.append([b"x"])
            for node in group:
                node.log_uuid = "another"
                node.requests.clear()
            with pytest.raises(OtherLogError):
                await CALLS[name](client)
            assert group.log.end == 1, "another cluster took an append"

    async def test_one_node_of_other_cluster_is_left_out(self, kind: str) -> None:
        async with FakeGroup("n1") as group, client_of(kind, group.peers) as client:
            await client.append([b"x"])
            group.nodes.n1.log_uuid, group.leader = "another", "n2"
            await client.append([b"y"])
            assert (await client.read(0, 10)).num_rows == 2
            nodes = (await client.metadata()).nodes
            assert [node.reachable for node in nodes] == [True, False, True]
            assert "OTHER_LOG" in nodes[1].reason

    @pytest.mark.parametrize("name", [name for name in CALLS if name not in ("read of a node", "transfer")])
    async def test_client_follows_log_that_continues_its_own(self, kind: str, name: str) -> None:
        async with FakeGroup("n1") as group, client_of(kind, group.peers) as client:
            await client.append([b"x"])
            for node in group:
                node.log_uuid, node.chain = "new", [["older", -1, -1, -1], ["uuid", 0, 1, 7]]
            await CALLS[name](client)
            assert (await client.metadata()).log_uuid == "new"
            assert (await client.bounds()).chain[-1].index == 0

    async def test_client_gets_error_naming_both_logs_if_it_saw_entry_that_was_lost(self, kind: str) -> None:
        async with FakeGroup("n1") as group, client_of(kind, group.peers, timeout_ms=2_000) as client:
            await client.append([b"x", b"y"])
            for node in group:
                node.log_uuid, node.chain = "new", [["uuid", 0, 1, 7]]
            for call in (client.append([b"z"]), client.read(0, 10)):
                with pytest.raises(OtherLogError) as caught:
                    await call
                values = caught.value.values
                assert (values["ours"], values["theirs"], values["continued_index"]) == ("uuid", "new", 0)
            assert group.log.end == 2

    async def test_client_stays_with_log_that_has_a_leader_still(self, kind: str) -> None:
        async with FakeGroup("n1") as group, client_of(kind, group.peers) as client:
            await client.append([b"x"])
            group.nodes.n2.log_uuid, group.nodes.n2.chain = "new", [["uuid", 0, 1, 7]]
            await client.append([b"y"])
            assert (await client.metadata()).log_uuid == "uuid"

    async def test_wait_for_entries_names_log(self, kind: str) -> None:
        async with FakeGroup("n1") as group, client_of(kind, group.peers) as client:
            await client.append([b"x"])
            assert await client.wait_for_entries({"default": 0}, wait_ms=0, logs={"default": "uuid"}) == {"default"}

    async def test_client_of_named_log_refuses_another_at_first_request(self, kind: str) -> None:
        async with FakeGroup("n1") as group, client_of(kind, group.peers, log_uuid="mine", timeout_ms=2_000) as client:
            for call in (client.append([b"x"]), client.read(0, 10)):
                with pytest.raises(OtherLogError):
                    await call
            assert not group.log.end
            assert (await client.metadata()).log_uuid == "uuid", "the caller learns which log is there"
