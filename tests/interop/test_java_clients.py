"""Java's own ``DLedgerClient``, of both generations, against a real cluster, and the frames that its classes make."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dledger_core import Client, LocalCluster
from tests.interop.java_dledger import JavaDLedger
from tests.rocketmq.remoting.record_frames import VERSIONS, Recorder, recorded
from tests.support.slow_elections import SLOW_ELECTIONS

pytestmark = [pytest.mark.integration, pytest.mark.slow]

GROUP = "default"


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(**SLOW_ELECTIONS) as running:
        yield running


@pytest.fixture(params=["A", "B"])
def java(request: pytest.FixtureRequest) -> JavaDLedger:
    found: JavaDLedger = request.getfixturevalue(f"java_{request.param.lower()}")
    return found


@pytest.fixture
def java_client(java: JavaDLedger, cluster: LocalCluster) -> Iterator[Any]:
    client = java.classes.client.DLedgerClient(GROUP, cluster.peers)
    client.startup()
    try:
        yield client
    finally:
        client.shutdown()


def test_java_appends_and_gets(java_client: Any, cluster: LocalCluster) -> None:
    bodies = [b"from java", b"", bytes(range(256)) * 40, bytes(4_194_304 - 48)]
    responses = [java_client.append(body) for body in bodies]
    assert [response.getCode() for response in responses] == [200] * 4
    assert {response.getLeaderId() for response in responses} == {cluster.leader()}
    indexes = [response.getIndex() for response in responses]
    assert indexes == sorted(indexes)
    with Client(cluster.peers, GROUP) as ours:
        held = [ours.get(index) for index in indexes]
    assert [entry.body for entry in held] == bodies
    assert [response.getPos() for response in responses] == [entry.position for entry in held]
    assert [response.getTerm() for response in responses] == [entry.term for entry in held]
    for entry in held:
        answer = java_client.get(entry.index)
        assert answer.getCode() == 200
        [got] = answer.getEntries()
        facts = (got.getIndex(), got.getTerm(), got.getPos(), got.getMagic(), got.getSize())
        assert facts == (entry.index, entry.term, entry.position, 1, len(entry.body) + 48)
        assert bytes(got.getBody()) == entry.body


def test_java_client_gets_error_for_missing_index(java_client: Any) -> None:
    assert java_client.get(1 << 40).getCode() == 410


def test_java_transfers_leadership_and_is_redirected(
    java: JavaDLedger, java_client: Any, cluster: LocalCluster
) -> None:
    first = java_client.append(b"before")
    leader = cluster.leader()
    target = next(node for node in ("n0", "n1", "n2") if node != leader)
    wrong = java_client.leadershipTransfer(leader, target, first.getTerm() + 5)
    assert wrong.getCode() == 407
    assert java_client.leadershipTransfer(leader, target, first.getTerm()).getCode() == 200
    assert cluster.leader() == target
    after = java_client.append(b"after")  # it still asks the old leader, whose response names the new one
    assert (after.getCode(), after.getLeaderId()) == (200, target)
    assert after.getTerm() > first.getTerm()
    fresh = java.classes.client.DLedgerClient(GROUP, cluster.peers)
    fresh.startup()
    try:
        [got] = fresh.get(after.getIndex()).getEntries()
        assert bytes(got.getBody()) == b"after"
    finally:
        fresh.shutdown()


def test_java_of_another_group_gets_nothing(java: JavaDLedger, cluster: LocalCluster) -> None:
    client = java.classes.client.DLedgerClient("other", cluster.peers)
    client.startup()
    try:
        assert client.append(b"x").getCode() in (301, 400)  # no metadata, or refused by the node it tries first
    finally:
        client.shutdown()


def test_java_classes_make_recorded_frames(java: JavaDLedger) -> None:
    version = VERSIONS[0 if java.generation_a else 1]
    assert {name: bytes.fromhex(frame) for name, frame in Recorder(java).frames().items()} == recorded(version)
