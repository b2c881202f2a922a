"""Holes of a store whose group lost its majority: found, filled with the same entries only, or cut with bytes kept."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from dledger_core.errors import CorruptRecordError
from dledger_core.ids import Index
from dledger_core.record import HEADER_BYTES, Records
from dledger_core.storage.check.repair import StoreRepair
from dledger_core.storage.files.layout import Layout
from tests.storage.sample import DATA, INDEX, Sample
from tests.storage.test_stored_tables import producer_entry
from tests.support.faulty_files import Crash
from tests.support.logs import SMALL, STORE, read_all

CONFIG = dataclasses.replace(SMALL, data_segment_bytes=2048, index_segment_bytes=512)
BATCHES = [([bytes([65 + n]) * (20 + 13 * at) for at in range(4)], 1 + n // 9, None) for n in range(24)]
INTACT = Sample.fill(CONFIG, BATCHES, commit_index=10)
"""Only the first entries are known to be committed."""
LAST = INTACT.last
HOLE = 42
META = Layout(STORE).meta


def opened(store: Sample, *, write: bool = True) -> StoreRepair:
    return StoreRepair.open(STORE, files=store.files, config=CONFIG, write=write)


def damaged(*indexes: int, store: Sample = INTACT) -> Sample:
    store = store.clone()
    for index in indexes:
        store.record(index)[HEADER_BYTES + 1] ^= 1
    for inode in store.files.names.values():
        inode.durable[:] = inode.content
    return store


def read(store: Sample, start: int, end: int) -> Records | None:
    with opened(store, write=False) as reader:
        try:
            return reader.read(start, end, 1 << 20)
        except CorruptRecordError:
            return None


def fill(store: Sample, other: Sample, *, commit_index: int = -1) -> None:
    """Fill all holes from another survivor, as far as its records are the same entries."""
    with opened(store) as repairing:
        repairing.prepare()
        for hole in repairing.inspect().holes:
            records, behind = read(other, hole.start, hole.end), read(other, hole.end, hole.end + 1)
            assert records is not None
            agreed = repairing.agreed_end(hole.start, records, behind, commit_index)
            assert repairing.write_back(hole, records, agreed) is None


def holes_of(store: Sample) -> list[tuple[int, int]]:
    with opened(store, write=False) as reader:
        return [(hole.start, hole.end) for hole in reader.inspect().holes]


def test_inspection_finds_holes_and_end_behind_them() -> None:
    store = damaged(HOLE, HOLE + 1, HOLE + 20)
    before = store.content()
    with opened(store, write=False) as reader:
        found = reader.inspect()
    assert [(hole.start, hole.end) for hole in found.holes] == [(HOLE, HOLE + 2), (HOLE + 20, HOLE + 21)]
    assert (found.last_index, found.last_term) == (LAST, INTACT.entries[LAST][0])
    assert found.last is not None
    assert store.content() == before


def test_inspection_counts_torn_tail_as_no_hole_but_damaged_durable_end() -> None:
    assert holes_of(damaged(LAST)) == [(LAST, LAST + 1)], "the checkpoint says that it was durable"
    store = damaged(LAST)
    for path in list(store.files.names):
        if path.name.startswith("checkpoint"):
            store.files.names.pop(path)
    with opened(store, write=False) as reader:
        found = reader.inspect()
    assert found.last_index <= LAST


def test_two_survivors_fill_each_other() -> None:
    one, two = damaged(HOLE), damaged(HOLE + 9)
    fill(one, two)
    fill(two, one)
    for store in (one, two):
        store.files.crash(0.0)
        assert store.content(DATA, INDEX) == INTACT.content(DATA, INDEX)
        assert holes_of(store) == []


def test_last_entry_of_filler_is_taken_by_its_row() -> None:
    shorter = Sample.fill(CONFIG, BATCHES[: HOLE // 4 + 1])
    hole = shorter.last
    store = damaged(hole)
    fill(store, shorter)
    assert read_all(store.open()) == INTACT.entries


def other_history(term: int) -> Sample:
    """A log with other entries from the batch of the hole on, of the same sizes and places."""
    at = HOLE // 4
    mine = [(bodies, old if n < at else max(term, old), None) for n, (bodies, old, _) in enumerate(BATCHES[: at + 1])]
    return Sample.fill(CONFIG, mine)


def test_record_of_another_term_is_refused() -> None:
    store = damaged(HOLE)
    before = store.content(DATA, INDEX)
    with pytest.raises(CorruptRecordError):
        fill(store, other_history(3))
    assert store.content(DATA, INDEX) == before


def test_record_of_another_term_is_refused_where_row_is_lost_too() -> None:
    other = other_history(2)
    store = damaged(other.last)
    row = store.row(other.last)
    row[:] = bytes(len(row))
    with pytest.raises(CorruptRecordError):
        fill(store, other)  # nothing behind it, no row, not committed: it may be another entry
    fill(store, other, commit_index=other.last)


def test_cut_keeps_entries_before_and_bytes_behind() -> None:
    store = damaged(HOLE)
    position, end = INTACT.positions[HOLE - HOLE % 4], INTACT.positions[LAST + 1]
    behind = np.concatenate([np.frombuffer(bytes(store.at(at)), np.uint8) for at in range(0, end, 2048)])[position:end]
    with opened(store) as repairing:
        assert repairing.end_before_hole(HOLE + 1) is None, "another hole is meant"
        path = repairing.end_before_hole(HOLE)
        assert path is not None
        assert repairing.inspect().holes == ()
    assert bytes(store.files.content(path)) == behind.tobytes()
    assert read_all(store.open()) == INTACT.entries[: HOLE - HOLE % 4], "complete batches only"


def test_cut_interrupted_anywhere_is_continued_and_keeps_all_bytes() -> None:
    whole = damaged(HOLE)
    with opened(whole) as repairing:
        path = repairing.end_before_hole(HOLE)
    assert path is not None
    kept, after = bytes(whole.files.content(path)), read_all(whole.open())
    step = 0
    while True:
        store = damaged(HOLE)
        store.files.crash_at = store.files.operations + step
        try:
            with opened(store) as repairing:
                repairing.end_before_hole(HOLE)
            break
        except Crash:
            store.files.crash(step % 3 / 2)
        with opened(store) as repairing:
            found = repairing.inspect()
            start = found.holes[0].start if found.holes else found.last_index + 1
            assert repairing.end_before_hole(start) == path
        assert bytes(store.files.content(path)) == kept
        assert read_all(store.open()) == after
        step += 1
    assert step > 10


def with_tables(store: Sample, *, trimmed: bool) -> Sample:
    """Store tables that include an entry after the hole."""
    log = store.open()
    tables = log.load_tables()
    for index, name in ((0, "kept"), (HOLE + 14, "lost")):
        tables.apply(Index(index), 0, producer_entry(name))
    log.save_tables(tables.take_changes())
    if trimmed:
        assert log.trim(HOLE, tables.take_changes(), log.last_index()) > 0
    log.close()
    return store


@pytest.mark.parametrize("trimmed", [False, True], ids=["complete log", "trimmed log"])
def test_log_that_was_cut_is_no_log_that_lost_its_end(trimmed: bool) -> None:
    step, interrupted = 0, True
    while interrupted:
        store = damaged(HOLE, store=with_tables(INTACT.clone(), trimmed=trimmed))
        store.files.crash_at = store.files.operations + step
        try:
            with opened(store) as repairing:
                repairing.end_before_hole(HOLE)
            interrupted, store.files.crash_at = False, None
        except Crash:
            store.files.crash(step % 3 / 2)
            with opened(store) as repairing:
                found = repairing.inspect()
                repairing.end_before_hole(found.holes[0].start if found.holes else found.last_index + 1)
        store.files.crash(0.0)
        log = store.open()
        assert (log.last_index(), log.floor) == (HOLE - HOLE % 4 - 1, None), f"a crash at operation {step}"
        assert "lost" not in log.load_tables().producers
        log.close()
        step += 1
    assert step > 10
