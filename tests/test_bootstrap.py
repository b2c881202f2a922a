"""Bootstrap: the decisions of stores and inits, one by one and in all interleavings."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dledger_core import bootstrap
from dledger_core.bootstrap import (
    EMPTY,
    Admission,
    BootstrapRecord,
    Complete,
    Decision,
    Exists,
    LogConstants,
    Refusal,
    Retire,
    StoreAnswer,
    StoreIdentity,
    Take,
    Wait,
)
from dledger_core.errors import FoundingRefusedError
from dledger_core.ids import NodeId
from tests.support.bootstrap_search import CONSTANTS, Search

PEERS = tuple((NodeId(f"n{i}"), f"host:{i}") for i in range(3))
NODES = tuple(node for node, _ in PEERS)


def answer(node: str, identity: StoreIdentity | None = None, **fields: object) -> StoreAnswer:
    known = {
        "node_id": NodeId(node),
        "peers": PEERS,
        "identity": identity or StoreIdentity(store=f"store of {node}"),
        "constants": CONSTANTS,
    }
    return StoreAnswer(**known | fields)  # type: ignore[arg-type]


def decided(*answers: StoreAnswer, again: bool = False) -> Decision:
    return bootstrap.decide("g", PEERS, {each.node_id: each for each in answers}, "record", "log", again=again)


def record() -> BootstrapRecord:
    decision = decided(*map(answer, NODES))
    assert isinstance(decision, Take)
    return decision.record


def holding(node: str, made: BootstrapRecord | None = None, *, complete: bool = False) -> StoreAnswer:
    taken = bootstrap.taken(answer(node), made or record())
    return answer(node, bootstrap.completed(taken, taken.record.record_id) if complete and taken.record else taken)


# --- all interleavings ----------------------------------------------------------------------------------------------


def test_search_of_two_inits_and_two_lost_disks_finds_one_log() -> None:
    result = Search(nodes=3, wipes=2, inits=2).run()
    assert result.violation is None
    assert result.states > 30_000


def test_search_finds_two_logs_where_stores_vote_before_complete_mark() -> None:
    assert Search(again=False, may_vote=lambda identity: identity.record is not None).run().violation


@pytest.mark.soak
def test_search_finds_two_logs_where_retired_stores_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "is_retired", lambda *_: True)
    assert Search().run().violation


@pytest.mark.soak
def test_search_finds_two_logs_where_records_do_not_name_retired_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "knows_retired", lambda *_: True)
    assert Search().run().violation


@pytest.mark.soak
@pytest.mark.parametrize(
    "size",
    [{"wipes": 2, "records": 3}, {"wipes": 3}, {"nodes": 4, "wipes": 2}, {"inits": 3, "wipes": 1}],
    ids=["3 records", "3 wipes", "4 nodes", "3 inits"],
)
def test_larger_search_finds_one_log(size: dict[str, int]) -> None:
    assert Search(**size).run().violation is None


# --- init -----------------------------------------------------------------------------------------------------------


def test_init_sends_new_record_to_all_nodes_once_all_answer() -> None:
    assert decided(answer("n0"), answer("n1")) == Wait((NodeId("n2"),))
    decision = decided(*map(answer, NODES))
    assert isinstance(decision, Take)
    assert decision.nodes == NODES
    assert [(named.node_id, named.store, named.address) for named in decision.record.voters] == [
        (node, f"store of {node}", address) for node, address in PEERS
    ]


def test_init_continues_record_and_completes_it_once_all_stores_hold_it() -> None:
    assert decided(holding("n0"), answer("n1"), holding("n2")) == Take(record(), (NodeId("n1"),))
    assert decided(*map(holding, NODES)) == Complete(record(), NODES)
    done = holding("n2", complete=True)
    assert decided(holding("n0"), holding("n1"), done) == Complete(record(), (NodeId("n0"), NodeId("n1")))
    assert decided(*(holding(node, complete=True) for node in NODES)) == Exists("log")


def test_init_refuses_other_list_other_node_and_other_settings() -> None:
    other = answer("n1", peers=(*PEERS, (NodeId("n3"), "host:3")))
    assert isinstance(decided(answer("n0"), other), Refusal)
    moved = bootstrap.decide("g", PEERS, {NodeId("n0"): answer("n1")}, "record", "log")
    assert isinstance(moved, Refusal)
    larger = answer("n2", constants=replace(CONSTANTS, data_segment_bytes=1 << 21))
    assert isinstance(decided(answer("n0"), answer("n1"), larger), Refusal)
    after_prefix = answer("n2", constants=replace(CONSTANTS, commitlog_prefix="0-1-a", first_position=1))
    assert isinstance(decided(answer("n0"), answer("n1"), after_prefix), Refusal)


def test_init_gives_two_records_up_only_when_asked() -> None:
    other = holding("n1", replace(record(), record_id="other", log_uuid="other log"))
    refused = decided(holding("n0"), other, answer("n2"))
    assert isinstance(refused, Refusal)
    assert "dledger init --again" in refused.remedy
    decision = decided(holding("n0"), other, answer("n2"), again=True)
    assert decision == Retire(((NodeId("n0"), "record"), (NodeId("n1"), "other")))


def test_init_replaces_retired_record_only_if_enough_stores_have_retired_it() -> None:
    def retired(node: str) -> StoreAnswer:
        return answer(node, bootstrap.retired(holding(node).identity, NodeId(node), "record"))

    assert isinstance(decided(retired("n0"), answer("n1"), answer("n2")), Refusal)
    decision = decided(retired("n0"), retired("n1"), answer("n2"))
    assert isinstance(decision, Take)
    assert decision.record.replaces == ("record",)
    with pytest.raises(FoundingRefusedError):
        bootstrap.taken(retired("n0"), record())
    with pytest.raises(FoundingRefusedError):
        bootstrap.taken(retired("n0"), replace(record(), record_id="asked before"))


def test_init_next_to_a_bootstrapped_log_names_replacement_or_recovery() -> None:
    one_lost = decided(holding("n0", complete=True), holding("n1", complete=True), answer("n2", EMPTY))
    assert isinstance(one_lost, Refusal)
    assert "member replace n2" in one_lost.remedy
    two_lost = decided(holding("n0", complete=True), answer("n1", EMPTY), answer("n2", EMPTY))
    assert isinstance(two_lost, Refusal)
    assert "recover --lost n1,n2" in two_lost.remedy


def test_incomplete_record_next_to_two_empty_nodes_bootstraps_nothing() -> None:
    """The two may have completed it, and committed entries, before their disks were lost."""
    left, wiped = holding("n2"), [answer("n0", StoreIdentity(store="new")), answer("n1", StoreIdentity(store="newer"))]
    assert isinstance(decided(*wiped, left), Refusal)
    assert decided(*wiped, left, again=True) == Retire(((NodeId("n2"), "record"),))
    retired = answer("n2", bootstrap.retired(left.identity, NodeId("n2"), "record"))
    assert isinstance(decided(*wiped, retired), Refusal)
    assert isinstance(decided(*wiped, retired, again=True), Refusal)


def test_converted_stores_become_voters_and_empty_ones_learners() -> None:
    converted = [answer(node, converted_log="converted") for node in ("n0", "n1")]
    empty = answer("n2", constants=replace(CONSTANTS, data_segment_bytes=1 << 22))
    decision = decided(*converted, empty)
    assert isinstance(decision, Take)
    made = decision.record
    assert ([v.node_id for v in made.voters], [v.node_id for v in made.learners]) == (["n0", "n1"], ["n2"])
    assert made.log_uuid == "converted"
    assert bootstrap.taken(empty, made).record == made
    assert isinstance(decided(*converted, answer("n2", converted_log="another")), Refusal)


# --- a store --------------------------------------------------------------------------------------------------------


def test_store_takes_only_a_record_that_names_it_and_equals_its_list() -> None:
    made = record()
    for stranger in (
        answer("n0", StoreIdentity(store="another store")),
        answer("n0", peers=(*PEERS[:2], (NodeId("n2"), "elsewhere:2"))),
        answer("n0", constants=LogConstants(profile="A", data_segment_bytes=1 << 20, index_segment_bytes=1 << 20)),
        answer("n0", converted_log="another log"),
        holding("n0", replace(made, record_id="other")),
        answer("n0", StoreIdentity(store="store of n0", admission=Admission("log", CONSTANTS))),
    ):
        with pytest.raises(FoundingRefusedError):
            bootstrap.taken(stranger, made)


def test_complete_record_is_never_retired_and_no_other_is_completed() -> None:
    with pytest.raises(FoundingRefusedError):
        bootstrap.retired(holding("n0", complete=True).identity, NodeId("n0"), "record")
    with pytest.raises(FoundingRefusedError):
        bootstrap.completed(holding("n0").identity, "other")


def test_admission_makes_new_store_once_and_only_where_there_is_no_log() -> None:
    admission = Admission("log", CONSTANTS)
    admitted = bootstrap.admitted(answer("n2"), admission, "new store")
    assert (admitted.store, admitted.is_member, admitted.log_uuid) == ("new store", True, "log")
    assert bootstrap.admitted(answer("n2", admitted), admission, "newer store") == admitted
    for other in (
        answer("n2", admitted, converted_log=None),
        answer("n2", converted_log="converted"),
        holding("n2"),
    ):
        with pytest.raises(FoundingRefusedError):
            bootstrap.admitted(other, Admission("another log", CONSTANTS), "newer store")


def test_record_survives_its_map_and_malformed_maps_are_none() -> None:
    made = replace(record(), replaces=("retired",))
    assert BootstrapRecord.from_fields(made.to_fields()) == made
    for fields in (None, {}, made.to_fields() | {"voters": ()}, made.to_fields() | {"constants": {}}):
        assert BootstrapRecord.from_fields(fields) is None
