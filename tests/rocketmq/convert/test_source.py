"""Sources are recognized, their faults are reported, and they are never written to."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dledger_core.config import RECORD_BYTES_MAX
from dledger_core.errors import ConfigError, CorruptRecordError, DLedgerError, StoreBusyError, StoreMismatchError
from dledger_core.record import HEADER_BYTES
from dledger_core.rocketmq import encode_messages, open_log_directory
from dledger_core.rocketmq.convert.source import open_source
from dledger_core.rocketmq.store.commit_log import scan_records
from dledger_core.storage import CommitLog, open_store
from dledger_core.storage.files.file_system import OsFiles
from dledger_core.storage.files.log_info import load_log_meta, save_log_meta
from tests.jobs.broker_store import write_broker_store, write_commitlog
from tests.rocketmq.convert.stores import converted, entries, manifest, snapshot, store_of, unpacked
from tests.rocketmq.golden import MIXED, THREE, extract
from tests.support.only_reading import only_reading


def test_open_source_recognizes_kinds(tmp_path: Path) -> None:
    classic = extract(MIXED, "n0/commitlog", tmp_path)
    store = extract(MIXED, "n0/dledger-n0", tmp_path)
    three, _ = store_of(unpacked("dledger-0.4.0-three", tmp_path), "n1")
    converted(three, tmp_path / "dledger-n0")
    found = {
        open_source(path, commitlog).kind: path
        for path, commitlog in (
            (classic, None),
            (store, None),
            (store, classic),
            (three, None),
            (tmp_path / "dledger-n0", None),
        )
    }
    assert list(found) == ["classic", "java-a", "mixed", "java-b", "dledger"]
    assert open_source(store.parent).kind == "mixed"
    shutil.rmtree(classic)
    assert open_source(store.parent).kind == "java-a"


def test_open_source_rejects_other_paths(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "file", tmp_path / "nothing", tmp_path / "empty"):
        with pytest.raises(StoreMismatchError):
            open_source(path)
    for node in ("n0", "n1"):
        (tmp_path / "two" / f"dledger-{node}" / "data").mkdir(parents=True)
    with pytest.raises(StoreMismatchError):
        open_source(tmp_path / "two")
    with pytest.raises(StoreMismatchError):
        open_source(tmp_path / "empty", tmp_path / "empty")


def test_open_source_rejects_store_of_other_commitlog(tmp_path: Path) -> None:
    classic = extract(MIXED, "n0/commitlog", tmp_path)
    other = extract(THREE, "n0/dledger-n0", tmp_path)
    with pytest.raises(StoreMismatchError):
        open_source(other, classic)


def test_convert_rejects_store_of_running_node(tmp_path: Path) -> None:
    log = CommitLog.open(tmp_path / "dledger-n0", group="g", node_id="n0")
    before = snapshot(tmp_path / "dledger-n0")
    with pytest.raises(StoreBusyError):
        converted(tmp_path / "dledger-n0", tmp_path / "new")
    assert snapshot(tmp_path / "dledger-n0") == before
    log.close()
    converted(tmp_path / "dledger-n0", tmp_path / "new")


def test_convert_rejects_store_of_running_broker(tmp_path: Path) -> None:
    """A broker locks the first byte of its file ``lock`` while it runs, as Java's FileChannel.tryLock does."""
    store = extract(MIXED, "n0/dledger-n0", tmp_path)
    extract(MIXED, "n0/commitlog", tmp_path)
    lock = store.parent / "lock"
    lock.write_bytes(b"lock")
    code = (
        "import fcntl, sys; file = open(sys.argv[1], 'r+b'); fcntl.lockf(file, fcntl.LOCK_EX, 1)\n"
        "print('locked', flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as broker:
        assert broker.stdout is not None
        assert broker.stdout.readline() == "locked\n"
        for source in (store, store.parent, store.parent / "commitlog"):
            for dry_run in (True, False):
                with pytest.raises(StoreBusyError):
                    converted(source, tmp_path / "new", dry_run=dry_run)
        broker.communicate("\n")
    assert not (tmp_path / "new").exists()
    assert converted(store.parent, tmp_path / "new").entries == 588


@pytest.mark.slow
@pytest.mark.parametrize("what", ["commitlog", "mixed", "java-a", "java-b", "dledger"])
def test_source_is_opened_for_reading_only(tmp_path: Path, what: str) -> None:
    folder = tmp_path / "from"
    if what in ("commitlog", "mixed"):
        source = extract(MIXED, "n0/commitlog", folder)
        extract(MIXED, "n0/dledger-n0", folder)
        source = source if what == "commitlog" else source.parent
    else:
        version = {"java-b": "0.4.0"}.get(what, "0.3.1.2")
        source = store_of(unpacked(f"dledger-{version}-rejoined", folder), "")[0]
        if what == "dledger":
            converted(source, folder / "ours", self_id="n0")
            source = folder / "ours"
    before = snapshot(folder)
    with only_reading(folder):
        for profile in ("A", "B"):
            assert converted(source, tmp_path / "dry", profile=profile, dry_run=True).entries > 0
            assert converted(source, tmp_path / profile, profile=profile).entries > 0
    assert snapshot(folder) == before
    with pytest.raises(AssertionError, match=r"open .*data"), only_reading(tmp_path / "A"):  # the proof would fail
        (tmp_path / "A" / "data" / "x").write_bytes(b"")


@pytest.mark.parametrize(
    ("files", "term", "vote"),
    [
        ({"currterm": "currTerm=9\nvoteLeader=n2\n"}, 9, "n2"),
        ({"currterm": "", "currterm.tmp": "currTerm=7\nvoteLeader=n1\n"}, 7, None),
        ({"currterm.bak": "currTerm=5\nvoteLeader=n1\n"}, 5, "n1"),
        ({"currterm": "currTerm=1\nvoteLeader=n1\n"}, 3, None),
        ({}, 3, None),
    ],
)
def test_source_term_is_highest_recorded_term(
    tmp_path: Path, files: dict[str, str], term: int, vote: str | None
) -> None:
    """Java can lose currterm in a crash; our node campaigns above whatever is left, so no vote is given twice."""
    source, _ = store_of(unpacked("dledger-0.3.1.2-three", tmp_path), "n0")
    for path in source.glob("currterm*"):
        path.unlink()
    for name, text in files.items():
        (source / name).write_text(text)
    state = open_source(source).hard_state
    assert (state.term, state.voted_for) == (term, vote)


def test_damaged_store_is_named_and_not_published(tmp_path: Path) -> None:
    source, _ = store_of(unpacked("dledger-0.3.1.2-single", tmp_path), "n0")
    first = min((source / "data").iterdir())
    content = bytearray(first.read_bytes())
    struct.pack_into(">i", content, 4, 7)
    first.write_bytes(content)
    before = snapshot(source)
    with pytest.raises(CorruptRecordError) as caught:
        converted(source, tmp_path / "new")
    assert str(first) in caught.value.where
    assert snapshot(source) == before
    with pytest.raises(DLedgerError):
        open_store(tmp_path / "new")


@pytest.mark.parametrize(
    ("at", "field"), [(at, field) for at in (0, 100, 266) for field in (0, 8, 16) if (at, field) != (266, 16)]
)
def test_damage_that_looks_like_end_is_rejected(tmp_path: Path, at: int, field: int) -> None:
    """Java's recovery would cut everything from there on; a copy must not lose entries without notice."""
    source, _ = store_of(unpacked("dledger-0.3.1.2-three", tmp_path), "n0")
    with open_store(source) as reader:
        position = int(reader.records(at, at + 1, 1).headers["position"][0])
    path = source / "data" / f"{position // 65536 * 65536:020d}"
    content = bytearray(path.read_bytes())
    content[position % 65536 + field] ^= 0x40
    path.write_bytes(content)
    with pytest.raises(CorruptRecordError) as caught:
        converted(source, tmp_path / "new", dry_run=True)
    assert field == 8 or caught.value.values.get("start", caught.value.values.get("index")) == at
    if (at, field) == (266, 0):
        report = converted(source, tmp_path / "new", cut_tail=True)
        assert report.last_index == 265
        assert any("dropped" in note for note in report.notes)


def test_term_that_differs_from_index_is_noted(tmp_path: Path) -> None:
    source, _ = store_of(unpacked("dledger-0.3.1.2-three", tmp_path), "n0")
    with open_store(source) as reader:
        position = int(reader.records(266, 267, 1).headers["position"][0])
    path = source / "data" / f"{position // 65536 * 65536:020d}"
    content = bytearray(path.read_bytes())
    content[position % 65536 + 23] ^= 0x40
    path.write_bytes(content)
    report = converted(source, tmp_path / "new")
    assert any("266" in note and "index" in note for note in report.notes)


@pytest.mark.parametrize("damage", ["body", "magic", "gap", "size"])
def test_damaged_commitlog_is_rejected(tmp_path: Path, damage: str) -> None:
    classic = extract(MIXED, "n0/commitlog", tmp_path)
    first, second = sorted(classic.iterdir())
    content = bytearray(first.read_bytes())
    size = struct.unpack_from(">i", content)[0]
    if damage == "body":
        content[size + 90] ^= 1
    elif damage == "magic":
        content[size + 4] ^= 1
    elif damage == "size":
        content[:4] = struct.pack(">i", size + 1)
    first.write_bytes(content)
    if damage == "gap":
        second.rename(second.with_name(f"{262144:020d}"))
    before = snapshot(classic)
    with pytest.raises((CorruptRecordError, ConfigError)) as caught:
        converted(classic, tmp_path / "new")
    assert str(classic) in str(caught.value)
    assert snapshot(classic) == before


def test_commitlog_truncated_inside_message_is_rejected(tmp_path: Path) -> None:
    classic = extract(MIXED, "n0/commitlog", tmp_path)
    last = max(classic.iterdir())
    content = last.read_bytes()
    sizes = struct.unpack_from(">i", content)[0]
    last.write_bytes(content[: sizes + 40])
    with pytest.raises(CorruptRecordError):
        converted(classic, tmp_path / "new")


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize("inside", [0, 60])
def test_lost_messages_before_store_are_rejected(tmp_path: Path, inside: int, dry_run: bool) -> None:
    """RocketMQ closes the last file with a BLANK before an upgrade to DLedger, so zeros there are lost messages."""
    classic, store = extract(MIXED, "n0/commitlog", tmp_path), extract(MIXED, "n0/dledger-n0", tmp_path)
    last = max(classic.iterdir())
    content = bytearray(last.read_bytes())
    [*_, (begin, _)] = scan_records(content)
    last.write_bytes(content[: begin + inside] + bytes(len(content) - begin - inside))
    with pytest.raises(CorruptRecordError) as caught:
        converted(store.parent, tmp_path / "new", dry_run=dry_run)
    assert caught.value.where == str(last)
    assert caught.value.values == {"position": int(last.name) + begin}
    assert converted(classic, tmp_path / "alone", dry_run=True).entries > 0, "without a store it is the log's end"
    assert not (tmp_path / "new" / "g" / "dledger-n0" / "meta" / "log.json").exists()


@pytest.mark.parametrize("name", ["dledger-0.3.1.2-single", "dledger-0.4.0-single"])
@pytest.mark.parametrize("left", [0, 1, 20, 48, 100, 600, 65535])
def test_truncated_last_file_is_damage(tmp_path: Path, name: str, left: int) -> None:
    """Java rejects such a store; zeros after the rest would look like the end of a body, which has no CRC."""
    source, _ = store_of(unpacked(name, tmp_path), "")
    os.truncate(max((source / "data").iterdir()), left)
    with pytest.raises(CorruptRecordError):
        converted(source, tmp_path / "new", dry_run=True)
    with pytest.raises(CorruptRecordError):
        converted(source, tmp_path / "new", cut_tail=True)


def test_store_without_committed_end_is_rejected(tmp_path: Path) -> None:
    source, _ = store_of(unpacked("dledger-0.3.1.2-single", tmp_path), "")
    with open_store(source) as reader:
        position = int(reader.records(890, 891, 1).headers["position"][0])
    for path in (source / "data").iterdir():
        content = path.read_bytes()
        keep = min(max(position - int(path.name), 0), len(content))
        path.write_bytes(content[:keep] + bytes(len(content) - keep))
    with pytest.raises(CorruptRecordError) as caught:
        converted(source, tmp_path / "new", dry_run=True)
    assert caught.value.values == {"last_index": 889, "committed_index": 899}
    report = converted(source, tmp_path / "new", cut_tail=True)
    assert report.last_index == 889
    assert any("890 to 899" in note for note in report.notes)
    assert any("Java's index" in note and "10 entries" in note for note in report.notes)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("9" * 20, b"\0" * 100, "position"),
        (f"{2**63 - 50:020d}", b"\0" * 100, "position"),
        ("0" * 20, b"", "empty"),
    ],
)
def test_convert_rejects_wrong_commitlog_files(tmp_path: Path, name: str, content: bytes, expected: str) -> None:
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / name).write_bytes(content)
    with pytest.raises(ConfigError, match=expected):
        converted(tmp_path / "log", tmp_path / "new")


