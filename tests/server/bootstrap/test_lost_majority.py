"""``dledger recover --lost`` on real nodes: wiped disks, interruptions, and a majority that is alive after all."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from dledger_core import AsyncClient, Client, LocalCluster
from dledger_core.client import recovery
from dledger_core.client.recovery import LostMajority, recover_lost
from dledger_core.config import Peer, format_peers, parse_peers
from dledger_core.errors import (
    DLedgerError,
    LogContestedError,
    LogContinuedError,
    RecoveryRefusedError,
    UnreachableError,
)
from dledger_core.ids import Index, MemberId, NodeId, Term
from dledger_core.lineage import AncestorLog, RecoveryRecord, Survivor
from dledger_core.net.credentials import PLAINTEXT
from dledger_core.recovery import Recovered
from dledger_core.server import store_requests
from dledger_core.server.group_state import GroupState
from dledger_core.server.replica.attachments import StoreClaim
from dledger_core.server.replica.replica import Replica
from dledger_core.storage.files.file_system import OsFiles
from dledger_core.storage.files.layout import Layout
from dledger_core.storage.files.meta_files import mark_needs_verification
from tests.support.server_group import ServerGroup, eventually, run
from tests.support.soon import soon

TIMEOUT_S = 20.0


class Interrupted(Exception):  # noqa: N818
    """The command ends here."""


async def recover(group: ServerGroup, *lost: str, **options: bool) -> LostMajority:
    return await recover_lost(group.peers, "default", frozenset(map(NodeId, lost)), TIMEOUT_S, **options)


async def leaderless(group: ServerGroup, *nodes: str) -> None:
    """Wait until these nodes have noticed that there is no leader."""
    for node in nodes:
        raft = group.hosted(node).replica.raft
        await eventually(lambda raft=raft: not raft.status().has_active_leader)  # type: ignore[misc]


def wipe(group: ServerGroup, node_id: str) -> None:
    shutil.rmtree(group.config(node_id).store_path("default"))


@contextlib.asynccontextmanager
async def client_of(group: ServerGroup) -> AsyncIterator[AsyncClient]:
    client = AsyncClient(format_peers(group.peers), timeout_ms=int(TIMEOUT_S * 1000))
    try:
        yield client
    finally:
        await client.close()


async def bodies(client: AsyncClient) -> list[bytes]:
    return (await client.read(0, 1 << 20)).column("body").to_pylist()


async def append(client: AsyncClient, count: int, name: str = "entry") -> list[bytes]:
    found = [f"{name} {number}".encode() for number in range(count)]
    for body in found:
        await client.append([body])
    return found


async def settled(group: ServerGroup, node_id: str) -> None:
    """Wait until a node has all entries of the leader."""
    leader = group.hosted(await group.leader()).replica
    await eventually(lambda: group.hosted(node_id).replica.readable_end == leader.readable_end)


async def only_n2_left(group: ServerGroup, client: AsyncClient) -> list[bytes]:
    """Append entries that all nodes have, stop n0 and n1, and return the entries."""
    await group.leader()
    acknowledged = await append(client, 5)
    await settled(group, "n2")
    for node in ("n0", "n1"):
        await group.stop(node)
    await leaderless(group, "n2")
    return acknowledged


def state(group: ServerGroup, node_id: str) -> GroupState:
    return group.nodes[node_id].groups["default"].state


def test_two_wiped_disks_bootstrap_nothing_and_recover_keeps_entries_of_survivor(tmp_path: Path) -> None:
    async def work() -> None:
        async with ServerGroup(tmp_path) as group, client_of(group) as client:
            await group.leader()
            acknowledged = await append(client, 20)
            before = (await client.metadata()).log_uuid
            await settled(group, "n2")
            for node in ("n0", "n1"):
                await group.stop(node)
                wipe(group, node)
            for node in ("n0", "n1"):
                await group.start(node)
            await eventually(lambda: "recover --lost n0,n1" in why(group, "n0"))
            await leaderless(group, "n2")
            assert state(group, "n0") is state(group, "n1") is GroupState.WAITING
            with pytest.raises(RecoveryRefusedError):
                await recover(group, "n1")  # n0 has lost its store too

            planned = await recover(group, "n0", "n1", dry_run=True)
            # A leader that changes on the way leaves the newest commit index unknown to the survivor.
            assert planned.preview["committed_end"] <= planned.preview["continues_at_index"] + 1
            done = await recover(group, "n0", "n1")
            assert isinstance(done.action, Recovered)
            assert await bodies(client) == acknowledged, "the client follows the new log"
            assert (await client.metadata()).log_uuid == done.action.log_uuid != before
            again = await recover(group, "n0", "n1")
            assert (again.action, again.is_new) == (done.action, False)

            for node in ("n0", "n1"):
                address = next(peer.address for peer in group.peers if peer.node_id == node)
                await client.add_member(node, address)
            await eventually(lambda: len(group.hosted("n2").replica.raft.configuration.voters) == 3)
            acknowledged += await append(client, 5, "after")
            assert await bodies(client) == acknowledged
            await group.stop("n2")
            acknowledged += await append(client, 1, "without the survivor")
            assert await bodies(client) == acknowledged

    run(work())


def test_wiped_node_of_two_names_recover_and_other_node_continues(tmp_path: Path) -> None:
    async def work() -> None:
        async with ServerGroup(tmp_path, 2) as group, client_of(group) as client:
            await group.leader()
            acknowledged = await append(client, 3)
            await group.stop("n0")
            wipe(group, "n0")
            await group.start("n0")
            await eventually(lambda: "recover --lost n0" in why(group, "n0"))
            await leaderless(group, "n1")
            assert isinstance((await recover(group, "n0")).action, Recovered)
            assert await bodies(client) == acknowledged

    run(work())


def why(group: ServerGroup, node_id: str) -> str:
    try:
        group.nodes[node_id].groups["default"].services()
    except UnreachableError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("restart", [False, True], ids=["", "restarted"])
def test_recovery_interrupted_after_any_message_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restart: bool
) -> None:
    async def work() -> None:
        async with ServerGroup(tmp_path, 4) as group, client_of(group) as client:
            await group.leader()
            acknowledged = await append(client, 10)
            await settled(group, "n2")
            await settled(group, "n3")
            for node in ("n0", "n1"):
                await group.stop(node)
                wipe(group, node)
            await leaderless(group, "n2", "n3")
            for left in range(6):
                stop_after(monkeypatch, left)
                with contextlib.suppress(Interrupted):
                    await recover(group, "n0", "n1")
                monkeypatch.undo()
                if restart:
                    for node in ("n2", "n3"):
                        await group.stop(node)
                        await group.start(node)
            done = await recover(group, "n0", "n1")
            assert isinstance(done.action, Recovered)
            assert await bodies(client) == acknowledged
            await append(client, 1)
            leader = await group.leader()
            await eventually(lambda: len(group.hosted(leader).replica.raft.configuration.voters) == 2)

    run(work())


def stop_after(monkeypatch: pytest.MonkeyPatch, messages: int) -> None:
    """Let the command end after this many messages that change a store; the last one has taken effect."""
    left, send = [messages], recovery.RecoveryNodes.send

    async def counted(self: object, node: NodeId, operation: str, *args: object, **fields: object) -> object:
        answer = await send(self, node, operation, *args, **fields)  # type: ignore[arg-type]
        if operation != "ask":
            left[0] -= 1
            if left[0] < 0:
                raise Interrupted
        return answer

    monkeypatch.setattr(recovery.RecoveryNodes, "send", counted)


@pytest.mark.integration
def test_recovery_survives_kill_of_survivor_after_any_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalCluster(3, tmp_path) as cluster, Client(cluster.peers) as client:
        acknowledged = [f"entry {number}".encode() for number in range(20)]
        client.append(acknowledged)
        soon(lambda: next(node.last_index for node in client.metadata().nodes if node.node_id == "n2") >= 20)
        for node in ("n0", "n1"):
            cluster.kill(node)
            shutil.rmtree(cluster.store_path(node))
        soon(lambda: client.metadata().leader_id is None)
        lost, peers = frozenset({NodeId("n0"), NodeId("n1")}), parse_peers(cluster.peers)

        def recover_once() -> LostMajority:
            return asyncio.run(recover_lost(peers, "default", lost, TIMEOUT_S))

        for _ in range(3):  # retire the log, take the record, complete it
            stop_after(monkeypatch, 0)
            with pytest.raises(Interrupted):
                recover_once()
            monkeypatch.undo()
            cluster.kill("n2")
            cluster.restart("n2")
            soon(lambda: answers(peers))
        assert isinstance(recover_once().action, Recovered)
        assert client.read(0, 1 << 20).column("body").to_pylist() == acknowledged
        client.append([b"after"])


def answers(peers: tuple[Peer, ...]) -> bool:
    """Whether n2 answers about its store."""

    async def ask() -> bool:
        nodes = recovery.RecoveryNodes(peers, "default", 1.0, PLAINTEXT)
        try:
            return NodeId("n2") in await nodes.ask()
        finally:
            await nodes.close()

    return asyncio.run(ask())


def test_majority_that_is_alive_stays_and_new_log_refuses_appends(tmp_path: Path) -> None:
    async def work() -> None:
        async with ServerGroup(tmp_path) as group, client_of(group) as client:
            acknowledged = await only_n2_left(group, client)
            await recover(group, "n0", "n1")
            async with client_of(group) as other:
                await append(other, 1, "in the new log")
            await group.stop("n2")
            for node in ("n0", "n1"):
                await group.start(node)
            async with client_of(group) as old:
                await append(old, 3, "in the old log")
                await group.start("n2")
                replica = group.hosted("n2").replica
                await eventually(lambda: replica.lineage.forked is not None)
                with pytest.raises(LogContestedError):
                    await group_append(group, "n2")
                await append(old, 1, "later")
                found = await bodies(old)
                assert found[:5] == acknowledged
                assert len(found) == 9
                assert state(group, "n0") is state(group, "n1") is GroupState.HOSTED

    run(work())


def force_recovery(peers: str, node: str, addresses: Mapping[str, str]) -> None:
    """Continue the log in a new one on a node alone, by the operations of its store, whatever the others have."""

    async def work() -> None:
        nodes = recovery.RecoveryNodes(parse_peers(peers), "default", TIMEOUT_S, PLAINTEXT)
        try:
            old = (await nodes.send(NodeId(node), "ask")).log_uuid
            found = await nodes.send(NodeId(node), "give-up", old)
            assert found.end is not None
            record = RecoveryRecord(
                log_uuid="the new log",
                continues=(AncestorLog(str(old), found.end.last_index, found.end.last_term, found.end.check),),
                term=found.end.term,
                version=found.version,
                voter=Survivor(NodeId(node), str(found.store), "the new store", addresses[node]),
                learners=(),
                lost=tuple(each for each in map(NodeId, sorted(addresses)) if each != node),
            )
            await nodes.send(NodeId(node), "take", record=record)
            await nodes.send(NodeId(node), "complete", record.log_uuid)
        finally:
            await nodes.close()

    asyncio.run(work())


def log_has(cluster: LocalCluster, node: str, *texts: str) -> bool:
    return any(all(text in line for text in texts) for line in cluster.log_path(node).read_text().splitlines())


@pytest.mark.integration
@pytest.mark.parametrize("others", ["down", "isolated"])
def test_majority_with_committed_entries_stays_although_other_log_is_longer(tmp_path: Path, others: str) -> None:
    """A deposed leader has 30 uncommitted entries; the majority has acknowledged fewer, in a newer term."""
    with LocalCluster(3, tmp_path) as cluster:
        addresses = {str(peer.node_id): peer.address for peer in parse_peers(cluster.peers)}
        old = cluster.leader()
        majority = [node for node in cluster.node_ids if node != old]
        peers = {name: listed(addresses, *nodes) for name, nodes in {"old": [old], "majority": majority}.items()}
        with cluster.client() as client:
            client.append([b"before"])
            soon(lambda: all(node.commit_index == client.bounds().end - 1 for node in client.metadata().nodes))
        asyncio.run(append_uncommitted(cluster, peers["old"], majority))
        cluster.kill(old)
        for node in majority:
            cluster.restart(node)
        with Client(peers["majority"], timeout_ms=20_000) as client:
            acknowledged = [client.append([f"acknowledged {number}".encode()]).first_index for number in range(3)]
        for node in majority:
            (cluster.stop if others == "down" else cluster.pause)(node)
        cluster.restart(old)
        with Client(peers["old"], timeout_ms=2_000) as client:
            assert soon(lambda: ends_after(client, acknowledged[-1] + 10)), "the old leader has the longer log"
        force_recovery(peers["old"], old, addresses)
        with Client(peers["old"], timeout_ms=20_000) as client:
            client.append([b"in the new log"])

        for node in majority:
            (cluster.restart if others == "down" else cluster.resume)(node)
        soon(lambda: all(log_has(cluster, node, "log continued by another one", "response=stay") for node in majority))
        soon(lambda: leads_one_of(majority, peers["majority"]))  # without a leader, clients follow the new log
        with Client(peers["majority"], timeout_ms=20_000) as client:
            client.append([b"later"])
            rows = client.read(0, 1 << 20)
            found = dict(zip(rows.column("index").to_pylist(), rows.column("body").to_pylist(), strict=True))
            assert [found[index] for index in acknowledged] == [b"acknowledged 0", b"acknowledged 1", b"acknowledged 2"]
        with Client(peers["old"], timeout_ms=20_000) as client, pytest.raises(LogContestedError):
            client.append([b"refused"])


def listed(addresses: Mapping[str, str], *nodes: str) -> str:
    return ";".join(f"{node}-{addresses[node]}" for node in nodes)


def leads_one_of(nodes: list[str], peers: str) -> bool:
    with contextlib.suppress(DLedgerError), Client(peers, timeout_ms=2_000) as client:
        return client.metadata().leader_id in nodes
    return False


def ends_after(client: Client, index: int) -> bool:
    with contextlib.suppress(DLedgerError):
        return client.metadata().nodes[0].last_index > index
    return False


async def append_uncommitted(cluster: LocalCluster, leader: str, followers: list[str]) -> None:
    """Send appends to a leader that has just lost its followers."""
    async with AsyncClient(leader, timeout_ms=500) as client:
        await client.metadata()
        for node in followers:
            cluster.kill(node)
        sent = (client.append([f"never acknowledged {number}".encode()] * 2) for number in range(15))
        done = await asyncio.gather(*sent, return_exceptions=True)
        assert all(isinstance(each, DLedgerError) for each in done)


def shown(replica: Replica, node: str, end: tuple[int, int], commit: tuple[int, int | None]) -> StoreClaim:
    """Return a store of the log that a replica's continues, with (term, index) of its end, (index, term) committed."""
    commit_index, commit_term = Index(commit[0]), None if commit[1] is None else Term(commit[1])
    return StoreClaim(
        MemberId(f"{node}/store"), replica.lineage.chain[-1].log_uuid, Term(9), Term(end[0]), Index(end[1]), 1,
        commit_index, commit_term,
    )  # fmt: skip


