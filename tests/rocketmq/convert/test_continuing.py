"""A new group that starts after a CommitLog: the prefix, wrong sources, and unchanged source files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from dledger_core import Client, LocalCluster
from dledger_core.config import StorageConfig
from dledger_core.errors import (
    ConfigError,
    CorruptRecordError,
    DLedgerError,
    StoreBusyError,
    StoreMismatchError,
)
from dledger_core.rocketmq import encode_messages
from dledger_core.rocketmq.convert import read_commitlog, start_store_after
from dledger_core.rocketmq.store.commit_log import ClassicCommitLog
from dledger_core.rocketmq.store.commitlog_prefix import CommitLogFingerprint
from dledger_core.rocketmq.store.location import COMMITLOG_DIRECTORY
from dledger_core.storage.files.file_system import OsFiles
from dledger_core.storage.files.layout import Layout, load_log_meta
from tests.cli.command import rows_of, run, run_process
from tests.rocketmq.convert.stores import converted, entries, running_broker
from tests.rocketmq.convert.test_take_over import wait_for_all
from tests.rocketmq.golden import MIXED, messages
from tests.support.damage import flip, overwrite
from tests.support.soon import soon

FILE_BYTES = 131_072
END = 2 * FILE_BYTES
CONFIG = StorageConfig(data_segment_bytes=1 << 20, index_segment_bytes=1 << 15)


@pytest.fixture
def closed(classic: Path) -> Path:
    """The CommitLog that a real broker closed when it was upgraded."""
    return classic


@pytest.fixture
def open_(closed: Path, tmp_path: Path) -> Path:
    """The same as it was before: no BLANK yet, and a preallocated file."""
    folder = shutil.copytree(closed, tmp_path / "broker" / "commitlog")
    last = folder / f"{FILE_BYTES:020}"
    overwrite(last, stop_of(last), bytes(FILE_BYTES - stop_of(last)))
    (folder / f"{END:020}").write_bytes(bytes(FILE_BYTES))
    return folder


def stop_of(path: Path) -> int:
    """End of the messages of a file."""
    (file,) = (f for f in ClassicCommitLog(path.parent).files if f.path == str(path))
    return list(file.scan())[-1].position - file.position


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def start(folder: Path, directory: Path, node_id: str = "n0") -> None:
    store = directory / "g" / f"dledger-{node_id}"
    start_store_after(read_commitlog(folder), store, group="g", node_id=node_id, config=CONFIG)


def test_fingerprint_is_same_before_and_after_last_file_is_closed(closed: Path, open_: Path) -> None:
    before, after = read_commitlog(open_), read_commitlog(closed)
    assert before.fingerprint == after.fingerprint == CommitLogFingerprint.parse(str(after.fingerprint))
    assert (before.closed, after.closed) == (False, True)
    assert (before.fingerprint.start, before.fingerprint.end) == (0, END)


def test_fingerprint_starts_at_first_file_that_node_kept(closed: Path, tmp_path: Path) -> None:
    later = shutil.copytree(closed, tmp_path / "later")
    (later / f"{0:020}").unlink()
    found = read_commitlog(later).fingerprint
    assert found.start == FILE_BYTES
    assert read_commitlog(closed, found.start).fingerprint == found != read_commitlog(closed).fingerprint


def test_prefix_equals_files_of_rocketmq_upgrade(closed: Path, open_: Path, tmp_path: Path) -> None:
    before = contents(open_)
    start(open_, tmp_path / "node")
    target = tmp_path / "node" / "g" / COMMITLOG_DIRECTORY
    assert contents(target) == contents(closed)
    assert contents(open_) == before
    assert (target / f"{0:020}").samefile(open_ / f"{0:020}")
    meta = load_log_meta(OsFiles(), Layout(tmp_path / "node" / "g" / "dledger-n0").log_meta)
    assert meta is not None
    assert (meta.first_position, meta.first_index, meta.data_segment_bytes) == (END, 0, FILE_BYTES)


def test_prefix_files_are_copied_without_hard_links(open_: Path, closed: Path, tmp_path: Path, monkeypatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(Path, "hardlink_to", refused)
    start(open_, tmp_path / "node")
    assert contents(tmp_path / "node" / "g" / COMMITLOG_DIRECTORY) == contents(closed)


@pytest.mark.parametrize("left", ["part", "prefix"])
def test_interrupted_start_resumes(open_: Path, closed: Path, tmp_path: Path, left: str) -> None:
    group = tmp_path / "node" / "g"
    if left == "part":
        (group / f"{COMMITLOG_DIRECTORY}-n0.part").mkdir(parents=True)
        (group / f"{COMMITLOG_DIRECTORY}-n0.part" / f"{0:020}").write_bytes(b"torn")
    else:
        shutil.copytree(closed, group / COMMITLOG_DIRECTORY)
    start(open_, tmp_path / "node")
    assert sorted(path.name for path in group.iterdir()) == [COMMITLOG_DIRECTORY, "dledger-n0"]
    assert contents(group / COMMITLOG_DIRECTORY) == contents(closed)


def replaced(path: Path) -> None:
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: flip(folder / f"{0:020}", 500),
        lambda folder: os.truncate(folder / f"{FILE_BYTES:020}", FILE_BYTES + 1),
        lambda folder: shutil.copy(folder / f"{0:020}", folder / f"{END:020}"),  # the preallocated file
        lambda folder: replaced(folder / f"{0:020}"),
    ],
    ids=["flip", "longer", "one more", "new file"],
)
def test_start_rejects_commitlog_changed_after_read(
    open_: Path, tmp_path: Path, change: Callable[[Path], object]
) -> None:
    """Nodes may wait for each other for long before they start."""
    commitlog, store = read_commitlog(open_), tmp_path / "node" / "g" / "dledger-n0"
    with running_broker(open_.parent), pytest.raises(StoreBusyError):
        start_store_after(commitlog, store, group="g", node_id="n0", config=CONFIG)
    change(open_)
    with pytest.raises(ConfigError):
        start_store_after(commitlog, store, group="g", node_id="n0", config=CONFIG)
    assert not (store.parent / COMMITLOG_DIRECTORY).exists()


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lambda first, last: flip(first, 35), CorruptRecordError),  # the first message's physical offset
        (lambda first, last: overwrite(first, 0, bytes(8)), CorruptRecordError),
        (lambda first, last: flip(first, stop_of(first) + 3), CorruptRecordError),  # the BLANK's length
        (lambda first, last: overwrite(last, stop_of(last), b"\1" * (FILE_BYTES - stop_of(last))), CorruptRecordError),
        (lambda first, last: os.truncate(last, FILE_BYTES - 1024), ConfigError),
        (lambda first, last: [path.write_bytes(bytes(FILE_BYTES)) for path in (first, last)], ConfigError),
    ],
    ids=["flip", "hole", "blank", "no space", "sizes", "empty"],
)
def test_start_rejects_damaged_commitlog(
    closed: Path, tmp_path: Path, damage: Callable[[Path, Path], object], error: type[DLedgerError]
) -> None:
    damage(closed / f"{0:020}", closed / f"{FILE_BYTES:020}")
    with pytest.raises(error):
        start(closed, tmp_path / "node")
    assert not (tmp_path / "node").exists()


def test_start_rejects_other_prefix_and_existing_store(closed: Path, open_: Path, tmp_path: Path) -> None:
    shutil.copytree(open_, tmp_path / "node" / "g" / COMMITLOG_DIRECTORY)
    with pytest.raises(StoreMismatchError):
        start(closed, tmp_path / "node")
    start(closed, tmp_path / "other")
    with pytest.raises(StoreMismatchError):
        start(closed, tmp_path / "other")


@pytest.mark.parametrize("text", ["", "1-2", "0-10-xyz", "0-10-" + "A" * 32, "-1-10-" + "a" * 32])
def test_malformed_fingerprint_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError):
        CommitLogFingerprint.parse(text)


def options_of(commitlog: Path) -> dict[str, str]:
    """Options of ``dledger serve``."""
    return {"commitlog": str(commitlog), "fingerprint": str(read_commitlog(commitlog).fingerprint)}


WRONG = f"0-{END}-{'0' * 32}"


@pytest.mark.integration
def test_serve_requires_and_checks_fingerprint_that_convert_prints(open_: Path, closed: Path, tmp_path: Path) -> None:
    printed = run("convert", "--fingerprint", open_).stdout.strip()
    assert printed == str(read_commitlog(closed).fingerprint)
    peers = "n0-127.0.0.1:1;n1-127.0.0.1:2"
    given = ("serve", "--self-id", "n0", "--peers", peers, "--dir", tmp_path / "node", "--commitlog", open_)
    run_process(*given, code=3)
    assert printed in run_process(*given, "--fingerprint", WRONG, code=3).stderr
    run_process(*given, "--fingerprint", printed, "--group", "a,b", code=3)
    run_process(*given, "--fingerprint", printed, "--check")
    assert not (tmp_path / "node").exists()


def test_restarted_node_checks_recorded_fingerprint(open_: Path, tmp_path: Path) -> None:
    start(open_, tmp_path / "node")
    fingerprint = options_of(open_)["fingerprint"]
    given = ("serve", "--self-id", "n0", "--peers", "n0-127.0.0.1:1", "--dir", tmp_path / "node", "--group", "g")
    given = (*given, "--check", "--commitlog", tmp_path)  # the files may be elsewhere by now
    run_process(*given)
    run_process(*given, "--fingerprint", fingerprint)
    assert fingerprint in run_process(*given, "--fingerprint", WRONG, code=3).stderr


@pytest.mark.integration
def test_three_nodes_and_replacement_start_after_prefix(open_: Path, tmp_path: Path) -> None:
    directory = tmp_path / "nodes"
    with LocalCluster(3, directory, **options_of(open_)) as cluster, Client(cluster.peers) as client:
        result = client.append([b"after the prefix"] * 100)
        assert client.records(0, 1).batch.column("position")[0].as_py() == END
        cluster.kill("n2")
        shutil.rmtree(cluster.store_path("n2"))
        cluster.restart("n2")
        soon(lambda: is_replaced(client, "n2"), every_s=0.2)
        wait_for_all(client, result.last_index)
        soon(lambda: client.members().voters == ("n0", "n1", "n2"))
        cluster.restart("n1")  # with the same options, though its store exists
        wait_for_all(client, result.last_index)
        cluster.leader()
        last = client.append([b"with the new node"]).last_index
        wait_for_all(client, last)
        shutil.rmtree(directory / "default" / COMMITLOG_DIRECTORY)  # the prefix is no longer needed
        cluster.restart("n0")
        wait_for_all(client, last)
        cluster.leader()
        wait_for_all(client, client.append([b"without the prefix"]).last_index)
    stores = [entries(directory / "default" / f"dledger-n{n}") for n in range(3)]
    assert stores[0] == stores[1] == stores[2]
    assert min(stores[0])[0] == 0


def is_replaced(client: Client, node: str) -> bool:
    """Ask for the replacement of a node's member."""
    with suppress(DLedgerError):
        client.replace_member(node)
        return True
    return False


