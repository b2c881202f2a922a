"""Out of DLedger mode: a broker's directory from stores that a real RocketMQ wrote, and from native ones."""

from __future__ import annotations

import asyncio
import errno
import gzip
import json
import os
import re
import shutil
import struct
import tarfile
import zlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from click.testing import Result

from dledger_core import open_store
from dledger_core.errors import (
    ConfigError,
    CorruptRecordError,
    DiskFullError,
    DLedgerError,
    StoreBusyError,
    StoreMismatchError,
)
from dledger_core.rocketmq import ClassicCommitLog, decode_messages, decode_units, java_hash
from dledger_core.rocketmq import leaving as leaving_package
from dledger_core.rocketmq.leaving import CommittedEntry, LeaveReport, LeaveRequest, leave
from dledger_core.rocketmq.remoting.messages import WireEntry
from dledger_core.rocketmq.store.key_files import KEY_UNIT
from dledger_core.storage.files.file_system import File, OsFiles, write_checked
from tests.cli.command import error_of, last_error, run, run_process
from tests.client.fake_group import running_group
from tests.contracts.small_file_stores import generation_b
from tests.rocketmq import golden
from tests.rocketmq.convert.stores import snapshot, store_of, unpacked
from tests.rocketmq.convert.test_moved import OwnLog, message_bodies
from tests.rocketmq.golden import MIXED, REUSED, THREE, members, messages
from tests.rocketmq.leaving.dying_files import DyingFiles, Killed
from tests.rocketmq.remoting.fake_nodes import NAME, RunningGroup


@cache
def _broker_files(name: str) -> dict[str, bytes]:
    """The files of a broker and its configuration, without its log's index, and with a short timer wheel."""
    found = {}
    with tarfile.open(golden.TESTDATA / f"{name}.tar.gz") as archive:
        for member in archive:
            path = member.name.removeprefix(f"{name}/")
            if member.isfile() and path.startswith(("n0/", "broker-n0.conf")) and "dledger-n0/index" not in path:
                found[path] = archive.extractfile(member).read(4096 if path.endswith("timerwheel") else -1)
    return found


def broker(name: str, directory: Path) -> tuple[Path, Path]:
    """The directory of a broker and its configuration."""
    for path, data in _broker_files(name).items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(data)
    return directory / "n0", directory / "broker-n0.conf"


def left(source: Path, destination: Path, conf: Path | None = None, **given: Any) -> LeaveReport:
    given = {"replica_checked": True, "verify": True} | given
    return leave(LeaveRequest(source=source, destination=destination, broker_conf=conf, **given))


def new_messages(destination: Path) -> dict[int, bytes]:
    """Every message of the new CommitLog by position."""
    log = ClassicCommitLog(destination / "commitlog")
    assert log.damage(0, log.end()) == []
    found = {}
    for batch in log.messages(0, log.end()):
        found |= dict(zip(batch["position"].to_pylist(), batch["body"].to_pylist(), strict=True))
    return found


def units(destination: Path) -> dict[tuple[str, int, int], tuple[int, int, int]]:
    """Every unit by topic, queue id and slot."""
    found = {}
    for path in (destination / "consumequeue").glob("*/*/*"):
        base = int(path.name) // 20
        for slot, unit in enumerate(decode_units(path.read_bytes()).tolist(), base):
            if 0 < unit[1] < 0x7FFFFFFF:
                found[path.parent.parent.name, int(path.parent.name), slot] = unit
    return found


def same_message(old: bytes, new: bytes) -> bool:
    """Whether only the positions in a message differ: its own, and that of its half message."""
    at = 76  # IPv4 store host; of IPv6 born hosts 12 later
    at += 12 * bool(struct.unpack_from(">i", old, 36)[0] & 0x10)
    return [old[:28], old[36:at], old[at + 8 :]] == [new[:28], new[36:at], new[at + 8 :]]