def test_new_log_stops_store_only_for_end_that_it_contains(tmp_path: Path) -> None:
    """A node of 0.2.0 sends no term of its commit index, and stops for a chain by indexes alone."""

    async def work() -> None:
        async with ServerGroup(tmp_path) as group, client_of(group) as client:
            await only_n2_left(group, client)
            await recover(group, "n0", "n1")
            await append(client, 1, "in the new log")
            hosted = group.hosted("n2")
            replica = hosted.replica
            link = replica.lineage.chain[-1]

            def response(end: tuple[int, int], commit: tuple[int, int | None]) -> tuple[object, bool]:
                with pytest.raises(LogContinuedError) as caught:
                    hosted.check_attach(shown(replica, "n0", end, commit))
                assert caught.value.retriable, "asked again"
                values = caught.value.values
                assert values.get("end") == (list(end) if "chain" in values else None)
                return values["response"], "chain" in values

            def is_forked() -> bool:
                return replica.lineage.forked is not None

            same, below, later = (link.term, link.index), link.index - 1, link.term + 1
            assert response(same, (link.index, link.term)) == ("stop", True)
            assert response((link.term, below), (below, None)) == ("stop", True)
            assert response((later, below), (0, link.term)) == ("wait", False)
            assert response((later, below), (below, None)) == ("wait", False)
            assert response((later, link.index + 9), (0, None)) == ("wait", False)
            assert not is_forked(), "entries that are not committed fork nothing"
            assert response((later, below), (below, later)) == ("stay", False)
            assert is_forked()
            replica.lineage.forked = None
            assert response((later, link.index + 1), (link.index + 1, None)) == ("stay", False)
            assert is_forked()

    run(work())


