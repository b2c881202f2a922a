"""Stores of each release: this version reads their files, starts on them, and continues their writers and members."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dledger_core import Client, LocalCluster, Producer, SequenceConflictError, TransactionError
from dledger_core.storage.files.file_system import OsFiles
from dledger_core.storage.files.layout import Layout
from dledger_core.storage.files.members_file import members_file, newest_configuration
from dledger_core.storage.files.meta_files import checkpoint_file, hard_state_file
from tests.compatibility.clusters import (
    ABORTED,
    CLUSTERS,
    COMMITTED,
    OPEN,
    STREAM,
    answers_of,
    facts_of,
    json_fields,
    members_of,
)
from tests.compatibility.make import VERSIONS, extract
from tests.support.soon import soon

KEPT = [(release, name) for release in VERSIONS for name in CLUSTERS if (release / f"stores-{name}.json").exists()]
STORES = pytest.mark.parametrize(("release", "name"), KEPT, ids=lambda part: getattr(part, "name", part))
RELEASES = pytest.mark.parametrize("release", VERSIONS, ids=lambda path: path.name)


def expected_of(release: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((release / f"stores-{name}.json").read_text())
    return found


@contextmanager
def started(release: Path, name: str, directory: Path) -> Iterator[tuple[LocalCluster, Client]]:
    """Start the nodes of this version on the stores of a release."""
    path = extract(release / f"stores-{name}.tar.xz", directory)
    with CLUSTERS[name].start(path) as cluster, Client(cluster.peers, retry_timeout_ms=60_000) as client:
        yield cluster, client


@STORES
def test_files_have_the_recorded_entries_and_state(release: Path, name: str, tmp_path: Path) -> None:
    path = extract(release / f"stores-{name}.tar.xz", tmp_path)
    assert facts_of(path) == expected_of(release, name)["stores"]


@RELEASES
def test_either_copy_of_each_ab_file_is_enough(release: Path, tmp_path: Path) -> None:
    path, files = extract(release / "stores-native.tar.xz", tmp_path), OsFiles()
    layout = Layout(path / "default" / "dledger-n0")
    ab_files = (hard_state_file(layout.hard_state), checkpoint_file(layout.checkpoint), members_file(layout))
    for ab_file in ab_files:
        both = ab_file.load(files)
        assert both.value is not None
        for copy in (ab_file.path, ab_file.path.with_name(f"{ab_file.path.name}.2")):
            data = copy.read_bytes()
            copy.unlink()
            assert ab_file.load(files).value == both.value
            copy.write_bytes(data)


@pytest.mark.integration
@STORES
def test_nodes_start_and_give_the_recorded_answers(release: Path, name: str, tmp_path: Path) -> None:
    expected, kept = expected_of(release, name), CLUSTERS[name]
    with started(release, name, tmp_path) as (_, client):
        answers = answers_of(client, kept, expected["end"])
        assert json.loads(json.dumps(answers)) == expected["answers"]
        if name != "replacing":
            assert members_of(client) == expected["members"]
        appended = client.append([b"by a later version"])
        index = appended.first_index  # an open transaction may precede it
        found = client.fetch(index, index + 1, isolation="read_uncommitted", min_commit=index)
        assert found.batch["body"].to_pylist() == [b"by a later version"]
        if kept.has_tables:
            _continue_writers(client)


def _continue_writers(client: Client) -> None:
    state = client.producer(STREAM)
    assert state.last_range is not None
    last = client.append([b"x"], producer_id=STREAM, epoch=state.epoch, sequence=state.next_sequence)
    again = client.append([b"x"], producer_id=STREAM, epoch=state.epoch, sequence=state.next_sequence)
    assert again == last
    with pytest.raises(SequenceConflictError):
        client.append([b"y"], producer_id=STREAM, epoch=state.epoch, sequence=state.next_sequence)
    Producer(client, STREAM).append([b"z"])
    before = client.transaction(COMMITTED)
    assert before.state == "committed"
    with pytest.raises(TransactionError):
        client.commit_transaction(COMMITTED, [])  # other rows
    assert client.transaction(COMMITTED).fingerprint == before.fingerprint


@pytest.mark.integration
@RELEASES
def test_transactions_of_release_end_as_they_began(release: Path, tmp_path: Path) -> None:
    with started(release, "native", tmp_path) as (_, client):
        assert client.bounds().end < client.bounds(isolation="read_uncommitted").end
        with pytest.raises(TransactionError):
            client.append_attempt([b"late"], transaction=ABORTED, attempt="late")
        with pytest.raises(TransactionError):
            client.append_attempt([b"late"], transaction=COMMITTED, attempt="late")
        client.append_attempt([b"open-3"], transaction=OPEN, attempt="attempt-o")
        client.abort_transaction(OPEN)
        soon(lambda: client.bounds().end == client.bounds(isolation="read_uncommitted").end)


@pytest.mark.integration
@RELEASES
def test_replacement_that_began_in_release_is_finished(release: Path, tmp_path: Path) -> None:
    path = extract(release / "stores-replacing.tar.xz", tmp_path / "files")
    stores = [Layout(path / "default" / node) for node in expected_of(release, "replacing")["stores"]]
    configurations = [newest_configuration(OsFiles(), layout) for layout in stores]
    assert any(found is not None and found.configuration.replaces for found in configurations)
    with started(release, "replacing", tmp_path / "nodes") as (cluster, client):
        soon(lambda: {member.role for member in client.members().members} == {"voter"})
        assert len(client.members().members) == 3
        for node in cluster.node_ids:
            assert client.read(0, 10, node=node).num_rows > 0


@pytest.mark.integration
@RELEASES
def test_json_of_commands_has_the_fields_of_release(release: Path, tmp_path: Path) -> None:
    with started(release, "native", tmp_path) as (cluster, _):
        found = json_fields(cluster)
    for command, fields in expected_of(release, "native")["json"].items():
        assert set(fields) <= set(found[command]), command