@pytest.mark.parametrize("name", [THREE, MIXED])
def test_every_message_and_unit_of_broker_is_in_new_directory(tmp_path: Path, name: str) -> None:
    source, conf = broker(name, tmp_path)
    before, new = snapshot(source), tmp_path / "new"
    report = left(source, new, conf)
    assert snapshot(source) == before
    old, found = messages(name), new_messages(new)
    assert (report.messages, report.verified, report.entries_left_out) == (len(old), True, 0)
    moved = dict(zip(old, found, strict=True))
    assert all(same_message(old[at], found[moved[at]]) for at in old)
    assert all(struct.unpack_from(">q", body, 28) == (at,) for at, body in found.items())
    expected = {
        (unit["topic"], unit["queueId"], unit["queueOffset"]): (
            moved[unit["physicalOffset"]],
            unit["size"],
            unit["tagsCode"],
        )
        for unit in golden.units(name)
    }
    assert units(new) == expected
    assert {path.name for path in new.iterdir()} >= {"commitlog", "consumequeue", "index", "config", "checkpoint"}
    assert not [path for path in new.iterdir() if "converting" in path.name]
    assert (new / "config/consumerOffset.json").read_bytes() == (source / "config/consumerOffset.json").read_bytes()
    if name == MIXED:
        first, second = ((root / "commitlog" / f"{0:020d}").stat() for root in (source, new))
        assert first.st_ino == second.st_ino, "the classic part is linked"
        assert list(moved.items())[:325] == [(at, at) for at in list(old)[:325]]


@pytest.mark.parametrize("name", [MIXED, REUSED])
def test_index_files_equal_those_of_broker_except_positions(tmp_path: Path, name: str) -> None:
    source, conf = broker(name, tmp_path)
    left(source, tmp_path / "new", conf, on_duplicate="first")
    [ours], [theirs] = (list((root / "index").iterdir()) for root in (tmp_path / "new", source))
    slots = 40 + 4 * 1000
    assert ours.read_bytes()[40:slots] == theirs.read_bytes()[40:slots]
    assert ours.read_bytes()[32:40] == theirs.read_bytes()[32:40]
    first, second = (np.frombuffer(path.read_bytes()[slots:], KEY_UNIT) for path in (ours, theirs))
    for field in ("hash", "seconds", "previous"):
        assert (first[field] == second[field]).all()


def test_keys_continue_in_further_index_files(tmp_path: Path) -> None:
    source, conf = broker(MIXED, tmp_path)
    conf.write_text(conf.read_text().replace("maxIndexNum=4000", "maxIndexNum=500"))
    for path in (source / "index").iterdir():
        path.unlink()
    report = left(source, tmp_path / "new", conf)
    files = sorted((tmp_path / "new/index").iterdir())
    assert [struct.unpack_from(">i", path.read_bytes(), 36)[0] - 1 for path in files] == [499, 499, report.keys - 998]
    found = new_messages(tmp_path / "new")
    rows = decode_messages(pa.array(list(found.values())), ["topic", "properties"]).to_pylist()
    unique = [dict(row["properties"]).get("UNIQ_KEY") for row in rows]
    hashes = java_hash(pa.array([f"{row['topic']}#{key}" for row, key in zip(rows, unique, strict=True)]))
    wanted = {(at, abs(int(code))) for at, code, key in zip(found, hashes, unique, strict=True) if key}
    indexed = {
        (int(unit["position"]), int(unit["hash"]))
        for path in files
        for unit in np.frombuffer(path.read_bytes()[4040:], KEY_UNIT)
    }
    assert len(wanted) > 400
    assert wanted <= indexed