@pytest.mark.parametrize("values", [{}, {"response": "stop", "end": [1, 0]}, {"response": "later"}], ids=str)
def test_store_continues_unless_refusal_names_its_present_end(tmp_path: Path, values: dict[str, Any]) -> None:
    """A node of 0.2.0 sends the chain alone."""

    async def work() -> None:
        async with ServerGroup(tmp_path, 1) as group, client_of(group) as client:
            await append(client, 3)
            found, replica = group.nodes["n0"].groups["default"], group.hosted("n0").replica
            chain = [[replica.log_uuid, replica.raft.last_index + 9, 9, 7]]
            error = LogContinuedError("another log", "", "", {"ours": "new", "chain": chain} | values)
            found.attach_refused(NodeId("n9"), error)
            await append(client, 3, "after")
            assert state(group, "n0") is GroupState.HOSTED

    run(work())


async def group_append(group: ServerGroup, node_id: str) -> None:
    peer = next(peer for peer in group.peers if peer.node_id == node_id)
    client = AsyncClient(format_peers((peer,)), timeout_ms=5_000)
    try:
        await client.append([b"refused"])
    finally:
        await client.close()


@pytest.mark.parametrize("verify_first", [False, True], ids=["", "after a repair at its start"])
def test_store_of_old_log_without_more_entries_is_set_aside(tmp_path: Path, verify_first: bool) -> None:
    async def work() -> None:
        async with ServerGroup(tmp_path) as group, client_of(group) as client:
            acknowledged = await only_n2_left(group, client)
            await recover(group, "n0", "n1")
            acknowledged += await append(client, 1, "new")
            if verify_first:
                mark_needs_verification(OsFiles(), Layout(group.config("n0").store_path("default")), "a write failed")
            await group.start("n0")
            assert (state(group, "n0") is GroupState.REPAIRING) is verify_first
            await eventually(lambda: state(group, "n0") is GroupState.WAITING)
            await group.stop("n0")
            await group.start("n0")
            assert state(group, "n0") is GroupState.WAITING, "it retired the log durably"
            assert await bodies(client) == acknowledged
            await group.stop("n0")
            wipe(group, "n0")
            await group.start("n0")
            address = next(peer.address for peer in group.peers if peer.node_id == "n0")
            await client.add_member("n0", address)
            await eventually(lambda: len(group.hosted("n2").replica.raft.configuration.voters) == 2)

    run(work())


