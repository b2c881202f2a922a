"""A complete store whose files are damaged in any way, opened by the node and by a reader.

Allowed results: the log as it was; the log truncated before the first damage, but never below the entries that the
checkpoint covers; or a DLedgerError that names the file. Never another exception, never a silent loss of entries, never
an entry with other content.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dledger_core import control
from dledger_core.checksum import crc32
from dledger_core.errors import CorruptRecordError, DLedgerError
from dledger_core.record import segment_name
from dledger_core.storage import CommitLog, StoreReader, open_store
from dledger_core.storage.files.ab_file import copies
from dledger_core.storage.files.meta_files import Checkpoint, load_checkpoint, save_checkpoint
from dledger_core.storage.tables.tables import LogTables, TableChanges
from tests.fuzz.counted_files import CountedFiles
from tests.fuzz.finding import expect, memory_below
from tests.support.logs import STORE, append, open_log

DATA, INDEX, META = STORE / "data", STORE / "index", STORE / "meta"
FIXED_BYTES = 48 << 20
STEPS_MAX = 8


@dataclass(frozen=True)
class Origin:
    """A store before the damage.

    Attributes:
        files: its files.
        first: its first entry.
        bodies: of all its entries.
        ends: (position, index) after each batch.
        covered: the last entry that the checkpoint covers; -1 without one.
    """

    files: CountedFiles
    first: int
    bodies: list[bytes]
    ends: list[tuple[int, int]]
    covered: int

    @property
    def last(self) -> int:
        return self.first + len(self.bodies) - 1


def _fill(log: CommitLog, batches: int) -> list[tuple[int, int]]:
    ends = []
    for number in range(batches):
        bodies = [bytes([65 + number]) * (size * 37 % 300) for size in range(number, number + 1 + number % 4)]
        fields = {"k": "producer", "p": "p", "e": 0, "s": number, "n": len(bodies), "c": 0}
        lead = control.pack(fields) if number % 3 == 0 else None
        append(log, bodies, term=1 + number // 4, control=lead, now_ms=1000 + number)
        ends.append((int(log.staged_end), log.last_index() + 1))
    return ends


def _origin(files: CountedFiles, ends: list[tuple[int, int]]) -> Origin:
    whole = files.clone()
    log = open_log(whole)
    first = int(log.first_index())
    bodies = [bytes(log.read(i, i + 1, 1).data)[48:] for i in range(first, log.last_index() + 1)]
    checkpoint = load_checkpoint(files, META / "checkpoint")
    kept = [end for end in ends if end[1] > first]
    return Origin(files.clone(), first, bodies, kept, checkpoint.durable_index if checkpoint is not None else -1)


@functools.cache
def origins() -> tuple[Origin, ...]:
    """Stopped; killed long after its last checkpoint; without a checkpoint; trimmed."""
    closed, killed, bare, shortened = (CountedFiles(seed) for seed in range(4))
    log = open_log(closed)
    log.adopt_uuid("0" * 32)
    ends = _fill(log, 14)
    log.close(log.last_index())
    log = open_log(killed)
    killed_ends = _fill(log, 6)
    log.save_checkpoint(log.last_index())
    for number in range(5):
        append(log, [b"late" * (number + 1), b""], term=3, now_ms=2001 + number)
        killed_ends.append((int(log.staged_end), log.last_index() + 1))
    killed.kill()
    log = open_log(bare)
    bare_ends = _fill(log, 8)
    bare.kill()
    save_checkpoint(bare, META / "checkpoint", Checkpoint(-1, -1, 0))
    log = open_log(shortened)
    shortened_ends = _fill(log, 20)
    log.save_checkpoint(log.last_index())
    tables = LogTables()
    for index, time_ms, body in log.control_entries(0, log.last_index() + 1):
        tables.apply(index, time_ms, body)
    log.trim(int(log.last_index()), TableChanges.complete(tables), log.last_index())
    log.close(log.last_index())
    found = (
        _origin(closed, ends),
        _origin(killed, killed_ends),
        _origin(bare, bare_ends),
        _origin(shortened, shortened_ends),
    )
    assert found[3].first > 0
    assert found[1].covered < found[1].last
    return found


@dataclass
class Damage:
    """The changes of a store: the files that differ, and the first data position that does."""

    files: CountedFiles
    touched: set[Path]
    position: int

    @classmethod
    def of(cls, origin: Origin, files: CountedFiles) -> Damage:
        touched, position = set(), 1 << 62
        for path in {*origin.files.names, *files.names}:
            before = bytes(origin.files.content(path)) if path in origin.files.names else None
            after = bytes(files.content(path)) if path in files.names else None
            if before == after:
                continue
            touched.add(path)
            if path.parent == DATA:
                position = min(position, int(path.name) + _first_difference(before or b"", after or b""))
        return cls(files, touched, position)


def _first_difference(before: bytes, after: bytes) -> int:
    both = min(len(before), len(after))
    return next((at for at in range(both) if before[at] != after[at]), both)


def _steps(data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """Yields (file, kind, place, bytes) of each step: u8, u8, u16, u8 length, bytes."""
    at = 0
    for _ in range(STEPS_MAX):
        if at + 5 > len(data):
            return
        which, kind, size = data[at], data[at + 1], data[at + 4]
        yield which, kind, int.from_bytes(data[at + 2 : at + 4], "big"), data[at + 5 : at + 5 + size]
        at += 5 + size


def _damage(files: CountedFiles, data: bytes) -> None:
    for which, kind, place, given in _steps(data):
        paths = sorted(path for path in files.names if path.name != "lock")
        if not paths:
            return
        path = paths[which % len(paths)]
        match kind % 9:
            case 5:
                del files.names[path]
            case 7:  # another file in its place
                files.content(path)[:] = bytes(files.content(paths[place % len(paths)]))
            case 8:  # under another name
                if path.parent in (DATA, INDEX):
                    step = 4096 if path.parent == DATA else 1024
                    files.names[path.with_name(segment_name(place * step))] = files.names.pop(path)
            case change:
                content = files.content(path)
                _change(content, change, place % (len(content) + 1), given)


def _change(content: bytearray, kind: int, at: int, given: bytes) -> None:
    match kind:
        case 0:
            for offset, byte in enumerate(given[: len(content) - at]):
                content[at + offset] ^= byte
        case 1:
            content[at : at + len(given)] = given[: len(content) - at]
        case 2:
            del content[at:]
        case 3:
            content.extend(given)
        case 4:  # a misdirected write: the bytes of another place
            source = int.from_bytes(given[:2], "big") % (len(content) + 1)
            piece = content[source : source + 16 * (given[2] if len(given) > 2 else 3)]
            content[at : at + len(piece)] = piece[: len(content) - at]
        case 6:
            stop = min(len(content), at + 16 * (given[0] if given else 32))
            content[at:stop] = bytes(stop - at)


def run_store(data: bytes) -> None:
    """Input: u8 which store, then the steps of damage."""
    origin = origins()[(data[:1] or b"\0")[0] % len(origins())]
    files = origin.files.clone()
    _damage(files, data[1:])
    files.counted = 0
    damage = Damage.of(origin, files)
    # Measuring takes three times as long as the rest: one input in eight, chosen by its content.
    measured = crc32(data) % 8 == 0
    with memory_below(FIXED_BYTES) if measured else contextlib.nullcontext():
        _look(origin, damage, files.clone())
        _open(origin, damage)


def _look(origin: Origin, damage: Damage, files: CountedFiles) -> None:
    """Opens the store as a reader does: nothing is changed, and nothing wrong is shown."""
    before = {path: bytes(inode.content) for path, inode in files.names.items()}
    try:
        with open_store(STORE, files=files) as reader:
            report = reader.verify()
            if not damage.touched:
                errors = [finding for finding in report.findings if finding.severity == "error"]
                intact = errors == [] and reader.last_index == origin.last
                expect(intact, "an intact store is called damaged", it=errors)
            _compare(origin, damage, range(reader.first_index, reader.last_index + 1), _reading(reader))
    except DLedgerError as error:
        _check_error(error)
    expect(before == {path: bytes(inode.content) for path, inode in files.names.items()}, "a reader wrote")


def _reading(reader: StoreReader) -> Callable[[int], bytes]:
    return lambda index: reader.read(index, index + 1).column("body")[0].as_py()


def _open(origin: Origin, damage: Damage) -> None:
    files = damage.files
    before = {path: bytes(inode.content) for path, inode in files.names.items() if path.parent == DATA}
    try:
        log = open_log(files)
    except DLedgerError as error:
        _check_error(error)
        if isinstance(error, CorruptRecordError) and error.where.startswith(str(DATA)):
            after = {path: bytes(inode.content) for path, inode in files.names.items() if path.parent == DATA}
            expect(after == before, "damage was found, yet the data was changed", it=error)
        expect(bool(damage.touched), "an intact store was rejected", it=error)
        return
    first, last = log.first_index(), log.last_index()
    expected = max((index - 1 for position, index in origin.ends if position <= damage.position), default=-1)
    if not damage.touched.issuperset(copies(META / "checkpoint")):
        expected = max(expected, origin.covered)
    expect(last >= min(expected, origin.last), "entries were lost silently", last=last, expected=expected)
    expect(first == origin.first or last < first, "the log begins elsewhere", first=first, was=origin.first)

    def body(index: int) -> bytes:
        return bytes(log.read(index, index + 1, 1).data)[48:]

    _compare(origin, damage, range(first, last + 1), body)
    _continue(log, files)


def _compare(origin: Origin, damage: Damage, indexes: range, body: Callable[[int], bytes]) -> None:
    """Reads every entry: what it was, or an error; an error only where data or index were touched."""
    expect(indexes.stop - 1 <= origin.last, "entries that were never appended", last=indexes.stop - 1)
    for index in indexes:
        try:
            found = body(index)
        except CorruptRecordError as error:
            _check_error(error)
            # A row of the index that contradicts its record in the term counts as damage: one of the two is wrong.
            # A changed log.json may say that the log begins elsewhere.
            others = any(path.parent == INDEX or path == META / "log.json" for path in damage.touched)
            needs_recheck = damage.position < 1 << 62 or others
            expect(needs_recheck, "an intact entry is called damaged", index=index, it=error)
            continue
        expect(index >= origin.first, "an entry that was deleted", index=index)
        expect(found == origin.bodies[index - origin.first], "an entry with other content", index=index)


def _check_error(error: DLedgerError) -> None:
    expect(error.where.startswith(str(STORE)) and bool(error.what), "the error does not name the file", it=error)
    if isinstance(error, CorruptRecordError) and error.where.startswith(str(DATA)):
        named = error.where != str(DATA) and ("position" in error.values or "missing" in error.what)
        expect(named, "the error names no file or position", it=error)


def _continue(log: CommitLog, files: CountedFiles) -> None:
    """Check that the log accepts another batch, and has it after the process was killed."""
    last = log.last_index()
    try:
        term = max([int(run.term) for run in log.term_ranges()], default=1)
    except CorruptRecordError as error:  # below the checkpoint, where opening only takes samples
        _check_error(error)
        return
    term = max(term, int(log.hard_state.term))
    if term > 1 << 40:  # a damaged term that nothing contradicts
        return
    append(log, [b"one more"], term=term, now_ms=5000)
    files.kill()
    again = open_log(files)
    expect(again.last_index() == last + 1, "the next entry was lost", last=again.last_index(), was=last + 1)
    found = bytes(again.read(last + 1, last + 2, 1).data)[48:]
    expect(found == b"one more", "the next entry has other content", it=found)
