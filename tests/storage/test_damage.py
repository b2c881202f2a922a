"""Damage of a store's files: the node's start, ``verify`` and ``read`` name file, position and remedy.

The store was closed cleanly, so its checkpoint covers every entry, and nothing may be truncated.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from dledger_core.errors import ConfigError, CorruptRecordError, DLedgerError, StoreMismatchError
from dledger_core.record import segment_name
from dledger_core.storage import CommitLog, open_store
from dledger_core.storage.files.file_system import OsFile, OsFiles
from tests.support.logs import append, open_log

FIRST, LAST = f"data/{segment_name(0)}", f"data/{segment_name(4096)}"
ROWS = f"index/{segment_name(0)}"
IDENTITY = "meta/log.json"
Damage = Callable[[Path], object]


@dataclass(frozen=True)
class Store:
    path: Path
    positions: list[int]


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """60 entries of 128 bytes in 12 batches of two terms over two files."""
    path = tmp_path_factory.mktemp("damage") / "dledger-n0"
    log = open_log(directory=path)
    for number in range(12):
        append(log, [bytes([65 + number]) * 80] * 5, term=1 + number // 6)
    positions = [int(log.position_of(i)) for i in range(60)]
    log.close(40)
    assert positions[31] == 4096
    return Store(path, positions)


@pytest.fixture
def store(intact: Store, tmp_path: Path) -> Store:
    shutil.copytree(intact.path, tmp_path / "dledger-n0")
    return Store(tmp_path / "dledger-n0", intact.positions)


def content(path: Path) -> dict[str, bytes | None]:
    """Every file but the lock."""
    found = {str(name.relative_to(path)): name.read_bytes() if name.is_file() else None for name in path.rglob("*")}
    found.pop("meta/lock", None)
    return found


def count(read: Callable[[int], int]) -> int:
    """Return the number of entries of consecutive reads."""
    begin = 0
    while begin < 60:
        begin += read(begin)
    return begin


def start(path: Path) -> CommitLog:
    """Open and check a store as a node does before it serves."""
    return open_log(directory=path).checked()


def flip(name: str, at: int) -> Damage:
    def damage(path: Path) -> None:
        data = bytearray((path / name).read_bytes())
        data[at] ^= 1
        (path / name).write_bytes(data)

    return damage


def wipe(name: str, start: int, stop: int) -> Damage:
    def damage(path: Path) -> None:
        data = bytearray((path / name).read_bytes())
        data[start:stop] = bytes(stop - start)
        (path / name).write_bytes(data)

    return damage


def shorten(name: str, size: int) -> Damage:
    return lambda path: os.truncate(path / name, size)


def remove(name: str) -> Damage:
    return lambda path: shutil.rmtree(path / name) if (path / name).is_dir() else (path / name).unlink()


def put(name: str, data: bytes) -> Damage:
    return lambda path: (path / name).write_bytes(data)


def swap(path: Path) -> None:
    (path / FIRST).rename(path / "aside")
    (path / LAST).rename(path / FIRST)
    (path / "aside").rename(path / LAST)


AT_10 = 10 * 128
AT_40 = 4096 + 9 * 128

DAMAGED = [
    # name, damage, file, position, entries
    ("a magic in the middle", flip(FIRST, AT_10 + 3), FIRST, AT_10, (10, 11)),
    ("a size in the middle", flip(FIRST, AT_10 + 6), FIRST, AT_10, (10, 11)),
    ("an index in the middle", flip(FIRST, AT_10 + 15), FIRST, AT_10, (10, 11)),
    ("an index below the others", flip(FIRST, AT_10 + 128 + 15), FIRST, AT_10 + 128, (11, 12)),
    ("an index at a file's end", flip(FIRST, 30 * 128 + 15), FIRST, 30 * 128, (30, 31)),
    ("a body in the middle", flip(FIRST, AT_10 + 60), FIRST, AT_10, (10, 11)),
    ("a body in the last file", flip(LAST, AT_40 - 4096 + 60), LAST, AT_40, (40, 41)),
    ("the first record", flip(FIRST, 3), FIRST, 0, (0, 1)),
    ("zeros in the middle", wipe(FIRST, AT_10, AT_10 + 3 * 128), FIRST, AT_10, (10, 13)),
    ("the first file zeroed", wipe(FIRST, 0, 4096), FIRST, 0, (0, 31)),
    ("the first file missing", remove(FIRST), FIRST, 0, (0, 31)),
    ("the first file too short", shorten(FIRST, 2000), FIRST, None, (15, 31)),
    ("the first file too long", shorten(FIRST, 5000), FIRST, None, None),
    ("the last file too long", shorten(LAST, 5000), LAST, None, None),
    ("two files swapped", swap, FIRST, 0, (0, 60)),
]


@pytest.mark.parametrize(
    ("damage", "file", "position", "entries"), [c[1:] for c in DAMAGED], ids=[c[0] for c in DAMAGED]
)
def test_start_rejects_damaged_records_with_file_and_position(
    store: Store, damage: Damage, file: str, position: int | None, entries: tuple[int, int] | None
) -> None:
    damage(store.path)
    before = content(store.path)
    with pytest.raises(CorruptRecordError) as caught:
        start(store.path)
    error = caught.value
    assert (error.where, error.exit_code) == (str(store.path / file), 4)
    assert position is None or error.values["position"] == position
    assert "position" in error.values
    assert error.remedy
    after = content(store.path)
    assert {name: after[name] for name in before if name.startswith("data/")} == {
        name: data for name, data in before.items() if name.startswith("data/")
    }
    with open_store(store.path) as reader:
        findings = [f for f in reader.verify().findings if f.kind == "CORRUPT"]
    assert str(store.path / file) in {f.path for f in findings}
    assert entries is None or entries in {(f.start, f.end) for f in findings}


@pytest.mark.parametrize(
    "damage",
    [remove(LAST), shorten(LAST, 0), wipe(LAST, 0, 4096), remove("data")],
    ids=["missing", "empty", "zeroed", "all missing"],
)
def test_start_rejects_a_log_without_its_durable_end(store: Store, damage: Damage) -> None:
    damage(store.path)
    with pytest.raises(CorruptRecordError) as caught:
        start(store.path)
    assert caught.value.where.startswith(str(store.path / "data"))
    with open_store(store.path) as reader:
        [finding] = reader.verify().findings
        assert (finding.kind, finding.end, reader.checkpoint_commit_index) == ("CORRUPT", 60, 40)


@pytest.mark.parametrize(
    ("damage", "where", "what", "kinds"),
    [
        pytest.param(put(IDENTITY, b'{"x'), IDENTITY, "malformed", None, id="identity cut"),
        pytest.param(put(IDENTITY, b"\xff\xfe\0"), IDENTITY, "malformed", None, id="identity of other bytes"),
        pytest.param(put(IDENTITY, b"[1]"), IDENTITY, "not a map", None, id="identity is not a map"),
        pytest.param(put(IDENTITY, b""), IDENTITY, "malformed", None, id="identity empty"),
        pytest.param(
            put(IDENTITY, b'{"format_version": 1}'), IDENTITY, "profile is missing", None, id="identity incomplete"
        ),
        pytest.param(
            put(IDENTITY, b'{"format_version": 9}'), IDENTITY, "version 9 is newer", None, id="identity newer"
        ),
        pytest.param(remove(IDENTITY), IDENTITY, "log.json", ["CORRUPT"], id="identity missing"),
        pytest.param(remove("meta"), IDENTITY, "log.json", ["CORRUPT"], id="meta missing"),
        pytest.param(put("data/notes.txt", b""), "data", "'notes.txt'", ["FOREIGN_FILE"], id="unexpected file"),
    ],
)
def test_start_rejects_a_store_without_a_valid_identity(
    store: Store, damage: Damage, where: str, what: str, kinds: list[str] | None
) -> None:
    damage(store.path)
    before = content(store.path)
    with pytest.raises(StoreMismatchError, match=what) as caught:
        start(store.path)
    assert (caught.value.where, caught.value.exit_code) == (str(store.path / where), 3)
    assert caught.value.remedy
    assert content(store.path) == before
    if kinds is None:
        with pytest.raises(StoreMismatchError, match=what):
            open_store(store.path)
    else:
        with open_store(store.path) as reader:
            assert [finding.kind for finding in reader.verify().findings] == kinds
            assert (reader.last_index, reader.identity_lost) == (59, kinds == ["CORRUPT"])
    assert content(store.path) == before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("format_version", None),
        ("format_version", "1"),
        ("profile", "Z"),
        ("group", 5),
        ("node_id", None),
        ("data_segment_bytes", 0),
        ("data_segment_bytes", True),
        ("index_segment_bytes", 33),
        ("first_position", -1),
        ("first_index", 1.5),
        ("log_uuid", 5),
        ("previous_term", "x"),
    ],
)
def test_identity_error_names_the_wrong_field(store: Store, name: str, value: object) -> None:
    path = store.path / IDENTITY
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    for look in (start, open_store):
        with pytest.raises(StoreMismatchError, match=f"malformed: {name}") as caught:
            look(store.path)
        assert caught.value.where == str(path)


def test_identity_rejects_every_damaged_byte(store: Store) -> None:
    path = store.path / IDENTITY
    whole = path.read_bytes()
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 1
        path.write_bytes(damaged)
        if b"crc32" not in damaged:
            assert open_store(store.path).last_index == 59
            continue
        with pytest.raises(StoreMismatchError) as caught:
            open_store(store.path)
        assert caught.value.where == str(path)


@pytest.mark.parametrize(
    "text",
    [b"hello", b"\xff\0", b"", b"currTerm=", b"currTerm=-1", b"currTerm=1", b"currTerm=" + b"9" * 5000, None],
    ids=lambda text: "missing" if text is None else repr(text[:12]),
)
def test_start_rejects_an_unusable_currterm(store: Store, text: bytes | None) -> None:
    path = store.path / "currterm"
    path.unlink()
    if text is not None:
        path.write_bytes(text)
    before = content(store.path)
    with pytest.raises(CorruptRecordError, match="currterm") as caught:
        start(store.path)
    assert caught.value.where == str(path)
    assert len(str(caught.value)) < 500
    assert content(store.path) == before
    with open_store(store.path) as reader:
        assert [(finding.kind, finding.path) for finding in reader.verify().findings] == [("CORRUPT", str(path))]


@pytest.mark.parametrize(
    "damage",
    [flip(ROWS, 5 * 32 + 6), shorten(ROWS, 100), remove(ROWS), remove("index"), put("meta/tables", b"\xff" * 40)],
    ids=["a row", "a short file", "a missing file", "all missing", "tables"],
)
def test_start_rebuilds_files_that_follow_from_the_data(store: Store, damage: Damage) -> None:
    damage(store.path)
    before = {name: data for name, data in content(store.path).items() if name.startswith("data/")}
    with open_store(store.path) as reader:
        assert {finding.severity for finding in reader.verify().findings} <= {"warning"}
        assert count(lambda begin: reader.read(begin, 60).num_rows) == 60
    log = start(store.path)
    assert count(lambda begin: log.read(begin, 60, 1 << 20).count) == 60
    log.close()
    after = {name: data for name, data in content(store.path).items() if name.startswith("data/")}
    assert after == before


@pytest.mark.parametrize("row", range(10, 15))
@pytest.mark.parametrize("max_bytes", [1, 300, 1 << 20])
def test_read_batches_returns_a_complete_batch_without_one_of_its_rows(store: Store, row: int, max_bytes: int) -> None:
    wipe(ROWS, row * 32, row * 32 + 32)(store.path)
    log = start(store.path)
    for index in range(10, 15):
        batch = log.read_batches(index, max_bytes)[0]
        assert (batch.first_index, batch.count) == (10, 5)
    log.close()


@pytest.mark.parametrize("name", ["data", "meta", IDENTITY, "currterm"])
def test_start_rejects_a_file_in_the_place_of_a_directory_and_vice_versa(store: Store, name: str) -> None:
    path = store.path / name
    if path.is_dir():
        shutil.rmtree(path)
        path.write_bytes(b"")
    else:
        path.unlink()
        path.mkdir()
    with pytest.raises((ConfigError, DLedgerError)) as caught:
        start(store.path)
    assert (caught.value.exit_code, caught.value.where) == (3, str(path))


def test_unreadable_file_is_not_reported_as_damaged(store: Store) -> None:
    class Locked(OsFiles):
        def open(self, path: Path, *, write: bool = False, create: bool = False) -> OsFile:
            if path.parent.name == "data":
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return super().open(path, write=write, create=create)

    with pytest.raises(ConfigError, match="Permission denied") as caught:
        open_log(Locked(), directory=store.path)
    assert (caught.value.where, caught.value.exit_code) == (str(store.path / FIRST), 3)
    with pytest.raises(PermissionError):
        open_store(store.path, files=Locked())


FOREIGN = [
    # files, name in the error
    ({"notes.txt": b"x"}, "'notes.txt'"),
    ({"data/notes.txt": b"x"}, "'data/notes.txt'"),
    ({FIRST: bytes(4096), "data/notes.txt": b"x"}, "'data/notes.txt'"),
    ({FIRST: b"PK\3\4" + bytes(4092)}, f"'{FIRST}'"),
    ({"meta/something": b"x"}, "'meta/something'"),
    ({"data/x": b"x", "meta/lock": b""}, "'meta/lock'"),
    ({FIRST: bytes(4096), ROWS: bytes(1024), "currterm": b""}, "Java"),
    ({FIRST: b"\0\0\0\1" + bytes(4092), "checkpoint": b""}, "Java"),
    ({FIRST: b"\xff\xff\xff\xff" + bytes(4092)}, "Java"),
    ({FIRST: b"\0\0\0\2" + bytes(36) + b"\1" * 4 + bytes(400)}, "log.json"),
    ({"data/x": b"x", "meta/checkpoint": b""}, "log.json"),
]


@pytest.mark.parametrize(("files", "word"), FOREIGN, ids=[f"{at} {word[:20]}" for at, (_, word) in enumerate(FOREIGN)])
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


def test_open_store_rejects_a_directory_of_other_files(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "notes.txt").write_bytes(b"x")
    with pytest.raises(StoreMismatchError, match="notes"):
        open_store(tmp_path)
