"""Stores that have forgotten what they promised: a disk set back in time, a copied directory started as a node."""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from typing import Any

import pytest

from dledger_core.errors import EndLostError, IdentityLostError
from dledger_core.founding import GROUP_VERSION
from dledger_core.ids import Index, MemberId, NodeId, Term, member_id
from dledger_core.raft import AppendEntries, AppendEntriesResponse, RequestVoteResponse
from dledger_core.server.group import GroupState
from dledger_core.server.replica.acknowledged import Acknowledged
from dledger_core.server.replica.attachments import ShownStore
from tests.support.server_group import ServerGroup, eventually, free_peers

A, B = member_id("n0", "a"), member_id("n1", "b")


def accepted(term: int, index: int, sender: MemberId = B) -> AppendEntriesResponse:
    return AppendEntriesResponse(
        sender=sender,
        target=A,
        term=Term(term),
        accepted=True,
        match_index=Index(index),
        hint_term=Term(-1),
        hint_first_index=Index(index + 1),
        last_index=Index(index),
    )


def granted(term: int, *, pre: bool = False) -> RequestVoteResponse:
    return RequestVoteResponse(sender=B, target=A, term=Term(term), granted=True, pre=pre)


def shown(term: int, last_index: int, member: MemberId = B) -> ShownStore:
    return ShownStore(member, "log", Term(term), Term(term), Index(last_index), GROUP_VERSION)


@pytest.mark.parametrize(
    ("term", "last_index", "error"),
    [(5, 9, None), (5, 10, None), (6, 3, None), (5, 8, EndLostError), (4, 9, IdentityLostError)],
)
def test_store_that_shows_less_than_remembered_is_refused(term: int, last_index: int, error: Any) -> None:
    memory = Acknowledged({})
    for message in (granted(5), accepted(5, 9), accepted(5, 7), accepted(4, 20), granted(7, pre=True)):
        memory.observe(message)
    again = Acknowledged(memory.unwritten() or {})
    assert memory.unwritten() is None, "nothing new to write"
    for each in (memory, again):
        each.check("g", shown(0, -1, member_id("n1", "another store")))
        if error is None:
            each.check("g", shown(term, last_index))
        else:
            with pytest.raises(error):
                each.check("g", shown(term, last_index))


def test_leader_of_term_is_remembered_and_page_cache_promises_no_end() -> None:
    memory = Acknowledged({}, is_durable=False)
    memory.observe(
        AppendEntries(
            sender=B,
            target=A,
            term=Term(3),
            prev_index=Index(-1),
            prev_term=Term(-1),
            commit_index=Index(-1),
            last_index=Index(-1),
            batches=(),
        )
    )
    with pytest.raises(IdentityLostError):
        memory.check("g", shown(2, 9))
    memory.observe(accepted(3, 9))
    memory.check("g", shown(3, 4))


async def acknowledged(cluster: ServerGroup, node: str) -> int:
    """Append an entry and wait until the leader has the node's acknowledgement; return its index."""
    leader = await cluster.leader()
    replica = cluster.hosted(leader).replica
    _, last, _ = await (await cluster.client()).append([b"x" * 100])
    member = cluster.hosted(node).replica.member
    await eventually(lambda: replica.raft.status().progress[member].match_index >= last)
    return last


async def test_disk_set_back_by_a_term_stops_with_identity_lost(tmp_path, caplog):
    async with ServerGroup(tmp_path) as cluster:
        leader, (node, other) = await cluster.leader(), await cluster.followers()
        await acknowledged(cluster, node)
        await cluster.stop(node)
        store = cluster.config(node).store_path("default")
        shutil.copytree(store, tmp_path / "earlier")
        await cluster.start(node)
        await cluster.leader()
        await cluster.nodes[leader].groups["default"].transfer_leadership(NodeId(other), 60)
        last = await acknowledged(cluster, node)
        await cluster.stop(node)
        shutil.rmtree(store)
        shutil.copytree(tmp_path / "earlier", store)
        with caplog.at_level(logging.WARNING):
            set_back = await cluster.start(node)
            await eventually(lambda: set_back.groups["default"].state is GroupState.QUARANTINED)
        assert "IDENTITY_LOST" in caplog.text
        assert f"member replace {node}" in caplog.text
        await (await cluster.client()).append([b"the others continue"])
        await cluster.nodes.pop(node).close_after_failure()
        again = await cluster.start(node)
        assert again.groups["default"].state is GroupState.QUARANTINED, "a restart does not end it"
        assert last > 0
        assert "IDENTITY_LOST" in (store / "meta" / "quarantine").read_text()
        await cluster.nodes.pop(node).close_after_failure()


async def test_disk_set_back_in_its_term_becomes_recovering_voter(tmp_path, caplog):
    async with ServerGroup(tmp_path) as cluster:
        _, (node, _) = await cluster.leader(), await cluster.followers()
        await acknowledged(cluster, node)
        await cluster.stop(node)
        store = cluster.config(node).store_path("default")
        shutil.copytree(store, tmp_path / "earlier")
        await cluster.start(node)
        last = await acknowledged(cluster, node)
        await cluster.stop(node)
        shutil.rmtree(store)
        shutil.copytree(tmp_path / "earlier", store)
        with caplog.at_level(logging.WARNING):
            await cluster.start(node)
            await eventually(lambda: "END_LOST" in caplog.text)
            replica = cluster.hosted(node).replica
            await eventually(lambda: replica.readable_end > last and not replica.raft.status().is_recovering)
            await eventually(lambda: "voting resumed" in caplog.text)


async def test_cloned_directory_gets_no_link_while_first_holder_answers(tmp_path, caplog):
    async with ServerGroup(tmp_path) as cluster:
        node = (await cluster.followers())[0]
        await acknowledged(cluster, node)
        await cluster.stop(node)
        clone = tmp_path / "clone"
        shutil.copytree(cluster.config(node).directory, clone)
        await cluster.start(node)
        await acknowledged(cluster, node)
        [moved] = free_peers(1)
        peers = tuple(replace(p, port=moved.port) if p.node_id == node else p for p in cluster.peers)
        first = cluster.nodes[node]
        with caplog.at_level(logging.WARNING):
            copy = await cluster.start(node, directory=clone, peers=peers)
            await eventually(lambda: caplog.text.count("newcomer refused, the peer is connected") >= 2)
        cluster.nodes[node] = first
        members = {n: cluster.hosted(n).replica.member for n in cluster.nodes if n != node}
        assert all(first.links.is_attached("default", member) for member in members.values())
        await acknowledged(cluster, node)
        await copy.close()
