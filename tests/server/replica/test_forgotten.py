"""Stores that have forgotten what they promised: a disk set back in time, a copied directory started as a node."""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from typing import Any

import pytest

from dledger_core.bootstrap import GROUP_VERSION
from dledger_core.errors import EndLostError, IdentityLostError
from dledger_core.ids import NO_INDEX, NO_TERM, Index, MemberId, NodeId, Term, member_id
from dledger_core.net.attach import floor_of_row
from dledger_core.raft import AppendEntries, AppendEntriesResponse, Message, RequestVote, RequestVoteResponse, TermRange
from dledger_core.raft.floor import Floor
from dledger_core.raft.log import TermRanges
from dledger_core.server.group_state import GroupState
from dledger_core.server.replica.attachments import StoreClaim
from dledger_core.server.replica.peer_watermarks import PeerWatermarks
from dledger_core.storage.files.acknowledged_file import Remembered, load_acknowledged, save_acknowledged
from dledger_core.storage.files.file_system import read_checked, write_checked
from dledger_core.storage.files.layout import Layout
from tests.support.faulty_files import FaultyFiles
from tests.support.logs import STORE
from tests.support.replica_group import HandDriven
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


def request(term: int) -> RequestVote:
    end = {"last_index": NO_INDEX, "last_term": NO_TERM}
    return RequestVote(sender=B, target=A, term=Term(term), pre=False, transfer=False, **end)


def granted(term: int, *, pre: bool = False) -> RequestVoteResponse:
    return RequestVoteResponse(sender=B, target=A, term=Term(term), granted=True, pre=pre)


def shown(
    term: int,
    last_index: int,
    *,
    last_term: int = 1,
    member: MemberId = B,
    floor: Floor | None = None,
    shows_floor: bool = True,
) -> StoreClaim:
    return StoreClaim(
        member,
        "log",
        Term(term),
        Term(last_term),
        Index(last_index),
        GROUP_VERSION,
        floor=floor,
        shows_floor=shows_floor,
    )


def led(term: int, sender: MemberId = B) -> AppendEntries:
    ends = {"prev_index": NO_INDEX, "prev_term": NO_TERM, "commit_index": NO_INDEX, "last_index": NO_INDEX}
    return AppendEntries(sender=sender, target=A, term=Term(term), batches=(), **ends)


class Terms:
    """The log of the node that remembers: the term of each entry, of which some may be trimmed."""

    def __init__(self, *terms: int, trimmed: int = 0) -> None:
        self.terms, self.trimmed = terms, trimmed
        ranges = [TermRange(Index(at), Term(term)) for at, term in enumerate(terms) if at >= trimmed - 1]
        self.ranges = TermRanges(each for at, each in enumerate(ranges) if not at or ranges[at - 1].term != each.term)

    def term_at(self, index: Index) -> Term | None:
        return Term(self.terms[index]) if self.trimmed - 1 <= index < len(self.terms) and index >= 0 else None

    def last_index_up_to(self, term: Term) -> Index:
        return self.ranges.last_index_up_to(term, Index(len(self.terms) - 1))


LONG = Terms(*[1] * 20)


def check(memory: PeerWatermarks, theirs: StoreClaim, log: Terms = LONG, commit_index: int = -1) -> Any:
    """Return the class of the refusal and the floor that it names; the same after the memory was written and read."""
    files, layout = FaultyFiles(), Layout(STORE)
    files.mkdir(layout.meta)
    memories = [memory]
    if (known := memory.unwritten()) is not None:
        save_acknowledged(files, layout, known)
        memories.append(PeerWatermarks(load_acknowledged(files, layout)))
    assert memory.unwritten() is None, "nothing new to write"
    found = []
    for each in memories:
        try:
            each.check("g", theirs, log, Index(commit_index))
            found.append(None)
        except IdentityLostError:
            found.append(IdentityLostError)
        except EndLostError as error:
            found.append(floor_of_row(error.values["floor"]))
    assert found == found[:1] * len(found)
    return found[0]


def remembering(*messages: Message) -> PeerWatermarks:
    memory = PeerWatermarks({})
    for message in messages:
        memory.observe(message)
    return memory


LOST_5 = Floor(Term(5), None)
"""Floor of a store that has lost entries which it acknowledged in term 5."""


