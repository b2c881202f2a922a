"""Trim and restart: a crash leaves the old or the new log, and the tables are never lost."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from dledger_core import control
from dledger_core.errors import CorruptRecordError, DiskFailedError, IndexOutOfRangeError, StoreIncompleteError
from dledger_core.ids import NO_TERM, Index, NodeId, Position, Term
from dledger_core.raft.batch import TermRange
from dledger_core.raft.ready import HardState
from dledger_core.record import Records, segment_name
from dledger_core.storage import CommitLog, open_store
from dledger_core.storage.check.repair import StoreRepair
from dledger_core.storage.files.ab_file import copies
from dledger_core.storage.read.record_reader import RecordReader
from dledger_core.storage.tables.tables import LogTables, TableChanges
from dledger_core.storage.write.trim import LogStart
from tests.storage.sample import DATA, META, Sample
from tests.support.faulty_files import Crash, FaultyFiles
from tests.support.logs import MEMBERS, NO_TABLES, SMALL, STORE, append, open_log, place, read_all

TABLES, LOG_META = META / "tables", META / "log.json"
VOTE = HardState(Term(2), NodeId("n0"))
ENTRIES = 300


def tables_of(log: CommitLog) -> LogTables:
    """The tables as a node has them after its start."""
    tables = log.load_tables()
    for index, time_ms, body in log.control_entries(log.first_index(), log.last_index() + 1):
        tables.apply(index, time_ms, body)
    return tables


def batch(number: int) -> tuple[list[bytes], int, bytes]:
    fields = {"k": "producer", "p": f"p{number % 3}", "e": 0, "s": number // 3, "n": 9, "c": number}
    if number % 7 == 3:
        fields = {"k": "attempt", "q": "q", "b": number, "r": "run", "a": f"a{number}", "n": 9, "c": number}
    return [bytes([number]) * 30] * 9, 1 + number // 20, control.pack(fields)


FULL = Sample.fill(SMALL, map(batch, range(ENTRIES // 10)))
"""Several segments, with producers, an open transaction and orphaned attempts."""
KNOWN_TABLES = tables_of(open_log(FULL.files.clone()))
KNOWN = TableChanges.complete(KNOWN_TABLES)
SECOND, THIRD, FOURTH = (FULL.positions.index(position) for position in (4096, 8192, 12288))


@pytest.fixture
def files() -> FaultyFiles:
    return FULL.files.clone()


def trim(log: CommitLog, index: int) -> int:
    return log.trim(index, KNOWN, ENTRIES - 1)


@cache
def start_tables() -> LogTables:
    """Tables with one more producer than those of the store, as a snapshot install brings them."""
    tables = LogTables.restore(KNOWN_TABLES.snapshot())
    fields = {"k": "producer", "p": "another", "e": 0, "s": 0, "n": 1, "c": 1}
    tables.apply(Index(990), 5, control.pack(fields))
    return LogTables.restore(tables.snapshot())


@cache
def start() -> LogStart:
    return LogStart(
        first_index=Index(1000),
        position=Position(5 * 4096),
        previous_term=Term(2),
        log_uuid="uuid",
        tables=TableChanges.complete(start_tables()),
        members=MEMBERS,
        commitlog_prefix="0-64-seal",
    )


def restart(log: CommitLog, start: LogStart, hard_state: HardState | None = None) -> None:
    log.stage_restart(start)
    log.persist(hard_state, None, [], start)


def crash_everywhere(action: Callable[[CommitLog], object], look: Callable[[FaultyFiles, str], None]) -> int:
    """Crash ``action`` at each of its operations, by a kill and by power losses; return how many there are."""
    clone = FULL.files.clone()
    log = open_log(clone)
    before = clone.operations
    action(log)
    count = clone.operations - before
    for at in range(1, count + 1):
        for keep in (None, 0.0, 0.5, 1.0):
            clone = FULL.files.clone()
            log = open_log(clone)
            clone.crash_at = clone.operations + at
            with pytest.raises(Crash):
                action(log)
            clone.kill() if keep is None else clone.crash(keep)
            look(clone, f"operation {at} of {count}, keep {keep}")
    return count


def test_trim_is_atomic_across_crashes_and_keeps_the_tables() -> None:
    seen = set()

    def look(clone: FaultyFiles, when: str) -> None:
        log = open_log(clone)
        begin = log.first_index()
        seen.add(begin)
        assert read_all(log) == FULL.entries[begin:], when
        assert tables_of(log).snapshot() == KNOWN_TABLES.snapshot(), when
        assert (log.commit_index, log.hard_state) == (ENTRIES - 1, VOTE)
        append(log, [b"more"], term=2)
        log.close()
        assert open_store(STORE, files=clone).verify().findings == ()

    assert crash_everywhere(lambda log: trim(log, THIRD), look) >= 6
    assert {0, THIRD} <= seen <= {0, SECOND, THIRD}


@pytest.mark.parametrize("left", [(0,), (4096, 8192), (8192,)], ids=["with a hole", "the end", "the last"])
@pytest.mark.parametrize("damaged", [False, True])
def test_open_removes_segments_that_an_interrupted_trim_left(
    files: FaultyFiles, left: tuple[int, ...], damaged: bool
) -> None:
    log, before = open_log(files), files.clone()
    trim(log, FOURTH)
    log.close()
    old = [DATA / segment_name(base) for base in left]
    for path in old:
        files.names[path] = files.durable_names[path] = before.names[path]  # the order of removals is the file system's
        files.content(path)[100] ^= damaged
    log = open_log(files)
    assert log.first_index() == FOURTH
    assert not set(old) & set(files.names)
    log.close()
    files.crash(0.0)
    assert not set(old) & set(files.names)


@pytest.mark.parametrize("damage", ["missing", "damaged", "older"])
def test_trimmed_log_without_its_tables_is_corrupt(files: FaultyFiles, damage: str) -> None:
    log = open_log(files)
    log.save_tables(NO_TABLES)
    log.close()
    old = files.read(TABLES)
    assert old is not None
    log = open_log(files)
    trim(log, THIRD)
    log.close()
    if damage == "missing":
        del files.names[TABLES]
    elif damage == "damaged":
        files.content(TABLES)[20] ^= 1
    else:
        files.replace(TABLES, old)
    with pytest.raises(CorruptRecordError) as caught:
        open_log(files)
    assert caught.value.where == str(TABLES)
    assert [finding.path for finding in open_store(STORE, files=files).verify().findings] == [str(TABLES)]


def test_complete_log_needs_no_tables(files: FaultyFiles) -> None:
    log = open_log(files)
    log.save_tables(KNOWN)
    log.close()
    files.content(TABLES)[20] ^= 1
    assert tables_of(open_log(files)).snapshot() == KNOWN_TABLES.snapshot()


def test_trim_deletes_nothing_if_the_tables_cannot_be_written(files: FaultyFiles) -> None:
    log = open_log(files)
    files.fail_at = files.operations + 1
    with pytest.raises(DiskFailedError):
        trim(log, THIRD)
    files.kill()
    assert read_all(open_log(files)) == FULL.entries


@pytest.mark.parametrize("bit", range(6))
def test_trim_does_not_trust_a_damaged_first_record(bit: int) -> None:
    """The index in a record's header has no CRC: what is deleted must not depend on it alone."""
    store = FULL.clone()
    log = store.open()
    firsts = [int(summary.first_index) for summary in log.segment_summaries()]
    store.record(firsts[2])[15] ^= 1 << bit
    assert {int(summary.first_index) for summary in log.segment_summaries()} <= set(firsts)
    for index in range(firsts[1], firsts[3] + 1):
        first = trim(log, index)
        assert first in firsts
        assert first <= index
    assert log.first_index() == firsts[3]
    log.close()
    store.open().close()


