"""Damage of a store's files: the node's start, ``verify`` and ``read`` report it with file, position and remedy.

The store was closed cleanly, so its checkpoint covers every entry, and nothing may be truncated. A header has no CRC of
its own; the index row is its cross-check. After any flipped bit of the two the node either reports the damaged record
and changes nothing, or serves the same entries as before.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import shutil
from pathlib import Path

import pytest

from dledger_core.errors import ConfigError, CorruptRecordError, DLedgerError, StoreMismatchError
from dledger_core.record import HEADER, INDEX_RECORD_BYTES, segment_name
from dledger_core.storage import CommitLog, open_store
from dledger_core.storage.files.ab_file import copies
from dledger_core.storage.files.file_system import OsFile, OsFiles
from tests.storage.damage import CASES, FILES, INTACT, LAST, Damage, flip, flip_row, lose, put, resize
from tests.storage.sample import DATA, INDEX, META, Sample
from tests.support.logs import SMALL, STORE, append, bodies_of, open_log, read_all

ROWS = INDEX / segment_name(0)
IDENTITY, HARD_STATE = META / "log.json", META / "hard-state"


@pytest.fixture
def store() -> Sample:
    return INTACT.clone()


@pytest.mark.parametrize("case", CASES)
def test_start_rejects_damaged_records_with_file_and_position(store: Sample, case: str) -> None:
    CASES[case].damage(store)
    found = store.findings()
    assert [(finding.kind, finding.start, finding.end) for finding in found] == CASES[case].found
    assert all(finding.severity == "error" for finding in found if finding.kind != "INDEX_MISMATCH")
    if DATA in store.files.directories:
        assert open_store(STORE, files=store.files).checkpoint_commit_index == LAST
    before = store.content(DATA)
    with pytest.raises(CorruptRecordError) as caught:
        store.open()
    error = caught.value
    path, position = CASES[case].named()
    assert (error.where, error.values.get("position"), error.exit_code) == (str(path), position, 4)
    assert error.remedy
    assert store.content(DATA) == before


def test_read_and_verify_report_the_same_place(store: Sample) -> None:
    flip((40, 60))(store)
    [finding] = store.findings()
    assert (finding.path, finding.position) == (str(FILES[1]), store.positions[40])
    with open_store(STORE, files=store.files) as reader:
        with pytest.raises(CorruptRecordError) as caught:
            reader.read(30, 50)
        place = {"index": 40, "position": store.positions[40]}
        assert (caught.value.where, caught.value.values) == (str(FILES[1]), place)
        assert reader.read(41, 60).num_rows == 19


def test_verify_reports_a_torn_tail_as_a_warning(store: Sample) -> None:
    log = open_log(store.files)
    append(log, [b"z" * 80] * 2, term=3)
    store.at(store.positions[-1] + 128)[60] ^= 1
    with open_store(STORE, files=store.files) as reader:
        assert (reader.last_index, reader.commit_index) == (LAST, LAST)
    assert [(found.kind, found.start, found.end, found.severity) for found in store.findings()] == [
        ("TORN_TAIL", LAST + 1, LAST + 2, "warning")
    ]


@pytest.mark.parametrize(
    ("damage", "kinds"),
    [
        pytest.param(lambda _: None, set(), id="none"),
        pytest.param(flip_row(5, 6), {"INDEX_MISMATCH"}, id="row"),
        pytest.param(resize(ROWS, 100), {"INDEX_MISMATCH"}, id="short file"),
        pytest.param(lose(ROWS), {"INDEX_MISMATCH"}, id="missing file"),
        pytest.param(lose(INDEX), {"INDEX_MISMATCH"}, id="all missing"),
        pytest.param(put(META / "tables", b"\xff" * 40), set(), id="tables"),
    ],
)
def test_start_rebuilds_files_that_follow_from_the_data(store: Sample, damage: Damage, kinds: set[str]) -> None:
    damage(store)
    assert {(finding.kind, finding.severity) for finding in store.findings()} == {(kind, "warning") for kind in kinds}
    with open_store(STORE, files=store.files) as reader:
        begin = 0
        while begin <= LAST:  # rows with wrong sizes make reads end early
            begin += reader.read(begin, LAST + 1).num_rows
        assert begin == LAST + 1
    before = store.content(DATA)
    log = store.open()
    assert read_all(log) == store.entries
    log.close()
    assert store.content(DATA) == before


@pytest.mark.parametrize("row", range(9, 13))
@pytest.mark.parametrize("max_bytes", [1, 300, 1 << 20])
def test_read_batches_returns_a_complete_batch_without_one_of_its_rows(store: Sample, row: int, max_bytes: int) -> None:
    store.row(row)[:] = bytes(32)
    log = store.open()
    for index in range(9, 13):
        batch = log.read_batches(index, max_bytes)[0]
        assert (batch.first_index, batch.count) == (9, 4)


# --- identity and hard state ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "where", "kinds"),
    [
        pytest.param(lose(IDENTITY), IDENTITY, ["CORRUPT"], id="identity missing"),
        pytest.param(lose(META), IDENTITY, ["CORRUPT"], id="meta missing"),
        pytest.param(put(DATA / "notes.txt", b""), DATA, ["FOREIGN_FILE"], id="unexpected file"),
    ],
)
def test_start_rejects_a_store_that_open_store_reads(
    store: Sample, damage: Damage, where: Path, kinds: list[str]
) -> None:
    damage(store)
    before = store.content()
    with pytest.raises(StoreMismatchError) as caught:
        store.open()
    assert (caught.value.where, caught.value.exit_code) == (str(where), 3)
    assert store.content() == before
    assert [finding.kind for finding in store.findings()] == kinds
    with open_store(STORE, files=store.files) as reader:
        assert (reader.last_index, reader.identity_lost) == (LAST, kinds == ["CORRUPT"])


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b'{"x', "malformed"),
        (b"\xff\xfe\0", "malformed"),
        (b"[1]", "malformed"),
        (b"", "malformed"),
        (b'{"format_version": 1}', "profile is missing"),
        (b'{"format_version": 9}', "version 9"),
        ({"format_version": None}, "format_version"),
        ({"format_version": "1"}, "format_version"),
        ({"profile": "Z"}, "profile"),
        ({"group": 5}, "group"),
        ({"node_id": None}, "node_id"),
        ({"data_segment_bytes": 0}, "data_segment_bytes"),
        ({"data_segment_bytes": True}, "data_segment_bytes"),
        ({"index_segment_bytes": 33}, "index_segment_bytes"),
        ({"first_position": -1}, "first_position"),
        ({"first_index": 1.5}, "first_index"),
        ({"log_uuid": 5}, "log_uuid"),
        ({"previous_term": "x"}, "previous_term"),
    ],
    ids=str,
)
def test_store_with_a_malformed_identity_is_rejected(store: Sample, data: bytes | dict[str, object], word: str) -> None:
    if isinstance(data, dict):
        data = json.dumps(json.loads(store.files.content(IDENTITY)) | data).encode()
    put(IDENTITY, data)(store)
    before = store.content()
    for look in (store.open, lambda: open_store(STORE, files=store.files)):
        with pytest.raises(StoreMismatchError, match=word) as caught:
            look()
        assert (caught.value.where, caught.value.exit_code) == (str(IDENTITY), 3)
        assert caught.value.remedy
    assert store.content() == before


def test_identity_rejects_every_damaged_byte(store: Sample) -> None:
    content = store.files.content(IDENTITY)
    for at in range(len(content)):
        content[at] ^= 1
        if b"crc32" not in content:
            assert open_store(STORE, files=store.files).last_index == LAST
        else:
            with pytest.raises(StoreMismatchError) as caught:
                open_store(STORE, files=store.files)
            assert caught.value.where == str(IDENTITY)
        content[at] ^= 1


@pytest.mark.parametrize(
    "text",
    [b"hello", b"\xff\0", b"", b"{}", b'{"term": -1}', b'{"term": ' + b"9" * 5000 + b"}", None],
    ids=lambda text: "missing" if text is None else repr(text[:12]),
)
def test_start_rejects_an_unusable_hard_state(store: Sample, text: bytes | None) -> None:
    for path in copies(HARD_STATE):
        (lose(path) if text is None else put(path, text))(store)
    before = store.content()
    with pytest.raises(CorruptRecordError) as caught:
        store.open()
    assert caught.value.where == str(HARD_STATE)
    assert len(str(caught.value)) < 500
    assert store.content() == before
    assert [(finding.kind, finding.path) for finding in store.findings()] == [("CORRUPT", str(HARD_STATE))]


# --- directories ----------------------------------------------------------------------------------------------------


def content(path: Path) -> dict[str, bytes | None]:
    return {str(name.relative_to(path)): name.read_bytes() if name.is_file() else None for name in path.rglob("*")}


@pytest.mark.parametrize("name", ["data", "meta", "meta/log.json", "meta/hard-state"])
def test_start_rejects_a_file_in_the_place_of_a_directory_and_vice_versa(tmp_path: Path, name: str) -> None:
    append(log := open_log(directory=tmp_path), [b"a"])
    log.close()
    path = tmp_path / name
    if path.is_dir():
        shutil.rmtree(path)
        path.write_bytes(b"")
    else:
        path.unlink()
        path.mkdir()
    with pytest.raises(DLedgerError) as caught:
        open_log(directory=tmp_path)
    assert (caught.value.exit_code, caught.value.where) == (3, str(path))


def test_unreadable_file_is_not_reported_as_damaged(tmp_path: Path) -> None:
    class Locked(OsFiles):
        def open(self, path: Path, *, write: bool = False, create: bool = False) -> OsFile:
            if path.parent.name == "data":
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return super().open(path, write=write, create=create)

    append(log := open_log(directory=tmp_path), [b"a"])
    log.close()
    with pytest.raises(ConfigError) as caught:
        open_log(Locked(), directory=tmp_path)
    assert (caught.value.where, caught.value.exit_code) == (str(tmp_path / "data" / segment_name(0)), 3)
    with pytest.raises(PermissionError):
        open_store(tmp_path, files=Locked())


DATA_0, INDEX_0 = f"data/{segment_name(0)}", f"index/{segment_name(0)}"


@pytest.mark.parametrize(
    ("files", "word"),
    [
        ({"notes.txt": b"x"}, "'notes.txt'"),
        ({"data/notes.txt": b"x"}, "'data/notes.txt'"),
        ({DATA_0: bytes(4096), "data/notes.txt": b"x"}, "'data/notes.txt'"),
        ({DATA_0: b"PK\3\4" + bytes(4092)}, f"'{DATA_0}'"),
        ({"meta/something": b"x"}, "'meta/something'"),
        ({"data/x": b"x", "meta/lock": b""}, "'meta/lock'"),
        ({DATA_0: bytes(4096), INDEX_0: bytes(1024), "currterm": b""}, "Java"),
        ({DATA_0: b"\0\0\0\1" + bytes(4092), "checkpoint": b""}, "Java"),
        ({DATA_0: b"\xff\xff\xff\xff" + bytes(4092)}, "Java"),
        ({DATA_0: b"\0\0\0\2" + bytes(36) + b"\1" * 4 + bytes(400)}, "log.json"),
        ({"data/x": b"x", "meta/checkpoint": b""}, "log.json"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_open_rejects_foreign_directory_and_leaves_it_unchanged(
    tmp_path: Path, files: dict[str, bytes], word: str
) -> None:
    for name, data in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    before = content(tmp_path)
    with pytest.raises(StoreMismatchError, match=word) as caught:
        open_log(directory=tmp_path)
    assert caught.value.where.startswith(str(tmp_path))
    assert content(tmp_path) == before


@pytest.mark.parametrize("names", [[], ["index/x"], ["data.txt/x"], ["data/notes.txt"]], ids=str)
def test_open_store_rejects_a_directory_without_data_files(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(StoreMismatchError) as caught:
        open_store(tmp_path)
    assert (caught.value.where, caught.value.exit_code) == (str(tmp_path), 3)


# --- every bit ------------------------------------------------------------------------------------------------------

FIELDS = ("magic", "size", "index", "term", "position", "crc", "length")
BITS = Sample.fill(
    dataclasses.replace(SMALL, data_segment_bytes=1024, index_segment_bytes=256),
    (([bytes([65 + n]) * 60] * 3, 1 + n // 7, b"\x80" if n % 5 == 0 else None) for n in range(14)),
)
"""Six data files and many index files, two terms, with control entries."""
FIRSTS = [index for index in range(1, BITS.last) if BITS.positions[index] % 1024 == 0]
BIT_PLACES = {
    "the first record, a control entry": 0,
    "inside a batch": 2,
    "the end of a batch": 3,
    "the first of a segment": FIRSTS[0],
    "the first of the last full segment": FIRSTS[-2],
    "the first of the last segment": FIRSTS[-1],
    "the first of a term": next(i for i, (term, _) in enumerate(BITS.entries) if term == 2),
    "the last record": BITS.last,
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
@pytest.mark.parametrize("place", BIT_PLACES)
def test_flipped_bit_of_a_header_is_damage_with_its_place(place: str, field: str) -> None:
    index = BIT_PLACES[place]
    position = BITS.positions[index]
    kind, begin = HEADER.fields[field][:2]
    store = BITS.clone()
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
    assert read_all(store.open()) == BITS.entries


@pytest.mark.slow
@pytest.mark.parametrize("place", BIT_PLACES)
def test_flipped_bit_of_a_row_is_corrected_or_reported(place: str) -> None:
    index = BIT_PLACES[place]
    store = BITS.clone()
    names, whole = set(store.files.names), bytes(store.row(index))
    for offset in range(INDEX_RECORD_BYTES):
        for bit in range(8):
            store.row(index)[offset] ^= 1 << bit
            if offset < 4 or offset >= 24:  # magic or term: this store alone cannot decide which is right
                with pytest.raises(CorruptRecordError) as caught:
                    store.open()
                assert caught.value.values == {"index": index, "position": BITS.positions[index]}, (offset, bit)
            else:
                log = store.open()
                assert entries(log) == BITS.entries
                log.close()
            store.row(index)[:] = whole
            assert set(store.files.names) == names


@pytest.mark.parametrize("lost", ["none", "its row", "all rows"])
@pytest.mark.parametrize(
    "place", ["the first record, a control entry", "the first of a segment", "the first of the last segment"]
)
def test_wrong_index_in_a_first_record_creates_no_index_files(place: str, lost: str) -> None:
    index, store = BIT_PLACES[place], BITS.clone()
    store.record(index)[10] ^= 1  # 2 ** 40 more
    rows = {"none": range(0), "its row": range(index, index + 1), "all rows": range(BITS.last + 1)}[lost]
    for row in rows:
        store.row(row)[:] = bytes(INDEX_RECORD_BYTES)
    before = store.content()
    with pytest.raises(CorruptRecordError) as caught:
        store.open()
    assert caught.value.values == {"index": index, "position": BITS.positions[index]}
    assert set(store.files.names) == set(BITS.files.names)
    if lost != "all rows":  # rows of records that are known to be good are rebuilt
        assert store.content() == before


def test_reader_rejects_a_record_that_its_row_contradicts() -> None:
    index, store = BIT_PLACES["inside a batch"], BITS.clone()
    store.record(index)[3] ^= 2  # data becomes membership
    with open_store(STORE, files=store.files) as reader, pytest.raises(CorruptRecordError) as caught:
        reader.read(0, 10)
    assert caught.value.values == {"index": index, "position": BITS.positions[index]}
