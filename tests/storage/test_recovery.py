"""Crashes at every byte, damage below the checkpoint, and a model of the whole log under Hypothesis."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dledger_core.errors import CorruptRecordError
from dledger_core.ids import Index, NodeId, Term
from dledger_core.raft.batch import TermRange
from dledger_core.raft.ready import HardState
from dledger_core.record import HEADER_BYTES, INDEX_RECORD_BYTES, segment_name
from dledger_core.storage import open_store
from dledger_core.storage.files.ab_file import copies
from dledger_core.storage.files.meta_files import Checkpoint, save_checkpoint
from dledger_core.storage.write.log_writer import LogHooks
from tests.support.faulty_files import Crash, FaultyFiles
from tests.support.logs import SMALL, STORE, PreallocationByHand, append, open_log, place, read_all

DATA, META = STORE / "data", STORE / "meta"
TIMES = [1, 0x18BCFE50000, 0x18C00000000, 0x18BCFE56800, 0x18BCFE568FF]
ATTEMPTS = 60
NOTHING_COVERED = Checkpoint(-1, -1, 0)


def filled(batches: int, segment_bytes: int = 4096) -> tuple[FaultyFiles, list[int], list[int]]:
    """Return a store, and the positions and the indexes at which its batches end."""
    log = open_log(files := FaultyFiles(), config=dataclasses.replace(SMALL, data_segment_bytes=segment_bytes))
    ends, indexes = [], []
    for number in range(batches):
        bodies = [bytes([1 + number]) * (size * 7 + 1) for size in range(number % 4 + 1)]
        append(log, bodies, term=1 + number // 3, control=b"\x80" if number % 3 == 0 else None)
        ends.append(int(log.staged_end))
        indexes.append(log.last_index())
    log.close(log.last_index())
    return files, ends, indexes


def data_of(files: FaultyFiles, directory: Path = DATA) -> dict[Path, bytes]:
    return {path: bytes(inode.content) for path, inode in sorted(files.names.items()) if path.parent == directory}


def first_loss(content: bytes, length: int) -> int:
    """Offset of the first byte that is lost when everything from ``length`` on becomes zero."""
    rest = np.flatnonzero(np.frombuffer(content, np.uint8)[length:])
    return length + int(rest[0]) if len(rest) else 1 << 60


@pytest.mark.slow
@pytest.mark.parametrize("shortened", [False, True], ids=["zeros", "short file"])
@pytest.mark.parametrize(("batches", "segment_bytes"), [(4, 4096), (10, 1024)], ids=["one segment", "last of several"])
def test_recovery_truncates_or_reports_every_lost_byte(batches: int, segment_bytes: int, shortened: bool) -> None:
    whole, ends, indexes = filled(batches, segment_bytes)
    base = ends[-1] - ends[-1] % segment_bytes
    path = DATA / segment_name(base)
    content = bytes(whole.content(path))
    for length in range(ends[-1] - base):
        for covered in (False, True):
            files = whole.clone()
            del files.content(path)[length:]
            if not shortened:
                files.content(path).extend(bytes(segment_bytes - length))
            if not covered:
                save_checkpoint(files, META / "checkpoint", NOTHING_COVERED)
            lost = base + first_loss(content, length)
            before = data_of(files)
            if covered and lost < ends[-1]:
                with pytest.raises(CorruptRecordError) as caught:
                    open_log(files)
                assert caught.value.where.startswith(str(DATA))
                assert caught.value.values["position"] <= ends[-1]
                assert data_of(files) == before
                continue
            log = open_log(files)
            kept = [index for end, index in zip(ends, indexes, strict=True) if end <= lost]
            assert log.last_index() == (kept[-1] if kept else -1)
            assert len(read_all(log)) == log.last_index() + 1
            # Anything left after the end would look like the next entries once the log grows up to it.
            rows = INDEX_RECORD_BYTES * (log.last_index() + 1)
            assert not any(b"".join(data_of(files).values())[log.recovered.position :])
            assert not any(b"".join(data_of(files, STORE / "index").values())[rows:])
            log.close()
            again = open_log(files)
            assert again.last_index() == log.last_index()
            again.close()


def test_bad_record_far_from_the_end_is_damage() -> None:
    files, ends, indexes = filled(40)
    save_checkpoint(files, META / "checkpoint", NOTHING_COVERED)
    files.content(DATA / segment_name(0))[ends[2] + 48] ^= 1
    config = dataclasses.replace(SMALL, unsynced_bytes_max=ends[-1] - ends[3])
    with pytest.raises(CorruptRecordError) as caught:
        open_log(files, config=config)
    assert caught.value.values["index"] == indexes[2] + 1
    assert caught.value.values["position"] == ends[2]
    log = open_log(files, config=dataclasses.replace(SMALL, unsynced_bytes_max=ends[-1]))
    assert log.last_index() == indexes[2]
    log.close()


@pytest.mark.parametrize("lost", ["all", "first file", "middle file", "rows", "first row of a segment"])
def test_recovery_rebuilds_the_index_from_the_data(lost: str) -> None:
    files, _, _ = filled(40, 1024)
    log = open_log(files)
    expected, second = read_all(log), log.index_at_position(1024)
    log.close()
    paths = sorted(name for name in files.names if name.parent == STORE / "index")
    assert len(paths) >= 3
    for path in {"all": paths, "first file": paths[:1], "middle file": paths[1:2]}.get(lost, []):
        del files.names[path]
    if lost == "rows":
        files.content(paths[-1])[-200:] = bytes(200)
        save_checkpoint(files, META / "checkpoint", NOTHING_COVERED)
    if lost == "first row of a segment":
        files.content(paths[0])[second * 32 : second * 32 + 32] = bytes(32)
    log = open_log(files)
    assert read_all(log) == expected
    assert [found.term for found in log.term_ranges()] == sorted({term for term, _ in expected})
    log.close()
    assert open_store(STORE, files=files).verify().findings == ()


def test_first_record_of_another_index_is_damage_if_not_covered() -> None:
    files, _, _ = filled(5)
    save_checkpoint(files, META / "checkpoint", NOTHING_COVERED)
    files.content(DATA / segment_name(0))[15] ^= 1
    with pytest.raises(CorruptRecordError) as caught:
        open_log(files)
    assert (caught.value.values["index"], caught.value.values["first_index"]) == (1, 0)


def test_torn_record_after_the_checkpoint_is_truncated() -> None:
    files, ends, indexes = filled(5)
    save_checkpoint(files, META / "checkpoint", NOTHING_COVERED)
    files.content(DATA / segment_name(0))[ends[-1] - 1] ^= 1
    log = open_log(files)
    assert (log.last_index(), log.commit_index) == (indexes[-2], -1)
    assert log.recovered.position == ends[-2]
    log.close()


Entry = tuple[int, bytes, bool]  # term, body, last of its batch


class LogMachine(RuleBasedStateMachine):
    """CommitLog over a disk that loses and tears unsynced writes, against a list."""

    @initialize(seed=st.integers(0, 1 << 30))
    def start(self, seed: int) -> None:
        self.files = FaultyFiles(seed)
        self.model: list[Entry] = []
        self.commit = -1
        self.term = 1
        self.hard = HardState(Term(0), None)
        self.open()

    def open(self) -> None:
        self.log = open_log(
            self.files,
            config=dataclasses.replace(SMALL, data_segment_bytes=1024, preallocate_bytes=2048),
            hooks=LogHooks(preallocation=PreallocationByHand),  # its step is a rule here
        )

    def entries(self, sizes: list[int]) -> list[Entry]:
        fill = len(self.model) % 250 + 1
        return [(self.term, bytes([fill + i]) * size, i == len(sizes) - 1) for i, size in enumerate(sizes)]

    def stage(self, batches: list[list[int]], model: list[Entry]) -> tuple[list[Entry], list[object]]:
        staged = []
        for sizes in batches:
            entries = self.entries(sizes)
            bodies = [body for _, body, _ in entries]
            staged.append(place(self.log, len(model), bodies, self.term, now_ms=self.term * 10))
            model = model + entries
        return model, staged

    def persist(self, truncate: int | None, batches: list[list[int]], crash_in: int | None, keep: float) -> None:
        """Persist; after a crash, any state on the way is right."""
        cut = self.model if truncate is None else self.model[:truncate]
        if truncate is not None:
            self.log.stage_truncate(Index(truncate))
        model, staged = self.stage(batches, list(cut))
        hard = HardState(Term(self.term), NodeId("n0"))
        if crash_in is not None:
            self.files.crash_at = self.files.operations + crash_in
        try:
            self.log.persist(hard if hard != self.hard else None, None if truncate is None else Index(truncate), staged)
        except Crash:
            allowed = [self.model[:n] for n in range(len(cut), len(self.model) + 1)]
            allowed += [model[:n] for n in range(len(cut), len(model) + 1)]
            allowed = [m for m in allowed if not m or m[-1][2]]
            self.files.crash_at = self.files.operations + crash_in  # and again while it recovers
            self.files.crash(keep)
            with contextlib.suppress(Crash):
                self.open()
            self.files.crash_at = None
            self.files.crash(keep)
            self.open()
            found = read_all(self.log)
            assert found in [[entry[:2] for entry in m] for m in allowed]
            self.model = next(m for m in allowed if [entry[:2] for entry in m] == found)
            assert self.log.hard_state in (self.hard, hard)
            self.hard = self.log.hard_state
            return
        finally:
            self.files.crash_at = None
        self.model, self.hard = model, hard

    sizes = st.lists(st.lists(st.integers(0, 200), min_size=1, max_size=5), min_size=1, max_size=3)
    crashes = st.none() | st.integers(1, 12)
    keeps = st.sampled_from([0.0, 0.5, 0.9, 1.0])

    @rule(batches=sizes, crash_in=crashes, keep=keeps)
    def append(self, batches: list[list[int]], crash_in: int | None, keep: float) -> None:
        self.persist(None, batches, crash_in, keep)

    @precondition(lambda self: self.commit + 1 < len(self.model))
    @rule(data=st.data(), batches=st.just([]) | sizes, crash_in=crashes, keep=keeps)
    def overwrite(self, data: st.DataObject, batches: list[list[int]], crash_in: int | None, keep: float) -> None:
        boundaries = [n for n in range(self.commit + 1, len(self.model)) if n == 0 or self.model[n - 1][2]]
        if boundaries:
            self.term += 1
            self.persist(data.draw(st.sampled_from(boundaries)), batches, crash_in, keep)

    @rule(commit=st.integers(-1, 30))
    def checkpoint(self, commit: int) -> None:
        if 0 <= commit < len(self.model) and self.model[commit][2]:
            self.commit = max(self.commit, commit)
        self.log.save_checkpoint(self.commit)

    @rule()
    def preallocate(self) -> None:
        self.log.preallocate()

    @rule(keep=keeps, crash_in=crashes)
    def lose_power(self, keep: float, crash_in: int | None) -> None:
        self.files.crash(keep)
        if crash_in is not None:  # and again while it recovers
            self.files.crash_at = self.files.operations + crash_in
            with contextlib.suppress(Crash):
                self.open()
            self.files.crash_at = None
            self.files.crash(keep)
        self.open()

    @rule()
    def restart(self) -> None:
        self.log.close(self.commit)
        self.open()
        assert self.log.commit_index == self.commit

    @rule()
    def look_from_outside(self) -> None:
        reader = open_store(STORE, files=self.files)
        assert reader.last_index == len(self.model) - 1
        assert reader.verify().findings == ()

    @invariant()
    def holds_what_was_persisted(self) -> None:
        assert read_all(self.log) == [entry[:2] for entry in self.model]
        assert self.log.last_index() == len(self.model) - 1
        assert self.log.hard_state == self.hard
        runs = [
            TermRange(Index(i), Term(entry[0]))
            for i, entry in enumerate(self.model)
            if i == 0 or self.model[i - 1][0] != entry[0]
        ]
        assert self.log.term_ranges() == runs
        ends = [i for i, entry in enumerate(self.model) if entry[2]]
        if self.model:
            got = self.log.read_batches(Index(len(self.model) // 2), 1 << 20)
            assert [b.last_index for b in got] == [end for end in ends if end >= len(self.model) // 2]


TestLogMachine = LogMachine.TestCase
TestLogMachine.settings = settings(
    max_examples=60, stateful_step_count=20, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def test_page_cache_durability_loses_only_the_unsynced_tail() -> None:
    for seed in range(30):
        files = FaultyFiles(seed)
        # With the low limit the log must sync from time to time, or the tail would look like damage far from the end.
        limit = 1000 if seed % 2 else SMALL.unsynced_bytes_max
        config = dataclasses.replace(SMALL, durability="page-cache", unsynced_bytes_max=limit)
        log = open_log(files, config=config)
        expected = []
        for number in range(30):
            bodies = [bytes([number + 1]) * 30] * 3
            append(log, bodies)
            expected += [(1, body) for body in bodies]
            if number == 12:
                log.save_checkpoint(20)
        files.crash(keep=0.7)
        log = open_log(files, config=config)
        found = read_all(log)
        assert len(found) >= 39
        assert len(found) % 3 == 0
        assert found == expected[: len(found)]


@pytest.mark.slow
@pytest.mark.parametrize("now_ms", TIMES)
@pytest.mark.parametrize("kind", ["NOOP", "empty body", "empty body last"])
def test_record_with_a_torn_append_time_is_a_torn_tail(kind: str, now_ms: int) -> None:
    """A record without a body has no CRC: the last byte of its append time, which is never 0, shows a torn write."""
    files = FaultyFiles()
    log = open_log(files)
    log.persist(HardState(Term(1), None), None, ())
    append(log, [b"before"], now_ms=1)
    bodies = {"NOOP": [], "empty body": [b""], "empty body last": [b"some", b""]}[kind]
    batch = place(log, 1, bodies, control=b"" if kind == "NOOP" else None, now_ms=now_ms)
    log.persist(None, None, [batch])
    end = int(log.staged_end)
    files.kill()
    whole = bytes(files.content(DATA / segment_name(0))[:end])
    for kept in range(HEADER_BYTES):
        torn = files.clone()
        at = end - HEADER_BYTES + kept
        torn.content(DATA / segment_name(0))[at:end] = bytes(end - at)
        found = open_log(torn)
        if bytes(torn.content(DATA / segment_name(0))[:end]) == whole:
            assert found.last_index() == batch.last_index
        else:
            assert found.last_index() == 0, f"{kept} bytes of the last header were believed"


@pytest.mark.parametrize("checkpoint", ["intact", "damaged"])
@pytest.mark.parametrize("attempt", range(1, ATTEMPTS))
def test_state_found_at_a_start_survives_a_power_loss(attempt: int, checkpoint: str) -> None:
    files = FaultyFiles()
    log = open_log(files)
    files.crash_at = files.operations + attempt
    with contextlib.suppress(Crash):
        log.persist(HardState(Term(1), NodeId("n1")), None, ())
        append(log, [b"first"])
        log.save_checkpoint(0)
        log.persist(HardState(Term(2), NodeId("n2")), None, ())
        append(log, [b"second"], term=2)
        log.save_checkpoint(1)
    files.crash_at = None
    files.kill()
    if checkpoint == "damaged":
        for path in copies(META / "checkpoint"):
            files.replace(path, b"")
    found = open_log(files)
    hard_state, last_index = found.hard_state, found.last_index()
    files.crash(keep=0.0)
    again = open_log(files)
    assert (again.hard_state, again.last_index()) == (hard_state, last_index)
