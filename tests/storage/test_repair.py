"""Repair restores damaged records from a peer byte for byte, and rejects records that do not fit."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dledger_core.checksum import crc32
from dledger_core.errors import ConfigError, CorruptRecordError, DiskFailedError, StoreBusyError, StoreMismatchError
from dledger_core.ids import NUMBER_MAX, Index, NodeId, Position, Term
from dledger_core.raft import Floor, HardState
from dledger_core.record import HEADER_BYTES, Records, segment_name
from dledger_core.storage import CommitLog
from dledger_core.storage.check.damage import Damage
from dledger_core.storage.check.repair import StoreRepair
from dledger_core.storage.files.ab_file import copies
from dledger_core.storage.files.layout import Layout
from dledger_core.storage.files.meta_files import (
    load_floor,
    mark_needs_verification,
    save_floor,
    save_hard_state,
    verification_reason,
)
from dledger_core.storage.files.segments import Segments
from dledger_core.storage.write.log_writer import LogHooks
from tests.storage.damage import (
    BLANK,
    CASES,
    CONFIG,
    FILES,
    HEAD,
    INTACT,
    LAST,
    SECTOR,
    SEGMENT,
    both,
    overwrite_blank,
    zero,
)
from tests.storage.sample import DATA, INDEX, META, Sample
from tests.support.damage import remove, zero_from
from tests.support.faulty_files import Crash, FaultyFile, FaultyFiles
from tests.support.logs import STORE, append, read_all

LAYOUT = Layout(STORE)
PEER = INTACT.clone().open()


@pytest.fixture
def store() -> Sample:
    return INTACT.clone()


def fetch(damage: Damage, count: int = 1 << 20) -> Records | None:
    """Return the peer's records for a damaged range."""
    if damage.start == damage.end:
        return None
    return PEER.read(damage.start, min(damage.end, damage.start + count), 1 << 20)


def open_repair(store: Sample, *, write: bool = True) -> StoreRepair:
    return StoreRepair.open(STORE, group="g", node_id="n0", files=store.files, config=CONFIG, write=write)


def work(repairing: StoreRepair, count: int = 1 << 20) -> list[tuple[int, int]]:
    """Run all steps of a node's repair, ``count`` entries at a time; return the damaged entries."""
    repairing.prepare()
    found = repairing.find(rewrite_rows=True)
    repairing.set_floor_if_end_is_lost(found)
    for damage in found:
        left: Damage | None = damage
        while left is not None:
            left = repairing.write_back(left, fetch(left, count), LAST)
    assert repairing.find(rewrite_rows=True) == []
    repairing.settle()
    return [(damage.start, damage.end) for damage in found]


def repair(store: Sample, count: int = 1 << 20) -> list[tuple[int, int]]:
    with open_repair(store) as repairing:
        return work(repairing, count)


def check_like_new(store: Sample) -> None:
    store.files.crash(0.0)  # all writes are durable
    assert store.content(DATA, INDEX) == INTACT.content(DATA, INDEX)
    log = store.open()
    assert read_all(log) == INTACT.entries
    log.close()
    assert store.findings() == ()


REPAIRED = {name: case.damage for name, case in CASES.items() if case.is_repaired} | {"a blank": overwrite_blank}


@pytest.mark.parametrize("count", [1 << 20, 2], ids=["at once", "in parts"])
@pytest.mark.parametrize("case", REPAIRED)
def test_repair_restores_damage_byte_for_byte(store: Sample, case: str, count: int) -> None:
    REPAIRED[case](store)
    before = store.content(DATA, INDEX, META)
    with open_repair(store, write=False) as looking:
        found = looking.find()
    assert bool(found) != case.endswith("too long"), "a length is restored first"
    assert all(0 <= one.start <= one.end <= LAST + 1 and one.path for one in found)
    assert store.content(DATA, INDEX, META) == before
    repair(store, count)
    check_like_new(store)