# --- restart --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_restart_is_atomic_across_crashes() -> None:
    seen = set()
    later = HardState(Term(3), NodeId("n2"))

    def look(clone: FaultyFiles, when: str) -> None:
        log = open_log(clone)
        assert log.hard_state in (VOTE, later), when
        seen.add(log.first_index())
        if log.first_index() == 0:
            assert read_all(log) == FULL.entries, when
            assert tables_of(log).snapshot() == KNOWN_TABLES.snapshot(), when
            assert META / "tables.new" not in clone.names
            return
        assert log.hard_state.term == 3, when
        assert (log.first_index(), log.last_index(), log.commit_index) == (1000, 999, 999), when
        assert (log.staged_end, log.commitlog_prefix) == (start().position, "0-64-seal")
        assert list(log.term_ranges()) == [TermRange(Index(999), Term(2))]
        assert log.load_tables().snapshot() == start_tables().snapshot(), when
        append(log, [b"next"] * 3, term=3)
        log.close(1002)
        assert open_store(STORE, files=clone).verify().findings == ()

    assert crash_everywhere(lambda log: restart(log, start(), later), look) >= 10
    assert seen == {0, 1000}


@pytest.mark.parametrize("power", [False, True])
def test_repair_completes_a_restart_with_a_failed_write(files: FaultyFiles, power: bool) -> None:
    log, before = open_log(clone := files.clone()), files.operations
    restart(log, start())
    seen = set()
    for ahead in range(1, clone.operations - before + 1):
        log = open_log(clone := files.clone())
        clone.fail_at = clone.operations + ahead
        with contextlib.suppress(DiskFailedError):
            restart(log, start())
        clone.fail_at = None
        clone.crash(0.5) if power else clone.kill()
        with StoreRepair.open(STORE, files=clone) as store:
            assert store.find() == []
            store.settle()
        clone.crash(0.0)
        log = open_log(clone)
        assert (log.first_index(), log.last_index()) in ((0, ENTRIES - 1), (1000, 999))
        seen.add(log.first_index())
    assert seen == {0, 1000}


