"""Hard state and checkpoint have two copies; a store that lost both of one has forgotten what it once knew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from dledger_core.errors import CorruptRecordError
from dledger_core.ids import Index, NodeId, Term
from dledger_core.raft.floor import Floor
from dledger_core.raft.ready import HardState
from dledger_core.storage.files.ab_file import copies
from dledger_core.storage.files.file_system import write_checked
from dledger_core.storage.files.layout import Layout
from dledger_core.storage.files.meta_files import (
    Checkpoint,
    hard_state_file,
    load_checkpoint,
    load_hard_state,
    save_checkpoint,
    save_hard_state,
)
from tests.storage.sample import DATA, INDEX, Sample
from tests.support.damage import flip_durably, remove
from tests.support.faulty_files import Crash, FaultyFiles
from tests.support.logs import SMALL, STORE, append, open_log, read_all

LAYOUT = Layout(STORE)
STATE = HardState(Term(7), NodeId("n2"))
AB_FILES = pytest.mark.parametrize("ab_file", [LAYOUT.hard_state, LAYOUT.checkpoint], ids=["hard state", "checkpoint"])
CONFIG = replace(SMALL, data_segment_bytes=1024)
INTACT = Sample.fill(CONFIG, [([bytes([n])] * 4, 1, None) for n in range(10)])
Loss = Callable[..., None]


@pytest.fixture
def store() -> Sample:
    return INTACT.clone()


def kept(files: FaultyFiles) -> tuple[HardState, Checkpoint | None]:
    return load_hard_state(files, LAYOUT, 0), load_checkpoint(files, LAYOUT.checkpoint)


@AB_FILES
@pytest.mark.parametrize("copy", [0, 1])
@pytest.mark.parametrize("lose", [remove, flip_durably])
def test_one_lost_copy_costs_nothing_and_is_made_again(store: Sample, ab_file: object, copy: int, lose: Loss) -> None:
    before = kept(store.files)
    path = copies(ab_file)[copy]  # type: ignore[arg-type]
    lose(store.files, path)
    log = store.open()
    assert log.floor is None
    assert read_all(log) == store.entries
    log.close()
    assert kept(store.files) == before
    other = copies(ab_file)[1 - copy]  # type: ignore[arg-type]
    lose(store.files, other)
    assert kept(store.files) == before
    assert store.open().floor is None


def test_power_cut_in_any_write_leaves_old_or_new_content_in_both_copies() -> None:
    steps, done = 0, False
    while not done:
        steps += 1
        store = INTACT.clone()
        old = kept(store.files)
        new = STATE, Checkpoint(39, 20, old[1].position if old[1] else 0)
        store.files.crash_at = store.files.operations + steps
        try:
            save_hard_state(store.files, LAYOUT, STATE)
            save_checkpoint(store.files, LAYOUT.checkpoint, new[1])
            done = True
        except Crash:
            pass
        store.files.crash_at = None
        store.files.crash(0.5)
        found = kept(store.files)
        assert found in (old, (new[0], old[1]), new)
        log = store.open()
        assert log.floor is None
        state = log.hard_state
        log.close()
        for path in (*copies(LAYOUT.hard_state)[:1], *copies(LAYOUT.checkpoint)[:1]):
            remove(store.files, path)
        assert kept(store.files)[0] == state
    assert steps > 8


def test_new_store_has_lost_nothing_after_a_power_cut_at_any_step() -> None:
    steps, done = 0, False
    while not done:
        steps += 1
        files = FaultyFiles(steps)
        files.crash_at = steps
        try:
            open_log(files)
            done = True
        except Crash:
            files.crash_at = None
            files.crash(0.5)
            assert open_log(files).floor is None
    assert steps > 5


@pytest.mark.parametrize("lose", [remove, flip_durably])
def test_store_without_hard_state_is_refused(store: Sample, lose: Loss) -> None:
    lose(store.files, *copies(LAYOUT.hard_state))
    before = store.content()
    with pytest.raises(CorruptRecordError) as caught:
        store.open()
    assert caught.value.where == str(LAYOUT.hard_state)
    assert store.content() == before, "currterm is for Java only"


def test_vote_without_entries_is_not_forgotten() -> None:
    log = open_log(files := FaultyFiles())
    log.persist(STATE, None, [])
    log.close()
    remove(files, *copies(LAYOUT.hard_state))
    with pytest.raises(CorruptRecordError, match="hard-state"):
        open_log(files)


def flip_byte(store: Sample, entry: int, offset: int) -> None:
    store.record(entry)[offset] ^= 1
    for inode in store.files.names.values():
        inode.durable[:] = inode.content


def one_entry(store: Sample) -> None:
    flip_byte(store, 5, 48)


def last_file(store: Sample) -> None:
    remove(store.files, max(path for path in store.files.names if path.parent == DATA))


def all_files(store: Sample) -> None:
    remove(store.files, *[path for path in store.files.names if path.parent in (DATA, INDEX)])


def index_of_first_entry(store: Sample) -> None:
    """In the header, which has no CRC; ``meta/log.json`` and the index have the right one."""
    flip_byte(store, 0, 13)


@pytest.mark.parametrize("damage", [one_entry, index_of_first_entry, last_file, all_files, lambda _: None])
@pytest.mark.parametrize("lose", [remove, flip_durably])
def test_lost_checkpoint_makes_recovering_voter_that_cuts_nothing(
    store: Sample, damage: Callable[[Sample], None], lose: Loss
) -> None:
    """A lost end shows no bad record, and a damaged record looks like a torn one."""
    lose(store.files, *copies(LAYOUT.checkpoint))
    damage(store)
    before = store.content(DATA)
    for _ in range(2):
        log = open_log(store.files)
        found = read_all(log)
        assert found == store.entries[: len(found)]
        assert log.floor == Floor(Term(1))
        assert store.content(DATA) == before
        log.close()
        store.files.crash(0.0)


@pytest.mark.parametrize("damage", [one_entry, last_file])
def test_one_damaged_copy_of_the_checkpoint_hides_no_damage(store: Sample, damage: Callable[[Sample], None]) -> None:
    flip_durably(store.files, LAYOUT.checkpoint)
    damage(store)
    before = store.content(DATA, INDEX)
    with pytest.raises(CorruptRecordError):
        store.open()
    assert store.content(DATA, INDEX) == before


@pytest.mark.parametrize("keep", [0.0, 0.5, 1.0])
def test_first_append_replaces_kept_tail_at_any_power_cut(keep: float) -> None:
    """Entries after the damage would otherwise continue a later leader's shorter log."""
    steps, done = 0, False
    while not done:
        steps += 1
        store = INTACT.clone()
        remove(store.files, *copies(LAYOUT.checkpoint))
        one_entry(store)
        log = open_log(store.files)
        known = read_all(log)
        assert len(known) == 4
        store.files.crash_at = store.files.operations + steps
        try:
            append(log, [bytes([n]) for n in range(8)], term=1)
            done = True
        except Crash:
            pass
        store.files.crash_at = None
        store.files.crash(keep)
        log = open_log(store.files)
        assert read_all(log) in ([*known], [*known, *((1, bytes([n])) for n in range(8))])
        append(log, [b"x"], term=1)
        assert log.last_index() in (4, 12)
    assert not any(store.at(int(log.staged_end)))
    assert steps > 3


