"""Member requests of clients to real nodes: reports, refusals and errors over the wire."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dledger_core.client.verdict import health_of, reasons_of
from dledger_core.config import format_peers
from dledger_core.connect import AsyncClient
from dledger_core.errors import BadRequestError, DLedgerError, MemberChangeRefusedError
from tests.support.server_group import ServerGroup, eventually


async def leader_of(group: ServerGroup, client: AsyncClient) -> str:
    """Return the leader once it has committed an entry and all members have answered it."""
    await client.append([b"a"])
    leader = await group.leader()
    await eventually(lambda: all(found.is_active for found in group.hosted(leader).membership.report().members))
    return leader


async def test_members_are_reported_and_wrong_changes_refused_over_the_wire(tmp_path: Path) -> None:
    async with ServerGroup(tmp_path, 3) as group, AsyncClient(format_peers(group.peers)) as client:
        leader = await leader_of(group, client)
        found = await client.members()
        assert found.voters == ("n0", "n1", "n2")
        assert not found.is_change_pending
        for node in group.nodes:
            if node != leader:
                await eventually(lambda node=node: group.hosted(node).replica.commit_index >= 1)
        assert (await client.members()).failures_survived() == 1
        with pytest.raises(MemberChangeRefusedError) as caught:
            await client.remove_member("n9")
        assert caught.value.reason == "unknown-member"
        with pytest.raises(MemberChangeRefusedError) as caught:
            await client.add_member("n3", "127.0.0.1:1", learner=True)
        assert caught.value.reason == "store-unknown"
        for change in (client.add_member("n-3", "127.0.0.1:1"), client.promote_member("")):
            with pytest.raises(BadRequestError):
                await change
        with pytest.raises(DLedgerError):
            await client.add_member("n3", "no address")
        assert (tmp_path / "admin.log").read_text().count('"outcome": "[MEMBER_CHANGE_REFUSED]') == 1


async def test_removed_node_is_no_member_and_a_restart_keeps_that(tmp_path: Path) -> None:
    async with ServerGroup(tmp_path, 3) as group, AsyncClient(format_peers(group.peers)) as client:
        leader = await leader_of(group, client)
        follower = next(node for node in group.nodes if node != leader)
        found = await client.remove_member(follower)
        left = tuple(node for node in ("n0", "n1", "n2") if node != follower)
        assert found.voters == left
        assert found.warning is not None
        for node in left:
            await group.stop(node)
        for node in left:
            await group.start(node)
        assert (await client.members()).voters == left
        await client.append([b"b"])


async def test_learner_that_lost_its_disk_is_replaced_by_command_that_status_names(tmp_path: Path) -> None:
    async with ServerGroup(tmp_path, 3) as group, AsyncClient(format_peers(group.peers)) as client:
        leader = await leader_of(group, client)
        lost = next(node for node in group.nodes if node != leader)
        address = next(peer.address for peer in group.peers if peer.node_id == lost)
        await client.remove_member(lost)

        async def wipe() -> None:
            await group.stop(lost)
            shutil.rmtree(group.config(lost).store_path("default"))
            await group.start(lost)

        await wipe()
        found = await client.add_member(lost, address, learner=True)
        (before,) = [member.store_uuid for member in found.members if member.node_id == lost]
        await wipe()
        progress = group.hosted(leader).replica.raft.status
        await eventually(lambda: not any(each.is_active for m, each in progress().progress.items() if before in m))
        with pytest.raises(MemberChangeRefusedError) as caught:
            await client.add_member(lost, address, learner=True)
        assert "member replace" in caught.value.remedy
        reasons = reasons_of(health_of("default", await client.metadata(), await client.members()))
        assert any(f"dledger member replace {lost}" in reason.remedy for reason in reasons)
        found = await client.replace_member(lost)
        (after,) = [member for member in found.members if member.node_id == lost]
        assert (after.role, after.is_promoted) == ("learner", False)
        assert after.store_uuid != before
        await client.append([b"b"])
        await eventually(lambda: group.hosted(lost).replica.commit_index == group.hosted(leader).replica.commit_index)


async def test_leader_is_removed_by_one_command_and_removed_nodes_are_named(tmp_path: Path) -> None:
    async with ServerGroup(tmp_path, 3) as group, AsyncClient(format_peers(group.peers)) as client:
        leader = await leader_of(group, client)
        first, second = sorted({"n0", "n1", "n2"} - {leader})
        assert (await client.remove_member(leader)).voters == (first, second)

        await group.stop(leader)
        await group.start(leader)
        for role in ("removed", "waiting"):
            if role == "waiting":
                await group.stop(leader)
                shutil.rmtree(tmp_path / "default" / f"dledger-{leader}")
                await group.start(leader)
            metadata = await client.metadata()
            found = next(node for node in metadata.nodes if node.node_id == leader)
            assert found.is_member is False
            assert (found.role == "waiting", found.reachable) == (role == "waiting", role == "removed")
            (reason,) = reasons_of(health_of("default", metadata, await client.members()))
            address = next(peer.address for peer in group.peers if peer.node_id == leader)
            assert f"dledger member add {leader} --address {address} --group default" in reason.remedy
        # The remedy works as it is typed.
        added = await client.add_member(leader, address)
        assert leader in {member.node_id for member in added.members}