def test_commitlog_of_killed_broker_is_converted(tmp_path: Path) -> None:
    """Its next file is preallocated, and a slave may have received part of a message."""
    classic = extract(MIXED, "n0/commitlog", tmp_path)
    last = max(classic.iterdir())
    content, begins = last.read_bytes(), [at for at, _ in scan_records(last.read_bytes())]
    last.write_bytes(content[: begins[-40] + 70].ljust(len(content), b"\0"))
    (classic / f"{int(last.name) + len(content):020d}").write_bytes(bytes(len(content)))
    before = snapshot(classic)
    report = converted(classic, tmp_path / "new")
    assert report.entries == 325 - 40
    assert snapshot(classic) == before


@pytest.mark.parametrize("dry_run", [True, False])
def test_message_above_record_limit_is_rejected(tmp_path: Path, dry_run: bool) -> None:
    """A broker takes messages that are larger, with what DLedger puts before them, than a record may be."""
    limit = RECORD_BYTES_MAX - HEADER_BYTES
    least = len(encode_messages("T", 0, [b""])[0].as_py())
    fits, large = (encode_messages("T", 0, [bytes(size - least)]).to_pylist() for size in (limit, limit + 1))
    places = write_commitlog(tmp_path / "commitlog", [*fits, *large], file_bytes=9 << 20)
    with pytest.raises(ConfigError, match=rf"position {places[1]}.* {RECORD_BYTES_MAX + 1} bytes") as caught:
        converted(tmp_path / "commitlog", tmp_path / "to", dry_run=dry_run)
    assert "serve --commitlog" in str(caught.value)
    write_commitlog(tmp_path / "commitlog", fits, file_bytes=9 << 20)
    shutil.rmtree(tmp_path / "to", ignore_errors=True)
    assert converted(tmp_path / "commitlog", tmp_path / "to", dry_run=dry_run).entries == 1