def test_retirement_whose_client_disconnects_is_finished(tmp_path: Path) -> None:
    """A node cancels the requests of a lost connection: the group must not stay closed and not retired."""

    async def work() -> None:
        async with ServerGroup(tmp_path) as group, client_of(group) as client:
            acknowledged = await only_n2_left(group, client)
            found, log = group.nodes["n2"].groups["default"], group.hosted("n2").replica.log_uuid
            request = asyncio.create_task(store_requests.recover(found, "give-up", log, None))
            await eventually(lambda: found.is_waiting)
            request.cancel()
            await asyncio.wait([request])
            assert request.cancelled()
            done = await recover(group, "n0", "n1")
            assert isinstance(done.action, Recovered)
            assert await bodies(client) == acknowledged

    run(work())


def test_lost_node_that_returns_in_the_middle_becomes_survivor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with ServerGroup(tmp_path) as group, client_of(group) as client:
            await group.leader()
            acknowledged = await append(client, 5)
            await settled(group, "n2")
            await group.stop("n2")
            acknowledged += await append(client, 5, "n2 lacks")
            for node in ("n0", "n1"):
                await group.stop(node)
            await group.start("n2")
            await leaderless(group, "n2")
            stop_after(monkeypatch, 0)
            with pytest.raises(Interrupted):
                await recover(group, "n0", "n1")
            monkeypatch.undo()
            await group.start("n0")
            with pytest.raises(RecoveryRefusedError):
                await recover(group, "n0", "n1")
            done = await recover(group, "n1")
            assert done.preview["first_voter"] == "n0"
            assert await bodies(client) == acknowledged, "committed entries that only n0 and n1 had"

    run(work())


