"""The members file: what a store knows of its group after any crash, truncation, snapshot, trim or loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from dledger_core.errors import CorruptRecordError
from dledger_core.ids import NO_INDEX, NO_TERM, Index, MemberId, Position, Term
from dledger_core.raft import UNKNOWN, Floor
from dledger_core.raft.ready import HardState
from dledger_core.storage import CommitLog, open_store
from dledger_core.storage.files.ab_file import copies
from dledger_core.storage.files.layout import Layout
from dledger_core.storage.files.members_file import ConfigurationEntry, KnownConfigurations, members_file
from dledger_core.storage.write.trim import LogStart
from tests.storage.sample import DATA
from tests.support.damage import remove, zero_from
from tests.support.faulty_files import Crash, FaultyFiles
from tests.support.logs import MEMBERS, NO_TABLES, SMALL, STORE, append, open_log, place

LAYOUT = Layout(STORE)
BOOTSTRAPPED = ConfigurationEntry(NO_INDEX, NO_TERM, b"bootstrap")
VOTE = HardState(Term(1), MemberId("n0"))
SEGMENTS = replace(SMALL, data_segment_bytes=1024)


def entry(index: int, body: bytes, term: int = 1) -> ConfigurationEntry:
    return ConfigurationEntry(Index(index), Term(term), body)


def bootstrapped() -> tuple[FaultyFiles, CommitLog]:
    """Return a store of a bootstrapped group with entries 0 to 3, of which 2 is a configuration."""
    files = FaultyFiles()
    open_log(files, config=SEGMENTS).close()
    members_file(LAYOUT).save(files, KnownConfigurations((BOOTSTRAPPED,)))
    log = open_log(files, config=SEGMENTS)
    append(log, [b"a", b"b"])
    append(log, [], configuration=b"second")
    append(log, [b"c"])
    return files, log


def known(log: CommitLog) -> list[ConfigurationEntry]:
    assert log.ends_below_members == (log.ends_below_members and log.floor is not None)
    return list(log.configurations)


def reopened(files: FaultyFiles) -> CommitLog:
    files.kill()
    return open_log(files, config=SEGMENTS)


# --- set back ---------------------------------------------------------------------------------------------------------


def test_store_that_was_set_back_does_not_know_its_group_until_it_recovered():
    files, log = bootstrapped()
    log.raise_floor(Floor(Term(1)))
    log = reopened(files)
    assert log.ends_below_members
    log.remove_floor(log.last_index())
    assert not log.ends_below_members
    assert not reopened(files).ends_below_members


# --- append ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", ["fsync", "page-cache"])
def test_configuration_entry_is_durable_and_named_before_persist_returns(durability: str) -> None:
    files = FaultyFiles()
    log = open_log(files, config=replace(SMALL, durability=durability))  # type: ignore[arg-type]
    append(log, [b"a"])
    before = len(files.log)
    append(log, [], configuration=b"new")
    steps = [(kind, path.parent.name, path.name) for kind, path in files.log[before:]]
    named = [at for at, (_, _, name) in enumerate(steps) if name.startswith("members")]
    synced = [at for at, (kind, parent, _) in enumerate(steps) if kind == "sync" and parent in ("data", "index")]
    assert len(named) >= 2
    assert {steps[at][1] for at in synced if at < min(named)} == {"data", "index"}
    files.crash(0.0)
    assert known(open_log(files)) == [entry(1, b"new")]


def test_only_entries_after_the_checkpoint_are_searched_at_start() -> None:
    files, log = bootstrapped()
    log.close()
    names = {path: bytes(files.content(path)) for path in copies(LAYOUT.members)}
    for path in names:
        files.content(path)[:] = b""
        files.names[path].sync()
    members_file(LAYOUT).save(files, KnownConfigurations((BOOTSTRAPPED,)))
    assert known(reopened(files)) == [BOOTSTRAPPED], "the checkpoint covers the entry, so the file had named it"


# --- crashes ---------------------------------------------------------------------------------------------------------


def crash_everywhere(
    prepare: Callable[[], tuple[FaultyFiles, CommitLog]],
    action: Callable[[CommitLog], object],
    look: Callable[[CommitLog], None],
) -> int:
    """Crash ``action`` at each of its operations, by a kill and by power losses; return how many there are."""
    files, log = prepare()
    before = files.operations
    action(log)
    count = files.operations - before
    for at in range(1, count + 1):
        for keep in (None, 0.0, 0.5, 1.0):
            files, log = prepare()
            files.crash_at = files.operations + at
            with pytest.raises(Crash):
                action(log)
            files.kill() if keep is None else files.crash(keep)
            log = open_log(files, config=SEGMENTS)
            look(log)
            log.close()
            if not log.ends_below_members:  # else bytes that may be damaged are kept
                findings = open_store(STORE, files=files).verify().findings
                assert [found for found in findings if found.severity == "error"] == []
    return count


def test_crash_of_an_append_leaves_old_or_new_configuration() -> None:
    seen = set()

    def look(log: CommitLog) -> None:
        assert not log.ends_below_members
        names = [found.body for found in known(log)]
        assert names == [b"bootstrap", b"second"] + [b"third"] * (log.last_index() == 4)
        seen.add(len(names))

    assert crash_everywhere(bootstrapped, lambda log: append(log, [], configuration=b"third"), look) >= 8
    assert seen == {2, 3}


def replace_tail(log: CommitLog) -> None:
    log.stage_truncate(Index(2))
    batch = place(log, 2, [], term=2, configuration=b"other")
    log.persist(HardState(Term(2), None), Index(2), [batch])


def test_crash_of_a_truncation_leaves_no_floor_and_no_truncated_configuration() -> None:
    seen = set()

    def look(log: CommitLog) -> None:
        assert not log.ends_below_members
        assert log.floor is None
        names = tuple(found.body for found in known(log))
        seen.add(names)
        if log.last_index() >= 2:
            of_term = {1: b"second", 2: b"other"}[log.term_ranges()[-1].term]
            assert names == (b"bootstrap", of_term)
        else:
            assert names == (b"bootstrap",)

    assert crash_everywhere(bootstrapped, replace_tail, look) >= 10
    assert seen == {(b"bootstrap", b"second"), (b"bootstrap", b"other"), (b"bootstrap",)}


def installed(log: CommitLog) -> None:
    start = LogStart(
        first_index=Index(1000),
        position=Position(1 << 16),
        previous_term=Term(1),
        log_uuid=None,
        tables=NO_TABLES,
        members=MEMBERS,
    )
    log.stage_restart(start)
    log.persist(HardState(Term(5), MemberId("n2")), None, [], start)


def test_crash_of_a_snapshot_install_keeps_vote_and_configuration_of_the_log() -> None:
    seen = set()

    def look(log: CommitLog) -> None:
        assert not log.ends_below_members
        assert log.floor is None
        expected = [MEMBERS] if log.first_index() == 1000 else [BOOTSTRAPPED, entry(2, b"second")]
        assert known(log) == expected
        assert log.first_index() == 0 or log.hard_state == HardState(Term(5), MemberId("n2"))
        seen.add(int(log.first_index()))

    assert crash_everywhere(bootstrapped, installed, look) >= 12
    assert seen == {0, 1000}


def trimmable() -> tuple[FaultyFiles, CommitLog]:
    files, log = bootstrapped()
    append(log, [bytes(300)] * 5)
    append(log, [], configuration=b"third")
    log.save_checkpoint(log.last_index())
    return files, log


def test_crash_of_a_trim_keeps_the_configuration_in_force() -> None:
    def look(log: CommitLog) -> None:
        assert not log.ends_below_members
        assert [found.body for found in known(log)][-2:] == [b"second", b"third"]

    def trim(log: CommitLog) -> None:
        assert log.trim(7, NO_TABLES, log.last_index()) > 2

    assert crash_everywhere(trimmable, trim, look) >= 4
    _, log = trimmable()
    trim(log)
    assert known(log) == [entry(2, b"second"), entry(9, b"third")]


# --- losses ----------------------------------------------------------------------------------------------------------


def test_log_that_ends_below_the_file_is_a_recovering_voter() -> None:
    files, log = bootstrapped()
    zero_from(files, DATA, int(log.position_of(2)))
    log = reopened(files)
    assert (log.last_index(), log.ends_below_members) == (1, True)
    assert log.floor == Floor(VOTE.term)
    assert known(log) == [BOOTSTRAPPED]
    append(log, [b"x"], term=2)
    append(log, [], term=2, configuration=b"of another leader")
    append(log, [b"y"], term=2)
    log = reopened(files)
    assert known(log) == [BOOTSTRAPPED, entry(3, b"of another leader", term=2)], "the lost entry was replaced"
    log.remove_floor(4)
    log = reopened(files)
    assert (log.ends_below_members, log.floor) == (False, None)


def test_store_forgets_its_lost_end_only_when_recovery_ends() -> None:
    files, log = bootstrapped()
    append(log, [b"d"] * 3)
    append(log, [], configuration=b"third")
    zero_from(files, DATA, int(log.position_of(2)))
    log = reopened(files)
    append(log, [], term=2, configuration=b"early")
    log.stage_truncate(Index(2))
    log.persist(HardState(Term(3), None), Index(2), [place(log, 2, [b"z"], term=3)])
    log = reopened(files)
    assert (log.ends_below_members, known(log)) == (True, [BOOTSTRAPPED])
    log.remove_floor(2)
    log = reopened(files)
    assert (log.ends_below_members, known(log)) == (False, [BOOTSTRAPPED])


def test_snapshot_install_below_a_lost_entry_does_not_hide_the_loss() -> None:
    files, log = bootstrapped()
    append(log, [], configuration=b"third")
    zero_from(files, DATA, int(log.position_of(2)))
    log = reopened(files)
    start = LogStart(
        first_index=Index(3),
        position=Position(1024),
        previous_term=Term(1),
        log_uuid=None,
        tables=NO_TABLES,
        members=entry(2, b"second"),
    )
    log.stage_restart(start)
    log.persist(None, None, [], start)
    log = reopened(files)
    assert known(log) == [entry(2, b"second")]
    assert log.ends_below_members


@pytest.mark.parametrize("damage", ["removed", "flipped"])
@pytest.mark.parametrize("copy", [0, 1])
def test_one_lost_copy_costs_nothing(copy: int, damage: str) -> None:
    files, log = bootstrapped()
    path = copies(LAYOUT.members)[copy]
    remove(files, path) if damage == "removed" else files.content(path).__setitem__(30, 0)
    log = reopened(files)
    assert (log.ends_below_members, log.floor) == (False, None)
    assert known(log) == [BOOTSTRAPPED, entry(2, b"second")]
    remove(files, copies(LAYOUT.members)[1 - copy])
    assert known(reopened(files)) == [BOOTSTRAPPED, entry(2, b"second")]


def test_store_that_lost_both_copies_recovers_until_a_leader_compared_its_log() -> None:
    files, log = bootstrapped()
    log.close()
    remove(files, *copies(LAYOUT.members))
    findings = open_store(STORE, files=files).verify().findings
    assert [(found.kind, found.path) for found in findings] == [("CORRUPT", str(LAYOUT.members))]
    for _ in range(2):
        log = reopened(files)
        assert (log.ends_below_members, log.floor) == (True, Floor(VOTE.term))
        assert known(log) == [entry(2, b"second")], "what the log itself has"
    log.persist(HardState(Term(2), None), None, [])
    log.remove_floor(3)
    assert not reopened(files).ends_below_members


def test_trimmed_store_that_lost_both_copies_knows_no_group_after_its_recovery() -> None:
    files, log = bootstrapped()
    append(log, [bytes(300)] * 5)
    assert log.trim(7, NO_TABLES, log.last_index()) > 2
    log.close()
    remove(files, *copies(LAYOUT.members))
    log = reopened(files)
    unknown = ConfigurationEntry(NO_INDEX, NO_TERM, UNKNOWN.to_bytes())
    assert (log.ends_below_members, known(log)) == (True, [unknown]), "not what the group was bootstrapped with"
    log.persist(HardState(Term(2), None), None, [])
    log.remove_floor(log.last_index())
    log = reopened(files)
    assert (log.ends_below_members, known(log)) == (False, [unknown])
    append(log, [], term=2, configuration=b"fourth")
    assert [found.body for found in known(reopened(files))] == [unknown.body, b"fourth"]


def test_new_store_without_the_file_has_lost_nothing() -> None:
    log = open_log(files := FaultyFiles())
    log.close()
    remove(files, *copies(LAYOUT.members))
    log = open_log(files)
    assert (log.ends_below_members, log.floor, known(log)) == (False, None, [])


def test_damaged_entry_that_the_checkpoint_covers_is_an_error() -> None:
    files, log = bootstrapped()
    position = int(log.position_of(2))
    log.close()
    zero_from(files, DATA, position)
    with pytest.raises(CorruptRecordError):
        reopened(files)


@pytest.mark.parametrize(
    "fields",
    [
        {"entries": [[0, 1, "eA=="], [0, 1, "eA=="]], "lost": False, "next_start": None},
        {"entries": [[0, 1]], "lost": False, "next_start": None},
        {"entries": [[True, 1, "eA=="]], "lost": False, "next_start": None},
        {"entries": [[0, -2, "eA=="]], "lost": False, "next_start": None},
        {"entries": [[0, 1, "?"]], "lost": False, "next_start": None},
        {"entries": [], "lost": 0, "next_start": None},
        {"entries": [], "lost": False, "next_start": []},
        {"entries": []},
    ],
)
def test_content_with_impossible_values_is_no_content(fields: dict[str, object]) -> None:
    assert members_file(LAYOUT).parse(fields) is None
