"""Acknowledgements: after a majority has synced, and after any later step has failed.

Real replicas on disks in memory, driven by hand: ``FaultyFiles`` forgets at a power loss whatever was not synced.
"""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from dledger_core.client import Producer
from dledger_core.cluster import LocalCluster
from dledger_core.connect import Client
from dledger_core.errors import DiskFailedError
from dledger_core.raft import AppendEntries, AppendEntriesResponse
from tests.support.replica_group import Asker, ReplicaGroup
from tests.support.server_group import STORAGE
from tests.support.soon import soon

STEPS_MAX = 60
"""More file operations than a few appends need; a step beyond the last one ends the count."""


def three(storage=STORAGE):
    group = ReplicaGroup(storage=storage)
    leader = group.leader()
    group.append(leader, b"before", b"the fault")
    assert group.acknowledged
    followers = [node for node in group.members.values() if node is not leader]
    return group, leader, followers


def assert_nothing_lost(group):
    """All nodes run, agree and have all acknowledged entries; the group accepts appends."""
    group.drop = lambda _: False
    leader = group.leader()
    before = len(group.acknowledged)
    group.append(leader, b"after", ticks=5)
    group.tick(20)
    assert len(group.acknowledged) == before + 1
    assert [group.lost(member) for member in group.members.values()] == [[], [], []]
    logs = [group.bodies(node) for node in group.members.values()]
    assert logs[0] == logs[1] == logs[2]


# --- when does who flush ------------------------------------------------------------------------------------------


def test_append_is_sent_before_leader_has_synced():
    group, leader, _ = three()
    sent = []
    group.drop = lambda message: sent.append(message) or False
    leader.stalled = True
    group.append(leader, b"x")
    assert [m for m in sent if isinstance(m, AppendEntries) and m.batches]
    assert leader.disk.jobs, "its own disk still has it to do"


@pytest.mark.parametrize("slow", ["leader", "follower"])
def test_one_slow_disk_does_not_delay_acknowledgements(slow):
    group, leader, followers = three()
    (leader if slow == "leader" else followers[0]).stalled = True
    group.append(leader, b"x")
    assert [b"x"] in group.acknowledged.values()


@pytest.mark.parametrize("synced", ["leader", "follower"])
def test_no_acknowledgement_before_majority_has_synced(synced):
    group, leader, followers = three()
    slow = followers if synced == "leader" else [leader, followers[0]]
    for node in slow:
        node.stalled = True
    group.append(leader, b"synced by one node alone")
    assert group.unknown == 1
    slow[1].stalled = False
    group.append(leader, b"x")
    assert [b"x"] in group.acknowledged.values()


# --- all nodes crash right then -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("keep", [0.0, 0.5])
@pytest.mark.parametrize("slow", ["none", "leader", "follower"])
def test_power_failure_of_all_nodes_loses_no_acknowledged_entry(slow, keep):
    group, leader, followers = three()
    slow_one = {"leader": leader, "follower": followers[0]}.get(slow)
    if slow_one is not None:
        slow_one.stalled = True
    group.append(leader, *(b"%d" % number for number in range(50)))
    assert not group.unknown
    group.crash(keep=keep)
    assert_nothing_lost(group)


def test_page_cache_durability_loses_entries_at_power_failure():
    group, leader, _ = three(replace(STORAGE, durability="page-cache"))
    group.append(leader, b"acknowledged")
    assert [b"acknowledged"] in group.acknowledged.values()
    group.crash(keep=0.0)
    assert group.lost(group.leader()), "as with Java DLedger: this is what the setting gives up"


@pytest.mark.slow
@pytest.mark.parametrize("victims", [("n0",), ("n1",), ("n2",), ("n0", "n1")])
def test_power_failure_at_any_file_operation_of_append(victims):
    for step in range(1, STEPS_MAX):
        group, leader, _ = three()
        for name in victims:
            group.files[name].crash_at = group.files[name].operations + step
        for number in range(3):
            group.append(leader, b"%d" % number)
        unfinished = all(group.files[name].crash_at is not None for name in victims)
        group.crash()
        assert_nothing_lost(group)
        if unfinished:
            assert step > 3, "appends do touch files"
            return
    raise AssertionError("the steps do not end")