def test_changes_from_before_a_restart_of_the_log_are_dropped(files: FaultyFiles) -> None:
    log = open_log(files)
    restart(log, start())
    log.save_tables(KNOWN)
    log.close()
    log = open_log(files)
    assert log.load_tables().snapshot() == start_tables().snapshot()
    log.close()


def test_restart_and_later_batches_are_persisted_together(files: FaultyFiles) -> None:
    log = open_log(files)
    log.stage_restart(start())
    place(log, 1000, [b"x" * 50] * 200, term=2)
    log.stage_truncate(Index(1000))  # before the disk knows of the new start
    assert log.staged_end == start().position
    batch = place(log, 1000, [b"y" * 50] * 200, term=2)
    assert log.last_index() == ENTRIES - 1
    log.persist(None, None, [batch], start())
    assert (log.first_index(), log.last_index()) == (1000, 1199)
    log.save_tables(KNOWN)  # queued before, and late
    assert dict(files.read_tables(TABLES)) == start().tables.rows
    with pytest.raises(IndexOutOfRangeError):
        log.read(ENTRIES - 1, ENTRIES, 100)
    log.close(1199)
    log = open_log(files)
    assert (log.first_index(), log.last_index(), log.commit_index, log.log_uuid) == (1000, 1199, 1199, "uuid")
    assert {body for _, body in read_all(log)} == {b"y" * 50}


def test_restart_without_a_known_previous_term(files: FaultyFiles) -> None:
    log = open_log(files)
    restart(log, replace(start(), previous_term=NO_TERM))
    assert list(log.term_ranges()) == []
    log.close()
    assert list(open_log(files).term_ranges()) == []


def test_restarted_empty_store_needs_its_hard_state(files: FaultyFiles) -> None:
    log = open_log(files)
    restart(log, start())
    log.close()
    for path in copies(META / "hard-state"):
        del files.names[path]
    with pytest.raises(CorruptRecordError, match="hard-state"):
        open_log(files)


def test_open_store_rejects_an_interrupted_restart(files: FaultyFiles) -> None:
    meta = json.loads(files.read(LOG_META) or b"")
    del meta["crc32"]
    files.replace(LOG_META, json.dumps(meta | {"discarding": True}).encode())
    with pytest.raises(StoreIncompleteError):
        open_store(STORE, files=files)


def test_read_during_a_restart_is_out_of_range(files: FaultyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    log = open_log(files)
    read = RecordReader.read

    def interrupted(*args: Any, **kwargs: Any) -> Records:
        monkeypatch.undo()
        restart(log, start())
        return read(*args, **kwargs)

    monkeypatch.setattr(RecordReader, "read", interrupted)
    with pytest.raises(IndexOutOfRangeError):
        log.read(10, 20, 1 << 20)
