"""A store that retires its log and continues it in another one: after any crash between two steps or in one."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from dledger_core import recovery
from dledger_core.bootstrap import StoreIdentity
from dledger_core.ids import NO_INDEX, NO_TERM, MemberId, NodeId, Term
from dledger_core.lineage import LogEnd, RecoveryRecord, retired, taken
from dledger_core.raft import Configuration, Floor
from dledger_core.raft.ready import HardState
from dledger_core.recovery import KnownMember, SurvivorAnswer, TakeRecord
from dledger_core.storage import CommitLog
from dledger_core.storage.files.identity import continued, load_identity, recover_store, save_identity
from dledger_core.storage.files.layout import Layout, load_log_meta, save_log_meta
from dledger_core.storage.files.members_file import ConfigurationEntry, KnownConfigurations, members_file
from dledger_core.storage.files.meta_files import save_floor, save_hard_state
from tests.support.faulty_files import Crash, FaultyFiles
from tests.support.logs import STORE, append, open_log, read_all

LAYOUT = Layout(STORE)
ME = NodeId("n0")
BOOTSTRAPPED = Configuration(frozenset(MemberId(f"n{i}/s{i}") for i in range(3)))
BODIES = [b"a", b"b", b"c"]


def old_store() -> FaultyFiles:
    """Return a closed store of log ``old``: three entries of term 2, of which two are committed, and a membership."""
    files = FaultyFiles()
    open_log(files).close()
    members_file(LAYOUT).save(
        files, KnownConfigurations((ConfigurationEntry(NO_INDEX, NO_TERM, BOOTSTRAPPED.to_bytes()),))
    )
    meta = load_log_meta(files, LAYOUT.log_meta)
    assert meta is not None
    save_log_meta(files, LAYOUT.log_meta, replace(meta, log_uuid="old", store_uuid="s0"))
    save_hard_state(files, LAYOUT, HardState(Term(3), MemberId("n1/s1")))
    log = open_log(files)
    for body in BODIES:
        append(log, [body], 2)
    append(log, [], 2, configuration=BOOTSTRAPPED.to_bytes())
    log.close(1)
    save_identity(files, LAYOUT, StoreIdentity(store="s0"))
    return files


END = LogEnd(term=3, last_term=2, last_index=3, commit_index=1, check=7)
OTHER = LogEnd(term=5, last_term=2, last_index=9, commit_index=1, check=8)


def record_for(ends: dict[NodeId, LogEnd]) -> RecoveryRecord:
    nodes = [*ends, NodeId("n8"), NodeId("n9")] + [NodeId("n7")] * (len(ends) - 1)
    members = tuple(KnownMember(node, f"s{node[1:]}", f"host:{node}", True) for node in nodes)
    numbers = itertools.count()
    answers = {
        node: SurvivorAnswer(
            node_id=node,
            log_uuid="old",
            store=f"s{node[1:]}",
            members=members,
            end=end,
            state=retired(None, "old", f"s{node[1:]}", end),
        )
        for node, end in ends.items()
    }
    lost = frozenset(nodes) - ends.keys()
    action = recovery.decide(lost, answers, lambda: f"new{next(numbers)}")
    assert isinstance(action, TakeRecord)
    return action.record


ALONE = record_for({ME: END})
SECOND = record_for({ME: END, NodeId("n1"): OTHER})


def advance(files: FaultyFiles, record: RecoveryRecord) -> CommitLog:
    """Carry out all steps that are left, as a node does at its start and for a recovery that is run again."""
    found = load_identity(files, LAYOUT)
    if found.recovery is None:
        found = replace(found, recovery=retired(None, "old", "s0", END))
        save_identity(files, LAYOUT, found)
    if not found.is_member:
        found = replace(found, recovery=taken(found.recovery, ME, record))
        save_identity(files, LAYOUT, found)
        found = continued(found, record.log_uuid, ME)
        save_identity(files, LAYOUT, found)
    recover_store(files, LAYOUT, found)
    return open_log(files)


def check_continued(files: FaultyFiles, log: CommitLog, record: RecoveryRecord) -> None:
    meta = load_log_meta(files, LAYOUT.log_meta)
    survivor = record.find(ME)
    assert meta is not None
    assert survivor is not None
    assert (meta.log_uuid, meta.store_uuid) == (record.log_uuid, survivor.store)
    assert meta.continues == record.continues
    assert log.hard_state.term >= record.term
    assert log.hard_state.voted_for != "n1/s1"
    assert [body for _, body in read_all(log)][:3] == BODIES
    newest = Configuration.from_bytes(log.configurations[-1].body)
    assert newest.voters == {MemberId(f"{record.voter.node_id}/{record.voter.store}")}
    assert not log.ends_below_members
    assert log.floor is None
    assert load_identity(files, LAYOUT).store == survivor.store


@pytest.mark.parametrize("record", [ALONE, SECOND], ids=["best", "learner"])
def test_store_continues_in_new_log_with_its_entries(record: RecoveryRecord) -> None:
    files = old_store()
    log = advance(files, record)
    check_continued(files, log, record)
    in_force = log.configurations[-1].index
    assert in_force == (END.last_index if record is ALONE else NO_INDEX)
    append(log, [b"new"], record.term + 1)
    log.close(log.last_index())
    log = advance(files, record)
    check_continued(files, log, record)
    assert log.hard_state.term == record.term + 1, "it is not made again"


@pytest.mark.parametrize("keep", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("record", [ALONE, SECOND], ids=["best", "learner"])
def test_store_continues_after_crash_at_any_operation(record: RecoveryRecord, keep: float) -> None:
    template = old_store()
    start = template.operations
    complete = template.clone()
    advance(complete, record)
    for at in range(start + 1, complete.operations + 1):
        files = template.clone()
        files.operations, files.crash_at = start, at
        with pytest.raises(Crash):
            advance(files, record)
        files.crash(keep)
        check_continued(files, advance(files, record), record)


def test_store_that_retired_its_log_is_no_member_until_record_is_complete() -> None:
    found = StoreIdentity(store="s0", recovery=retired(None, "old", "s0", END))
    assert (found.is_member, found.log_uuid) == (False, None)
    held = replace(found, recovery=taken(found.recovery, ME, ALONE))
    assert (held.is_member, held.log_uuid) == (False, None)
    done = continued(held, ALONE.log_uuid, ME)
    assert (done.is_member, done.log_uuid, done.store) == (True, ALONE.log_uuid, ALONE.voter.store)


def test_best_store_stops_recovering_and_the_others_do_not() -> None:
    for record, floor in ((ALONE, None), (SECOND, Floor(Term(3)))):
        files = old_store()
        save_floor(files, LAYOUT, Floor(Term(3)))
        assert advance(files, record).floor == floor