@pytest.mark.slow
@pytest.mark.parametrize(
    "index", [0, 17, HEAD, HEAD - 1, LAST], ids=["first", "middle", "first of segment", "last of segment", "last"]
)
def test_repair_restores_every_damaged_byte_of_a_record(store: Sample, index: int) -> None:
    size = int(PEER.read(index, index + 1, 1).sizes[0])
    for offset in (at for at in range(size) if not 32 <= at < 40):  # time and flags have no cross-check
        for mask in (1, 0x80):
            store.record(index)[offset] ^= mask
            assert repair(store) == [(index, index + 1)], (offset, mask)
            assert store.content(DATA, INDEX) == INTACT.content(DATA, INDEX), (offset, mask)
    check_like_new(store)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_repair_restores_any_lost_bytes(data: st.DataObject) -> None:
    """Whatever bytes are lost anywhere: it is found, and repaired without touching what is intact."""
    store, end = INTACT.clone(), INTACT.positions[-1]
    rows_lost = data.draw(st.booleans())  # then term and magic have no cross-check
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, end - 50))
        length = data.draw(st.integers(49 if rows_lost else 1, 1500))
        junk = data.draw(st.sampled_from([b"\0", b"\xff", b"\x01\0\0"]))
        for at in range(start, min(start + length, end)):
            store.at(at)[0] = junk[(at - start) % len(junk)]
    if rows_lost:
        remove(store.files, *store.content(INDEX))
    repair(store, data.draw(st.sampled_from([1 << 20, 1, 3])))
    assert read_all(store.open()) == INTACT.entries


class UnreadableSector(FaultyFiles):
    """A disk that cannot read one sector of a data file."""

    def __init__(self, files: FaultyFiles, path: Path, sector: int) -> None:
        super().__init__()
        self.names, self.directories = files.names, files.directories
        self.path, self.sector = path, sector

    def open(self, path: Path, *, write: bool = False, create: bool = False) -> FaultyFile:
        file = super().open(path, write=write, create=create)
        if path != self.path:
            return file
        read, begin = file.pread, self.sector * SECTOR

        def pread(length: int, offset: int) -> bytes:
            if offset < begin + SECTOR and begin < offset + length:
                raise OSError(errno.EIO, "Input/output error", str(path))
            return read(length, offset)

        file.pread = pread  # type: ignore[method-assign]
        return file


class UnreadableData(FaultyFiles):
    """A disk that takes writes and returns errors for all reads of data files from some moment on."""

    def __init__(self, files: FaultyFiles) -> None:
        super().__init__()
        self.names, self.directories, self.broken = files.names, files.directories, False

    def open(self, path: Path, *, write: bool = False, create: bool = False) -> FaultyFile:
        file = super().open(path, write=write, create=create)
        read = file.pread

        def pread(length: int, offset: int) -> bytes:
            if self.broken and path.parent == DATA:
                raise OSError(errno.EIO, "Input/output error", str(path))
            return read(length, offset)

        file.pread = pread  # type: ignore[method-assign]
        return file


@pytest.mark.parametrize("index", [0, 17])
def test_repair_on_disk_that_fails_all_reads_is_a_failed_disk(store: Sample, index: int) -> None:
    store.files = files = UnreadableData(store.files)
    log = store.open()
    files.broken = True
    damage = log.damage_near(index)
    assert damage is not None
    with pytest.raises(DiskFailedError):
        log.write_back(damage, fetch(damage), LAST)
    with pytest.raises(DiskFailedError):
        log.persist(None, None, [])


def test_find_reports_sector_that_disk_cannot_read(store: Sample) -> None:
    base = INTACT.positions[40] // SEGMENT * SEGMENT
    store.files = UnreadableSector(store.files, DATA / segment_name(base), 1)
    with open_repair(store) as repairing:
        [damage] = repairing.find()
    assert damage.position < base + 2 * SECTOR
    assert base + SECTOR < damage.position + damage.length


def test_repair_of_an_intact_store_corrects_only_its_index(store: Sample) -> None:
    store.row(18)[6] ^= 1
    before = store.content(DATA)
    assert repair(store) == []
    assert store.content(DATA) == before
    check_like_new(store)


def forged(at: int, **fields: int) -> Records:
    """An entry as a peer might hold it, if it were wrong in some field."""
    records = PEER.read(at, at + 1, 1)
    headers = records.headers.copy()
    for name, value in fields.items():
        headers[name][0] = value
    return Records(records.sizes, headers.tobytes() + bytes(records.bodies))