def test_store_that_follows_a_leader_does_not_retire_its_log(tmp_path: Path) -> None:
    """Whatever the command believes: it may have asked before the leader was elected."""

    async def work() -> None:
        async with ServerGroup(tmp_path) as group, client_of(group) as client:
            leader = await group.leader()
            acknowledged = await append(client, 3)
            follower = next(node for node in group.nodes if node != leader)
            log = group.hosted(follower).replica.log_uuid
            for node in (follower, leader):
                with pytest.raises(RecoveryRefusedError):
                    await store_requests.recover(group.nodes[node].groups["default"], "give-up", log, None)
            assert not any(state(group, node) is GroupState.WAITING for node in group.nodes)
            assert await bodies(client) == acknowledged

    run(work())


def test_recovery_is_refused_where_majority_is_alive_or_survivor_is_missing(tmp_path: Path) -> None:
    async def work() -> None:
        async with ServerGroup(tmp_path) as group, client_of(group) as client:
            await group.leader()
            await append(client, 1)
            with pytest.raises(RecoveryRefusedError):
                await recover(group, "n0", "n1")
            await group.stop("n0")
            with pytest.raises(RecoveryRefusedError):
                await recover(group, "n0")
            with pytest.raises(DLedgerError):
                await recover(group, "n0", "n1")
            await append(client, 1)
            await group.stop("n1")
            with pytest.raises(UnreachableError):
                await recover(group, "n0")

    run(work())