def test_timers_and_half_messages_point_to_their_messages(tmp_path: Path) -> None:
    source, conf = broker(THREE, tmp_path)
    left(source, tmp_path / "new", conf)
    old, found = messages(THREE), new_messages(tmp_path / "new")
    moved = dict(zip(old, found, strict=True))
    before, after = ((root / "timerlog" / f"{0:020d}").read_bytes() for root in (source, tmp_path / "new"))
    timers = [at for at in range(0, len(before) - 52, 52) if before[at : at + 4] == (52).to_bytes(4, "big")]
    assert timers
    for at in timers:
        assert moved[int.from_bytes(before[at + 28 : at + 36], "big")] == int.from_bytes(
            after[at + 28 : at + 36], "big"
        )
        assert (before[at : at + 28], before[at + 36 : at + 52]) == (after[at : at + 28], after[at + 36 : at + 52])
    committed = [at for at, body in old.items() if struct.unpack_from(">i", body, 36)[0] & 0xC == 8]
    assert len(committed) == 15
    for at in committed:
        half = struct.unpack_from(">q", old[at], 76 + 12 * bool(old[at][39] & 0x10))[0]
        new = struct.unpack_from(">q", found[moved[at]], 76 + 12 * bool(old[at][39] & 0x10))[0]
        assert new == moved[half]


def test_doubled_queue_offsets_need_decision(tmp_path: Path) -> None:
    source, conf = broker(REUSED, tmp_path)
    with pytest.raises(ConfigError) as refused:
        left(source, tmp_path / "no", conf)
    assert "--on-duplicate" in refused.value.remedy
    assert not [path for path in (tmp_path / "no").iterdir() if path.name != "lock.converting"]
    old = messages(REUSED)
    for choice, oracle in (("first", "/oracle.jsonl.gz"), ("last", "/oracle-n0.jsonl.gz")):
        new = tmp_path / choice
        report = left(source, new, conf, on_duplicate=choice)
        moved = dict(zip(old, new_messages(new), strict=True))
        lines = map(json.loads, gzip.decompress(next(iter(members(REUSED, oracle).values()))).splitlines())
        expected = {
            (unit["topic"], unit["queueId"], unit["queueOffset"]): moved[unit["physicalOffset"]]
            for unit in lines
            if unit["kind"] == "unit"
        }
        assert {queue: unit[0] for queue, unit in units(new).items()} == expected
        assert (report.messages, report.units, report.duplicates_left_out) == (229, 220, 9)


def test_entries_after_commit_index_need_decision(tmp_path: Path) -> None:
    source, conf = broker(THREE, tmp_path)
    (source / "dledger-n0/checkpoint").write_text("committedIndex=1000\nendIndex=1023\n")
    with pytest.raises(ConfigError) as refused:
        left(source, tmp_path / "no", conf)
    assert refused.value.values == {"commit_index": 1000, "last_index": 1023}
    for given, last in (
        ({"until": "committed"}, 1000),
        ({"until": "end"}, 1023),
        ({"committed": committed(1010)}, 1010),
    ):
        report = left(source, tmp_path / "dry", conf, dry_run=True, **given)
        assert (report.last_index, report.entries_left_out, report.messages) == (last, 1023 - last, last + 1)
    with pytest.raises(ConfigError, match="has committed entry 1030"):
        left(source, tmp_path / "dry", conf, dry_run=True, committed=CommittedEntry(1030, 3, 0))
    for other in (replace(committed(1010), term=2), replace(committed(1010), crc=1)):
        with pytest.raises(StoreMismatchError):
            left(source, tmp_path / "dry", conf, dry_run=True, committed=other)
    assert not (tmp_path / "dry").exists()
    for path in (source / "dledger-n0").glob("checkpoint*"):
        path.unlink()
    with pytest.raises(ConfigError, match="records no commit index"):
        left(source, tmp_path / "no", conf, until="committed")


def committed(index: int) -> CommittedEntry:
    """An entry of THREE, all of whose entries from 879 on are of term 3."""
    return CommittedEntry(index, 3, zlib.crc32(list(messages(THREE).values())[index]))