@pytest.mark.integration
def test_positions_and_queues_lead_from_prefix_into_log(open_: Path, tmp_path: Path) -> None:
    near = max(messages(MIXED), key=lambda at: (at < END, at))
    (last,) = rows_of("dump", open_, "--from", f"@{near}", "--decode", "message")
    queue = ("--topic", last["topic"], "--queue", last["queue_id"])
    ends = max(row["queue_offset"] for row in rows_of("dump", open_, *queue))
    new = encode_messages(last["topic"], last["queue_id"], [b"a", b"b"]).to_pylist()
    with LocalCluster(1, tmp_path / "nodes", **options_of(open_)) as cluster, Client(cluster.peers) as client:
        client.append(new)
        served = rows_of("tail", "--peers", cluster.peers, "--from", f"@{near}", "--no-follow")
        (message,) = rows_of("get", "--peers", cluster.peers, f"@{near}")
        (entry,) = rows_of("get", "--peers", cluster.peers, f"@{served[1]['position'] + 48}")
    assert [(row["index"], row["position"]) for row in served[:2]] == [(None, near), (1, served[1]["position"])]
    assert entry == served[1]
    root, store = tmp_path / "nodes" / "default", tmp_path / "nodes" / "default" / "dledger-n0"
    offline = rows_of("dump", root, "--from", f"@{near}")
    assert message == {name: value for name, value in offline[0].items() if name not in ("magic", "hidden")}
    assert message["topic"]
    assert [(row["index"], row["position"]) for row in offline[:2]] == [(None, near), (0, END)]
    assert offline[2]["index"] == 1
    # Messages of the prefix have the broker's queue offsets.
    both = rows_of("dump", root, "--from", f"@{near}", "--count", 1, "--decode", "message")
    assert both[0]["queue_offset"] == last["queue_offset"] is not None

    # Equal offsets in prefix and log would make RocketMQ serve one of two messages.
    with pytest.raises(ConfigError):
        converted(store, tmp_path / "alone", profile="A")
    for number, (source, commitlog) in enumerate(((root, None), (store, root / "commitlog"))):
        made = tmp_path / f"dledger-{number}"
        report = converted(source, made, profile="A", commitlog=commitlog)
        assert (report.kind, report.entries, report.messages) == ("dledger", 2, 2)
        assert any("CommitLog was not converted" in note for note in report.notes)
        rows = rows_of("dump", made, "--decode", "message")
        assert [row["queue_offset"] for row in rows] == [ends + 1, ends + 2]
        assert [row["physical_offset"] - 48 for row in rows] == [row["position"] for row in rows]
        assert rows[0]["position"] == END
    assert converted(store, tmp_path / "dledger-b").entries == 3  # no entry moves, so no offsets are assigned
    metas = [load_log_meta(OsFiles(), Layout(path).log_meta) for path in (store, tmp_path / "dledger-b")]
    assert {meta and meta.commitlog_prefix for meta in metas} == {options_of(open_)["fingerprint"]}
