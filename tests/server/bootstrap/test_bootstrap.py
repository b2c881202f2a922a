"""Groups are bootstrapped once, by all their nodes, whatever crashes, is lost, or belongs to another cluster."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest

from dledger_core import bootstrap
from dledger_core.bootstrap import BootstrapRecord, StoreAnswer
from dledger_core.client.bootstrap import Bootstrap, StoreAccess, bootstrap_group
from dledger_core.config import Peer
from dledger_core.errors import DLedgerError, FoundingRefusedError, UnreachableError
from dledger_core.ids import NodeId, member_id, node_of
from dledger_core.server.bootstrap.store import GroupStore, configuration_of
from dledger_core.server.config import ServerConfig
from dledger_core.server.group_state import GroupState
from dledger_core.storage import CommitLog
from tests.support.faulty_files import Crash, FaultyFiles
from tests.support.server_group import STORAGE, RawClient, ServerGroup, eventually, run

PEERS = tuple(Peer(NodeId(f"n{i}"), "host", 1 + i) for i in range(3))


# --- stores on simulated disks --------------------------------------------------------------------------------------


class Stores:
    """The stores of three nodes; each request opens a store again after its node crashed. A ``StoreAccess``."""

    def __init__(self, seed: int = 0) -> None:
        self.peers = tuple((peer.node_id, peer.address) for peer in PEERS)
        self.files = {peer.node_id: FaultyFiles(seed) for peer in PEERS}
        self.open: dict[NodeId, GroupStore] = {}
        self.keep: float | None = None
        self.messages_left: int | None = None

    def store(self, node: NodeId) -> GroupStore:
        if node not in self.open:
            config = ServerConfig(self_id=node, peers=PEERS, directory=Path("/disk"), storage=STORAGE)
            self.open[node] = GroupStore(config, "g", self.files[node])
        return self.open[node]

    def lose(self, node: NodeId) -> None:
        self.files[node] = FaultyFiles()
        self.open.pop(node, None)

    def crash(self, node: NodeId) -> None:
        """Kill the node, with a power cut that keeps a share of the unsynced writes if there is a ``keep``."""
        if self.keep is None:
            self.files[node].kill()
        else:
            self.files[node].crash(self.keep)
        self.files[node].crash_at = None
        self.open.pop(node, None)

    async def send(
        self,
        node: NodeId,
        group: str,
        operation: str,
        record_id: str | None = None,
        record: BootstrapRecord | None = None,
    ) -> StoreAnswer:
        if self.messages_left is not None:
            self.messages_left -= 1
            if self.messages_left < 0:
                raise KeyboardInterrupt
        try:
            return self.store(node).apply(operation, record_id, record)
        except Crash:
            self.crash(node)
            raise UnreachableError("the node crashed", str(node)) from None

    async def ask(self, group: str, operation: str) -> tuple[dict[NodeId, StoreAnswer], dict[NodeId, DLedgerError]]:
        answers: dict[NodeId, StoreAnswer] = {}
        failures: dict[NodeId, DLedgerError] = {}
        for node, _ in self.peers:
            try:
                answers[node] = await self.send(node, group, operation)
            except DLedgerError as error:
                failures[node] = error
        return answers, failures

    def bootstrap(self, *, again: bool = False) -> Bootstrap:
        return asyncio.run(bootstrap_group(self, "g", again=again))  # type: ignore[arg-type]

    def logs(self) -> set[str | None]:
        return {self.store(peer.node_id).identity.log_uuid for peer in PEERS}


def test_bootstrap_makes_stores_of_one_log_with_all_voters() -> None:
    stores = Stores()
    assert stores.bootstrap().is_new
    again = stores.bootstrap()
    assert not again.is_new
    assert stores.logs() == {again.log_uuid}
    voters = {store.member for store in stores.open.values()}
    for node, store in stores.open.items():
        assert configuration_of(store.identity).voters == voters
        log = CommitLog.open(
            Path(f"/disk/g/dledger-{node}"), group="g", node_id=node, files=stores.files[node], config=STORAGE
        )
        assert (log.log_uuid, log.floor, len(log.configurations)) == (again.log_uuid, None, 1)
        log.close()


@pytest.mark.parametrize("keep", [None, 0.0, 0.5], ids=["kill", "power cut", "half of the writes"])
@pytest.mark.parametrize("node", ["n0", "n2"])
def test_bootstrap_ends_as_one_log_after_crash_at_every_file_operation(node: str, keep: float | None) -> None:
    for number in itertools.count():
        stores = Stores(seed=number)
        stores.keep = keep
        stores.files[NodeId(node)].crash_at = number
        try:
            stores.bootstrap()
            crashed = False
        except UnreachableError:
            crashed = True
        done = stores.bootstrap()
        assert stores.logs() == {done.log_uuid}
        if not crashed:
            break
    assert number > 20


def test_bootstrap_is_continued_after_interruption_before_any_message() -> None:
    for number in itertools.count():
        stores = Stores()
        stores.messages_left = number
        try:
            stores.bootstrap()
        except KeyboardInterrupt:
            stores.messages_left = None
            done = stores.bootstrap()
            assert stores.logs() == {done.log_uuid}
        else:
            break
    assert number > 10


def incomplete_on_n2() -> Stores:
    """n0 and n1 have the complete mark; n2 holds the record and has not got it."""
    stores = Stores()
    nodes = [peer.node_id for peer in PEERS]
    for node in nodes:
        stores.store(node).apply("ask", None, None)

    decision = bootstrap.decide("g", stores.peers, {node: stores.store(node).answer for node in nodes}, "r", "log")
    assert isinstance(decision, bootstrap.Take)
    for node in nodes:
        stores.store(node).apply("take", None, decision.record)
    for node in nodes[:2]:
        stores.store(node).apply("complete", "r", None)
    return stores


@pytest.mark.parametrize("again", [False, True])
def test_store_without_complete_mark_and_two_lost_disks_bootstrap_nothing(again: bool) -> None:
    """n0 and n1 may have committed entries before their disks were lost."""
    stores = incomplete_on_n2()
    stores.lose(NodeId("n0"))
    stores.lose(NodeId("n1"))
    for _ in range(2):
        with pytest.raises(FoundingRefusedError):
            stores.bootstrap(again=again)
    assert stores.logs() == {None}


def test_store_without_complete_mark_gets_it_from_next_init() -> None:
    stores = incomplete_on_n2()
    assert stores.bootstrap().log_uuid == "log"
    assert stores.logs() == {"log"}


def test_incomplete_record_with_lost_disk_is_replaced_only_by_init_again() -> None:
    stores = Stores()
    stores.messages_left = 5  # three questions, two records
    with pytest.raises(KeyboardInterrupt):
        stores.bootstrap()
    stores.messages_left = None
    stores.lose(NodeId("n2"))
    with pytest.raises(FoundingRefusedError) as refused:
        stores.bootstrap()
    assert "init --again" in refused.value.remedy
    assert stores.logs() == {None}
    done = stores.bootstrap(again=True)
    assert stores.logs() == {done.log_uuid}


# --- nodes ------------------------------------------------------------------------------------------------------------


def test_nodes_that_start_in_order_wait_and_name_the_missing_ones(tmp_path: Path) -> None:
    async def test() -> None:
        group = ServerGroup(tmp_path)
        try:
            first = await group.start("n0")
            assert first.is_started
            assert first.groups["default"].state is GroupState.WAITING
            client = RawClient(await group.channel("n0"))
            await eventually(lambda: "n1, n2" in waiting_reason(first))
            with pytest.raises(UnreachableError) as refused:
                await client.read(0, 1)
            assert "n1, n2" in refused.value.what
            await group.start("n1")
            await eventually(lambda: "n2" in waiting_reason(first) and "n1" not in waiting_reason(first))
            await group.start("n2")
            await eventually(group.is_bootstrapped)
            await group.leader()
            assert len({group.hosted(node).replica.log_uuid for node in group.nodes}) == 1
        finally:
            await group.__aexit__()

    run(test())


def waiting_reason(node: Any) -> str:
    try:
        node.groups["default"].services()
    except UnreachableError as error:
        return error.what
    return ""


def test_two_empty_nodes_next_to_full_one_bootstrap_nothing_and_it_serves_reads(tmp_path: Path) -> None:
    """The old code: the two elected each other, made another log, and refused the only good copy."""

    async def test() -> None:
        group = ServerGroup(tmp_path)
        async with group:
            client = await group.client()
            await client.append([b"kept"])
            await eventually(lambda: all(group.hosted(node).replica.commit_index >= 1 for node in group.nodes))
            log = group.hosted("n0").replica.log_uuid
            for node in ("n0", "n1", "n2"):
                await group.stop(node)
            for node in ("n1", "n2"):
                shutil.rmtree(tmp_path / "default" / f"dledger-{node}")
                await group.start(node)
            full = await group.start("n0")
            await eventually(lambda: "recover --lost n1,n2" in remedy_of(group.nodes["n1"]))
            assert f"log {log} exists on n0" in waiting_reason(group.nodes["n2"]) or await told(group, "n2", str(log))
            assert [group.nodes[node].groups["default"].state for node in ("n1", "n2")] == [GroupState.WAITING] * 2
            assert full.hosted["default"].replica.log_uuid == log
            _, rows = await RawClient(await group.channel("n0")).read(0, 2)
            assert rows[-1][2] == b"kept"

    run(test())


async def told(group: ServerGroup, node: str, text: str) -> bool:
    await eventually(lambda: text in waiting_reason(group.nodes[node]))
    return True


def remedy_of(node: Any) -> str:
    try:
        node.groups["default"].services()
    except UnreachableError as error:
        return error.remedy
    return ""


def test_wiped_voter_waits_until_it_is_admitted_as_another_store(tmp_path: Path) -> None:
    async def test() -> None:
        group = ServerGroup(tmp_path)
        async with group:
            client = await group.client()
            await client.append([b"kept"])
            before = group.hosted("n2").replica.member
            await group.stop("n2")
            shutil.rmtree(tmp_path / "default" / "dledger-n2")
            node = await group.start("n2")
            await eventually(lambda: "member replace n2" in remedy_of(node))
            assert node.groups["default"].state is GroupState.WAITING
            access = StoreAccess(group.peers, 10.0)
            log = group.hosted("n0").replica.log
            constants = (await access.send(NodeId("n0"), "default", "look")).constants
            with pytest.raises(FoundingRefusedError):
                await access.admit(NodeId("n0"), "default", "another log", constants)
            store = await access.admit(NodeId("n2"), "default", str(log.log_uuid), constants)
            assert await access.admit(NodeId("n2"), "default", str(log.log_uuid), constants) == store
            await access.close()
            replica = (await eventually(lambda: node.hosted.get("default"))).replica
            assert replica.member == member_id("n2", store) != before
            assert replica.raft.configuration.is_unknown
            await group.stop("n2")
            node = await group.start("n2")
            assert node.hosted["default"].replica.member == member_id("n2", store)

    run(test())


def test_leftover_node_of_another_cluster_disturbs_no_bootstrap(tmp_path: Path) -> None:
    """It has the usual ids, and finds a node of this cluster at an address of its own old list."""

    async def test() -> None:
        group = ServerGroup(tmp_path / "new")
        left = ServerGroup(tmp_path / "old")
        left.peers = (left.peers[0], group.peers[1], left.peers[2])
        try:
            await left.start("n0")
            await left.start("n2")
            await group.start("n1")
            await eventually(lambda: "another list" in waiting_reason(left.nodes["n0"]))
            with pytest.raises(FoundingRefusedError):
                await bootstrap_group(StoreAccess(left.peers, 10.0), "default")
            await group.start("n0")
            await group.start("n2")
            await eventually(group.is_bootstrapped)
            voters = group.hosted("n1").replica.raft.configuration.voters
            assert {node_of(voter) for voter in voters} == {"n0", "n1", "n2"}
            assert voters == {group.hosted(node).replica.member for node in group.nodes}
            assert left.nodes["n0"].groups["default"].state is GroupState.WAITING
        finally:
            await left.__aexit__()
            await group.__aexit__()

    run(test())


def test_two_concurrent_inits_found_one_log(tmp_path: Path) -> None:
    async def test() -> None:
        group = ServerGroup(tmp_path)
        async with group:
            accesses = [StoreAccess(group.peers, 10.0) for _ in range(2)]
            done = await asyncio.gather(*(bootstrap_group(access, "default") for access in accesses))
            assert {each.log_uuid for each in done} == {group.hosted("n0").replica.log_uuid}
            for access in accesses:
                await access.close()

    run(test())
