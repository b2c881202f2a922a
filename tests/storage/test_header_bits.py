"""Every bit of a committed record's header, and of its row in the index, below the checkpoint.

A header has no CRC of its own; the index row is its cross-check. After any flip the node either reports the damaged
record and changes nothing, or serves the same entries as before.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from dledger_core.errors import CorruptRecordError
from dledger_core.record import HEADER, segment_name
from dledger_core.storage import CommitLog, open_store
from tests.support.faulty_files import FaultyFiles
from tests.support.logs import SMALL, STORE, append, bodies_of, open_log, read_all

CONFIG = dataclasses.replace(SMALL, data_segment_bytes=1024, index_segment_bytes=256)
FIELDS = ("magic", "size", "index", "term", "position", "crc", "length")
ROW_BYTES = 32


class Intact:
    """A closed store over six data files and many index files, two terms, with control entries."""

    def __init__(self) -> None:
        self.files = FaultyFiles()
        log = open_log(self.files, config=CONFIG)
        for number in range(14):
            control = b"\x80" if number % 5 == 0 else None
            append(log, [bytes([65 + number]) * 60] * 3, term=1 + number // 7, control=control)
        self.positions = [int(log.position_of(index)) for index in range(log.last_index() + 1)]
        self.entries = read_all(log)
        log.close(log.last_index())
        firsts = [
            self.positions.index(base) for base in range(1024, self.positions[-1], 1024) if base in self.positions
        ]
        self.places = {
            "the first record, a control entry": 0,
            "inside a batch": 2,
            "the end of a batch": 3,
            "the first of a segment": firsts[0],
            "the first of the last full segment": firsts[-2],
            "the first of the last segment": firsts[-1],
            "the first of a term": next(i for i, (term, _) in enumerate(self.entries) if term == 2),
            "the last record": len(self.positions) - 1,
        }


INTACT = Intact()


def data_of(files: FaultyFiles) -> dict[Path, bytes]:
    return {path: bytes(inode.content) for path, inode in files.names.items() if path.name != "lock"}


def start(files: FaultyFiles) -> CommitLog:
    """Open and check a store as a node does before it serves."""
    return open_log(files, config=CONFIG).checked()


def entries(log: CommitLog) -> list[tuple[int, bytes]]:
    """Term and body of each entry; a row with too large a size makes a read end early, like a limit on bytes."""
    found: list[tuple[int, bytes]] = []
    while len(found) <= log.last_index():
        records = log.read(len(found), log.last_index() + 1, 1 << 30)
        found += zip(records.headers["term"].tolist(), bodies_of(records), strict=True)
    return found


def flip(files: FaultyFiles, path: Path, offset: int, bit: int) -> None:
    files.content(path)[offset] ^= 1 << bit


@pytest.mark.slow
@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("place", INTACT.places)
def test_flipped_bit_of_a_header_is_damage_with_its_place(place: str, field: str) -> None:
    index = INTACT.places[place]
    position = INTACT.positions[index]
    path, kind, begin = STORE / "data" / segment_name(position - position % 1024), *HEADER.fields[field][:2]
    files = INTACT.files.clone()
    for offset in range(begin, begin + kind.itemsize):
        for bit in range(8):
            flip(files, path, position % 1024 + offset, bit)
            before = data_of(files)
            with pytest.raises(CorruptRecordError) as caught:
                start(files)
            found = (caught.value.where, caught.value.values)
            assert found == (str(path), {"index": index, "position": position}), (offset, bit)
            assert data_of(files) == before, (offset, bit)
            if bit == 0:
                with open_store(STORE, files=files) as reader:
                    findings = {(f.kind, f.start, f.end, f.position) for f in reader.verify().findings}
                assert ("CORRUPT", index, index + 1, position) in findings, (offset, bit, findings)
            flip(files, path, position % 1024 + offset, bit)
    log = start(files)
    assert read_all(log) == INTACT.entries
    log.close()


@pytest.mark.slow
@pytest.mark.parametrize("place", INTACT.places)
def test_flipped_bit_of_a_row_is_corrected_or_reported(place: str) -> None:
    index = INTACT.places[place]
    path, begin = STORE / "index" / segment_name(index * ROW_BYTES - index * ROW_BYTES % 256), index * ROW_BYTES % 256
    files = INTACT.files.clone()
    names = set(files.names)
    for offset in range(ROW_BYTES):
        for bit in range(8):
            flip(files, path, begin + offset, bit)
            if offset < 4 or offset >= 24:  # magic or term: this store alone cannot decide which is right
                with pytest.raises(CorruptRecordError) as caught:
                    start(files)
                assert caught.value.values == {"index": index, "position": INTACT.positions[index]}, (offset, bit)
                flip(files, path, begin + offset, bit)
            else:
                log = start(files)
                assert entries(log) == INTACT.entries
                log.close()
                files.content(path)[:] = INTACT.files.content(path)
            assert set(files.names) == names


def test_wrong_index_in_a_first_record_creates_no_index_files() -> None:
    for place in ("the first record, a control entry", "the first of a segment", "the first of the last segment"):
        index = INTACT.places[place]
        files = INTACT.files.clone()
        position = INTACT.positions[index]
        flip(files, STORE / "data" / segment_name(position), 10, 0)  # 2 ** 40 more
        for lost in ("none", "its row", "all rows"):
            copy = files.clone()
            rows = [path for path in copy.names if path.parent == STORE / "index"]
            if lost == "its row":
                at = index * ROW_BYTES
                copy.content(STORE / "index" / segment_name(at - at % 256))[at % 256 : at % 256 + 32] = bytes(32)
            for path in rows if lost == "all rows" else ():
                copy.content(path)[:] = bytes(256)
            before = data_of(copy)
            with pytest.raises(CorruptRecordError) as caught:
                start(copy)
            assert caught.value.values == {"index": index, "position": position}
            assert set(copy.names) == set(files.names)
            if lost != "all rows":  # rows of records that are known to be good are rebuilt
                assert data_of(copy) == before


def test_reader_rejects_a_record_that_its_row_contradicts() -> None:
    index = INTACT.places["inside a batch"]
    files = INTACT.files.clone()
    flip(files, STORE / "data" / segment_name(0), INTACT.positions[index] + 3, 1)  # data becomes membership
    with open_store(STORE, files=files) as reader, pytest.raises(CorruptRecordError) as caught:
        reader.read(0, 10)
    assert caught.value.values == {"index": index, "position": INTACT.positions[index]}
