"""Each kind of damage, in each kind of store, is noticed by each way to look at it: no cell of the table is silent."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

from dledger_core import ConfigError, DLedgerError, open_store
from dledger_core.cli import main
from dledger_core.rocketmq import locate
from jobs._audit.replicas import stored_logs
from spark_connector.options import DLedgerOptions
from spark_connector.reading.readers import DLedgerBatchReader
from tests.contracts.small_file_stores import CONVERT, STORES
from tests.jobs.auditing import audit_replicas
from tests.support.damage import KINDS, DataFiles

FIRST_OF_MIXED = f"{262144:020d}"
UNKNOWABLE = {("classic", "lost_last_file"), ("classic", "lost_end")}
"""A CommitLog alone has nothing that tells its end: only a comparison with a replica shows that it is shorter."""
USUAL = {("mixed_before_upgrade", "lost_file")}
"""The oldest file: brokers delete it when it expires."""


@dataclass(frozen=True)
class Cell:
    """A damaged directory, the directory with the damaged files, and an intact copy."""

    path: Path
    data: Path
    intact: Path
    knowable: bool


@pytest.fixture(
    scope="module",
    params=[(store, kind) for store in STORES for kind in KINDS if (store, kind) not in USUAL],
    ids=" ".join,
)
def damaged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Cell:
    """Every way only reads, so all ways share a cell's directories."""
    store, kind = request.param
    (path, data), (intact, _) = (STORES[store](tmp_path_factory.mktemp(name)) for name in ("damaged", "intact"))
    KINDS[kind](DataFiles(data))
    return Cell(path, data, intact, (store, kind) not in UNKNOWABLE)


@pytest.mark.parametrize(
    "way",
    [
        ("verify",),
        ("dump",),
        ("dump", "--format", "json"),
        ("look",),
        ("export", "out", "--to", "jsonl"),
        ("convert", "out", *CONVERT),
    ],
    ids=lambda way: " ".join(way[:3:2]),
)
def test_damage_is_noticed_by_command(damaged: Cell, tmp_path: Path, way: tuple[str, ...]) -> None:
    command, *options = [str(tmp_path / word) if word == "out" else word for word in way]
    result = CliRunner().invoke(main, [command, str(damaged.path), *options])
    assert (result.exit_code in (1, 3, 4)) == damaged.knowable, result.output
    assert not damaged.knowable or damaged.path.name in result.output


def messages_of(store: Path) -> dict[int, tuple[int, bytes]]:
    """Queue offset and body of each message by its index: a message's position is another one where it was moved."""
    with open_store(store) as reader:
        found = reader.messages(until="end").read_all()
    columns = (found.column(name).to_pylist() for name in ("index", "queue_offset", "body"))
    return {index: (offset, body) for index, offset, body in zip(*columns, strict=True)}


def test_salvage_keeps_each_intact_entry_and_lists_the_others(damaged: Cell, tmp_path: Path) -> None:
    store, intact = locate(damaged.path).store, locate(damaged.intact).store
    if store is None or intact is None or store / "data" != damaged.data:
        return  # a CommitLog, which has no indexes to keep
    if store.parent == damaged.path and min(damaged.data.iterdir()).name != FIRST_OF_MIXED:
        return  # of the store alone, as it would be after retention
    result = CliRunner().invoke(main, ["salvage", str(store), str(tmp_path), "--format", "json"])
    assert result.exit_code == 1, result.output
    lost = {index for each in json.loads(result.stdout)["lost"] for index in range(each["start"], each["end"])}
    saved, before = messages_of(tmp_path / "salvaged" / "dledger-n0"), messages_of(intact)
    assert len(saved) > len(before) // 3 or (len(list(damaged.data.iterdir())) == 2 and not saved), "two files swapped"
    assert saved == {index: before[index] for index in saved}
    assert set(before) - set(saved) == set(before) & lost
    verified = CliRunner().invoke(main, ["verify", str(tmp_path / "salvaged" / "dledger-n0")])
    assert verified.exit_code == 0, verified.output


def test_damage_is_noticed_by_audit(damaged: Cell) -> None:
    assert ("damaged" in audited(damaged=damaged.path)) == damaged.knowable
    both = audited(damaged=damaged.path, intact=damaged.intact)
    assert "damaged" in both
    assert "intact" not in both


def audited(**directories: Path) -> set[str]:
    """The replicas that an audit names, or cannot read; "a,b" if it cannot tell which of them is right."""
    try:
        logs = stored_logs(directories)
    except ConfigError as error:
        return {name for name, path in directories.items() if str(path) in error.where}
    found = {each.name for replicas in logs.values() for each in replicas if not each.reachable}
    for replicas in logs.values():
        found |= {each.replica for each in audit_replicas(tuple(each for each in replicas if each.reachable))}
    return found


def test_damage_is_noticed_by_spark(damaged: Cell) -> None:
    """The connector's reader without a JVM, as an executor runs it."""
    options = {"path": str(damaged.path), "decode": "message", "pollMs": "1", "fetchRetryMs": "1"}
    reader = DLedgerBatchReader(DLedgerOptions.for_reading(options))
    try:
        parts = [batch for part in reader.partitions() for batch in reader.read(part)]
    except DLedgerError:
        noticed = True
    else:
        noticed = any(part.column("error").null_count < part.num_rows for part in parts)
    assert noticed == damaged.knowable
