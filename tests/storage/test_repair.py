"""Repair restores damaged records from a peer byte for byte, and rejects records that do not fit."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dledger_core.errors import CorruptRecordError, DiskFailedError, StoreBusyError, StoreMismatchError
from dledger_core.ids import Index, NodeId, Position, Term
from dledger_core.raft import HardState
from dledger_core.record import Records, segment_name
from dledger_core.storage import CommitLog, open_store
from dledger_core.storage.check.damage import Damage
from dledger_core.storage.check.repair import StoreRepair
from dledger_core.storage.files.layout import Layout
from dledger_core.storage.files.meta_files import (
    mark_needs_verification,
    mark_recovering,
    recovering_above,
    save_hard_state,
    verification_reason,
)
from dledger_core.storage.files.segments import Segments
from tests.support.faulty_files import Crash, FaultyFile, FaultyFiles
from tests.support.logs import SMALL, STORE, append, open_log, read_all

CONFIG = dataclasses.replace(SMALL, data_segment_bytes=2048, index_segment_bytes=512)
DATA, INDEX, META = STORE / "data", STORE / "index", STORE / "meta"
SECTOR = 512


class Intact:
    """A closed store: several data and index files, two terms, control entries, bodies of different sizes."""

    def __init__(self) -> None:
        self.files = FaultyFiles()
        log = open_log(self.files, config=CONFIG)
        for number in range(24):
            control = b"\x80" if number % 7 == 0 else None
            append(
                log, [bytes([65 + number]) * (20 + 13 * at) for at in range(4)], term=1 + number // 9, control=control
            )
        self.end = log.last_index() + 1
        self.positions = [int(log.position_of(index)) for index in range(self.end + 1)]
        self.entries = read_all(log)
        log.close(log.last_index())
        self.log = open_log(self.files.clone(), config=CONFIG)

    def fetch(self, damage: Damage, count: int | None = None) -> Records | None:
        if damage.start == damage.end:
            return None
        return self.log.read(damage.start, min(damage.end, damage.start + (count or 1 << 20)), 1 << 20)


INTACT = Intact()
LAST = INTACT.end - 1


def content(files: FaultyFiles, *folders: Path) -> dict[Path, bytes]:
    return {path: bytes(inode.content) for path, inode in files.names.items() if path.parent in (folders or (DATA,))}


def repair(files: FaultyFiles, chunk: int | None = None) -> list[tuple[int, int]]:
    """Repair a store from the intact one; return the damaged entries."""
    with StoreRepair.open(STORE, group="g", node_id="n0", files=files, config=CONFIG) as store:
        return work(store, chunk)


def work(store: StoreRepair, chunk: int | None = None) -> list[tuple[int, int]]:
    """Run all steps of a repair."""
    store.prepare()
    found = store.find(rewrite_rows=True)
    for damage in found:
        left: Damage | None = damage
        while left is not None:
            left = store.write_back(left, INTACT.fetch(left, chunk), LAST)
    assert store.find(rewrite_rows=True) == []
    store.settle()
    return [(damage.start, damage.end) for damage in found]


def check_like_new(files: FaultyFiles) -> None:
    files.crash(0.0)  # all writes are durable
    assert content(files, DATA, INDEX) == content(INTACT.files, DATA, INDEX)
    log = open_log(files, config=CONFIG)
    assert read_all(log) == INTACT.entries
    log.close()
    assert open_store(STORE, files=files).verify().findings == ()


class UnreadableSector(FaultyFiles):
    """A disk that cannot read one sector of a data file until it is written again."""

    def __init__(self, path: Path, sector: int) -> None:
        super().__init__()
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


def test_find_reports_sector_that_disk_cannot_read() -> None:
    segment = INTACT.positions[40] // 2048
    files = UnreadableSector(DATA / segment_name(segment * 2048), 1)
    files.names, files.directories = INTACT.files.clone().names, INTACT.files.clone().directories
    begin = segment * 2048 + SECTOR
    with StoreRepair.open(STORE, group="g", node_id="n0", files=files, config=CONFIG) as store:
        (damage,) = store.find()
    assert damage.position < begin + SECTOR
    assert begin < damage.position + damage.length


def data_file(files: FaultyFiles, position: int) -> tuple[bytearray, int]:
    return files.content(DATA / segment_name(position - position % 2048)), position % 2048


def first_of_segment() -> int:
    return next(index for index in range(1, INTACT.end) if INTACT.positions[index] % 2048 == 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "index",
    [0, 17, first_of_segment(), first_of_segment() - 1, LAST],
    ids=["first", "middle", "first of segment", "last of segment", "last"],
)
def test_repair_restores_every_damaged_byte_of_a_record(index: int) -> None:
    position, size = INTACT.positions[index], int(INTACT.log.read(index, index + 1, 1).sizes[0])
    files = INTACT.files.clone()
    for offset in (at for at in range(size) if not 32 <= at < 40):  # time and flags have no cross-check
        for mask in (1, 0x80):
            file, at = data_file(files, position)
            file[at + offset] ^= mask
            assert repair(files) == [(index, index + 1)], (offset, mask)
            assert content(files, DATA, INDEX) == content(INTACT.files, DATA, INDEX), (offset, mask)
    check_like_new(files)


def zero_sector(files: FaultyFiles, position: int) -> None:
    file, at = data_file(files, position)
    at -= at % SECTOR
    file[at : at + SECTOR] = bytes(SECTOR)


def misdirect(files: FaultyFiles, source: int, target: int) -> None:
    """Put a sector of another place here, complete and with valid CRCs."""
    (theirs, a), (ours, b) = data_file(files, source), data_file(files, target)
    a, b = a - a % SECTOR, b - b % SECTOR
    ours[b : b + SECTOR] = theirs[a : a + SECTOR]


def lose_rows(files: FaultyFiles) -> None:
    for path in [path for path in files.names if path.parent == INDEX]:
        del files.names[path]


def zero_blank(files: FaultyFiles) -> None:
    file, at = data_file(files, 2047)
    end = INTACT.positions[first_of_segment() - 1] + int(
        INTACT.log.read(first_of_segment() - 1, first_of_segment(), 1).sizes[0]
    )
    assert end < 2048, "the record before the head ends with the segment"
    file[end % 2048 :] = b"\x07" * (2048 - end % 2048)
    assert at


CASES: dict[str, Callable[[FaultyFiles], object]] = {
    "a sector zeroed": lambda files: zero_sector(files, INTACT.positions[20]),
    "the first sector of the log zeroed": lambda files: zero_sector(files, 0),
    "a file's first sector zeroed": lambda files: zero_sector(files, 2048),
    "a misdirected sector": lambda files: misdirect(files, INTACT.positions[40], INTACT.positions[20]),
    "a misdirected sector of the same place in another file": lambda files: misdirect(files, 2048 + 600, 600),
    "a complete file of another position": lambda files: data_file(files, 0)[0].__setitem__(
        slice(None), bytes(data_file(files, 2048)[0])
    ),
    "an older state of a file": lambda files: data_file(files, 2048)[0].__setitem__(
        slice(INTACT.positions[first_of_segment() + 5] % 2048, None),
        bytes(2048 - INTACT.positions[first_of_segment() + 5] % 2048),
    ),
    "a file zeroed": lambda files: data_file(files, 2048)[0].__setitem__(slice(None), bytes(2048)),
    "the first file missing": lambda files: files.names.pop(DATA / segment_name(0)),
    "a file missing between others": lambda files: files.names.pop(DATA / segment_name(2048)),
    "a file too short": lambda files: data_file(files, 2048)[0].__delitem__(slice(700, None)),
    "a blank overwritten": zero_blank,
    "two places, and all rows lost": lambda files: (
        zero_sector(files, 600),
        zero_sector(files, 5000),
        lose_rows(files),
    ),
    "all data files zeroed": lambda files: [
        inode.content.__setitem__(slice(None), bytes(2048))
        for path, inode in files.names.items()
        if path.parent == DATA
    ],
}


@pytest.mark.parametrize("chunk", [None, 2], ids=["at once", "in parts"])
@pytest.mark.parametrize("case", CASES)
def test_repair_restores_damage_byte_for_byte(case: str, chunk: int | None) -> None:
    files = INTACT.files.clone()
    CASES[case](files)
    before = content(files, DATA, INDEX, META)
    with StoreRepair.open(STORE, files=files, config=CONFIG, write=False) as look:
        found = look.find()
        assert found
        assert all(0 <= one.start <= one.end <= INTACT.end and one.path for one in found)
    assert content(files, DATA, INDEX, META) == before
    repair(files, chunk)
    for path, inode in INTACT.files.names.items():
        if path.parent == INDEX:  # rows after the end have no meaning
            assert bytes(files.content(path))[: len(inode.content)] == bytes(inode.content)
    check_like_new(files)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_repair_restores_any_lost_bytes(data: st.DataObject) -> None:
    """Whatever bytes are lost anywhere: it is found, and repaired without touching what is intact."""
    files = INTACT.files.clone()
    end = INTACT.positions[-1]
    rows_lost = data.draw(st.booleans())  # then term and magic have no cross-check
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, end - 50))
        length = data.draw(st.integers(49 if rows_lost else 1, 1500))
        junk = data.draw(st.sampled_from([b"\0", b"\xff", b"\x01\0\0"]))
        for at in range(start, min(start + length, end)):
            file, offset = data_file(files, at)
            file[offset] = junk[(at - start) % len(junk)]
    if rows_lost:
        lose_rows(files)
    repair(files, data.draw(st.sampled_from([None, 1, 3])))
    log = open_log(files, config=CONFIG)
    assert read_all(log) == INTACT.entries
    log.close()


def test_repair_of_an_intact_store_corrects_only_its_index() -> None:
    files = INTACT.files.clone()
    row = files.content(INDEX / segment_name(512))
    row[70] ^= 1
    before = content(files)
    assert repair(files) == []
    assert content(files) == before
    check_like_new(files)


def forged(at: int, **fields: int) -> Records:
    """An entry as a peer might hold it, if it were wrong in some field."""
    records = INTACT.log.read(at, at + 1, 1)
    headers = records.headers.copy()
    for name, value in fields.items():
        headers[name][0] = value
    return Records(records.sizes, headers.tobytes() + bytes(records.bodies))


@pytest.mark.parametrize(
    ("records", "commit_index"),
    [
        (lambda: forged(17, index=18), LAST),
        (lambda: forged(17, term=9), LAST),
        (lambda: forged(17, term=0), LAST),
        (lambda: forged(17, position=INTACT.positions[17] + 1), LAST),
        (lambda: forged(17, crc=5), LAST),
        (lambda: forged(17, crc=0, flags=0), LAST),
        (lambda: forged(17, magic=2), LAST),
        (lambda: INTACT.log.read(17, 18, 1), 16),
        (lambda: INTACT.log.read(17, 19, 1 << 20), LAST),
        (lambda: INTACT.log.read(18, 19, 1), LAST),
        (lambda: None, LAST),
        (lambda: Records(np.array([2048], np.uint32), bytes(2048)), LAST),
    ],
    ids=[
        "index",
        "term above",
        "term below",
        "position",
        "crc",
        "no crc",
        "magic",
        "commit",
        "more",
        "other",
        "none",
        "size",
    ],
)
def test_repair_rejects_records_that_do_not_fit(records: Callable[[], Records | None], commit_index: int) -> None:
    files = INTACT.files.clone()
    file, at = data_file(files, INTACT.positions[17])
    file[at + 50] ^= 1
    before = content(files, DATA, INDEX)
    with StoreRepair.open(STORE, files=files, config=CONFIG) as store:
        [damage] = store.find()
        with pytest.raises(CorruptRecordError):
            store.write_back(damage, records(), commit_index)
    assert content(files, DATA, INDEX) == before


def test_repair_rejects_a_part_with_another_position() -> None:
    files = INTACT.files.clone()
    for index in (17, 18):
        file, at = data_file(files, INTACT.positions[index])
        file[at : at + 48] = bytes(48)
    before = content(files, DATA, INDEX)
    with StoreRepair.open(STORE, files=files, config=CONFIG) as store:
        [damage] = store.find()
        assert (damage.start, damage.end) == (17, 19)
        with pytest.raises(CorruptRecordError, match="position"):
            store.write_back(damage, forged(17, position=INTACT.positions[17] + 1), LAST)
    assert content(files, DATA, INDEX) == before


@pytest.mark.parametrize("term", [0, 9])
def test_repair_rejects_a_term_outside_its_neighbors_without_a_row(term: int) -> None:
    files = INTACT.files.clone()
    file, at = data_file(files, INTACT.positions[17])
    file[at + 50] ^= 1
    row = files.content(INDEX / segment_name(512))
    row[17 * 32 - 512 : 18 * 32 - 512] = bytes(32)
    before = content(files, DATA, INDEX)
    with StoreRepair.open(STORE, files=files, config=CONFIG) as store:
        [damage] = store.find()
        with pytest.raises(CorruptRecordError, match="terms"):
            store.write_back(damage, forged(17, term=term), LAST)
    assert content(files, DATA, INDEX) == before


@pytest.mark.parametrize(("neighbour", "term"), [(16, 9), (18, 0)])
def test_repair_ignores_the_damaged_term_of_a_neighbor(neighbour: int, term: int) -> None:
    files = INTACT.files.clone()
    file, at = data_file(files, INTACT.positions[17])
    file[at] ^= 1
    file, at = data_file(files, INTACT.positions[neighbour])
    file[at + 16 : at + 24] = term.to_bytes(8, "big")
    position = INTACT.positions[17]
    damage = Damage(
        Index(17), Index(18), Position(position), INTACT.positions[18] - position, str(DATA), "as a read found it"
    )
    with StoreRepair.open(STORE, files=files, config=CONFIG) as store:
        store.prepare()
        assert store.write_back(damage, INTACT.fetch(damage), LAST) is None
    assert repair(files) == [(neighbour, neighbour + 1)]
    check_like_new(files)


def test_find_reports_no_damage_above_the_checkpoint() -> None:
    files = INTACT.files.clone()
    log = open_log(files, config=CONFIG)
    append(log, [b"new"] * 3, term=3)
    files.kill()
    file, at = data_file(files, INTACT.positions[-1])
    file[at + 20] ^= 1
    with StoreRepair.open(STORE, files=files, config=CONFIG) as store:
        assert store.find() == []


def test_open_for_repair_rejects_a_store_in_use_or_of_another_group() -> None:
    files = INTACT.files.clone()
    log = open_log(files, config=CONFIG)
    with pytest.raises(StoreBusyError):
        StoreRepair.open(STORE, files=files)
    StoreRepair.open(STORE, files=files, write=False).close()
    log.close()
    with pytest.raises(StoreMismatchError):
        StoreRepair.open(STORE, files=files, group="other")
    with pytest.raises(StoreMismatchError):
        StoreRepair.open(Path("/disk/nothing"), files=files)


@pytest.mark.parametrize("ahead", range(1, 14))
def test_repair_reports_a_failed_write_at_any_step(ahead: int) -> None:
    files = INTACT.files.clone()
    del files.names[DATA / segment_name(2048)]
    files.content(INDEX / segment_name(512))[70] ^= 1
    mark_needs_verification(files, Layout(STORE), "for a test")
    with StoreRepair.open(STORE, files=files, config=CONFIG) as store:
        files.fail_at = files.operations + ahead
        with pytest.raises(DiskFailedError):
            work(store)
    repair(files)
    check_like_new(files)


@pytest.mark.parametrize("ahead", range(1, 14))
def test_repair_resumes_after_a_crash_at_any_step(ahead: int) -> None:
    files = INTACT.files.clone()
    zero_sector(files, 600)
    zero_sector(files, 5000)
    files.crash_at = files.operations + ahead
    with contextlib.suppress(Crash):
        repair(files, 2)
    files.crash_at = None
    files.crash(0.5)
    repair(files)
    check_like_new(files)


# --- stores that need verification ---------------------------------------------------------------------------------


def store_with_a_tail() -> tuple[FaultyFiles, int]:
    """A store that grew after its checkpoint, and the number of operations for that."""
    files = FaultyFiles()
    log = open_log(files, config=CONFIG)
    append(log, [b"a" * 30] * 3)
    log.save_checkpoint(2)
    before = files.operations
    append(log, [b"b" * 30] * 3)
    return files, files.operations - before


@pytest.mark.parametrize("bodies", [[b"c" * 30] * 3, [b"c" * 1900]], ids=["same file", "new file"])
def test_failed_sync_marks_the_store_until_a_repair_makes_it_durable(bodies: list[bytes]) -> None:
    files, _ = store_with_a_tail()
    copy = files.clone()
    log = CommitLog.open(STORE, group="g", node_id="n0", config=CONFIG, files=copy)
    before = copy.operations
    append(log, bodies)
    steps = copy.operations - before
    for ahead in range(1, steps + 1):
        copy = files.clone()
        log = CommitLog.open(STORE, group="g", node_id="n0", config=CONFIG, files=copy)
        copy.fail_at = copy.operations + ahead
        with pytest.raises(DiskFailedError):
            append(log, bodies)
        layout = Layout(STORE)
        assert "Input/output error" in (verification_reason(copy, layout) or "")
        copy.kill()  # the page cache can still be read
        with StoreRepair.open(STORE, files=copy, config=CONFIG) as store:
            assert store.verification_reason is not None
            assert store.find() == []
            store.settle()
            assert store.verification_reason is None
        found = open_log(copy, config=CONFIG)
        held = read_all(found)
        found.close()
        copy.crash(0.0)
        found = open_log(copy, config=CONFIG)
        assert read_all(found) == held
        assert len(held) in (6, 6 + len(bodies))
        assert verification_reason(copy, layout) is None
        found.close()


def test_rewrite_restores_file_size_lost_in_failed_sync() -> None:
    files = FaultyFiles()
    files.mkdir(DATA)
    segments = Segments(files, DATA, 2048, (), write=True)
    files.fail_at = files.operations + 4  # create, truncate twice, sync
    with pytest.raises(OSError, match="Input/output"):
        segments.create(0)
    segments = Segments.load(files, DATA, 2048, write=True)
    segments.rewrite(0, 0)
    segments.sync_dir()
    files.crash(0.0)
    assert bytes(files.content(DATA / segment_name(0))) == bytes(2048)


def test_marker_that_cannot_be_written_hides_no_failure() -> None:
    files = FaultyFiles()
    log = open_log(files, config=CONFIG)
    append(log, [b"a"])

    def broken(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    files.replace = broken  # type: ignore[method-assign]
    files.fail_at = files.operations + 1
    with pytest.raises(DiskFailedError, match="Input/output error"):
        append(log, [b"b"])
    mark_needs_verification(files, Layout(STORE), "again")


def test_start_makes_entries_of_an_unmarked_failed_sync_durable() -> None:
    """Entries in the page cache count as durable from then on, and no later sync would write them."""
    files, steps = store_with_a_tail()
    for ahead in range(1, steps + 1):
        copy = files.clone()
        log = open_log(copy, config=CONFIG)
        copy.fail_at, copy.fail_more = copy.operations + ahead, 10
        with pytest.raises(DiskFailedError):
            append(log, [b"c" * 30] * 3)
        assert verification_reason(copy, Layout(STORE)) is None
        copy.fail_at, copy.fail_more = None, 0
        copy.kill()
        held = read_all(open_log(copy, config=CONFIG))
        copy.crash(0.0)
        assert read_all(open_log(copy, config=CONFIG)) == held, ahead
        assert len(held) in (6, 9)


# --- an open log ----------------------------------------------------------------------------------------------------


def test_open_log_is_repaired_while_it_serves() -> None:
    files = INTACT.files.clone()
    log = open_log(files, config=CONFIG)
    zero_sector(files, INTACT.positions[50])
    with pytest.raises(CorruptRecordError) as caught:
        log.read(45, 70, 1 << 20)
    damage = log.damage_near(caught.value.values["index"])
    assert damage is not None
    assert damage.start <= 50 < damage.end
    assert log.read(0, damage.start, 1 << 20).count == damage.start
    left: Damage | None = damage
    while left is not None:
        left = log.write_back(left, INTACT.fetch(left, 1), LAST)
    assert log.damage_near(50) is None
    assert read_all(log) == INTACT.entries
    log.close()
    check_like_new(files)


def test_open_log_corrects_rows_from_its_records() -> None:
    files = INTACT.files.clone()
    log = open_log(files, config=CONFIG)
    row = files.content(INDEX / segment_name(512))
    row[68:76] = bytes(8)
    records = log.read(16, 20, 1 << 20)
    assert not log.rows_fit(records, 16)
    log.rewrite_rows(records, 16)
    files.crash(0.0)
    log = open_log(files, config=CONFIG)
    assert log.rows_fit(records, 16)
    log.close()
    check_like_new(files)


def damage_row(files: FaultyFiles, index: int, byte: int, mask: int) -> None:
    at = index * 32
    files.content(INDEX / segment_name(at - at % 512))[at % 512 + byte] ^= mask


@pytest.mark.parametrize(("byte", "mask"), [(11, 8), (10, 1), (5, 1), (15, 4), (12, 0x80), (23, 1)])
def test_checkpoint_does_not_trust_a_damaged_row(byte: int, mask: int) -> None:
    files = INTACT.files.clone()
    log = open_log(files, config=CONFIG)
    end = log.position_of(LAST + 1)
    damage_row(files, LAST, byte, mask)
    assert log.position_of(LAST + 1) == end
    assert log.position_of(LAST) == INTACT.positions[LAST]
    log.save_checkpoint(LAST - 1)
    log.close()
    check_like_new(files)


@pytest.mark.parametrize("reopened", [False, True])
@pytest.mark.parametrize(("byte", "mask"), [(11, 8), (10, 1), (5, 1), (15, 4), (12, 0x80), (23, 1)])
def test_truncation_does_not_trust_a_damaged_row(byte: int, mask: int, reopened: bool) -> None:
    files = INTACT.files.clone()
    log = open_log(files, config=CONFIG)
    append(log, [b"to be truncated"] * 3, term=3)
    if reopened:
        files.kill()
        log = open_log(files, config=CONFIG)
    damage_row(files, LAST, byte, mask)
    log.stage_truncate(Index(LAST + 1))
    log.persist(None, Index(LAST + 1), [])
    assert log.staged_end == INTACT.positions[LAST + 1]
    log.rewrite_rows(log.read(LAST, LAST + 1, 1), LAST)
    assert read_all(log) == INTACT.entries
    files.crash(0.0)
    check_like_new(files)


def test_find_ends_when_its_store_is_closed() -> None:
    files = INTACT.files.clone()
    store = StoreRepair.open(STORE, files=files, config=CONFIG)
    store.close()
    with pytest.raises(RuntimeError, match="closed"):
        store.find()
    open_log(files, config=CONFIG).close()


@pytest.mark.parametrize("byte", range(8))
def test_damaged_blank_is_found_and_repaired(byte: int) -> None:
    files = INTACT.files.clone()
    log = open_log(files, config=CONFIG)
    last = first_of_segment() - 1
    end = INTACT.positions[last] + int(INTACT.log.read(last, last + 1, 1).sizes[0])
    file, at = data_file(files, end)
    file[at + byte] ^= 1
    for start, stop in [(last - 3, last + 3), (last - 3, last + 1)]:  # across the boundary, and up to it
        records = log.read(start, stop, 1 << 20)
        with pytest.raises(CorruptRecordError) as caught:
            log.check_blanks(records, start)
        assert caught.value.values == {"index": last, "position": end}
    log.check_blanks(log.read(0, last, 1 << 20), 0)
    damage = log.damage_near(last)
    assert damage is not None
    assert (damage.start, damage.end, damage.position) == (last + 1, last + 1, end)
    assert log.write_back(damage, None, LAST) is None
    log.check_blanks(log.read(0, INTACT.end, 1 << 20), 0)
    log.close()
    check_like_new(files)


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
def test_repair_marks_recovering_voter_before_repairing_damaged_end(first: int, last: int, lost: bool) -> None:
    files = INTACT.files.clone()
    save_hard_state(files, STORE, HardState(Term(5), NodeId("n1")))
    for index in range(first, last + 1):
        file, at = data_file(files, INTACT.positions[index])
        file[at + 3] ^= 0xFF
    before = content(files)
    with StoreRepair.open(STORE, files=files, config=CONFIG) as store:
        store.prepare()
        store.mark_recovering_if_end_is_lost(store.find())
    assert content(files) == before
    files.crash(0.0)
    assert recovering_above(files, Layout(STORE), Term(99)) == (5 if lost else None)


def test_missing_last_files_make_a_recovering_voter() -> None:
    files = INTACT.files.clone()
    save_hard_state(files, STORE, HardState(Term(5), None))
    last = max(content(files))
    for names in (files.names, files.durable_names):
        del names[last]
    assert repair_as_a_node(files) == [(int(index_at(last)), INTACT.end)]
    assert recovering_above(files, Layout(STORE), Term(99)) == 5
    log = open_log(files, config=CONFIG)
    append(log, [b"of a later term"], term=6)
    log.save_checkpoint(LAST + 1)
    log.close()
    log = open_log(files, config=CONFIG)
    assert log.recovering_marker.above == 5, "the core has not ended the recovery"
    log.end_recovery(LAST + 1)
    assert log.recovering_marker.above is None
    files.crash(0.0)
    assert recovering_above(files, Layout(STORE), Term(99)) is None


def index_at(path: Path) -> int:
    return INTACT.positions.index(int(path.name))


def repair_as_a_node(files: FaultyFiles) -> list[tuple[int, int]]:
    with StoreRepair.open(STORE, files=files, config=CONFIG) as store:
        store.prepare()
        store.mark_recovering_if_end_is_lost(store.find())
        return work(store)


@pytest.mark.parametrize("byte", [*range(0, 40, 7), None])
def test_damaged_recovering_marker_means_the_nodes_own_term(byte: int | None) -> None:
    files = INTACT.files.clone()
    save_hard_state(files, STORE, HardState(Term(7), None))
    mark_recovering(files, Layout(STORE), Term(5))
    mark = files.content(Layout(STORE).meta / "recovering")
    mark[:] = b"" if byte is None else mark[:byte] + bytes([mark[byte] ^ 1]) + mark[byte + 1 :]
    with StoreRepair.open(STORE, files=files, config=CONFIG) as store:
        assert store.recovering_above == 7
    log = open_log(files, config=CONFIG)
    assert log.recovering_marker.above == 7
    log.persist(HardState(Term(9), None), None, [])
    log.close()
    files.crash(0.0)
    log = open_log(files, config=CONFIG)
    assert log.recovering_marker.above == 7
    log.close()


def test_repair_of_a_store_in_term_0() -> None:
    """A conversion of a CommitLog writes it, before any vote."""
    files = INTACT.files.clone()
    save_hard_state(files, STORE, HardState(Term(0), None))
    file, at = data_file(files, INTACT.positions[LAST])
    file[at] ^= 0xFF
    assert repair_as_a_node(files) == [(LAST, INTACT.end)]
    assert recovering_above(files, Layout(STORE), Term(99)) == 0


def test_killed_repair_of_an_open_log_leaves_damage_and_no_torn_tail() -> None:
    """A checkpoint covers all entries before the first of them is repaired."""
    files = INTACT.files.clone()
    save_hard_state(files, STORE, HardState(Term(5), None))
    log = open_log(files, config=CONFIG)
    append(log, [b"after the checkpoint"] * 4, term=3)
    last, whole = log.last_index(), files.clone()
    intact = open_log(whole, config=CONFIG)
    position = INTACT.positions[LAST - 2]
    for path, inode in files.names.items():
        if path.parent == DATA:
            start = max(0, position - int(path.name))
            inode.content[start:] = bytes(len(inode.content[start:]))
            inode.durable[:] = inode.content
    damage = log.damage_near(LAST - 2)
    assert damage is not None
    assert (damage.start, damage.end) == (LAST - 2, last + 1)
    left = log.write_back(damage, intact.read(LAST - 2, LAST + 1, 1 << 20), LAST)
    assert left is not None
    files.kill()
    with pytest.raises(CorruptRecordError):
        open_log(files, config=CONFIG)
    with StoreRepair.open(STORE, files=files, config=CONFIG) as store:
        found = store.find()
        assert [(one.start, one.end) for one in found] == [(LAST + 1, last + 1)]
        store.mark_recovering_if_end_is_lost(found)
    assert recovering_above(files, Layout(STORE), Term(99)) == 5


def test_recovering_marker_needs_the_nodes_term() -> None:
    files = INTACT.files.clone()
    file, at = data_file(files, INTACT.positions[LAST])
    file[at] ^= 0xFF
    for names in (files.names, files.durable_names):
        names.pop(STORE / "currterm", None)
    with (
        StoreRepair.open(STORE, files=files, config=CONFIG) as store,
        pytest.raises(CorruptRecordError, match="currterm"),
    ):
        store.mark_recovering_if_end_is_lost(store.find())


@pytest.mark.slow
@pytest.mark.parametrize("keep", [0.0, 0.5, 1.0])
def test_repair_of_records_and_rows_resumes_after_any_crash(keep: float) -> None:
    """A torn record with a torn row would look like a good one with a damaged row."""
    start, steps = 40, 0
    while True:
        steps += 1
        files = INTACT.files.clone()
        for folder, end in ((DATA, INTACT.positions[start]), (INDEX, start * 32)):
            for path, inode in files.names.items():
                if path.parent == folder:
                    at = max(0, end - int(path.name))
                    inode.content[at:] = bytes(len(inode.content[at:]))
                    inode.durable[:] = inode.content
        files.crash_at = files.operations + steps
        with contextlib.suppress(Crash):
            repair(files, chunk=7)
        done, files.crash_at = files.crash_at is not None and files.operations < files.crash_at, None
        if done:
            break
        files.crash(keep)
        repair(files, chunk=7)
        check_like_new(files)
    assert steps > 20