@pytest.mark.parametrize(
    ("here", "last_term", "refused"),
    [
        pytest.param((1, 1, 5, 5), 4, LOST_5, id="tail of an earlier leader"),
        pytest.param((1, 1, 5, 5), 5, None, id="all of it"),
        pytest.param((1, 1, 4, 4), 4, None, id="entries of an earlier term"),
        pytest.param((1, 1, 5, 6), 5, None, id="replaced here"),
    ],
)
@pytest.mark.parametrize("last_index", [3, 9])
def test_log_of_older_term_lacks_acknowledged_entries_however_long(
    here: tuple[int, ...], last_term: int, refused: object, last_index: int
) -> None:
    memory = remembering(accepted(5, 3))
    assert check(memory, shown(5, last_index, last_term=last_term), Terms(*here)) == refused


@pytest.mark.parametrize(
    ("term", "last_index", "refused"),
    [
        (5, 9, None),
        (5, 10, None),
        (6, 3, None),
        (5, 8, LOST_5),
        (4, 9, IdentityLostError),
    ],
)
def test_store_that_shows_less_than_remembered_is_refused(term: int, last_index: int, refused: Any) -> None:
    memory = remembering(granted(5), accepted(5, 9), accepted(5, 7), accepted(4, 20), granted(7, pre=True))
    assert check(memory, shown(0, -1, member=member_id("n1", "another store"))) is None
    assert check(memory, shown(term, last_index)) == refused


@pytest.mark.parametrize("message", [granted(7), led(7), accepted(7, 0), request(7)], ids=lambda m: type(m).__name__)
def test_term_of_later_message_leaves_older_acknowledgement(message: Message) -> None:
    memory = remembering(accepted(5, 9), message)
    assert check(memory, shown(6, 9)) is IdentityLostError
    if not isinstance(message, AppendEntriesResponse):
        assert check(memory, shown(7, 8), Terms(*[5] * 20), commit_index=9) == LOST_5


@pytest.mark.parametrize(
    ("last_index", "log", "commit_index", "refused"),
    [
        (8, Terms(*[5] * 20), 9, LOST_5),
        (8, Terms(*[5] * 20), 15, LOST_5),
        (9, Terms(*[5] * 20), 15, None),
        (7, Terms(*[5] * 20), 8, LOST_5),
        (8, Terms(*[5] * 20), 8, None),
        (7, Terms(*[5] * 8, *[6] * 9), 12, None),
        (6, Terms(*[5] * 8, *[6] * 9), 12, LOST_5),
        (2, Terms(*[5] * 20, trimmed=12), 15, LOST_5),
        (2, Terms(*[5] * 10, *[6] * 9, trimmed=12), 15, None),
    ],
    ids=[
        "lost the last entry",
        "committed further",
        "has all",
        "lost a committed one",
        "has all committed ones",
        "the rest was replaced",
        "lost one before the rest was replaced",
        "trimmed here, of its term",
        "trimmed here, of an unknown term",
    ],
)
def test_committed_acknowledged_entry_is_remembered_in_later_term(
    last_index: int, log: Terms, commit_index: int, refused: Any
) -> None:
    memory = remembering(accepted(5, 9))
    assert check(memory, shown(6, last_index, last_term=5), log, commit_index) == refused
    old = shown(6, last_index, last_term=5, shows_floor=False)
    assert check(memory, old, log, commit_index) is None, "version 0.2.0 could not show that it recovers"


def test_entries_that_a_later_leader_replaced_here_are_not_expected() -> None:
    memory = remembering(accepted(5, 9))
    memory.truncated(Index(7))
    log = Terms(*[4] * 12)
    assert check(memory, shown(6, 6, last_term=4), log, commit_index=11) is None
    assert check(memory, shown(6, 5, last_term=4), log, commit_index=11) == LOST_5


@pytest.mark.parametrize(
    ("term", "last_term", "last_index", "refused"),
    [
        (3, 3, 9, None),
        (3, 3, 12, None),
        (3, 3, 8, Floor(Term(3), Index(9))),
        (3, 2, 20, Floor(Term(3), Index(9))),
        (4, 3, 8, None),
        (2, 2, 9, IdentityLostError),
    ],
)
def test_leader_with_less_of_its_term_needs_floor_at_end_here(
    term: int, last_term: int, last_index: int, refused: Any
) -> None:
    log = Terms(*[2] * 5, *[3] * 5, *[6] * 5)
    assert check(remembering(led(3)), shown(term, last_index, last_term=last_term), log, 14) == refused
    assert check(remembering(granted(3)), shown(term, last_index, last_term=last_term), log, 14) in (
        None,
        IdentityLostError,
    ), "it did not lead"


