"""Admissions: exactly one node must answer under the id, with a store for this log."""

from __future__ import annotations

import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dledger_core.bootstrap import EMPTY, Admission, LogConstants, StoreAnswer, StoreIdentity, admitted
from dledger_core.config import Peer
from dledger_core.errors import FoundingRefusedError, MemberChangeRefusedError, UnreachableError
from dledger_core.ids import MemberId, NodeId
from dledger_core.net import messages
from dledger_core.net.frame import Frame
from dledger_core.net.protocol import Type
from dledger_core.raft import Configuration
from dledger_core.server.replica.members import Members
from dledger_core.server.services.admission import Admissions
from tests.support.replica_group import HandDriven
from tests.support.server_group import run

LISTED, RECORDED, GIVEN = "10.0.0.2:1", "10.0.0.3:1", "10.0.0.4:1"
MEMBERS = Members(NodeId("n0"), (Peer(NodeId("n0"), "10.0.0.1", 1), Peer(NodeId("n2"), "10.0.0.2", 1)))
RECORDING = Configuration(frozenset((MemberId("n0"), MemberId("n2/old"))), addresses={MemberId("n2/old"): RECORDED})
N2 = NodeId("n2")


class Node:
    """A node that answers FOUND and ADMIT by the real decisions."""

    def __init__(self, node_id: str = "n2", identity: StoreIdentity = EMPTY) -> None:
        self.node_id = NodeId(node_id)
        self.identity = identity
        self.uuid = uuid.uuid4().hex

    def respond(self, header: dict[str, Any], constants: LogConstants) -> dict[str, Any]:
        answer = StoreAnswer(node_id=self.node_id, peers=(), identity=self.identity, constants=constants)
        if header["t"] == Type.FOUND:
            return messages.FOUND_OK.encode(
                messages.BootstrapResponse(answer=answer.to_fields(), node_uuid=self.uuid), r=1
            )
        request = messages.ADMIT.decode(header)
        admission = Admission(request.log, LogConstants(**request.constants))
        self.identity = admitted(answer, admission, uuid.uuid4().hex)
        return messages.ADMIT_OK.encode(
            messages.AdmitResponse(store=str(self.identity.store), node_uuid=self.uuid), r=1
        )


class Network:
    """Nodes by address, and the leader that asks them."""

    def __init__(self, directory: Path, nodes: dict[str, Node]) -> None:
        self.nodes = nodes
        self.n0 = HandDriven(directory / "store")
        self.n0.lead()

    async def ask(self, peer: Peer, header: dict[str, Any]) -> Frame:
        node = self.nodes.get(peer.address)
        if node is None:
            raise UnreachableError("nothing listens", peer.address)
        return Frame(node.respond(header, self.n0.log.constants), b"")

    def admit(self, address: str | None = None, configuration: Configuration = RECORDING) -> tuple[str, str]:
        with self.n0:
            return run(Admissions(self.n0.replica, MEMBERS, self.ask).admit(N2, address, configuration))


@pytest.mark.parametrize(("at", "address"), [(GIVEN, GIVEN), (RECORDED, None), (LISTED, None)])
def test_waiting_node_is_found_at_the_given_recorded_or_listed_address(
    tmp_path: Path, at: str, address: str | None
) -> None:
    node = Node()
    store, reached = Network(tmp_path, {at: node}).admit(address)
    assert (store, reached) == (node.identity.store, at)
    assert node.identity.log_uuid is not None


def test_two_nodes_that_wait_under_one_id_are_refused_and_stay_as_they_are(tmp_path: Path) -> None:
    """Execution 7: the waiting one is not the one that was meant."""
    meant, leftover = Node(), Node()
    for address in (GIVEN, None):
        with pytest.raises(MemberChangeRefusedError) as caught:
            Network(tmp_path / str(address), {GIVEN: meant, RECORDED: leftover, LISTED: meant}).admit(address)
        assert caught.value.reason == "two-stores-wait"
    assert meant.identity == leftover.identity == EMPTY


def test_one_node_at_two_addresses_is_one_node(tmp_path: Path) -> None:
    node = Node()
    store, reached = Network(tmp_path, {GIVEN: node, RECORDED: node}).admit(GIVEN)
    assert (store, reached) == (node.identity.store, GIVEN)


@pytest.mark.parametrize("node", [None, Node("n7")])
def test_node_that_does_not_answer_or_has_another_id_is_refused(tmp_path: Path, node: Node | None) -> None:
    with pytest.raises(MemberChangeRefusedError) as caught:
        Network(tmp_path, {GIVEN: node} if node is not None else {}).admit(GIVEN)
    assert caught.value.reason == "store-unknown"
    assert node is None or node.identity == EMPTY


def test_store_of_another_log_is_refused(tmp_path: Path) -> None:
    network = Network(tmp_path, {})
    foreign = replace(EMPTY, store="s", admission=Admission("another", network.n0.log.constants))
    network.nodes[GIVEN] = Node(identity=foreign)
    with pytest.raises(MemberChangeRefusedError) as caught:
        network.admit(GIVEN)
    assert caught.value.reason == "store-refuses"
    assert isinstance(caught.value.__cause__, FoundingRefusedError)
    assert network.nodes[GIVEN].identity == foreign


def test_same_request_gets_the_same_store(tmp_path: Path) -> None:
    node = Node()
    network = Network(tmp_path, {GIVEN: node})
    asking = Admissions(network.n0.replica, MEMBERS, network.ask)
    first = run(asking.admit(N2, GIVEN, RECORDING))
    assert run(asking.admit(N2, GIVEN, RECORDING)) == first
    network.n0.replica.store.close_blocking()
