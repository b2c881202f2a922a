"""Sources are recognized, their faults are reported, and they are never written to."""

from __future__ import annotations

import os
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from dledger_core import control
from dledger_core.config import RECORD_BYTES_MAX, StorageConfig
from dledger_core.errors import ConfigError, CorruptRecordError, DLedgerError, StoreBusyError, StoreMismatchError
from dledger_core.ids import NodeId, Term
from dledger_core.raft.floor import Floor
from dledger_core.raft.ready import HardState
from dledger_core.record import HEADER_BYTES
from dledger_core.rocketmq import encode_messages, open_log_directory
from dledger_core.rocketmq.convert.source import open_source
from dledger_core.rocketmq.store.commit_log import scan_records
from dledger_core.storage import CommitLog, open_store
from dledger_core.storage.files.file_system import OsFiles
from dledger_core.storage.files.layout import Layout, LogMeta, load_log_meta, save_log_meta
from dledger_core.storage.files.meta_files import clear_floor, save_floor, save_hard_state
from dledger_core.storage.tables.tables import LogTables, TableChanges
from tests.jobs.broker_store import write_broker_store, write_commitlog
from tests.rocketmq.convert.stores import (
    converted,
    entries,
    manifest,
    running_broker,
    snapshot,
    store_of,
    unpacked,
)
from tests.rocketmq.golden import THREE, extract
from tests.support.damage import flip, overwrite, place_of
from tests.support.logs import append, bodies_of
from tests.support.only_reading import only_reading


def test_open_source_recognizes_kinds(tmp_path: Path, classic: Path, mixed: Path) -> None:
    store = mixed / "dledger-n0"
    three, _ = store_of(unpacked("dledger-0.4.0-three", tmp_path), "n1")
    converted(three, tmp_path / "dledger-n0")
    sources = [
        (classic, None),
        (store, None),
        (store, classic),
        (mixed, None),
        (three, None),
        (tmp_path / "dledger-n0", None),
    ]
    kinds = [open_source(path, commitlog).kind for path, commitlog in sources]
    assert kinds == ["classic", "java-a", "mixed", "mixed", "java-b", "dledger"]
    shutil.rmtree(classic)
    assert open_source(mixed).kind == "java-a"