@pytest.mark.soak  # ten seconds are how long a leader of Java must have kept an entry
def test_live_java_nodes_end_conversion_with_entries_that_a_leader_kept(tmp_path: Path) -> None:
    source, conf = broker(THREE, tmp_path)
    conf.write_text(conf.read_text().replace("dLegerGroup=RaftNode00", f"dLegerGroup={NAME}"))
    stored = list(messages(THREE).values())

    async def converted() -> dict[str, Any]:
        async with RunningGroup() as running:
            group = running.group
            group.entries = [WireEntry(at, 3, 1, 0, body) for at, body in enumerate(stored[:1015])]
            command = ("convert", source, tmp_path / "new", "--to", "commitlog", "--broker-conf", conf, "--dry-run")
            done = asyncio.create_task(
                asyncio.to_thread(run_process, *command, "--committed-by", running.peers, "--format", "json")
            )
            while group.gets < 20 and not done.done():  # noqa: ASYNC110 - until it has seen the end
                await asyncio.sleep(0.05)
            group.leader_id, group.term = "n1", 4  # which lacks the last ones
            del group.entries[1011:]
            return json.loads((await done).stdout)

    report = asyncio.run(converted())
    assert (report["last_index"], report["entries_left_out"]) == (1010, 13)


def test_live_nodes_end_conversion_and_other_log_is_refused(tmp_path: Path) -> None:
    own = OwnLog(tmp_path / "dledger-n0")
    own.append([], k="log", u="0" * 32)
    bodies = message_bodies(50)
    own.append(bodies)
    source = own.close()

    def given(live: list[bytes]) -> Result:
        with running_group() as group:
            group.log.append_control()
            group.log.append_bodies(*live)
            command = ("convert", source, tmp_path / "new", "--to", "commitlog", "--dry-run", "--format", "json")
            return run(*command, "--committed-by", group.peers, code=None)

    report = json.loads(given(bodies[:30]).stdout)
    assert (report["last_index"], report["messages"], report["entries_left_out"]) == (30, 30, 20)
    other = given([*bodies[:29], b"another one"])
    assert last_error(other.stderr).code == "STORE_MISMATCH"


def test_unchecked_replica_is_refused_except_by_dry_run(tmp_path: Path) -> None:
    source, conf = broker(REUSED, tmp_path)
    with pytest.raises(ConfigError, match="not compared"):
        left(source, tmp_path / "new", conf, replica_checked=False, on_duplicate="last")
    report = left(source, tmp_path / "new", conf, replica_checked=False, on_duplicate="last", dry_run=True)
    assert report.estimated_seconds is not None
    assert report.needed_bytes > 151_899
    assert not (tmp_path / "new").exists()


def test_native_log_becomes_commitlog_with_assigned_offsets(tmp_path: Path) -> None:
    own = OwnLog(tmp_path / "dledger-n0")
    own.append([], k="log", u="0" * 32)
    own.append(message_bodies(50))
    own.append([], k="noop")
    own.append(message_bodies(20))
    report = left(own.close(), tmp_path / "new")
    assert (report.kind, report.messages, report.control_dropped) == ("dledger", 70, 2)
    found = units(tmp_path / "new")
    assert sorted(found) == [("t", queue, slot) for queue in (0, 1) for slot in range(35)]
    for (_, queue, slot), (at, size, _) in found.items():
        message = new_messages(tmp_path / "new")[at] if slot in (0, 34) else None
        if message is not None:
            assert struct.unpack_from(">i", message, 12) + struct.unpack_from(">q", message, 20) == (queue, slot)
            assert len(message) == size
    assert report.notes, "no broker's directory, so no config/"


def test_entry_that_is_no_message_is_refused_or_left_out(tmp_path: Path) -> None:
    own = OwnLog(tmp_path / "dledger-n0")
    own.append([], k="log", u="0" * 32)
    own.append([*message_bodies(4), b"no message", *message_bodies(4)])
    source = own.close()
    with pytest.raises(CorruptRecordError) as refused:
        left(source, tmp_path / "new")
    assert refused.value.values == {"index": 5}
    assert "--drop-damaged 5" in refused.value.remedy
    report = left(source, tmp_path / "other", drop=((5, 6),))
    assert (report.messages, report.damaged_dropped) == (8, 1)