def resized(at: int, *lengths: int) -> Records:
    """Entries from ``at`` on as a peer might hold them, if their bodies had other lengths."""
    header, position, parts = PEER.read(at, at + 1, 1).headers.copy(), INTACT.positions[at], []
    for index, length in enumerate(lengths, at):
        body, size = b"o" * length, HEADER_BYTES + length
        header[["index", "position", "size", "length", "crc"]] = [(index, position, size, length, crc32(body))]
        parts.append(header.tobytes() + body)
        position += size
    return Records(np.array([len(part) for part in parts], np.uint32), b"".join(parts))


@pytest.mark.parametrize(
    ("records", "damaged"),
    [
        pytest.param(lambda: forged(17, index=18), "body", id="index"),
        pytest.param(lambda: forged(17, term=9), "body", id="term above"),
        pytest.param(lambda: forged(17, term=0), "body", id="term below"),
        pytest.param(lambda: forged(17, term=9), "body and row", id="term above the neighbors"),
        pytest.param(lambda: forged(17, term=0), "body and row", id="term below the neighbors"),
        pytest.param(lambda: forged(17, position=INTACT.positions[17] + 1), "body", id="position"),
        pytest.param(
            lambda: forged(17, position=INTACT.positions[17] + 1), "two headers", id="position of the first of two"
        ),
        pytest.param(lambda: forged(17, crc=5), "body", id="crc"),
        pytest.param(lambda: forged(17, crc=0, flags=0), "body", id="no crc"),
        pytest.param(lambda: forged(17, magic=2), "body", id="magic"),
        pytest.param(lambda: PEER.read(17, 19, 1 << 20), "body", id="too many"),
        pytest.param(lambda: resized(16, 5, 6), "body of 16", id="two for one"),
        pytest.param(lambda: resized(17, 21), "body", id="longer"),
        pytest.param(lambda: resized(17, 19), "body", id="shorter"),
        pytest.param(lambda: resized(17, 200), "two headers", id="longer than two"),
        pytest.param(lambda: PEER.read(18, 19, 1), "body", id="another entry"),
        pytest.param(lambda: Records(np.array([2048], np.uint32), bytes(2048)), "body", id="larger than a segment"),
        pytest.param(lambda: None, "body", id="none"),
        pytest.param(lambda: PEER.read(17, 18, 1), "uncommitted", id="uncommitted"),
    ],
)
def test_repair_rejects_records_that_do_not_fit(
    store: Sample, records: Callable[[], Records | None], damaged: str
) -> None:
    if damaged == "two headers":
        for index in (17, 18):
            store.record(index)[:48] = bytes(48)
    else:
        store.record(16 if damaged == "body of 16" else 17)[50] ^= 1
    if damaged == "body and row":
        store.row(17)[:] = bytes(32)
    before = store.content(DATA, INDEX)
    with open_repair(store) as repairing:
        [damage] = repairing.find()
        with pytest.raises(CorruptRecordError):
            repairing.write_back(damage, records(), 16 if damaged == "uncommitted" else LAST)
    assert store.content(DATA, INDEX) == before


@pytest.mark.parametrize(("neighbour", "term"), [(16, 9), (18, 0)])
def test_repair_ignores_the_damaged_term_of_a_neighbor(store: Sample, neighbour: int, term: int) -> None:
    store.record(17)[0] ^= 1
    store.record(neighbour)[16:24] = term.to_bytes(8, "big")
    position = INTACT.positions[17]
    length = INTACT.positions[18] - position
    damage = Damage(Index(17), Index(18), Position(position), length, str(DATA), "as a read found it")
    with open_repair(store) as repairing:
        repairing.prepare()
        assert repairing.write_back(damage, fetch(damage), LAST) is None
    assert repair(store) == [(neighbour, neighbour + 1)]
    check_like_new(store)