def test_truncation_and_restart_remove_a_kept_tail(store: Sample) -> None:
    remove(store.files, *copies(LAYOUT.checkpoint))
    one_entry(store)
    log = open_log(store.files)
    log.stage_truncate(Index(2))
    log.persist(None, Index(2), [])
    assert not any(store.at(int(log.staged_end)))
    log.close()
    assert read_all(open_log(store.files)) == store.entries[:2]


@pytest.mark.parametrize("copy", [0, 1])
def test_later_of_two_copies_counts(copy: int) -> None:
    ab_file, files = hard_state_file(LAYOUT.hard_state), INTACT.clone().files
    ab_file.save(files, STATE)
    later = {"term": 8, "voted_for": None, "write": ab_file.load(files).number + 1}
    write_checked(files, copies(LAYOUT.hard_state)[copy], later)
    assert ab_file.load(files).value == HardState(Term(8), None)


def test_end_of_recovery_removes_a_kept_tail(store: Sample) -> None:
    """Without its marker the store would be damaged at the next start, beyond what a peer can repair."""
    store.config = replace(CONFIG, unsynced_bytes_max=200)
    remove(store.files, *copies(LAYOUT.checkpoint))
    one_entry(store)
    log = store.open()
    known = read_all(log)
    log.remove_floor(log.last_index())
    log.close()
    log = store.open()
    assert (read_all(log), log.floor) == (known, None)
    assert not any(store.at(int(log.staged_end)))