def test_store_without_preceding_commitlog_is_refused(tmp_path: Path) -> None:
    source, conf = broker(MIXED, tmp_path)
    with pytest.raises(ConfigError) as refused:
        left(source / "dledger-n0", tmp_path / "new", conf)
    assert "--commitlog" in refused.value.remedy
    report = left(source / "dledger-n0", tmp_path / "new", conf, commitlog=source / "commitlog", dry_run=True)
    assert report.messages == 588


def test_messages_of_generation_b_are_in_new_directory(tmp_path: Path) -> None:
    source, _ = generation_b(tmp_path)
    with pytest.raises(ConfigError, match="records no commit index"):
        left(source, tmp_path / "new")
    report = left(source, tmp_path / "new", until="end")
    with open_store(source) as log:
        old = log.messages(until="end").read_all()
    found = decode_messages(pa.array(new_messages(tmp_path / "new").values(), pa.binary()), ["topic", "keys", "body"])
    assert found.to_pylist() == old.select(["topic", "keys", "body"]).to_pylist()
    assert (report.messages, report.verified) == (old.num_rows, True)


def test_store_of_generation_b_without_messages_is_refused(tmp_path: Path) -> None:
    source, _ = store_of(unpacked("dledger-0.4.0-single", tmp_path), "")
    with pytest.raises(DLedgerError):
        left(source, tmp_path / "new", until="end")


def strike_message(new: Path) -> None:
    flip(new / "commitlog.converting" / f"{0:020d}", 5000)


def strike_unit(new: Path) -> None:
    flip(new / "consumequeue.converting/Clicks/0" / f"{0:020d}", 27)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("strike", [strike_message, strike_unit])
def test_verify_finds_difference_before_directory_gets_its_names(
    tmp_path: Path, strike: Callable[[Path], None]
) -> None:
    source, conf = broker(REUSED, tmp_path)
    new, struck = tmp_path / "new", list[str]()

    def on_step(step: Any) -> None:
        if step.phase == "verify" and not struck:
            struck.append(step.phase)
            strike(new)

    class Striking(OsFiles):
        def replace(self, path: Path, data: bytes) -> None:
            super().replace(path, data)
            if path.name == "broker.conf.proposed":
                strike(new)

    wanted = LeaveRequest(
        source=source, destination=new, broker_conf=conf, replica_checked=True, verify=True, on_duplicate="first"
    )
    with pytest.raises(CorruptRecordError):
        leave(wanted, files=Striking())
    assert not (new / "commitlog").exists()


def test_other_incomplete_conversion_and_full_directory_are_refused(tmp_path: Path) -> None:
    source, conf = broker(REUSED, tmp_path)
    new = tmp_path / "new"
    new.mkdir()
    (new / "file").touch()
    with pytest.raises(StoreMismatchError):
        left(source, new, conf, on_duplicate="first")
    (new / "file").unlink()
    with pytest.raises(Killed):
        leave(
            LeaveRequest(source=source, destination=new, broker_conf=conf, replica_checked=True, on_duplicate="first"),
            files=DyingFiles(30),
        )
    with pytest.raises(StoreMismatchError):
        left(source, new, conf, on_duplicate="last")
    with pytest.raises(ConfigError):
        left(source, source / "new", conf, on_duplicate="first")


def test_full_disk_is_reported_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, conf = broker(REUSED, tmp_path)
    monkeypatch.setattr("dledger_core.rocketmq.leaving.run.free_bytes", lambda _path: 1000)
    with pytest.raises(DiskFullError):
        left(source, tmp_path / "new", conf, on_duplicate="first")
    assert not list((tmp_path / "new").glob("commitlog*"))


def test_changed_source_restarts_run(tmp_path: Path) -> None:
    source, conf = broker(REUSED, tmp_path)
    wanted = LeaveRequest(
        source=source,
        destination=tmp_path / "new",
        broker_conf=conf,
        replica_checked=True,
        on_duplicate="first",
        verify=True,
    )
    with pytest.raises(Killed):
        leave(wanted, files=DyingFiles(60))
    os.utime(max((source / "dledger-n0/data").iterdir()), ns=(1, 1))
    report = leave(wanted)
    assert (report.resumed, report.verified, report.messages) == (False, True, 229)