@pytest.mark.parametrize("lost", ["nothing", "rows", "last row"])
def test_find_without_checkpoint_trusts_the_last_row(store: Sample, lost: str) -> None:
    remove(store.files, *copies(META / "checkpoint"))
    zero(INTACT.positions[20])(store)
    if lost == "rows":
        remove(store.files, *store.content(INDEX))
    elif lost == "last row":
        store.row(LAST)[23] ^= 1  # of its index
    config = dataclasses.replace(CONFIG, unsynced_bytes_max=1000)
    with StoreRepair.open(STORE, files=store.files, config=config) as repairing:
        assert bool(repairing.find()) == (lost == "nothing"), "without it, no entry is known to have been durable"


def test_find_reports_no_damage_above_the_checkpoint(store: Sample) -> None:
    append(store.open(), [b"new"] * 3, term=3)
    store.files.kill()
    store.at(INTACT.positions[-1])[20] ^= 1
    with open_repair(store) as repairing:
        assert repairing.find() == []


def test_find_ends_when_its_store_is_closed(store: Sample) -> None:
    repairing = open_repair(store)
    repairing.close()
    with pytest.raises(RuntimeError):
        repairing.find()
    store.open().close()


def test_open_for_repair_rejects_a_store_in_use_or_of_another_group(store: Sample) -> None:
    log = store.open()
    with pytest.raises(StoreBusyError):
        open_repair(store)
    open_repair(store, write=False).close()
    log.close()
    for path, group in ((STORE, "other"), (Path("/disk/nothing"), None)):
        with pytest.raises(StoreMismatchError):
            StoreRepair.open(path, files=store.files, group=group)


# --- failures and crashes of a repair -------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", range(1, 14))
def test_repair_reports_a_failed_write_at_any_step(store: Sample, ahead: int) -> None:
    del store.files.names[FILES[1]]
    store.row(18)[6] ^= 1
    mark_needs_verification(store.files, LAYOUT, "for a test")
    with open_repair(store) as repairing:
        store.files.fail_at = store.files.operations + ahead
        with pytest.raises(DiskFailedError):
            work(repairing)
    repair(store)
    check_like_new(store)


def zero_records_and_rows(store: Sample) -> None:
    """A torn record with a torn row would look like a good one with a damaged row."""
    zero_from(store.files, DATA, INTACT.positions[40])
    zero_from(store.files, INDEX, 40 * 32)


@pytest.mark.slow
@pytest.mark.parametrize("keep", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("damage", "count"), [(zero_records_and_rows, 7), (both(zero(600), zero(5000)), 2)])
def test_repair_resumes_after_a_crash_at_any_step(damage: Callable[[Sample], None], count: int, keep: float) -> None:
    steps = 0
    while True:
        steps += 1
        store = INTACT.clone()
        damage(store)
        store.files.crash_at = store.files.operations + steps
        with contextlib.suppress(Crash):
            repair(store, count)
            break
        store.files.crash_at = None
        store.files.crash(keep)
        repair(store, count)
        check_like_new(store)
    assert steps > 13


# --- stores that need verification ----------------------------------------------------------------------------------


def store_with_a_tail() -> Sample:
    """A running store that grew after its checkpoint."""
    store = Sample.fill(CONFIG, [([b"a" * 30] * 3, 1, None)])
    append(store.open(), [b"b" * 30] * 3)
    store.files.kill()
    return store


def fail_at_each_step(write: Callable[[CommitLog], object], fail_more: int = 0) -> list[Sample]:
    """Write to a store with a tail; fail at each operation of that, and kill the program."""
    whole = store_with_a_tail()
    log, before = (double := whole.clone()).open(), double.files.operations
    write(log)
    failed = []
    for ahead in range(1, double.files.operations - before + 1):
        store = whole.clone()
        log = store.open()
        store.files.fail_at, store.files.fail_more = store.files.operations + ahead, fail_more
        with pytest.raises(DiskFailedError):
            write(log)
        store.files.fail_at, store.files.fail_more = None, 0
        store.files.kill()  # the page cache can still be read
        failed.append(store)
    return failed


