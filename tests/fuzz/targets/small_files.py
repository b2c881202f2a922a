"""The small files: hard state, log.json, checkpoint, tables with their control entries, the settings of a node."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from dledger_core import control
from dledger_core.checksum import crc32
from dledger_core.cli.settings import read_settings
from dledger_core.config import format_peers, parse_peers
from dledger_core.errors import ConfigError, CorruptRecordError, DLedgerError, StoreMismatchError
from dledger_core.ids import Index
from dledger_core.rocketmq.store.broker_conf import read_broker_conf
from dledger_core.server.security.principals import Principals
from dledger_core.storage import CommitLog
from dledger_core.storage.files.layout import Layout, load_log_meta, save_log_meta
from dledger_core.storage.files.members_file import members_file
from dledger_core.storage.files.meta_files import load_checkpoint, load_hard_state, save_checkpoint, save_hard_state
from dledger_core.storage.read.visibility import Visibility
from dledger_core.storage.tables.tables import LogTables
from tests.fuzz.counted_files import CountedFiles
from tests.fuzz.finding import expect, memory_below
from tests.support.logs import STORE, append

FIXED_BYTES = 4 << 20
PER_BYTE = 200
META = STORE / "meta"


def files_with(path: Path, data: bytes) -> CountedFiles:
    """A file system that holds one file."""
    files = CountedFiles()
    files.mkdir(STORE)
    files.mkdir(path.parent)
    files.replace(path, data)
    return files


def run_hard_state(data: bytes) -> None:
    """Input: one copy; the other one is missing."""
    layout = Layout(STORE)
    path = layout.hard_state
    files = files_with(path, data)
    with memory_below(FIXED_BYTES + PER_BYTE * len(data)):
        try:
            state = load_hard_state(files, layout, 3)
        except CorruptRecordError as error:
            expect(error.where == str(path) and bool(error.remedy), "the error does not say where", it=error)
            return
    expect(state.term >= 3, "a term below the log's", term=state.term)
    found = json.loads(data)
    expect("voted_for" in found, "a file that says nothing of a vote was taken for no vote")
    expect((state.voted_for, state.term) == (found["voted_for"], found["term"]), "another vote than the file's")
    save_hard_state(files, layout, state)
    expect(load_hard_state(files, layout, 3) == state, "the state changes when written again", it=state)


def run_log_json(data: bytes) -> None:
    """Input: the file. What is taken must be usable: an empty store of it opens, appends, and opens again."""
    path = META / "log.json"
    files = files_with(path, data)
    with memory_below(FIXED_BYTES + PER_BYTE * len(data)):
        try:
            meta = load_log_meta(files, path)
        except StoreMismatchError as error:
            expect(error.where == str(path) and bool(error.remedy), "the error does not say where", it=error)
            return
        assert meta is not None
        save_log_meta(files, path, meta)
        expect(load_log_meta(files, path) == meta, "the identity changes when written again", it=meta)
        try:
            log = _open(files, meta.group, meta.node_id)
            append(log, [b"body"])
            log.close()
            last = log.last_index()
            log = _open(files, meta.group, meta.node_id)
        except DLedgerError:
            return
        expect(log.last_index() == last == meta.first_index, "an entry was lost", last=last)
        log.close()


def _open(files: CountedFiles, group: str, node_id: str) -> CommitLog:
    return CommitLog.open(STORE, group=group, node_id=node_id, files=files)


def run_checkpoint(data: bytes) -> None:
    """Input: one copy; the other one is missing. A damaged one counts as absent."""
    path = META / "checkpoint"
    files = files_with(path, data)
    with memory_below(FIXED_BYTES + PER_BYTE * len(data)):
        found = load_checkpoint(files, path)
    if found is not None:
        save_checkpoint(files, path, found)
        again = json.loads(files.read(path) or b"")
        expect(again.keys() == json.loads(data).keys(), "a damaged checkpoint was taken", it=found)
        expect(load_checkpoint(files, path) == found, "the checkpoint changes when written again", it=found)


def run_members(data: bytes) -> None:
    """Input: one copy; the other one is missing. A damaged one counts as lost."""
    ab_file = members_file(Layout(STORE))
    files = files_with(ab_file.path, data)
    with memory_below(FIXED_BYTES + PER_BYTE * len(data)):
        found = ab_file.load(files).value
    if found is not None:
        indexes = [entry.index for entry in found.entries]
        expect(indexes == sorted(set(indexes)), "configurations out of order", it=found)
        ab_file.save(files, found)
        expect(ab_file.load(files).value == found, "the configurations change when written again", it=found)


def run_tables(data: bytes) -> None:
    """Input: flags (1 = right CRC), then the snapshot. A damaged one gives empty tables."""
    flags, snapshot = (data[:1] or b"\0")[0], data[1:]
    if flags & 1:
        snapshot = crc32(snapshot[4:]).to_bytes(4, "big") + snapshot[4:]
    with memory_below(FIXED_BYTES + PER_BYTE * len(data)):
        tables = LogTables.restore(snapshot)
    if flags & 1 and data[1:] != snapshot:  # no node writes such a file
        return
    again = tables.snapshot()
    expect(LogTables.restore(again).snapshot() == again, "the tables change when written again")
    if snapshot[:4] != crc32(snapshot[4:]).to_bytes(4, "big"):
        expect(again == LogTables().snapshot(), "a damaged snapshot was taken")
    _ask(tables)


def _ask(tables: LogTables) -> None:
    for key in tables.producers:
        entry = tables.producers.get(key)
        expect(entry is not None and entry.next_sequence > 0, "a producer is not found", it=key)
    visibility = Visibility.of(tables.transactions, 1 << 40)
    expect(visibility.end <= 1 << 40, "the visible end is past the log", it=visibility.end)
    visibility.orphaned(0, 1 << 40)


def run_control(data: bytes) -> None:
    """Consecutive bodies of control entries, each after its u16 length; applied to the tables."""
    tables, at, index = LogTables(), 0, 0
    while at + 2 <= len(data):
        size = int.from_bytes(data[at : at + 2], "big")
        body = data[at + 2 : at + 2 + size]
        at += 2 + size
        with memory_below(FIXED_BYTES + PER_BYTE * len(data)):
            try:
                fields = control.unpack(body)
                tables.apply(Index(index), 1000 * index, body)
            except CorruptRecordError:
                continue
        expect(isinstance(fields, dict), "no map", it=fields)
        index += 4
        snapshot = tables.snapshot()
        restored = LogTables.restore(snapshot)
        expect(restored.applied_index == tables.applied_index, "a snapshot does not restore", it=fields)
        expect(restored.snapshot() == snapshot, "a snapshot restores to something else", it=fields)
        _ask(tables)


def run_config(data: bytes) -> None:
    """Input: the file."""
    with tempfile.NamedTemporaryFile(suffix=".toml") as file:
        file.write(data)
        file.flush()
        with memory_below((4 << 20) + 400 * len(data)):
            try:
                config = read_settings(Path(file.name), {}).server_config()
            except ConfigError as error:
                expect(bool(error.what and error.remedy), "the error does not say what to do", it=error)
                return
    expect(config.me.node_id == config.self_id, "another node's address")
    expect(config.storage.index_segment_bytes % 32 == 0 and bool(config.groups), "settings that fit nothing")
    for group in config.groups:
        path = config.store_path(group)
        expect(path.parent.parent == config.directory and ".." not in path.parts[-2:], "a store outside", it=path)


def run_broker_conf(data: bytes) -> None:
    """Input: the file."""
    with tempfile.NamedTemporaryFile(suffix=".conf") as file:
        file.write(data)
        file.flush()
        with memory_below((4 << 20) + 400 * len(data)):
            try:
                conf = read_broker_conf(Path(file.name))
            except ConfigError as error:
                expect(bool(error.what and error.remedy), "the error does not say what to do", it=error)
                return
    expect(conf.self_id in {str(peer.node_id) for peer in parse_peers(conf.peers)}, "a broker outside its peers")
    expect(conf.broker_store.parent == conf.root, "a store outside", it=conf.broker_store)


def run_principals(data: bytes) -> None:
    """Input: the file."""
    with tempfile.NamedTemporaryFile(suffix=".toml") as file:
        file.write(data)
        file.flush()
        with memory_below((4 << 20) + 400 * len(data)):
            try:
                principals = Principals(Path(file.name))
            except ConfigError as error:
                expect(bool(error.what and error.remedy), "the error does not say what to do", it=error)
                return
    expect(principals.of_token("") is None and principals.of_token("x") is None, "a token of no principal")


def run_peers(data: bytes) -> None:
    """Input: the text."""
    text = data.decode("utf-8", "replace")
    try:
        peers = parse_peers(text)
    except ConfigError as error:
        expect(type(error) is ConfigError and bool(error.remedy), "the error does not say what to do", it=error)
        return
    expect(parse_peers(format_peers(peers)) == peers, "the peers change when written again", it=peers)
    expect(len({peer.node_id for peer in peers}) == len(peers), "a node twice", it=peers)
    expect(all(peer.host and 0 < peer.port < 65536 for peer in peers), "a peer without an address", it=peers)
