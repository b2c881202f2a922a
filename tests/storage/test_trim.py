"""Trim and restart: a crash leaves the old or the new log, and the tables are never lost."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from dledger_core import control
from dledger_core.errors import CorruptRecordError, DiskFailedError, IndexOutOfRangeError, StoreIncompleteError
from dledger_core.ids import NO_TERM, Index, NodeId, Position, Term
from dledger_core.raft.batch import TermRange
from dledger_core.raft.ready import HardState
from dledger_core.record import segment_name
from dledger_core.storage import CommitLog, open_store
from dledger_core.storage.check.repair import StoreRepair
from dledger_core.storage.tables.tables import LogTables, TablesSnapshot
from dledger_core.storage.write.trim import LogStart
from tests.support.faulty_files import Crash, FaultyFiles
from tests.support.logs import NO_TABLES, STORE, append, open_log, place, read_all

TABLES, LOG_META = STORE / "meta" / "tables", STORE / "meta" / "log.json"
VOTE = HardState(Term(2), NodeId("n0"))
ENTRIES = 300


def tables_of(log: CommitLog) -> LogTables:
    """The tables as a node has them after its start."""
    tables = log.load_tables()
    for index, time_ms, body in log.control_entries(log.first_index(), log.last_index() + 1):
        tables.apply(index, time_ms, body)
    return tables


def filled() -> tuple[FaultyFiles, LogTables]:
    """A store of several segments, with producers, an open transaction and orphaned attempts; and its tables."""
    files = FaultyFiles()
    log = open_log(files)
    for at in range(ENTRIES // 10):
        fields = {"k": "producer", "p": f"p{at % 3}", "e": 0, "s": at // 3, "n": 9, "c": at}
        if at % 7 == 3:
            fields = {"k": "attempt", "q": "q", "b": at, "r": "run", "a": f"a{at}", "n": 9, "c": at}
        append(log, [bytes([at]) * 30] * 9, term=1 + at // 20, control=control.pack(fields))
    tables = tables_of(log)
    log.close(ENTRIES - 1)
    return files, tables


def first_of(log: CommitLog, position: int) -> int:
    return next(index for index in range(ENTRIES) if log.position_of(index) == position)


def crash_everywhere(
    files: FaultyFiles, action: Callable[[CommitLog], object], look: Callable[[FaultyFiles, str], None]
) -> int:
    """Crashes ``action`` at each of its operations, by a kill and by power losses; returns how many there are."""
    twin = files.clone()
    log = open_log(twin)
    before = twin.operations
    action(log)
    count = twin.operations - before
    for at in range(1, count + 1):
        for keep in (None, 0.0, 0.5, 1.0):
            twin = files.clone()
            log = open_log(twin)
            twin.crash_at = twin.operations + at
            with pytest.raises(Crash):
                action(log)
            twin.kill() if keep is None else twin.crash(keep)
            look(twin, f"operation {at} of {count}, keep {keep}")
    return count


def test_trim_is_atomic_across_crashes_and_keeps_the_tables() -> None:
    files, tables = filled()
    log = open_log(files)
    first, expected = first_of(log, 8192), read_all(log)
    log.close(ENTRIES - 1)
    seen = set()

    def look(twin: FaultyFiles, when: str) -> None:
        log = open_log(twin)
        begin = log.first_index()
        seen.add(begin)
        assert read_all(log) == expected[begin:], when
        assert tables_of(log).snapshot() == tables.snapshot(), when
        assert log.commit_index == ENTRIES - 1
        assert log.hard_state == VOTE
        append(log, [b"more"], term=2)
        log.close()
        assert open_store(STORE, files=twin).verify().findings == ()

    count = crash_everywhere(files, lambda log: log.trim(first, TablesSnapshot.of(tables), ENTRIES - 1), look)
    assert count >= 6
    assert {0, first} <= seen <= {0, first_of(open_log(files.clone()), 4096), first}


@pytest.mark.parametrize("left", [(0,), (4096, 8192), (8192,)], ids=["with a hole", "the end", "the last"])
@pytest.mark.parametrize("damaged", [False, True])
def test_open_removes_segments_that_an_interrupted_trim_left(left: tuple[int, ...], damaged: bool) -> None:
    files, tables = filled()
    log = open_log(files)
    before = files.clone()
    first = first_of(log, 12288)
    log.trim(first, TablesSnapshot.of(tables), ENTRIES - 1)
    log.close()
    old = [STORE / "data" / segment_name(base) for base in left]
    for path in old:
        files.names[path] = files.durable_names[path] = before.names[path]  # the order of removals is the file system's
        files.content(path)[100] ^= damaged
    log = open_log(files)
    assert log.first_index() == first
    assert not set(old) & set(files.names)
    log.close()
    files.crash(0.0)
    assert not set(old) & set(files.names)


@pytest.mark.parametrize("damage", ["missing", "damaged", "older"])
def test_trimmed_log_without_its_tables_is_corrupt(damage: str) -> None:
    files, tables = filled()
    log = open_log(files)
    log.save_tables(NO_TABLES)
    old = files.read(TABLES)
    assert old is not None
    log.trim(first_of(log, 8192), TablesSnapshot.of(tables), ENTRIES - 1)
    log.close()
    if damage == "missing":
        del files.names[TABLES]
    elif damage == "damaged":
        files.content(TABLES)[20] ^= 1
    else:
        files.replace(TABLES, old)
    with pytest.raises(CorruptRecordError, match=damage) as caught:
        open_log(files)
    assert caught.value.where == str(TABLES)
    found = open_store(STORE, files=files).verify().findings
    assert [finding.path for finding in found] == [str(TABLES)]


def test_complete_log_needs_no_tables() -> None:
    files, tables = filled()
    log = open_log(files)
    log.save_tables(TablesSnapshot.of(tables))
    log.close()
    files.content(TABLES)[20] ^= 1
    assert tables_of(open_log(files)).snapshot() == tables.snapshot()


def test_trim_deletes_nothing_if_the_tables_cannot_be_written() -> None:
    files, tables = filled()
    log = open_log(files)
    first, expected = first_of(log, 8192), read_all(log)
    files.fail_at = files.operations + 1
    with pytest.raises(DiskFailedError):
        log.trim(first, TablesSnapshot.of(tables), ENTRIES - 1)
    files.kill()
    assert read_all(open_log(files)) == expected


START = LogStart(
    first_index=Index(1000),
    position=Position(5 * 4096),
    previous_term=Term(2),
    log_uuid="uuid",
    tables=TablesSnapshot(Index(990), b""),
    commitlog_prefix="0-64-seal",
)


def start_with(tables: LogTables) -> LogStart:
    """A start whose tables know one more producer than those of the store."""
    twin = LogTables.restore(tables.snapshot())
    fields = {"k": "producer", "p": "another", "e": 0, "s": 0, "n": 1, "c": 1}
    twin.apply(Index(990), 5, control.pack(fields))
    return LogStart(
        first_index=START.first_index,
        position=START.position,
        previous_term=START.previous_term,
        log_uuid=START.log_uuid,
        tables=TablesSnapshot.of(twin),
        commitlog_prefix=START.commitlog_prefix,
    )


@pytest.mark.slow
def test_restart_is_atomic_across_crashes() -> None:
    files, tables = filled()
    start = start_with(tables)
    expected = read_all(log := open_log(files))
    log.close(ENTRIES - 1)
    seen = set()

    def look(twin: FaultyFiles, when: str) -> None:
        log = open_log(twin)
        assert log.hard_state in (VOTE, HardState(Term(3), NodeId("n2"))), when
        seen.add(log.first_index())
        if log.first_index() == 0:
            assert read_all(log) == expected, when
            assert tables_of(log).snapshot() in (tables.snapshot(), start.tables.data), when
            return
        assert log.hard_state.term == 3, when
        assert (log.first_index(), log.last_index(), log.commit_index) == (1000, 999, 999), when
        assert log.staged_end == start.position
        assert log.commitlog_prefix == "0-64-seal"
        assert list(log.term_ranges()) == [TermRange(Index(999), Term(2))]
        assert log.load_tables().snapshot() == start.tables.data, when
        append(log, [b"next"] * 3, term=3)
        log.close(1002)
        assert open_store(STORE, files=twin).verify().findings == ()

    def reset(log: CommitLog) -> None:
        log.stage_restart(start)
        log.persist(HardState(Term(3), NodeId("n2")), None, [], start)

    count = crash_everywhere(files, reset, look)
    assert count >= 10
    assert seen == {0, 1000}


@pytest.mark.parametrize("power", [False, True])
def test_repair_completes_a_restart_with_a_failed_write(power: bool) -> None:
    files, tables = filled()
    start = start_with(tables)
    before = files.operations
    twin = files.clone()
    open_log(twin).persist(None, None, [], start)
    seen = set()
    for ahead in range(1, twin.operations - before + 1):
        twin = files.clone()
        log = open_log(twin)
        twin.fail_at = twin.operations + ahead
        log.stage_restart(start)
        with contextlib.suppress(DiskFailedError):
            log.persist(None, None, [], start)
        twin.fail_at = None
        twin.crash(0.5) if power else twin.kill()
        with StoreRepair.open(STORE, files=twin) as store:
            assert store.find() == []
            store.settle()
        twin.crash(0.0)
        log = open_log(twin)
        assert (log.first_index(), log.last_index()) in ((0, ENTRIES - 1), (1000, 999))
        seen.add(log.first_index())
    assert seen == {0, 1000}


def test_restart_and_later_batches_are_persisted_together() -> None:
    files, tables = filled()
    start = start_with(tables)
    log = open_log(files)
    reader_end = log.last_index()
    log.stage_restart(start)
    place(log, 1000, [b"x" * 50] * 200, term=2)
    log.stage_truncate(Index(1000))  # before the disk knows of the new start
    assert log.staged_end == start.position
    batch = place(log, 1000, [b"y" * 50] * 200, term=2)
    assert log.last_index() == reader_end
    log.persist(None, None, [batch], start)
    assert (log.first_index(), log.last_index()) == (1000, 1199)
    log.save_tables(TablesSnapshot.of(tables))  # queued before, and late
    assert files.read(TABLES) == start.tables.data
    with pytest.raises(IndexOutOfRangeError):
        log.read(reader_end, reader_end + 1, 100)
    log.close(1199)
    log = open_log(files)
    assert (log.first_index(), log.last_index(), log.commit_index, log.log_uuid) == (1000, 1199, 1199, "uuid")
    assert {body for _, body in read_all(log)} == {b"y" * 50}


def test_restart_without_a_known_previous_term() -> None:
    files, tables = filled()
    log = open_log(files)
    start = replace(start_with(tables), previous_term=NO_TERM)
    log.stage_restart(start)
    log.persist(None, None, [], start)
    assert list(log.term_ranges()) == []
    log.close()
    assert list(open_log(files).term_ranges()) == []


def test_restarted_empty_store_needs_its_currterm() -> None:
    files, tables = filled()
    log = open_log(files)
    log.stage_restart(start := start_with(tables))
    log.persist(None, None, [], start)
    log.close()
    del files.names[STORE / "currterm"]
    with pytest.raises(CorruptRecordError, match="currterm"):
        open_log(files)


def test_open_store_rejects_an_interrupted_restart() -> None:
    files, _ = filled()
    meta = json.loads(files.read(LOG_META) or b"")
    del meta["crc32"]
    files.replace(LOG_META, json.dumps(meta | {"discarding": True}).encode())
    with pytest.raises(StoreIncompleteError):
        open_store(STORE, files=files)


def test_read_during_a_restart_is_out_of_range() -> None:
    files, tables = filled()
    log = open_log(files)
    expected = read_all(log)
    log.stage_restart(start := start_with(tables))
    read = log._reader.read

    def interrupted(*args: object, **kwargs: object) -> object:
        log._reader.read = read  # type: ignore[method-assign]
        log.persist(None, None, [], start)
        return read(*args, **kwargs)  # type: ignore[arg-type]

    log._reader.read = interrupted  # type: ignore[method-assign, assignment]
    with pytest.raises(IndexOutOfRangeError):
        log.read(10, 20, 1 << 20)
    assert len(expected) == ENTRIES


def first_indexes(log: CommitLog) -> list[int]:
    return [int(facts.first_index) for facts in log.segment_summaries()]


@pytest.mark.parametrize("bit", range(6))
def test_trim_does_not_trust_a_damaged_first_record(bit: int) -> None:
    """The index in a record's header has no CRC: what is deleted must not depend on it alone."""
    files, tables = filled()
    log = open_log(files)
    firsts = first_indexes(log)
    position = int(log.position_of(firsts[2]))
    file = files.content(STORE / "data" / segment_name(position))
    file[position % 4096 + 15] ^= 1 << bit
    assert set(first_indexes(log)) <= set(firsts)
    snapshot = TablesSnapshot.of(tables)
    for index in range(firsts[1], firsts[3] + 1):
        first = log.trim(index, snapshot, log.last_index())
        assert first in firsts
        assert first <= index
    assert log.first_index() == firsts[3]
    log.close()
    open_log(files).close()