def test_id_map_has_old_and_new_id_of_each_moved_message(tmp_path: Path) -> None:
    source, conf = broker(MIXED, tmp_path)
    left(source, tmp_path / "new", conf, id_map=tmp_path / "ids.tsv")
    lines = [line.split("\t") for line in (tmp_path / "ids.tsv").read_text().splitlines()]
    old = [unit for unit in golden.units(MIXED) if unit["physicalOffset"] >= 262144]
    assert {before for before, _ in lines} >= {unit["msgId"] for unit in old}
    found = new_messages(tmp_path / "new")
    assert [int(after[-16:], 16) for _, after in lines] == [at for at in found if at >= 262144]


def test_id_map_is_never_overwritten(tmp_path: Path) -> None:
    source, conf = broker(REUSED, tmp_path)
    existing = tmp_path / "ids.tsv"
    existing.write_text("kept")
    inside = source / "ids.tsv"
    for path, what in (
        (existing, "exists"),
        (tmp_path / "missing/ids.tsv", "does not exist"),
        (inside, "is inside the source"),
    ):
        with pytest.raises(ConfigError, match=f"of --id-map {what}"):
            left(source, tmp_path / "new", conf, id_map=path, on_duplicate="first")
    assert existing.read_text() == "kept"
    assert not inside.exists()
    assert not list((tmp_path / "new").glob("[!l]*"))


def test_linked_classic_files_do_not_depend_on_source(tmp_path: Path) -> None:
    """An owner whose CommitLog is in several directories makes one of symbolic links."""
    source, conf = broker(MIXED, tmp_path)
    (source / "commitlog").rename(tmp_path / "disk")
    (source / "commitlog").mkdir()
    for path in (tmp_path / "disk").iterdir():
        (source / "commitlog" / path.name).symlink_to(path)
    left(source, tmp_path / "new", conf)
    first, file = (root / f"{0:020d}" for root in (tmp_path / "new/commitlog", tmp_path / "disk"))
    assert not first.is_symlink()
    assert first.stat().st_ino == file.stat().st_ino


def test_second_process_with_same_destination_is_refused(tmp_path: Path) -> None:
    source, conf = broker(REUSED, tmp_path)
    (tmp_path / "new").mkdir()
    with (
        closing(OsFiles().lock(tmp_path / "new/lock.converting")),
        pytest.raises(StoreBusyError, match="another process converts to this directory"),
    ):
        left(source, tmp_path / "new", conf, on_duplicate="first")


def test_full_disk_in_the_middle_is_an_error_and_run_continues(tmp_path: Path) -> None:
    source, conf = broker(REUSED, tmp_path)

    class Full(OsFiles):
        def open(self, path: Path, *, write: bool = False, create: bool = False) -> File:
            if path.parent.name == "index.converting":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            return super().open(path, write=write, create=create)

    wanted = LeaveRequest(
        source=source, destination=tmp_path / "new", broker_conf=conf, replica_checked=True, on_duplicate="first"
    )
    with pytest.raises(DiskFullError, match="the disk is full") as full:
        leave(wanted, files=Full())
    assert "it continues" in full.value.remedy
    assert not (tmp_path / "new/commitlog").exists()
    report = leave(replace(wanted, verify=True))
    assert (report.resumed, report.verified, report.messages) == (True, True, 229)


def test_proposed_configuration_drops_dledger_and_keeps_rest(tmp_path: Path) -> None:
    source, conf = broker(THREE, tmp_path)
    left(source, tmp_path / "new", conf)
    lines = (tmp_path / "new/broker.conf.proposed").read_text().splitlines()
    settings = {line.partition("=")[0]: line.partition("=")[2] for line in lines if line and line[0] != "#"}
    assert not [name for name in settings if "dledger" in name.lower() or "dleger" in name.lower()]
    assert (settings["brokerRole"], settings["maxIndexNum"]) == ("ASYNC_MASTER", "4000")
    assert settings["storePathRootDir"] == str(tmp_path / "new")


