"""One data file and one index file of any content: the result of the scanner, against a scan record by record."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

from dledger_core.errors import DLedgerError
from dledger_core.record import segment_name
from dledger_core.storage.check.judge import Rules, ScanCursor
from dledger_core.storage.check.scan import Scanner
from dledger_core.storage.files.index_file import IndexFile, term_ranges
from dledger_core.storage.files.segments import Segments
from dledger_core.storage.read.record_reader import RecordReader
from tests.fuzz.counted_files import CountedFiles
from tests.fuzz.finding import expect, memory_below
from tests.support.logs import STORE

SEGMENT_BYTES = 1024
SEGMENTS = 2
FIXED_BYTES = 24 << 20
"""The scanner reads ahead by up to the largest record."""
RULES = (
    Rules(marked_from=0),
    Rules(marked_from=2),
    Rules(blank="jump"),
    Rules(position_checked=False, blank="skip"),
)


@dataclass(frozen=True)
class Found:
    """A record: where it lies and its fields."""

    index: int
    term: int
    position: int
    body: bytes


def _files(data: bytes, rows: bytes) -> tuple[Segments, IndexFile]:
    files = CountedFiles()
    for folder, content, count in (("data", data, SEGMENTS), ("index", rows, 1)):
        files.mkdir(STORE / folder)
        for base in range(0, count * SEGMENT_BYTES, SEGMENT_BYTES):
            files.replace(STORE / folder / segment_name(base), content[base : base + SEGMENT_BYTES])
    load = Segments.load
    return load(files, STORE / "data", SEGMENT_BYTES), IndexFile(load(files, STORE / "index", SEGMENT_BYTES))


def _scan(data: bytes, rows: bytes, rules: Rules, cursor: ScanCursor) -> tuple[list[Found], tuple[object, ...]]:
    segments, index = _files(data, rows)
    scanner, found = Scanner(segments, index, rules, cursor), []
    for run in scanner.blocks():
        headers, at = run.records.headers, 0
        for number, size in enumerate(run.records.sizes.tolist()):
            fields = int(headers["index"][number]), int(headers["term"][number]), int(run.positions[number])
            found.append(Found(*fields, bytes(memoryview(run.records.data)[at + 48 : at + size])))
            at += size
        expect(len(found) * 48 <= SEGMENTS * SEGMENT_BYTES, "more records than bytes")
    stop = scanner.stop
    expect(stop is not None, "a scan without an end")
    return found, (stop.fault, stop.cursor)


def _slow(data: bytes, rules: Rules) -> list[Found]:
    """The valid records from the start of the data on."""
    data = b"".join(
        data[base : base + SEGMENT_BYTES].ljust(SEGMENT_BYTES, b"\0")
        for base in range(0, SEGMENTS * SEGMENT_BYTES, SEGMENT_BYTES)
    )
    found: list[Found] = []
    at, index, term = 0, None, 0
    while at < len(data):
        left = SEGMENT_BYTES - at % SEGMENT_BYTES
        magic, size = struct.unpack_from(">ii", data, at) if left >= 8 else (0, 0)
        if magic == -1:
            if rules.blank == "jump" or size == left:
                at += left
            elif rules.blank == "skip" and 8 <= size < left:
                at += size
            else:
                break
            continue
        if not (1 <= magic <= 3 and 48 <= size <= left):
            break
        _, _, own, own_term, position, mark, crc, length = struct.unpack_from(">iiqqqQIi", data, at)
        body = data[at + 48 : at + size]
        timed = mark & (1 << 48) - 1
        good = (
            (length == size - 48 and own >= 0 and own_term >= term)
            and (position == at or not rules.position_checked)
            and (rules.marked_from is None or bool(timed) or own < rules.marked_from)
            and (index is None or own == index)
            and (zlib.crc32(body) == crc or (mark == 0 and crc == 0))
        )
        if not good:
            break
        found.append(Found(own, own_term, at, body))
        at, index, term = at + size, own + 1, own_term
    return found


def run_scan(data: bytes) -> None:
    """Input: u8 rules, then the data files, then the index file, each of its full size or less."""
    rules, rest = RULES[(data[:1] or b"\0")[0] % len(RULES)], data[1:]
    split = SEGMENTS * SEGMENT_BYTES
    content, rows = rest[:split], rest[split : split + SEGMENT_BYTES]
    with memory_below(FIXED_BYTES):
        found, stop = _scan(content, rows, rules, ScanCursor(0))
    slow = _slow(content, rules)
    expect(found == slow, "other records than one by one", found=found, slow=slow, stop=stop)
    if not found:
        return
    at_head = ScanCursor(0, found[0].index)
    hinted = _scan(content, rows, rules, at_head)
    expect(hinted == _scan(content, b"", rules, at_head), "the index changes what the data holds", hinted=hinted)
    expect(hinted[0] == found, "a known index changes the result", hinted=hinted, found=found)
    with memory_below(FIXED_BYTES):
        _read(content, rows, rules, found)


def _read(content: bytes, rows: bytes, rules: Rules, found: list[Found]) -> None:
    """Reads each record by its index: the right one, or an error, whatever the index says."""
    segments, index = _files(content, rows)
    reader = RecordReader(segments, index, rules)
    first, last = found[0].index, found[-1].index
    for record in found:
        try:
            got = reader.read(record.index, record.index + 1, 1)
        except DLedgerError as error:
            expect(bool(error.where and error.remedy), "the error does not say where", it=error)
            continue
        expect(got.count == 1, "not one record", count=got.count)
        # A wrong row may lead to another intact record that has this index and position.
        elsewhere = int(got.headers["position"][0]) != record.position
        same = bytes(memoryview(got.data)[48:]) == record.body
        expect(same or elsewhere or not rules.position_checked, "another record than asked for", index=record.index)
    if all(record.term == found[0].term for record in found) and not any(rows):
        try:
            runs = term_ranges(reader.term_at, first, last)
        except DLedgerError as error:  # after the log's end some bytes look like the start of a segment
            expect(bool(error.where), "the error does not say where", it=error)
            return
        expect([(run.first_index, run.term) for run in runs] == [(first, found[0].term)], "other terms", runs=runs)