@pytest.mark.parametrize("bodies", [[b"c" * 30] * 3, [b"c" * 1900]], ids=["same file", "new file"])
def test_failed_sync_marks_the_store_until_a_repair_makes_it_durable(bodies: list[bytes]) -> None:
    for store in fail_at_each_step(lambda log: append(log, bodies)):
        assert "Input/output error" in (verification_reason(store.files, LAYOUT) or "")
        with open_repair(store) as repairing:
            assert repairing.verification_reason is not None
            assert repairing.find() == []
            repairing.settle()
            assert repairing.verification_reason is None
        held = read_all(store.clone().open())
        store.files.crash(0.0)
        assert read_all(store.open()) == held
        assert len(held) in (6, 6 + len(bodies))
        assert verification_reason(store.files, LAYOUT) is None


def test_start_makes_entries_of_an_unmarked_failed_sync_durable() -> None:
    """Entries in the page cache count as durable from then on, and no later sync would write them."""
    for store in fail_at_each_step(lambda log: append(log, [b"c" * 30] * 3), fail_more=10):
        assert verification_reason(store.files, LAYOUT) is None
        held = read_all(store.open())
        store.files.crash(0.0)
        assert read_all(store.open()) == held
        assert len(held) in (6, 9)


def truncate_tail(log: CommitLog) -> None:
    """Remove the entries after the checkpoint."""
    log.stage_truncate(Index(3))
    log.persist(None, Index(3), [])


@pytest.mark.parametrize("tail", [[], [b"d" * 1900] * 2], ids=["one file", "more files"])
def test_start_makes_truncation_of_an_unmarked_failed_sync_durable(tail: list[bytes]) -> None:
    """Zeros in the page cache end the log from then on; entries that return behind later ones would be invented."""

    def append_and_truncate(log: CommitLog) -> None:
        if tail:
            append(log, tail)
        truncate_tail(log)

    for store in fail_at_each_step(append_and_truncate, fail_more=10):
        held = read_all(store.open())
        store.files.crash(0.0)
        assert read_all(store.open()) == held


def test_rewrite_restores_file_size_lost_in_failed_sync() -> None:
    files = FaultyFiles()
    files.mkdir(DATA)
    segments = Segments(files, DATA, 2048, (), write=True)
    files.fail_at = files.operations + 4  # create, truncate twice, sync
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        segments.create(0)
    segments = Segments.load(files, DATA, 2048, write=True)
    segments.rewrite(0, 0)
    segments.sync_dir()
    files.crash(0.0)
    assert bytes(files.content(DATA / segment_name(0))) == bytes(2048)


# --- an open log ----------------------------------------------------------------------------------------------------


def test_open_log_is_repaired_while_it_serves(store: Sample) -> None:
    reported: list[int] = []
    log = store.open(LogHooks(on_damage=reported.append))
    zero(INTACT.positions[50])(store)
    store.row(50)[:] = bytes(32)
    with pytest.raises(CorruptRecordError) as caught:
        log.read(45, 70, 1 << 20)
    assert reported == [caught.value.values["index"]]
    damage = log.damage_near(caught.value.values["index"])
    assert damage is not None
    assert damage.start <= 50 < damage.end
    assert log.read(0, damage.start, 1 << 20).count == damage.start
    left: Damage | None = damage
    while left is not None:
        left = log.write_back(left, fetch(left, 1), LAST)
    assert log.damage_near(50) is None
    assert log.rows_fit(log.read(50, 51, 1), 50)
    assert read_all(log) == INTACT.entries
    log.close()
    check_like_new(store)


def test_killed_repair_of_an_open_log_leaves_damage_and_no_torn_tail(store: Sample) -> None:
    """A checkpoint covers all entries before the first of them is repaired."""
    save_hard_state(store.files, LAYOUT, HardState(Term(5), None))
    log = store.open()
    append(log, [b"after the checkpoint"] * 4, term=3)
    last, intact = log.last_index(), store.clone().open()
    zero_from(store.files, DATA, INTACT.positions[LAST - 2])
    damage = log.damage_near(LAST - 2)
    assert damage is not None
    assert (damage.start, damage.end) == (LAST - 2, last + 1)
    assert log.write_back(damage, intact.read(LAST - 2, LAST + 1, 1 << 20), LAST) is not None
    store.files.kill()
    with pytest.raises(CorruptRecordError):
        store.open()
    with open_repair(store) as repairing:
        found = repairing.find()
        assert [(one.start, one.end) for one in found] == [(LAST + 1, last + 1)]
        repairing.set_floor_if_end_is_lost(found)
    assert load_floor(store.files, LAYOUT, Term(99)) == Floor(Term(5))