def test_leader_without_entry_of_its_term_here_needs_no_floor() -> None:
    assert check(remembering(led(4)), shown(4, 3, last_term=3), Terms(*[3] * 9), 8) is None


@pytest.mark.parametrize(
    ("floor", "refused"),
    [
        (Floor(Term(4), None), LOST_5),
        (Floor(Term(5), Index(20)), LOST_5),
        (LOST_5, None),
        (Floor(Term(6), Index(0)), None),
        (Floor(Term(7), None), None),
    ],
)
def test_store_with_floor_it_needs_is_taken(floor: Floor, refused: Any) -> None:
    assert check(remembering(accepted(5, 9)), shown(7, 3, floor=floor), Terms(*[5] * 20), 15) == refused


def test_term_shown_at_attach_is_remembered_where_it_is_durable() -> None:
    memory = PeerWatermarks({})
    assert check(memory, shown(6, 3, shows_floor=False)) is None
    assert check(memory, shown(5, 3, shows_floor=False)) is None
    assert check(memory, shown(6, 3)) is None
    assert check(memory, shown(5, 3)) is IdentityLostError


def test_page_cache_acknowledgement_promises_no_end() -> None:
    memory = PeerWatermarks({}, is_durable=False)
    memory.observe(led(3))
    with pytest.raises(IdentityLostError):
        memory.check("g", shown(2, 9), LONG, NO_INDEX)
    memory.observe(accepted(3, 9))
    memory.check("g", shown(3, 4), LONG, NO_INDEX)


def test_memory_of_version_0_2_0_is_read_and_version_0_2_0_reads_pairs() -> None:
    files, layout = FaultyFiles(), Layout(STORE)
    files.mkdir(layout.meta)
    write_checked(files, layout.acknowledged, {"stores": {"b": [5, 9], "c": [4, -1], "d": [1, 2, 3], "e": ["x", 1]}})
    known = load_acknowledged(files, layout)
    assert known == {"b": Remembered(5, acknowledged=(5, 9)), "c": Remembered(4, acknowledged=(4, -1))}
    known["b"] = Remembered(7, 6, (5, 9))
    known["f"] = Remembered(8)
    save_acknowledged(files, layout, known)
    fields = read_checked(files, layout.acknowledged)
    assert fields is not None
    assert fields["stores"] == {"b": [5, 9], "c": [4, -1], "f": [8, -1]}
    assert load_acknowledged(files, layout)["b"] == known["b"]


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


def test_memory_is_written_with_checkpoint() -> None:
    files, layout = FaultyFiles(), Layout(STORE)
    with HandDriven(STORE, voters=("n0", "n1"), files=files) as n0:
        n0.replica.peer_watermarks.observe(accepted(5, 9))
        n0.replica.peer_watermarks.observe(led(7))
        n0.replica.store.save_checkpoint()
        n0.run()
        assert load_acknowledged(files, layout) == {"b": Remembered(7, 7, (5, 9))}
        n0.replica.peer_watermarks.observe(granted(8))
    assert load_acknowledged(files, layout)["b"].term == 8, "an orderly stop writes it too"


async def test_nodes_that_restarted_still_remember_acknowledgements(tmp_path, caplog):
    async with ServerGroup(tmp_path) as cluster:
        _, (node, _) = await cluster.leader(), await cluster.followers()
        await acknowledged(cluster, node)
        await cluster.stop(node)
        store = cluster.config(node).store_path("default")
        shutil.copytree(store, tmp_path / "earlier")
        await cluster.start(node)
        last = await acknowledged(cluster, node)
        others = [name for name in cluster.nodes if name != node]
        for name in (node, *others):
            await cluster.stop(name)
        shutil.rmtree(store)
        shutil.copytree(tmp_path / "earlier", store)
        with caplog.at_level(logging.WARNING):
            for name in (*others, node):
                await cluster.start(name)
            await eventually(lambda: "END_LOST" in caplog.text or "IDENTITY_LOST" in caplog.text)
        assert last > 0


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