def restarted_store(source: Path, keep_from: int) -> None:
    """Does to a store what generation B's reset does: everything before an entry becomes one BLANK, index rows too."""
    with open_store(source) as reader:
        head = reader.records(keep_from, keep_from + 1, 1).headers[0]
        data_bytes, index_bytes = reader.segment_bytes
    position = int(head["position"])
    for folder, at, size in (("data", position, data_bytes), ("index", keep_from * 32, index_bytes)):
        for path in sorted((source / folder).iterdir()):
            base = int(path.name)
            if base + size <= at:
                path.unlink()
            elif base < at:
                content = path.read_bytes()
                blank = struct.pack(">ii", -1, at - base) + bytes(at - base - 8)
                path.write_bytes(blank + content[at - base :])


def test_store_after_blank_is_relocated(tmp_path: Path) -> None:
    folder = unpacked("dledger-0.4.0-single", tmp_path)
    source, node = store_of(folder, "n0")
    restarted_store(source, 333)
    before = snapshot(source)
    for profile in ("A", "B"):
        report = converted(source, tmp_path / profile, profile=profile)
        assert snapshot(source) == before
        assert (report.first_index, report.moved, report.renumbered) == (333, True, False)
        assert entries(tmp_path / profile) == manifest(folder, node)[333:]
        log = CommitLog.open(tmp_path / profile, group="g", node_id="n0")
        assert (log.first_index(), log.last_index()) == (333, report.last_index)
        log.close()