def test_open_log_corrects_rows_from_its_records(store: Sample) -> None:
    log = store.open()
    store.row(18)[4:12] = bytes(8)
    records = log.read(16, 20, 1 << 20)
    assert not log.rows_fit(records, 16)
    log.rewrite_rows(records, 16)
    store.files.crash(0.0)
    assert store.open().rows_fit(records, 16)
    store.files.kill()
    check_like_new(store)


ROW_BITS = pytest.mark.parametrize(("byte", "mask"), [(11, 8), (10, 1), (5, 1), (15, 4), (12, 0x80), (23, 1)])


@ROW_BITS
def test_checkpoint_does_not_trust_a_damaged_row(store: Sample, byte: int, mask: int) -> None:
    log = store.open()
    store.row(LAST)[byte] ^= mask
    assert [log.position_of(LAST), log.position_of(LAST + 1)] == INTACT.positions[LAST:]
    log.save_checkpoint(LAST - 1)
    log.close()
    check_like_new(store)


@pytest.mark.parametrize("reopened", [False, True])
@ROW_BITS
def test_truncation_does_not_trust_a_damaged_row(store: Sample, byte: int, mask: int, reopened: bool) -> None:
    log = store.open()
    append(log, [b"to be truncated"] * 3, term=3)
    if reopened:
        store.files.kill()
        log = store.open()
    store.row(LAST)[byte] ^= mask
    log.stage_truncate(Index(LAST + 1))
    log.persist(None, Index(LAST + 1), [])
    assert log.staged_end == INTACT.positions[LAST + 1]
    log.rewrite_rows(log.read(LAST, LAST + 1, 1), LAST)
    assert read_all(log) == INTACT.entries
    check_like_new(store)


@pytest.mark.parametrize("byte", range(8))
def test_damaged_blank_is_found_and_repaired(store: Sample, byte: int) -> None:
    log = store.open()
    store.at(BLANK)[byte] ^= 1
    for stop in (HEAD + 2, HEAD):  # across the boundary, and up to it
        records = log.read(HEAD - 4, stop, 1 << 20)
        with pytest.raises(CorruptRecordError) as caught:
            log.check_blanks(records, HEAD - 4)
        assert caught.value.values == {"index": HEAD - 1, "position": BLANK}
    log.check_blanks(log.read(0, HEAD - 1, 1 << 20), 0)
    damage = log.damage_near(HEAD - 1)
    assert damage is not None
    assert (damage.start, damage.end, damage.position) == (HEAD, HEAD, BLANK)
    assert log.write_back(damage, None, LAST) is None
    log.check_blanks(log.read(0, LAST + 1, 1 << 20), 0)
    log.close()
    check_like_new(store)


# --- the end of the log ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "last", "lost"),
    [
        (17, 17, False),
        (0, 40, False),
        (LAST - 1, LAST - 1, False),
        (LAST, LAST, True),
        (60, LAST, True),
        (0, LAST, True),
    ],
)
@pytest.mark.parametrize("term", [5, 0], ids=["term 5", "term 0, as a conversion writes it"])
def test_repair_marks_recovering_voter_before_repairing_damaged_end(
    store: Sample, first: int, last: int, lost: bool, term: int
) -> None:
    save_hard_state(store.files, LAYOUT, HardState(Term(term), None))
    for index in range(first, last + 1):
        store.record(index)[3] ^= 0xFF
    before = store.content(DATA)
    with open_repair(store) as repairing:
        repairing.prepare()
        repairing.set_floor_if_end_is_lost(repairing.find())
    assert store.content(DATA) == before
    store.files.crash(0.0)
    assert load_floor(store.files, LAYOUT, Term(99)) == (Floor(term) if lost else None)


