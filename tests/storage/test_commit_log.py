"""The commit log: positions, segments, reads, truncation, failures, and who may open it."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dledger_core.checksum import FEW
from dledger_core.config import StorageConfig
from dledger_core.control import pack
from dledger_core.errors import (
    BadRequestError,
    ConfigError,
    CorruptRecordError,
    DiskFailedError,
    IndexOutOfRangeError,
    InvariantViolationError,
    NotUnderstoodError,
    StoreBusyError,
    StoreMismatchError,
)
from dledger_core.ids import Index, NodeId, Term
from dledger_core.raft.batch import BATCHES_MAX, Batch, TermRange
from dledger_core.raft.ready import HardState
from dledger_core.record import (
    BATCH_END,
    Columns,
    ProposedBatch,
    Records,
    append_times,
    encode,
    records_of,
    segment_name,
)
from dledger_core.storage import CommitLog, open_store
from dledger_core.storage.files.layout import Layout
from dledger_core.storage.files.meta_files import save_hard_state
from dledger_core.storage.files.segments import Segments
from dledger_core.storage.write.log_writer import LogHooks
from tests.storage.sample import DATA, META
from tests.support.faulty_files import FaultyFiles
from tests.support.logs import (
    NO_TABLES,
    SMALL,
    STORE,
    PreallocationByHand,
    append,
    bodies_of,
    open_log,
    place,
    read_all,
    received,
)

LARGE = StorageConfig(data_segment_bytes=1 << 20, index_segment_bytes=1 << 18, preallocate_bytes=0)


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles()


def test_new_store_has_the_layout_of_the_format(tmp_path: Path) -> None:
    log = open_log(directory=tmp_path)
    assert (log.first_index(), log.last_index(), log.commit_index, log.staged_end) == (0, -1, -1, 0)
    assert (log.hard_state, log.log_uuid, log.term_ranges()) == (HardState(Term(0), None), None, [])
    append(log, [b"x" * 1000] * 9, term=3)
    log.close(8)
    names = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    data = [f"data/{segment_name(base)}" for base in (0, 4096, 8192)]
    ab_files = (f"meta/{name}{copy}" for name in ("checkpoint", "hard-state", "members") for copy in ("", ".2"))
    assert names == sorted(["currterm", *data, f"index/{segment_name(0)}", *ab_files, "meta/lock", "meta/log.json"])
    assert {(tmp_path / name).stat().st_size for name in data} == {4096}
    assert (tmp_path / "currterm").read_text() == "voteLeader=n0\ncurrTerm=3\n"
    recorded = json.loads((tmp_path / "meta" / "log.json").read_text())
    assert (recorded["group"], recorded["node_id"], recorded["profile"]) == ("g", "n0", "B")
    end = 3 * 1048
    blank = bytes.fromhex("ffffffff") + (4096 - end).to_bytes(4, "big")
    assert (tmp_path / data[0]).read_bytes()[end:] == blank + bytes(4096 - end - 8)


def test_read_stops_at_the_limit_and_returns_at_least_one_record(files: FaultyFiles) -> None:
    log = open_log(files)
    bodies = [bytes([n]) * (n * 10) for n in range(1, 40)]
    append(log, bodies)
    assert bodies_of(log.read(7, 12, 1 << 20)) == bodies[7:12]
    for start, end, max_bytes, count in (
        (0, 39, 1 << 20, 39),
        (0, 39, 0, 1),
        (0, 39, 58 + 68, 2),
        (0, 39, 58 + 67, 1),
        (30, 1 << 40, 1 << 20, 9),
    ):
        assert log.read(start, end, max_bytes).count == count
    assert log.read_raw(5, 6, 1).count == 1
    for start, end in ((39, 40), (-1, 3), (3, 3)):
        with pytest.raises(IndexOutOfRangeError) as caught:
            log.read(start, end, 100)
        assert caught.value.values == {"first_index": 0, "last_index": 38}


def test_follower_writes_the_leaders_bytes(files: FaultyFiles) -> None:
    leader, follower = open_log(files), open_log(other := FaultyFiles())
    for number in range(30):
        batch = append(leader, [bytes([number])] * (number % 7 + 1), control=b"" if number % 5 == 0 else None)
        copy = received(batch)
        follower.stage(copy)
        follower.persist(None, None, [copy])
    assert follower.staged_end == leader.staged_end
    for path in files.names:
        assert path.parent != DATA or files.content(path) == other.content(path)


@pytest.mark.parametrize("what", ["index", "term", "position", "flags"])
@pytest.mark.parametrize("count", [2, FEW + 1])
def test_stage_rejects_records_that_do_not_continue_the_log(files: FaultyFiles, what: str, count: int) -> None:
    append(log := open_log(files), [b"abc"] * 3)
    append(other := open_log(FaultyFiles()), [b"abc"] * 3)
    wrong = received(place(other, other.last_index() + 1, [b"def"] * count))
    headers = wrong.payload.headers.copy()
    if what == "flags":
        headers["flags"] |= np.uint64(BATCH_END)
    else:
        headers[what] += 1
    data = b"".join(header.tobytes() + b"def" for header in headers)
    with pytest.raises(CorruptRecordError):
        log.stage(Batch(Index(3), count, Term(1), len(data), Records(wrong.payload.sizes, data)))
    assert log.staged_end == 3 * 51


@pytest.mark.parametrize(
    ("bodies", "body_bytes", "data_segment_bytes"),
    [(1, 3000, 2048), (1, 4 << 20, 64 << 20), (5, 2 << 20, 64 << 20)],
    ids=["larger than a segment", "record", "batch"],
)
def test_stage_rejects_records_above_the_limits(
    files: FaultyFiles, bodies: int, body_bytes: int, data_segment_bytes: int
) -> None:
    columns = Columns.from_bodies([bytes(body_bytes)] * bodies)
    records = encode(columns, first_index=0, term=1, position=0, timestamp_ms=1, segment_bytes=64 << 20)
    log = open_log(files, config=dataclasses.replace(SMALL, data_segment_bytes=data_segment_bytes))
    with pytest.raises(CorruptRecordError):
        log.stage(Batch(Index(0), bodies, Term(1), records.nbytes, records))
    assert log.staged_end == 0


@pytest.mark.parametrize(
    "proposal",
    [
        ProposedBatch(),
        ProposedBatch(Columns.from_bodies([b"x" * 4041])),
        ProposedBatch(control=b"x" * 4041),
        ProposedBatch(Columns.from_bodies([b"x" * 4000] * 2200)),
    ],
    ids=["empty", "body", "control", "batch"],
)
def test_place_rejects_batches_that_exceed_a_limit(files: FaultyFiles, proposal: ProposedBatch) -> None:
    log = open_log(files)
    log.check_proposal(ProposedBatch(Columns.from_bodies([b"x" * 4040])))
    with pytest.raises(BadRequestError):
        log.check_proposal(proposal)
    with pytest.raises(BadRequestError):
        log.place(proposal, Index(0), Term(1))
    assert log.staged_end == 0


def must_be_understood(batch: Batch) -> Batch:
    """Return the batch as a later version would send it."""
    records = records_of(batch)
    data = bytearray(records.data)
    for start in records.starts.tolist():
        data[start + 33] |= 2
    return replace(batch, payload=Records(records.sizes.copy(), bytes(data)))


@pytest.mark.parametrize(
    ("entry", "known"),
    [
        ({"control": pack({"k": "split"})}, False),
        ({"control": pack({"k": 7})}, False),
        ({"bodies": [b"data"]}, False),
        ({"control": pack({"k": "log", "u": "x"})}, True),
        ({"control": b""}, True),
        ({"configuration": pack({"voters": []})}, True),
    ],
)
def test_received_entry_that_must_be_understood_is_refused_if_unknown(entry: dict[str, Any], known: bool) -> None:
    source, log = open_log(FaultyFiles()), open_log(FaultyFiles())
    batch = must_be_understood(place(source, 0, **({"bodies": []} | entry)))
    if known:
        log.stage(batch)
        log.persist(None, None, [batch])
        return
    with pytest.raises(NotUnderstoodError) as caught:
        log.stage(batch)
    assert caught.value.values["index"] == 0
    assert (log.staged_end, log.last_index()) == (0, -1)


def test_staged_end_moves_ahead_of_the_disk_and_back(files: FaultyFiles) -> None:
    log = open_log(files)
    append(log, [b"a" * 100] * 3)
    end = log.staged_end
    ahead, ends = [], []
    for at, bodies in ((3, [b"b" * 50] * 2), (5, [b"c" * 50] * 2), (7, [b"d"])):
        ahead.append(place(log, at, bodies, now_ms=2000))
        ends.append(log.staged_end)
    assert log.last_index() == 2
    # 4 is inside a batch: profile A and converted logs may ask for it
    for index, expected in ((7, ends[1]), (4, ends[0] - 98), (3, end)):
        log.stage_truncate(Index(index))
        assert log.staged_end == expected
    replacement = place(log, 3, [b"e" * 10] * 4, term=2, now_ms=1500)
    log.persist(None, None, ahead[:1])  # the writer was still busy
    log.persist(HardState(Term(2), None), Index(3), [replacement])
    assert read_all(log) == [(1, b"a" * 100)] * 3 + [(2, b"e" * 10)] * 4
    assert log.term_ranges() == [TermRange(Index(0), Term(1)), TermRange(Index(3), Term(2))]
    assert append_times(log.read(0, 9, 1 << 20).column("flags")).tolist() == [1000] * 3 + [1500] * 4


def test_append_time_never_decreases(files: FaultyFiles) -> None:
    log = open_log(files)
    for now in (0, 500, 300, 700):
        append(log, [b"x"], now_ms=now)
    log.close()
    log = open_log(files)
    append(log, [b"x"], now_ms=100)
    for body in (b"a", b"", b"b", b""):  # a record without a body avoids a time whose last byte is 0
        append(log, [body], now_ms=0x300)
    times = append_times(log.read(0, 9, 1 << 20).column("flags")).tolist()
    assert times == [1, 500, 500, 700, 700, 0x300, 0x301, 0x301, 0x301]
    for at, index in ((0, 0), (1, 0), (2, 1), (500, 1), (501, 3), (700, 3), (701, 5)):
        assert log.index_at_time(at) == index


def test_truncation_zeroes_the_tail_after_lowering_the_checkpoint(files: FaultyFiles) -> None:
    log = open_log(files)
    for number in range(12):
        append(log, [bytes([number + 1]) * 300] * 2)
    log.save_checkpoint(5)
    end = int(log.position_of(8))
    files.log.clear()
    log.persist(None, Index(8), [])
    lowered = files.log.index(("sync", META / "checkpoint"))
    assert lowered < files.log.index(("unlink", DATA / segment_name(4096)))
    assert [path for path in files.names if path.parent == DATA] == [DATA / segment_name(0)]
    assert not any(files.content(DATA / segment_name(0))[end:])
    files.crash(keep=0.0)
    log = open_log(files)
    assert (log.last_index(), log.commit_index, log.recovered.position) == (7, 5, end)
    with pytest.raises(InvariantViolationError):
        log.persist(None, Index(5), [])


def test_read_batches_returns_complete_batches(files: FaultyFiles) -> None:
    log = open_log(files)
    shapes = [1, 5, 2, 9, 1, 1, 30, 3]
    starts = [0, *itertools.accumulate(shapes)]
    for number, count in enumerate(shapes):
        append(log, [bytes([number]) * 40] * count, term=1 + number // 3)
    all_batches = [(starts[n], count, 1 + n // 3) for n, count in enumerate(shapes)]
    for start in range(starts[-1]):
        batches = log.read_batches(Index(start), 88 * 12)
        first = max(n for n, edge in enumerate(starts) if edge <= start)
        found = [(batch.first_index, batch.count, batch.term) for batch in batches]
        assert found == all_batches[first : first + len(batches)]
        assert len(batches) == 1 or sum(batch.nbytes for batch in batches) <= 88 * 12
        assert all(batch.payload.count == batch.count for batch in batches)
    with pytest.raises(IndexOutOfRangeError):
        log.read_batches(Index(starts[-1]), 1)


def test_read_batches_finds_the_start_of_a_long_batch(files: FaultyFiles) -> None:
    log = open_log(files, config=LARGE)
    for bodies in ([b"first"], [b"y" * 100] * 6000, [b"last"]):
        append(log, bodies)
    assert [(batch.first_index, batch.count) for batch in log.read_batches(Index(6000), 1)] == [(1, 6000)]


def test_read_batches_limits_the_number_of_batches(files: FaultyFiles) -> None:
    log = open_log(files, config=LARGE)
    log.persist(HardState(Term(1), None), None, [place(log, index, [b""]) for index in range(BATCHES_MAX + 20)])
    assert [batch.first_index for batch in log.read_batches(Index(7), 8 << 20)] == [*range(7, 7 + BATCHES_MAX)]


def test_control_entries_are_returned_with_index_and_time(files: FaultyFiles) -> None:
    log = open_log(files)
    expected = []
    for number in range(20):
        control = bytes([0x81, number]) if number % 4 == 1 else None
        if control is not None:
            expected.append((log.last_index() + 1, number + 1, control))
        append(log, [b"data"] * 3, control=control, now_ms=number + 1)
    assert list(log.control_entries(0, 1 << 40)) == expected
    assert list(log.control_entries(4, 16)) == []


def test_position_of_returns_each_record_and_the_end(files: FaultyFiles) -> None:
    log = open_log(files)
    batch = append(log, [b"a" * 1000] * 9)
    expected = [*batch.payload.headers["position"].tolist(), log.staged_end]
    assert [log.position_of(index) for index in range(10)] == expected
    assert log.data_bytes == log.staged_end
    with pytest.raises(IndexOutOfRangeError):
        log.position_of(10)


@pytest.mark.parametrize("kind", ["write", "sync", "create", "sync_dir"])
def test_log_rejects_writes_after_the_first_failure(files: FaultyFiles, kind: str) -> None:
    log = open_log(files)
    append(log, [b"a" * 1000] * 3)
    batch = place(log, 3, [b"b" * 1000] * 4)
    real = files.operation

    def operation(name: str, path: Path) -> None:
        if name == kind and DATA in (path, path.parent):
            files.fail_at = 0
        real(name, path)

    files.operation = operation
    with pytest.raises(DiskFailedError) as caught:
        log.persist(None, None, [batch])
    del files.operation
    assert (caught.value.exit_code, log.failure) == (4, caught.value)
    before = files.read(META / "checkpoint")
    for write in (
        lambda: log.persist(None, None, []),
        lambda: log.save_checkpoint(1),
        lambda: log.trim(1, NO_TABLES, 0),
        lambda: log.adopt_uuid("u"),
    ):
        with pytest.raises(DiskFailedError):
            write()
    assert log.preallocate() is False
    assert read_all(log) == [(1, b"a" * 1000)] * 3
    log.close(2)
    assert files.read(META / "checkpoint") == before


def test_persist_syncs_once_or_as_often_as_unsynced_bytes_require(files: FaultyFiles) -> None:
    log = open_log(files, config=dataclasses.replace(SMALL, unsynced_bytes_max=1000))
    append(log, [b"x"])
    batches = [place(log, 1 + n, [bytes([n])]) for n in range(10)]
    files.log.clear()
    log.persist(None, None, batches)
    assert [kind for kind, _ in files.log] == ["write", "write", "sync"]
    batches = [place(log, 11 + n, [bytes(100)]) for n in range(20)]
    files.log.clear()
    log.persist(None, None, batches)
    assert [kind for kind, path in files.log if path.parent == DATA].count("sync") >= 6


def test_trim_deletes_complete_committed_segments(files: FaultyFiles) -> None:
    log = open_log(files)
    for number in range(20):
        append(log, [bytes([number])] * 20, term=1 + number // 10)
    expected = read_all(log)
    second = next(index for index in range(400) if log.position_of(index) == 4096)
    assert log.trim(second - 1, NO_TABLES, 100) == 0
    assert log.trim(second + 5, NO_TABLES, second - 1) == 0, "the first entry that is kept must be committed"
    assert log.trim(second + 5, NO_TABLES, 100) == second
    with pytest.raises(IndexOutOfRangeError):
        log.read(second - 1, second + 5, 100)
    for commit_index in (None, 100):
        if commit_index is not None:
            log.close(commit_index)
            log = open_log(files)
            assert (log.first_index(), log.commit_index) == (second, commit_index)
        assert read_all(log) == expected[second:]
        assert log.term_ranges()[0] == TermRange(Index(second - 1), Term(1))
    append(log, [b"more"], term=2)
    log.close()
    with open_store(STORE, files=files) as reader:
        assert (reader.first_index, reader.last_index, reader.verify().findings) == (second, 400, ())


def test_profile_a_writes_the_bytes_of_java(files: FaultyFiles) -> None:
    log = open_log(files, config=dataclasses.replace(SMALL, profile="A"))
    batch = append(log, [b"Hello World", b"\x01"])
    assert bytes(batch.payload.data)[:59] == bytes.fromhex(
        "000000010000003b0000000000000000000000000000000100000000000000000000000000000000000000000000000b"
        "48656c6c6f20576f726c64"
    )
    append(log, [bytes([n]) for n in range(100)])
    assert [b.count for b in log.read_batches(Index(3), 49 * 2)] == [1, 1]
    with pytest.raises(BadRequestError):
        log.check_proposal(ProposedBatch(control=b""))
    log.close(5)
    log = open_log(files)  # the recorded profile wins
    assert (log.config.profile, log.last_index()) == ("A", 101)


def test_store_has_one_log_uuid_and_its_own_segment_sizes(files: FaultyFiles) -> None:
    log = open_log(files)
    log.adopt_uuid("one")
    log.adopt_uuid("one")
    with pytest.raises(StoreMismatchError):
        log.adopt_uuid("two")
    log.close()
    log = open_log(files, config=StorageConfig())
    assert (log.log_uuid, log.config.data_segment_bytes) == ("one", 4096)
    with open_store(STORE, files=files) as reader:
        assert (reader.log_uuid, reader.group, reader.node_id, reader.writer) == ("one", "g", "n0", "dledger-python")


def test_store_in_use_is_rejected_with_its_process(tmp_path: Path) -> None:
    log = open_log(directory=tmp_path)
    with pytest.raises(StoreBusyError) as caught:
        open_log(directory=tmp_path)
    assert caught.value.where == str(tmp_path / "meta" / "lock")
    assert str(os.getpid()) in caught.value.remedy
    log.close()
    open_log(directory=tmp_path).close()


@pytest.mark.parametrize(("group", "node"), [("other", "n0"), ("g", "n1")])
def test_open_rejects_a_store_of_another_owner(files: FaultyFiles, group: str, node: str) -> None:
    open_log(files).close()
    before = dict(files.names)
    with pytest.raises(StoreMismatchError):
        CommitLog.open(STORE, group=group, node_id=node, files=files)
    assert files.names == before


def test_open_reports_an_unwritable_directory() -> None:
    class ReadOnlyFiles(FaultyFiles):
        def mkdir(self, path: Path) -> None:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with pytest.raises(ConfigError) as caught:
        open_log(ReadOnlyFiles())
    assert (caught.value.where, caught.value.exit_code) == (str(META), 3)


def test_hard_state_decides_and_currterm_repeats_it(files: FaultyFiles) -> None:
    state, path = HardState(Term(7), NodeId("n2")), STORE / "currterm"
    log = open_log(files)
    log.persist(state, None, [])
    assert log.hard_state == state
    assert files.read(path) == b"voteLeader=n2\ncurrTerm=7\n"
    append(log, [b"x"], term=7)
    log.close()
    files.replace(path, b"currTerm=9\nvoteLeader=n1\n")
    log = open_log(files)
    assert log.hard_state == state
    log.close()
    save_hard_state(files, Layout(STORE), HardState(Term(6), None))
    with pytest.raises(CorruptRecordError) as caught:  # the log has an entry of term 7
        open_log(files)
    assert caught.value.where == str(META / "hard-state")


def test_preallocation_during_appends_changes_no_entry(tmp_path: Path) -> None:
    log = open_log(directory=tmp_path, config=StorageConfig(data_segment_bytes=1 << 20, preallocate_bytes=300_000))
    stop = threading.Event()

    def zero() -> None:
        while not stop.is_set():
            log.preallocate()

    thread = threading.Thread(target=zero)
    thread.start()
    expected = []
    for number in range(60):
        bodies = [bytes([number + 1]) * 990] * 50
        append(log, bodies)
        expected += [(1, body) for body in bodies]
    stop.set()
    thread.join()
    assert read_all(log) == expected
    log.close()
    assert open_store(tmp_path).verify().findings == ()


@pytest.mark.parametrize(("number", "continues"), [(errno.ENOSPC, True), (errno.EIO, False)])
def test_full_disk_during_preallocation_does_not_stop_the_log(files: FaultyFiles, number: int, continues: bool) -> None:
    append(log := open_log(files), [b"x"])
    log.close()
    log = open_log(files, config=dataclasses.replace(SMALL, preallocate_bytes=2000))
    files.fail_errno, files.fail_at = number, files.operations + 1
    assert not log.preallocate()
    assert (log.failure is None) == continues
    if continues:
        append(log, [b"y"])
        assert read_all(log) == [(1, b"x"), (1, b"y")]
        log.close()


def test_preallocation_is_limited_by_appended_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = StorageConfig(data_segment_bytes=4 << 20, preallocate_bytes=4000)
    append(log := open_log(directory=tmp_path, config=config), [b"x" * 900])
    log.close()
    log = open_log(directory=tmp_path, config=config, hooks=LogHooks(preallocation=PreallocationByHand))
    zeroed: list[tuple[int, int]] = []
    real = Segments.preallocate
    monkeypatch.setattr(
        Segments, "preallocate", lambda self, start, stop: (zeroed.append((start, stop)), real(self, start, stop))[1]
    )

    def zeroed_after(*bodies: int) -> list[int]:
        """Return the lengths of the zeroed chunks after appending bodies of these lengths."""
        append(log, [b"y" * length for length in bodies])
        tail = log.space()[0]
        zeroed.clear()
        while log.preallocate():
            pass
        assert all(before[1] == after[0] for before, after in itertools.pairwise(zeroed))
        assert not zeroed or zeroed[-1][1] <= tail + 4000
        return [stop - start for start, stop in zeroed]

    assert zeroed_after(8) == [1000, 1000], "two chunks for a new log"
    assert zeroed_after(500) == [], "a chunk is not used up"
    assert zeroed_after(500) == [1000]
    assert zeroed_after(1000) == [1000]
    assert zeroed_after(500, 500) == [1000, 1000], "as much as was appended"
    assert sum(zeroed_after(3000, 3000)) == 4000, "never more than preallocate_bytes"
    assert sum(zeroed_after(900)) == 0
    assert sum(zeroed_after(100)) == 1000
    assert zeroed_after(*[1000] * 600) == [], "a large sync gains nothing by zeros"
    assert sum(zeroed_after(1000)) == 4000
    log.close()


@pytest.mark.slow
def test_other_threads_read_during_appends_and_truncations(tmp_path: Path) -> None:
    log = open_log(directory=tmp_path)
    append(log, [b"keep" * 10] * 50)
    stop, wrong = threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            try:
                end = log.last_index() + 1
                records = log.read(max(end - 20, 0), end, 1 << 20)
                if any(len(set(body)) > 4 for body in bodies_of(records)):
                    wrong.append(records)
            except IndexOutOfRangeError:
                pass
            except Exception as error:  # noqa: BLE001
                wrong.append(error)
                return

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(30):
        log.stage_truncate(Index(50))
        batch = place(log, 50, [bytes([number + 1]) * 200] * 40)
        log.persist(None, Index(50), [batch])
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    log.close()