def test_store_with_other_positions_is_relocated(tmp_path: Path) -> None:
    """Generation B keeps the leader's position in the header, wherever the record lies."""
    folder = unpacked("dledger-0.4.0-three", tmp_path)
    source, node = store_of(folder, "n0")
    with open_store(source) as reader:
        positions = reader.records(0, 400, 1 << 30).headers["position"].tolist()
    for path in (source / "data").iterdir():
        content = bytearray(path.read_bytes())
        for position in positions[150:]:
            at = position - int(path.name)
            if 0 <= at < len(content):
                struct.pack_into(">q", content, at + 24, position + 4096)
        path.write_bytes(content)
    report = converted(source, tmp_path / "new")
    assert (report.moved, report.renumbered) == (True, False)
    assert entries(tmp_path / "new") == manifest(folder, node)
    with open_store(tmp_path / "new") as reader:
        assert reader.verify().findings == ()


def test_entries_missing_in_java_index_are_noted(tmp_path: Path) -> None:
    source, _ = store_of(unpacked("dledger-0.3.1.2-three", tmp_path), "n0")
    with open_store(source) as reader:
        last = int(reader.last_index)
    path = source / "index" / f"{last * 32 // 4096 * 4096:020d}"
    content = bytearray(path.read_bytes())
    content[last * 32 % 4096 :] = bytes(len(content) - last * 32 % 4096)
    path.write_bytes(content)
    report = converted(source, tmp_path / "new")
    assert report.entries == last + 1
    assert any("the last 1 entries" in note for note in report.notes)