@pytest.mark.parametrize("clean", [True, False])
def test_damage_before_complete_records_up_to_clean_end_is_no_lost_end(store: Sample, clean: bool) -> None:
    log = store.open()
    for number in range(3):
        append(log, [b"after the checkpoint %d" % number] * 4, term=3)
    end, last = int(log.staged_end), log.last_index()
    store.files.kill()
    store.record(LAST)[0] ^= 0xFF
    if not clean:
        store.at(end - 1)[0] ^= 1
    repair(store, 1)
    assert load_floor(store.files, LAYOUT, Term(99)) == (None if clean else Floor(Term(3)))
    assert store.open().last_index() == (last if clean else last - 4)


def test_recovering_marker_needs_the_nodes_term(store: Sample) -> None:
    store.record(LAST)[0] ^= 0xFF
    remove(store.files, *copies(META / "hard-state"))
    with open_repair(store) as repairing, pytest.raises(CorruptRecordError, match="hard-state"):
        repairing.set_floor_if_end_is_lost(repairing.find())


@pytest.mark.parametrize("found", [NUMBER_MAX, NUMBER_MAX + 1, (1 << 63) - 1, None])
def test_term_is_set_above_the_entries_and_without_a_vote(store: Sample, found: int | None) -> None:
    if found is None:
        remove(store.files, *copies(META / "hard-state"))
    else:
        save_hard_state(store.files, LAYOUT, HardState(Term(found), NodeId("n1")))
    last_term = INTACT.clone().open().term_ranges()[-1].term
    with open_repair(store) as repairing:
        for refused in (0, last_term, NUMBER_MAX):
            with pytest.raises(ConfigError):
                repairing.set_term(Term(refused))
        repairing.set_term(Term(last_term + 1))
    store.files.crash(0.0)
    assert store.open().hard_state == HardState(Term(last_term + 1), None)


def test_repaired_replica_is_a_recovering_voter_after_its_quarantine(store: Sample) -> None:
    save_hard_state(store.files, LAYOUT, HardState(Term(7), None))
    log = store.open()
    log.quarantine("two leaders")
    log.quarantine("a later reason")
    log.close()
    with open_repair(store) as repairing:
        assert repairing.quarantine_reason == "two leaders"
        repairing.end_quarantine()
        assert (repairing.quarantine_reason, repairing.floor) == (None, Floor(Term(7)))
    store.files.crash(0.0)
    assert store.open().floor == Floor(Term(7))


def test_missing_last_files_make_a_recovering_voter(store: Sample) -> None:
    save_hard_state(store.files, LAYOUT, HardState(Term(5), None))
    last = max(store.content(DATA))
    remove(store.files, last)
    assert repair(store) == [(INTACT.positions.index(int(last.name)), LAST + 1)]
    assert load_floor(store.files, LAYOUT, Term(99)) == Floor(Term(5))
    log = store.open()
    append(log, [b"of a later term"], term=6)
    log.save_checkpoint(LAST + 1)
    log.close()
    log = store.open()
    assert log.floor == Floor(Term(5)), "the core has not ended the recovery"
    log.remove_floor(LAST + 1)
    assert log.floor is None
    store.files.crash(0.0)
    assert load_floor(store.files, LAYOUT, Term(99)) is None


@pytest.mark.parametrize("byte", [*range(0, 40, 7), None])
def test_damaged_recovering_marker_means_the_nodes_own_term(store: Sample, byte: int | None) -> None:
    save_hard_state(store.files, LAYOUT, HardState(Term(7), None))
    save_floor(store.files, LAYOUT, Floor(Term(5)))
    marker = store.files.content(META / "recovering")
    if byte is None:
        marker.clear()
    else:
        marker[byte] ^= 1
    with open_repair(store) as repairing:
        assert repairing.floor == Floor(Term(7))
    log = store.open()
    assert log.floor == Floor(Term(7))
    log.persist(HardState(Term(9), NodeId("n1")), None, [])
    log.close()
    store.files.crash(0.0)
    assert store.open().floor == Floor(Term(7))


def test_marker_that_cannot_be_written_hides_no_failure(store: Sample) -> None:
    log = store.open()

    def broken(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    store.files.replace = broken  # type: ignore[method-assign]
    store.files.fail_at = store.files.operations + 1
    with pytest.raises(DiskFailedError, match=os.strerror(errno.EIO)):
        append(log, [b"b"], term=3)
    mark_needs_verification(store.files, LAYOUT, "again")