def test_open_source_rejects_other_paths(tmp_path: Path, classic: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    for node in ("n0", "n1"):
        (tmp_path / "two" / f"dledger-{node}" / "data").mkdir(parents=True)
    other = extract(THREE, "n0/dledger-n0", tmp_path)
    for name, commitlog in (
        ("file", None),
        ("no", None),
        ("empty", None),
        ("two", None),
        ("empty", classic),
        (other, classic),
    ):
        with pytest.raises(StoreMismatchError):
            open_source(tmp_path / name, commitlog)


@pytest.mark.parametrize(
    ("name", "content"), [("9" * 20, b"\0" * 100), (f"{2**63 - 50:020d}", b"\0" * 100), ("0" * 20, b"")]
)
def test_convert_rejects_wrong_commitlog_files(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / name).write_bytes(content)
    with pytest.raises(ConfigError):
        converted(tmp_path / "log", tmp_path / "new")


# --- a source in use, and a destination inside it ---------------------------------------------------------------------


def test_convert_rejects_store_of_running_node(tmp_path: Path) -> None:
    log = CommitLog.open(tmp_path / "dledger-n0", group="g", node_id="n0")
    before = snapshot(tmp_path / "dledger-n0")
    with pytest.raises(StoreBusyError):
        converted(tmp_path / "dledger-n0", tmp_path / "new")
    assert snapshot(tmp_path / "dledger-n0") == before
    log.close()
    converted(tmp_path / "dledger-n0", tmp_path / "new")


def test_convert_rejects_store_of_running_broker(tmp_path: Path, mixed: Path) -> None:
    with running_broker(mixed):
        for source in (mixed / "dledger-n0", mixed, mixed / "commitlog"):
            for dry_run in (True, False):
                with pytest.raises(StoreBusyError):
                    converted(source, tmp_path / "new", dry_run=dry_run)
    assert not (tmp_path / "new").exists()
    assert converted(mixed, tmp_path / "new").entries == 588


@pytest.mark.slow
@pytest.mark.parametrize("what", ["commitlog", "mixed", "0.3.1.2", "0.4.0", "native"])
def test_source_is_opened_for_reading_only(tmp_path: Path, mixed: Path, what: str) -> None:
    if what in ("commitlog", "mixed"):
        source = mixed / "commitlog" if what == "commitlog" else mixed
    else:
        version = "0.4.0" if what == "0.4.0" else "0.3.1.2"
        source = store_of(unpacked(f"dledger-{version}-rejoined", tmp_path), "")[0]
    if what == "native":
        converted(source, tmp_path / "native")
        source = tmp_path / "native"
    before = snapshot(source.parent)
    with only_reading(source):
        for profile in ("A", "B"):
            new = mixed.parent.parent / "new" / profile
            assert converted(source, new, profile=profile, dry_run=True).entries > 0
            assert converted(source, new, profile=profile).entries > 0
    shutil.rmtree(mixed.parent.parent / "new")
    assert snapshot(source.parent) == before
    with pytest.raises(AssertionError, match=r"open .*x"), only_reading(source):  # the proof would fail
        (source / "x").write_bytes(b"")


@pytest.mark.parametrize("inside", ["", "new", "data/dledger-n0", "link"])
@pytest.mark.parametrize("dry_run", [False, True])
def test_convert_rejects_destination_inside_source(tmp_path: Path, three: Path, inside: str, dry_run: bool) -> None:
    (tmp_path / "link").symlink_to(three)
    before = snapshot(three)
    with pytest.raises(ConfigError):
        converted(three, tmp_path / "link" if inside == "link" else three / inside, dry_run=dry_run)
    assert snapshot(three) == before


def test_convert_leaves_other_directory_unchanged(three: Path) -> None:
    other = three.with_name("dledger-n1")
    before = snapshot(other)
    with pytest.raises(StoreMismatchError):
        converted(three, other)
    assert snapshot(other) == before


# --- stores of Java ---------------------------------------------------------------------------------------------------


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
def test_source_term_is_highest_recorded_term(three: Path, files: dict[str, str], term: int, vote: str | None) -> None:
    """Java can lose currterm in a crash; our node campaigns above the remaining terms, so no vote is given twice."""
    for path in three.glob("currterm*"):
        path.unlink()
    for name, text in files.items():
        (three / name).write_text(text)
    state = open_source(three).hard_state
    assert (state.term, state.voted_for) == (term, vote)


def test_damaged_store_is_named_and_not_published(tmp_path: Path, three: Path) -> None:
    first = min((three / "data").iterdir())
    overwrite(first, 4, struct.pack(">i", 7))
    before = snapshot(three)
    with pytest.raises(CorruptRecordError) as caught:
        converted(three, tmp_path / "new")
    assert str(first) in caught.value.where
    assert snapshot(three) == before
    with pytest.raises(DLedgerError):
        open_store(tmp_path / "new")


@pytest.mark.parametrize(
    ("at", "field"), [(at, field) for at in (0, 100, 266) for field in (0, 8, 16) if (at, field) != (266, 16)]
)
def test_damage_that_looks_like_end_is_rejected(tmp_path: Path, three: Path, at: int, field: int) -> None:
    """Java's recovery would cut everything from there on; a copy must not lose entries without notice."""
    path, offset = place_of(three, at)
    flip(path, offset + field)
    with pytest.raises(CorruptRecordError) as caught:
        converted(three, tmp_path / "new", dry_run=True)
    assert field == 8 or caught.value.values.get("start", caught.value.values.get("index")) == at
    if (at, field) == (266, 0):
        report = converted(three, tmp_path / "new", cut_tail=True)
        assert report.last_index == 265
        assert any("dropped" in note for note in report.notes)


def test_difference_of_index_and_data_is_noted(tmp_path: Path, three: Path) -> None:
    index = three / "index" / f"{266 * 32 // 4096 * 4096:020d}"
    content = index.read_bytes()
    overwrite(index, 266 * 32 % 4096, bytes(len(content) - 266 * 32 % 4096))
    report = converted(three, tmp_path / "short", dry_run=True)
    assert report.entries == 267
    assert any("the last 1 entries" in note for note in report.notes)
    index.write_bytes(content)
    path, offset = place_of(three, 266)
    flip(path, offset + 23)  # its term
    assert any("266" in note and "index" in note for note in converted(three, tmp_path / "new").notes)


@pytest.mark.parametrize("name", ["dledger-0.3.1.2-single", "dledger-0.4.0-single"])
@pytest.mark.parametrize("left", [0, 1, 20, 48, 100, 600, 65535])
def test_truncated_last_file_is_damage(tmp_path: Path, name: str, left: int) -> None:
    """Java rejects such a store; zeros after the rest would look like the end of a body, which has no CRC."""
    source, _ = store_of(unpacked(name, tmp_path), "")
    os.truncate(max((source / "data").iterdir()), left)
    for options in ({"dry_run": True}, {"cut_tail": True}):
        with pytest.raises(CorruptRecordError):
            converted(source, tmp_path / "new", **options)


def test_store_without_committed_end_is_rejected(tmp_path: Path) -> None:
    source, _ = store_of(unpacked("dledger-0.3.1.2-single", tmp_path), "")
    file, offset = place_of(source, 890)
    for path in (source / "data").iterdir():
        if path.name >= file.name:
            start = offset if path == file else 0
            overwrite(path, start, bytes(path.stat().st_size - start))
    with pytest.raises(CorruptRecordError) as caught:
        converted(source, tmp_path / "new", dry_run=True)
    assert [caught.value.values[name] for name in ("kind", "start", "end")] == ["MISSING", 890, 900]
    report = converted(source, tmp_path / "new", cut_tail=True)
    assert report.last_index == 889
    assert any("890 to 899" in note for note in report.notes)


def blank_before(source: Path, keep_from: int) -> None:
    """Change a store as generation B's reset does: a BLANK replaces the entries before one, and their index rows."""
    path, offset = place_of(source, keep_from)
    with open_store(source) as reader:
        data_bytes, index_bytes = reader.segment_bytes
    for folder, at, size in (("data", int(path.name) + offset, data_bytes), ("index", keep_from * 32, index_bytes)):
        for each in sorted((source / folder).iterdir()):
            base = int(each.name)
            if base + size <= at:
                each.unlink()
            elif base < at:
                overwrite(each, 0, struct.pack(">ii", -1, at - base) + bytes(at - base - 8))


def test_store_after_blank_is_relocated(tmp_path: Path) -> None:
    folder = unpacked("dledger-0.4.0-single", tmp_path)
    source, node = store_of(folder, "n0")
    blank_before(source, 333)
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
    """Generation B keeps the leader's position in the header, wherever the record is."""
    folder = unpacked("dledger-0.4.0-three", tmp_path)
    source, node = store_of(folder, "n0")
    with open_store(source) as reader:
        positions = reader.raw(0, 400, 1 << 30).headers["position"].tolist()
    for path in (source / "data").iterdir():
        for position in positions[150:]:
            if 0 <= position - int(path.name) < path.stat().st_size:
                overwrite(path, position - int(path.name) + 24, struct.pack(">q", position + 4096))
    planned = converted(source, tmp_path / "new", dry_run=True)
    report = converted(source, tmp_path / "new")
    assert (report.moved, report.renumbered, report.entries) == (True, False, planned.entries)
    assert entries(tmp_path / "new") == manifest(folder, node)


# --- classic CommitLogs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["body", "magic", "size", "gap", "truncated"])
def test_damaged_commitlog_is_rejected(tmp_path: Path, classic: Path, damage: str) -> None:
    first, second = sorted(classic.iterdir())
    size = struct.unpack_from(">i", first.read_bytes())[0]
    if damage == "gap":
        second.rename(second.with_name(f"{262144:020d}"))
    elif damage == "truncated":
        os.truncate(second, struct.unpack_from(">i", second.read_bytes())[0] + 40)
    else:
        flip(first, {"body": size + 90, "magic": size + 4, "size": 3}[damage], 1)
    before = snapshot(classic)
    with pytest.raises((CorruptRecordError, ConfigError)) as caught:
        converted(classic, tmp_path / "new")
    assert str(classic) in str(caught.value)
    assert snapshot(classic) == before


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize("inside", [0, 60])
def test_lost_messages_before_store_are_rejected(tmp_path: Path, mixed: Path, inside: int, dry_run: bool) -> None:
    """RocketMQ closes the last file with a BLANK before an upgrade to DLedger, so zeros there are lost messages."""
    last = max((mixed / "commitlog").iterdir())
    content = last.read_bytes()
    [*_, (begin, _)] = scan_records(content)
    overwrite(last, begin + inside, bytes(len(content) - begin - inside))
    with pytest.raises(CorruptRecordError) as caught:
        converted(mixed, tmp_path / "new", dry_run=dry_run)
    assert (caught.value.where, caught.value.values) == (str(last), {"position": int(last.name) + begin})
    assert not (tmp_path / "new" / "meta" / "log.json").exists()
    alone = converted(mixed / "commitlog", tmp_path / "alone", dry_run=True)
    assert alone.entries == 324, "without a store it is the log's end"


def test_commitlog_of_killed_broker_is_converted(tmp_path: Path, classic: Path) -> None:
    """Its next file is preallocated, and a slave may have received part of a message."""
    last = max(classic.iterdir())
    content, begins = last.read_bytes(), [at for at, _ in scan_records(last.read_bytes())]
    last.write_bytes(content[: begins[-40] + 70].ljust(len(content), b"\0"))
    (classic / f"{int(last.name) + len(content):020d}").write_bytes(bytes(len(content)))
    before = snapshot(classic)
    assert converted(classic, tmp_path / "new").entries == 325 - 40
    assert snapshot(classic) == before


@pytest.mark.parametrize("dry_run", [True, False])
def test_message_above_record_limit_is_rejected(tmp_path: Path, dry_run: bool) -> None:
    """A broker takes messages that are larger, with what DLedger puts before them, than a record may be."""
    limit = RECORD_BYTES_MAX - HEADER_BYTES
    least = len(encode_messages("T", 0, [b""])[0].as_py())
    fits, large = (encode_messages("T", 0, [bytes(size - least)]).to_pylist() for size in (limit, limit + 1))
    places = write_commitlog(tmp_path / "commitlog", [*fits, *large], file_bytes=9 << 20)
    with pytest.raises(ConfigError, match=rf"\b{places[1]}\b.*\b{RECORD_BYTES_MAX + 1}\b"):
        converted(tmp_path / "commitlog", tmp_path / "to", dry_run=dry_run)
    write_commitlog(tmp_path / "commitlog", fits, file_bytes=9 << 20)
    shutil.rmtree(tmp_path / "to", ignore_errors=True)
    assert converted(tmp_path / "commitlog", tmp_path / "to", dry_run=dry_run).entries == 1


# --- native stores ----------------------------------------------------------------------------------------------------


def meta_of(store: Path) -> LogMeta:
    meta = load_log_meta(OsFiles(), store / "meta" / "log.json")
    assert meta is not None
    return meta


def test_broker_continuation_sets_broker_end(tmp_path: Path) -> None:
    """All queue offsets are a broker's then, for dump and for the next conversion too."""
    bodies = encode_messages("T", 0, [b"x"] * 9, queue_offset=list(range(5, 14))).to_pylist()
    store, ours = tmp_path / "from" / "dledger-n0", tmp_path / "dledger-a"
    write_broker_store(store, bodies)
    converted(store, ours, profile="A")
    meta = meta_of(ours)
    for end, expected in ((9, 9), (3, None)):  # the last six are the broker's own
        (store / "meta").mkdir(exist_ok=True)
        save_log_meta(OsFiles(), store / "meta" / "log.json", replace(meta, broker_end_index=end, foreign_end=end))
        save_hard_state(OsFiles(), Layout(store), HardState(Term(0), NodeId("n0")))
        with open_log_directory(store) as opened:
            assert opened.broker_end == expected
        converted(store, tmp_path / f"dledger-{end}")
        assert meta_of(tmp_path / f"dledger-{end}").broker_end_index == 9
    save_log_meta(OsFiles(), ours / "meta" / "log.json", replace(meta, broker_end_index=3))
    path, offset = place_of(ours, 3)
    overwrite(path, offset + 4, b"\x7f")  # the record's size
    with open_log_directory(ours) as opened:
        assert opened.broker_end == 3, "a reader of the log reports the damage"


@pytest.fixture
def trimmed(tmp_path: Path) -> Path:
    """A native store without its first entries, which its tables cover."""
    path = tmp_path / "old" / "dledger-n0"
    config = StorageConfig(data_segment_bytes=4096, index_segment_bytes=1024, preallocate_bytes=0)
    log = CommitLog.open(path, group="g", node_id="n0", config=config)
    for at in range(30):
        fields = {"k": "producer", "p": "p", "e": 0, "s": at, "n": 9, "c": at}
        append(log, [bytes([at]) * 30] * 9, control=control.pack(fields))
    tables = LogTables()
    for index, time_ms, body in log.control_entries(0, 300):
        tables.apply(index, time_ms, body)
    first = log.segment_summaries()[2].first_index
    assert log.trim(first, TableChanges.complete(tables), 299) == first > 0
    log.close(299)
    return path


def test_tables_are_converted_with_trimmed_log(trimmed: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    converted(trimmed, new)
    assert entries(new) == entries(trimmed)
    assert open_store(new).first_index == open_store(trimmed).first_index > 0
    log = CommitLog.open(new, group="g", node_id="n0")
    assert log.load_tables().producers.get("p").next_sequence == 30
    log.close()
    (new / "meta" / "tables").unlink()
    with pytest.raises(CorruptRecordError):
        CommitLog.open(new, group="g", node_id="n0")


def test_trimmed_log_without_tables_is_rejected(trimmed: Path, tmp_path: Path) -> None:
    (trimmed / "meta" / "tables").write_bytes(b"rot")
    with pytest.raises(CorruptRecordError):
        converted(trimmed, tmp_path / "new")


def test_store_of_recovering_voter_is_rejected(trimmed: Path, tmp_path: Path) -> None:
    """The new node would vote at once although acknowledged entries may be lost."""
    save_floor(OsFiles(), Layout(trimmed), Floor(Term(3)))
    with pytest.raises(CorruptRecordError):
        converted(trimmed, tmp_path / "new")
    clear_floor(OsFiles(), Layout(trimmed))
    converted(trimmed, tmp_path / "new")
    assert entries(tmp_path / "new") == entries(trimmed)


def test_configuration_entries_of_source_have_no_effect_in_the_copy(tmp_path: Path) -> None:
    path, copy = tmp_path / "old" / "dledger-n0", tmp_path / "dledger-n0"
    log = CommitLog.open(path, group="g", node_id="n0")
    append(log, [b"a"])
    append(log, [], configuration=control.pack({"voters": ["n0"], "t": 77}))
    append(log, [b"b"])
    log.close(2)
    converted(path, copy)
    log = CommitLog.open(copy, group="g", node_id="n0")
    assert (list(log.configurations), log.ends_below_members, log.floor) == ([], False, None)
    assert bodies_of(log.read(0, 3, 1 << 20))[::2] == [b"a", b"b"]
    assert [control.log_time(control.unpack(body)) for _, _, body in log.control_entries(0, 3)] == [77]