@pytest.mark.parametrize("inside", ["", "new", "data/dledger-n0", "link"])
@pytest.mark.parametrize("dry_run", [False, True])
def test_convert_rejects_destination_inside_source(tmp_path: Path, inside: str, dry_run: bool) -> None:
    source, _ = store_of(unpacked("dledger-0.3.1.2-three", tmp_path), "n0")
    (tmp_path / "link").symlink_to(source)
    destination = tmp_path / "link" if inside == "link" else source / inside
    before = snapshot(source), sorted(path for path in source.rglob("*"))
    with pytest.raises(ConfigError, match="inside"):
        converted(source, destination, dry_run=dry_run)
    assert (snapshot(source), sorted(path for path in source.rglob("*"))) == before


def test_convert_leaves_other_directory_unchanged(tmp_path: Path) -> None:
    folder = unpacked("dledger-0.3.1.2-three", tmp_path)
    source, other = store_of(folder, "n0")[0], store_of(folder, "n1")[0]
    before = sorted(path for path in other.rglob("*"))
    with pytest.raises(StoreMismatchError):
        converted(source, other)
    assert sorted(path for path in other.rglob("*")) == before


def test_broker_continuation_sets_broker_end(tmp_path: Path) -> None:
    """All queue offsets are a broker's then, for dump and for the next conversion too."""
    bodies = encode_messages("T", 0, [b"x"] * 9, queue_offset=list(range(5, 14))).to_pylist()
    store = tmp_path / "from" / "dledger-n0"
    write_broker_store(store, bodies)
    converted(store, tmp_path / "dledger-a", profile="A")
    meta = load_log_meta(OsFiles(), tmp_path / "dledger-a" / "meta" / "log.json")
    assert meta is not None
    for end, expected in ((9, 9), (3, None)):  # the last six are the broker's own
        (store / "meta").mkdir(exist_ok=True)
        save_log_meta(OsFiles(), store / "meta" / "log.json", replace(meta, broker_end_index=end, foreign_end=end))
        with open_log_directory(store) as opened:
            assert opened.broker_end == expected
        again = tmp_path / f"dledger-{end}"
        converted(store, again)
        found = load_log_meta(OsFiles(), again / "meta" / "log.json")
        assert found is not None
        assert found.broker_end_index == 9
    ours = tmp_path / "dledger-a"
    save_log_meta(OsFiles(), ours / "meta" / "log.json", replace(meta, broker_end_index=3))
    with open_store(ours) as reader:
        at = reader.read(3, 4).column("position")[0].as_py()
    with (ours / "data" / f"{0:020}").open("r+b") as file:
        file.seek(at + 4)
        file.write(b"\x7f")  # the record's size
    with open_log_directory(ours) as opened:
        assert opened.broker_end == 3, "a reader of the log reports the damage"
