"""``dledger recover --lost`` of a log of profile A: all survivors vote, and each ends its log where it differs."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest

from dledger_core.bootstrap import StoreIdentity
from dledger_core.config import parse_peers
from dledger_core.ids import NO_INDEX, NodeId, Term
from dledger_core.lineage import AncestorLog, LogEnd, agreed_index, retired, taken
from dledger_core.raft import Configuration, Floor
from dledger_core.raft.ready import HardState
from dledger_core.recovery import KnownMember, Recovered, SurvivorAnswer, TakeRecord, decide
from dledger_core.server.bootstrap.store import GroupStore
from dledger_core.server.config import ServerConfig
from dledger_core.storage.files.identity import continued, save_identity
from dledger_core.storage.files.layout import Layout, load_log_meta, save_log_meta
from dledger_core.storage.files.meta_files import save_hard_state
from tests.server.bootstrap.test_lost_majority import append as append_entries
from tests.server.bootstrap.test_lost_majority import bodies, client_of, leaderless, recover, settled, wipe
from tests.support.faulty_files import Crash, FaultyFiles
from tests.support.logs import SMALL, STORE, append, open_log, read_all
from tests.support.server_group import STORAGE, ServerGroup, eventually, run

ME, OTHER = NodeId("n0"), NodeId("n1")
LAYOUT, CONFIG = Layout(STORE), replace(SMALL, profile="A")


def end(*terms: int, commit_index: int = 1) -> LogEnd:
    """The end of a log with one entry of each term."""
    ranges = tuple((term, i) for i, term in enumerate(terms) if i == 0 or terms[i - 1] != term)
    return LogEnd(
        term=9,
        last_term=terms[-1] if terms else -1,
        last_index=len(terms) - 1,
        commit_index=commit_index,
        ranges=ranges,
    )


@pytest.mark.parametrize(
    ("one", "other", "agreed"),
    [
        ((2, 2, 2), (2, 2, 2), 2),
        ((2, 2, 2), (2, 2), 1),
        ((2, 2, 2, 3, 3), (2, 2, 4), 1),
        ((1, 2, 3), (1, 4, 4, 4, 4), 0),
        ((1, 1), (2, 2), NO_INDEX),
        ((), (2, 2), NO_INDEX),
    ],
)
def test_logs_agree_up_to_their_last_entry_of_one_index_and_term(
    one: tuple[int, ...], other: tuple[int, ...], agreed: int
) -> None:
    assert agreed_index(end(*one), end(*other)) == agreed_index(end(*other), end(*one)) == agreed


def test_logs_without_known_terms_agree_nowhere_known() -> None:
    unknown = replace(end(2, 2, 2), ranges=())
    assert agreed_index(unknown, end(2, 2)) is None
    assert agreed_index(unknown, replace(unknown)) == 2, "the last entry is known"


def answer(node: NodeId, found: LogEnd) -> SurvivorAnswer:
    members = tuple(KnownMember(NodeId(f"n{i}"), f"s{i}", f"host:{i}", True) for i in range(4))
    store = f"s{node[1:]}"
    state = retired(None, "old", store, found)
    return SurvivorAnswer(
        node_id=node, log_uuid="old", store=store, profile="A", members=members, end=found, state=state
    )


OLD, BEST = (2, 2, 2, 3, 3), (2, 2, 2, 4)
"""``n0`` led term 3 and was cut off; a majority of the lost nodes and ``n1`` committed an entry of term 4."""


def old_store() -> FaultyFiles:
    """Return the store of n0, which holds a complete record: its node ended before it went over to the new log."""
    answers = {ME: answer(ME, end(*OLD)), OTHER: answer(OTHER, end(*BEST, commit_index=3))}
    action = decide(frozenset({NodeId("n2"), NodeId("n3")}), answers, iter(["a", "b", "c"]).__next__)
    assert isinstance(action, TakeRecord)
    record = action.record
    assert (record.voter.node_id, record.all_vote) == (OTHER, True)
    assert record.point == AncestorLog("old", 3, 4, None)
    files = FaultyFiles()
    open_log(files, config=CONFIG).close()
    meta = load_log_meta(files, LAYOUT.log_meta)
    assert meta is not None
    save_log_meta(files, LAYOUT.log_meta, replace(meta, log_uuid="old", store_uuid="s0"))
    save_hard_state(files, LAYOUT, HardState(Term(3), None))
    log = open_log(files, config=CONFIG)
    for at, term in enumerate(OLD):
        append(log, [b"entry %d" % at], term)
    log.close(1)
    state = taken(answers[ME].state, ME, record)
    held = StoreIdentity(store="s0", recovery=state)
    save_identity(files, LAYOUT, continued(held, record.log_uuid, ME))
    return files


def reopened(files: FaultyFiles) -> None:
    peers = parse_peers(";".join(f"n{i}-127.0.0.1:{i + 1}" for i in range(4)))
    config = ServerConfig(self_id=ME, peers=peers, directory=STORE.parent.parent, storage=CONFIG)
    GroupStore(config, "g", files)


def check_voter(files: FaultyFiles) -> None:
    with contextlib.closing(open_log(files, config=CONFIG)) as log:
        assert [body for _, body in read_all(log)] == [b"entry 0", b"entry 1", b"entry 2"]
        assert log.floor == Floor(Term(4), 3), "the link: only a log with all of it is elected"
        assert {member.split("/")[0] for member in Configuration.from_bytes(log.configurations[-1].body).voters} == {
            "n0",
            "n1",
        }
    kept = [name for name in files.listdir(LAYOUT.meta) if name.startswith("behind-3-")]
    assert any(b"entry 4" in (files.read(LAYOUT.meta / name) or b"") for name in kept)


def test_voter_ends_its_log_where_it_differs_and_takes_link_as_floor() -> None:
    files = old_store()
    reopened(files)
    check_voter(files)
    reopened(files)
    check_voter(files)


@pytest.mark.parametrize("keep", [0.0, 0.5, 1.0])
def test_voter_ends_its_log_after_crash_at_any_operation(keep: float) -> None:
    template = old_store()
    complete = template.clone()
    reopened(complete)
    for at in range(template.operations + 1, complete.operations + 1):
        files = template.clone()
        files.operations, files.crash_at = template.operations, at
        with pytest.raises(Crash):
            reopened(files)
        files.crash(keep)
        reopened(files)
        check_voter(files)


def test_two_of_four_nodes_continue_log_of_profile_a_and_both_vote(tmp_path: Path) -> None:
    async def work() -> None:
        storage = replace(STORAGE, profile="A")
        async with ServerGroup(tmp_path, 4, storage=storage) as group, client_of(group) as client:
            await group.leader()
            acknowledged = await append_entries(client, 10)
            await settled(group, "n3")
            await group.stop("n3")  # it lacks what follows
            acknowledged += await append_entries(client, 5, "later")
            await settled(group, "n2")
            for node in ("n0", "n1"):
                await group.stop(node)
                wipe(group, node)
            await group.start("n3")
            await leaderless(group, "n2", "n3")
            done = await recover(group, "n0", "n1")
            assert isinstance(done.action, Recovered)
            acknowledged += await append_entries(client, 1, "new")
            assert await bodies(client) == acknowledged
            leader = await group.leader()
            voters = group.hosted(leader).replica.raft.configuration.voters
            assert {member.split("/")[0] for member in voters} == {"n2", "n3"}
            await settled(group, "n2")
            await settled(group, "n3")
            for node in ("n2", "n3"):
                await eventually(lambda node=node: group.hosted(node).replica.log.floor is None)  # type: ignore[misc]
                await group.stop(node)
            for node in ("n2", "n3"):
                await group.start(node)
            assert await bodies(client) == acknowledged

    run(work())
