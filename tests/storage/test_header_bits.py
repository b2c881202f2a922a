"""Every bit of a committed record's header, and of its row in the index, below the checkpoint.

A header has no CRC of its own; the index row is its cross-check. After any flip the node either reports the damaged
record and changes nothing, or serves the same entries as before.
"""

from __future__ import annotations

import dataclasses

import pytest

from dledger_core.errors import CorruptRecordError
from dledger_core.record import HEADER, INDEX_RECORD_BYTES, segment_name
from dledger_core.storage import CommitLog, open_store
from tests.storage.sample import DATA, Sample
from tests.support.logs import SMALL, STORE, bodies_of, read_all

FIELDS = ("magic", "size", "index", "term", "position", "crc", "length")
INTACT = Sample.fill(
    dataclasses.replace(SMALL, data_segment_bytes=1024, index_segment_bytes=256),
    (([bytes([65 + n]) * 60] * 3, 1 + n // 7, b"\x80" if n % 5 == 0 else None) for n in range(14)),
)
"""Six data files and many index files, two terms, with control entries."""
FIRSTS = [index for index in range(1, INTACT.last) if INTACT.positions[index] % 1024 == 0]
PLACES = {
    "the first record, a control entry": 0,
    "inside a batch": 2,
    "the end of a batch": 3,
    "the first of a segment": FIRSTS[0],
    "the first of the last full segment": FIRSTS[-2],
    "the first of the last segment": FIRSTS[-1],
    "the first of a term": next(i for i, (term, _) in enumerate(INTACT.entries) if term == 2),
    "the last record": INTACT.last,
}


def entries(log: CommitLog) -> list[tuple[int, bytes]]:
    """Term and body of each entry; a row with too large a size makes a read end early, like a limit on bytes."""
    found: list[tuple[int, bytes]] = []
    while len(found) <= log.last_index():
        records = log.read(len(found), log.last_index() + 1, 1 << 30)
        found += zip(records.headers["term"].tolist(), bodies_of(records), strict=True)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("place", PLACES)
def test_flipped_bit_of_a_header_is_damage_with_its_place(place: str, field: str) -> None:
    index = PLACES[place]
    position = INTACT.positions[index]
    kind, begin = HEADER.fields[field][:2]
    store = INTACT.clone()
    for offset in range(begin, begin + kind.itemsize):
        for bit in range(8):
            store.record(index)[offset] ^= 1 << bit
            before = store.content()
            with pytest.raises(CorruptRecordError) as caught:
                store.open()
            found = (caught.value.where, caught.value.values)
            path = DATA / segment_name(position - position % 1024)
            assert found == (str(path), {"index": index, "position": position}), (offset, bit)
            assert store.content() == before, (offset, bit)
            if bit == 0:
                findings = {(f.kind, f.start, f.end, f.position) for f in store.findings()}
                assert ("CORRUPT", index, index + 1, position) in findings, (offset, bit, findings)
            store.record(index)[offset] ^= 1 << bit
    assert read_all(store.open()) == INTACT.entries


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_flipped_bit_of_a_row_is_corrected_or_reported(place: str) -> None:
    index = PLACES[place]
    store = INTACT.clone()
    names, whole = set(store.files.names), bytes(store.row(index))
    for offset in range(INDEX_RECORD_BYTES):
        for bit in range(8):
            store.row(index)[offset] ^= 1 << bit
            if offset < 4 or offset >= 24:  # magic or term: this store alone cannot decide which is right
                with pytest.raises(CorruptRecordError) as caught:
                    store.open()
                assert caught.value.values == {"index": index, "position": INTACT.positions[index]}, (offset, bit)
            else:
                log = store.open()
                assert entries(log) == INTACT.entries
                log.close()
            store.row(index)[:] = whole
            assert set(store.files.names) == names


@pytest.mark.parametrize("lost", ["none", "its row", "all rows"])
@pytest.mark.parametrize(
    "place", ["the first record, a control entry", "the first of a segment", "the first of the last segment"]
)
def test_wrong_index_in_a_first_record_creates_no_index_files(place: str, lost: str) -> None:
    index, store = PLACES[place], INTACT.clone()
    store.record(index)[10] ^= 1  # 2 ** 40 more
    rows = {"none": range(0), "its row": range(index, index + 1), "all rows": range(INTACT.last + 1)}[lost]
    for row in rows:
        store.row(row)[:] = bytes(INDEX_RECORD_BYTES)
    before = store.content()
    with pytest.raises(CorruptRecordError) as caught:
        store.open()
    assert caught.value.values == {"index": index, "position": INTACT.positions[index]}
    assert set(store.files.names) == set(INTACT.files.names)
    if lost != "all rows":  # rows of records that are known to be good are rebuilt
        assert store.content() == before


def test_reader_rejects_a_record_that_its_row_contradicts() -> None:
    index, store = PLACES["inside a batch"], INTACT.clone()
    store.record(index)[3] ^= 2  # data becomes membership
    with open_store(STORE, files=store.files) as reader, pytest.raises(CorruptRecordError) as caught:
        reader.read(0, 10)
    assert caught.value.values == {"index": index, "position": INTACT.positions[index]}