def test_damaged_entries_are_left_out_only_on_request(tmp_path: Path) -> None:
    source, conf = broker(THREE, tmp_path)
    position = list(messages(THREE))[300] - 48
    path = source / "dledger-n0/data" / f"{0:020d}"
    data = bytearray(path.read_bytes())
    data[position : position + 4] = bytes(4)
    path.write_bytes(data)
    with pytest.raises(CorruptRecordError) as refused:
        left(source, tmp_path / "no", conf)
    assert "--drop-damaged 300-324" in refused.value.remedy, "the rest of the file"
    report = left(source, tmp_path / "new", conf, drop=((310, 320), (300, 325)))
    assert (report.messages, report.damaged_dropped, report.holes_filled) == (999, 25, 25)
    # Before the first file a broker finds no message, so it skips the unit of a hole, and no message after it.
    assert report.start_position == 262_144
    assert min(unit[0] for unit in units(tmp_path / "new").values()) == 262_144


def keep_queue_offsets(log: Path) -> None:
    """Say that all messages of a native log have the queue offsets of a broker."""
    path = log / "meta/log.json"
    fields = json.loads(path.read_text())
    write_checked(OsFiles(), path, {k: v for k, v in fields.items() if k != "crc32"} | {"broker_end_index": 1 << 40})


def test_missing_queue_offsets_need_decision(tmp_path: Path) -> None:
    own = OwnLog(tmp_path / "dledger-n0")
    own.append([], k="log", u="0" * 32)
    bodies = [bytearray(body) for body in message_bodies(8)]
    for number, body in enumerate(bodies):
        struct.pack_into(">q", body, 20, number // 2 + 5 * (number >= 4))
    own.append([bytes(body) for body in bodies])
    keep_queue_offsets(own.close())
    with pytest.raises(ConfigError) as refused:
        left(own.path, tmp_path / "new")
    assert "--fill-holes" in refused.value.remedy
    report = left(own.path, tmp_path / "other", fill_holes=True)
    assert (report.messages, report.holes_filled) == (8, 10)
    assert sorted(slot for _, queue, slot in units(tmp_path / "other") if queue == 0) == [0, 1, 7, 8]


def test_commands_of_guide_work(tmp_path: Path) -> None:
    source, conf = broker(MIXED, tmp_path)
    for node in ("n1", "n2"):
        shutil.copytree(source, tmp_path / node / "broker")
    source.rename(tmp_path / "broker")
    conf.rename(tmp_path / "broker.conf")
    guide = (Path(leaving_package.__file__).parent / "README.md").read_text().replace("\\\n", "")
    commands = re.findall(r"^dledger (convert .*)$", guide, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        done = run(*command.replace("/mnt/", "/data/").replace("/data/", f"{tmp_path}/").split())
        assert "588" in done.stdout
        assert re.search(r"replicas compared\W+2\b", done.stdout)
    assert (tmp_path / "broker-new/commitlog" / f"{0:020d}").exists()


@pytest.mark.parametrize(
    ("option", "remedy"),
    [
        (("--group", "g"), "--to store"),
        (("--peers", "n0-127.0.0.1:1"), "--to store"),
        (("--committed-by", "n0-127.0.0.1:1", "--until", "end"), "leave one"),
    ],
)
def test_options_of_other_destination_are_refused(tmp_path: Path, option: tuple[str, ...], remedy: str) -> None:
    source, conf = broker(REUSED, tmp_path)
    error = error_of("convert", source, tmp_path / "new", "--to", "commitlog", "--broker-conf", conf, *option)
    assert (error.code, remedy in error) == ("CONFIG", True)
    assert "--until" in error_of("convert", source, tmp_path / "new", "--until", "end")