# --- a step of the asynchronous path fails ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["leader", "follower"])
def test_write_failure_at_any_step_stops_only_that_node(victim):
    for step in range(1, STEPS_MAX):
        group, leader, followers = three()
        node = leader if victim == "leader" else followers[0]
        files = group.files[node.node_id]
        files.fail_at = files.operations + step
        for number in range(3):
            group.append(leader, b"%d" % number)
        if files.fail_at is not None:
            assert step > 4, "appends do touch files"
            return
        assert [type(error) for error in node.failures] == [DiskFailedError]
        assert all(not other.failures for other in group.members.values() if other is not node)
        if victim == "follower":
            assert not group.unknown, "two of three go on as if nothing had happened"
        new = group.leader()
        assert group.lost(new) == []
        group.append(new, b"the other two go on")
        assert [b"the other two go on"] in group.acknowledged.values()
        group.crash(node.node_id)  # what a failed sync left in the page cache is not to be trusted
        assert_nothing_lost(group)
    raise AssertionError("the steps do not end")


def test_leader_with_failed_disk_hands_leadership_over_at_once():
    group, leader, followers = three()
    group.append(leader, b"x")
    files = group.files[leader.node_id]
    files.fail_at = files.operations + 1
    group.append(leader, b"y")  # no clock ticks
    assert [type(error) for error in leader.failures] == [DiskFailedError]
    assert sum(node.replica.is_leader for node in followers) == 1


def test_node_acknowledges_nothing_after_failed_sync():
    group, leader, followers = three()
    node = followers[0]
    files = group.files[node.node_id]
    said = []
    group.drop = lambda message: message.sender == node.node_id and said.append(message) is not None
    while not node.failures:
        files.fail_at = files.operations + 2
        group.append(leader, b"x")
    written, said[:] = len(files.log), []
    for _ in range(5):
        group.append(leader, b"more")
        group.tick()
    assert said == []
    assert len(files.log) == written


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AppendEntries, AppendEntriesResponse])
def test_any_lost_message_costs_time_only(kind):
    for victim in range(5):
        group, leader, _ = three()
        seen = []
        # Both followers' copies of it, so that the majority has to wait for the repetition.
        group.drop = lambda m, seen=seen, victim=victim: (
            isinstance(m, kind) and (seen.append(m) or len(seen) - 1 in (victim, victim + 1))
        )
        for number in range(3):
            group.append(leader, b"%d" % number, ticks=30)
        assert len(seen) > victim
        assert not group.unknown, victim
        assert leader.replica.is_leader
        assert_nothing_lost(group)


def test_isolated_leader_never_acknowledges():
    group, leader, followers = three()
    group.drop = lambda message: leader.node_id in (message.sender, message.target)
    ask = Asker(leader)
    ask.plain(b"lost?")
    group.deliver()
    assert ask.answers == []
    for _ in range(200):
        group.tick()
        if followers[0].replica.leader_ready or followers[1].replica.leader_ready:
            break
    new = next(node for node in followers if node.replica.leader_ready)
    group.append(new, b"of the new leader")
    assert [b"of the new leader"] in group.acknowledged.values()
    assert_nothing_lost(group)
    assert [answer.outcome_unknown for answer in ask.answers] == [True]


# --- and with real processes ----------------------------------------------------------------------------------------


@pytest.mark.integration
def test_kill_of_all_nodes_during_appends_loses_no_acknowledged_entry():
    acknowledged, stop = {}, threading.Event()

    def append(peers, number):
        with Client(peers, timeout_ms=60_000) as client:
            producer, step = Producer(client, f"p{number}"), 0
            while not stop.is_set():
                body = f"{number}/{step}".encode()
                acknowledged[producer.append([body]).last_index] = body
                step += 1

    with LocalCluster(3, data_segment_bytes=1 << 20, index_segment_bytes=1 << 15) as cluster:
        with ThreadPoolExecutor(4) as pool:
            appending = [pool.submit(append, cluster.peers, number) for number in range(4)]
            for kills in range(1, 4):
                wanted = len(acknowledged) + 40
                soon(lambda wanted=wanted: len(acknowledged) >= wanted or any(each.done() for each in appending))
                for pid in [cluster.pid(node) for node in cluster.node_ids]:
                    os.kill(pid, signal.SIGKILL)  # all of them before the first has exited
                before = dict(acknowledged)
                for node in cluster.node_ids:
                    cluster.kill(node)
                    cluster.restart(node)
                cluster.leader()
                assert len(before) >= 40 * kills
            stop.set()
            for each in appending:
                each.result(60)
        with Client(cluster.peers) as client:
            found, at, end = {}, 0, max(acknowledged) + 1
            while at < end:
                fetch = client.fetch(at, end, min_commit=end - 1)
                found |= dict(zip(fetch.batch["index"].to_pylist(), fetch.batch["body"].to_pylist(), strict=True))
                at = fetch.next_index
    assert {index: found.get(index) for index in acknowledged} == acknowledged
    ours = sorted(found.values())
    assert len(ours) == len(set(ours)), "nothing is there twice"
