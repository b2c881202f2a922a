"""Each kind of damage, in each kind of store, is noticed by each way to look at it: no cell of the table is silent."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner

from dledger_core import ConfigError, DLedgerError
from dledger_core.cli import main
from dledger_core.rocketmq import locate
from dledger_core.rocketmq.message.layout import MAGIC_V1
from jobs._audit.replicas import stored_logs
from spark_connector.options import DLedgerOptions
from spark_connector.reading.readers import DLedgerBatchReader
from tests.jobs.auditing import audit_replicas
from tests.jobs.broker_store import STORED_MS, messages, write_broker_store
from tests.rocketmq.convert.stores import flip, overwrite
from tests.rocketmq.golden import MIXED, extract
from tests.spark_connector.store_writer import StoreWriter

COUNT, FILE_BYTES = 100, 1 << 12
FIRST_OF_MIXED = f"{262144:020d}"
_BLANK = struct.pack(">i", -875286124)
_MESSAGE = struct.pack(">i", MAGIC_V1)


def bodies() -> list[bytes]:
    return messages(range(COUNT), body=b"twenty bytes of body", born_timestamp=STORED_MS, store_timestamp=STORED_MS)


# --- stores: each returns the directory to look at, and the one with its data files ---------------------------------


def native(directory: Path) -> tuple[Path, Path]:
    with StoreWriter(directory, segment_bytes=FILE_BYTES) as store:
        for start in range(0, COUNT, 5):
            store.append(bodies()[start : start + 5])
    return store.path, store.path / "data"


def generation_a(directory: Path) -> tuple[Path, Path]:
    path = directory / "g" / "dledger-n0"
    write_broker_store(path, bodies(), committed=COUNT - 1, data_bytes=FILE_BYTES)
    return path, path / "data"


def generation_b(directory: Path) -> tuple[Path, Path]:
    path = directory / "g" / "dledger-n0"
    write_broker_store(path, bodies(), data_bytes=FILE_BYTES)
    return path, path / "data"


def classic(directory: Path, file_bytes: int = FILE_BYTES) -> tuple[Path, Path]:
    """A CommitLog as its broker writes it: a file ends with a BLANK."""
    path = directory / "commitlog"
    path.mkdir()
    base, content = 0, bytearray()
    for body in bodies():
        if len(content) + len(body) + 8 > file_bytes:
            blank = struct.pack(">i", file_bytes - len(content)) + _BLANK
            (path / f"{base:020d}").write_bytes((content + blank).ljust(file_bytes, b"\0"))
            base, content = base + file_bytes, bytearray()
        content += body[:28] + struct.pack(">q", base + len(content)) + body[36:]
    (path / f"{base:020d}").write_bytes(content.ljust(file_bytes, b"\0"))
    return path, path


def mixed(directory: Path) -> tuple[Path, Path]:
    """The directory of a real broker; the DLedger part is damaged."""
    extract(MIXED, "n0/commitlog", directory)
    store = extract(MIXED, "n0/dledger-n0", directory)
    return store.parent, store / "data"


def mixed_before_upgrade(directory: Path) -> tuple[Path, Path]:
    """The same; its CommitLog is damaged."""
    path, _ = mixed(directory)
    return path, path / "commitlog"


STORES = {make.__name__: make for make in (native, generation_a, generation_b, classic, mixed, mixed_before_upgrade)}


# --- damage ---------------------------------------------------------------------------------------------------------


def places(file: Path) -> list[int]:
    """The offsets of the messages of a file."""
    content, found = file.read_bytes(), []
    at = content.find(_MESSAGE)
    while at >= 0:
        found.append(at - 4)
        at = content.find(_MESSAGE, at + 1)
    return found


def middle(files: list[Path]) -> tuple[Path, int]:
    """A file that is not the last one, and a message in its middle that has a body."""
    file = files[(len(files) - 1) // 2]
    content, starts = file.read_bytes(), places(file)
    return file, next(at for at in starts[len(starts) // 2 :] if int.from_bytes(content[at + 84 : at + 88]) > 4)


def bit(files: list[Path]) -> None:
    file, at = middle(files)
    flip(file, at + 88, 1)


def zeros(files: list[Path]) -> None:
    file, at = middle(files)
    overwrite(file, at, bytes(300))


def lost_file(files: list[Path]) -> None:
    files[(len(files) - 1) // 2].unlink()


def lost_last_file(files: list[Path]) -> None:
    files[-1].unlink()


def lost_end(files: list[Path]) -> None:
    starts = places(files[-1])
    at = starts[len(starts) // 2]
    overwrite(files[-1], at, bytes(files[-1].stat().st_size - at))


def swapped(files: list[Path]) -> None:
    one, other = files[-3:-1] if len(files) > 2 else files
    first = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(first)


def old_copy(files: list[Path]) -> None:
    """A full file is again as it was when it was half full."""
    file, at = middle(files)
    overwrite(file, at, bytes(file.stat().st_size - at))


DAMAGE = {make.__name__: make for make in (bit, zeros, lost_file, lost_last_file, lost_end, swapped, old_copy)}

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
    params=[(store, kind) for store in STORES for kind in DAMAGE if (store, kind) not in USUAL],
    ids=" ".join,
)
def damaged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Cell:
    """Every way only reads, so all ways share a cell's directories."""
    store, kind = request.param
    (path, data), (intact, _) = (STORES[store](tmp_path_factory.mktemp(name)) for name in ("damaged", "intact"))
    DAMAGE[kind](sorted(data.iterdir()))
    return Cell(path, data, intact, (store, kind) not in UNKNOWABLE)


TARGET = ("--group", "g", "--self-id", "n0", "--peers", "n0-127.0.0.1:1", "--dry-run")


@pytest.mark.parametrize(
    "way",
    [
        ("verify",),
        ("dump",),
        ("dump", "--format", "json"),
        ("look",),
        ("export", "out", "--to", "jsonl"),
        ("convert", "out", *TARGET),
    ],
    ids=lambda way: " ".join(way[:3:2]),
)
def test_damage_is_noticed_by_command(damaged: Cell, tmp_path: Path, way: tuple[str, ...]) -> None:
    command, *options = [str(tmp_path / word) if word == "out" else word for word in way]
    result = CliRunner().invoke(main, [command, str(damaged.path), *options])
    assert (result.exit_code in (1, 3, 4)) == damaged.knowable, result.output
    assert not damaged.knowable or damaged.path.name in result.output


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
    store = locate(damaged.path).store
    if store is None or store / "data" != damaged.data:
        return  # the source reads stores; a CommitLog is read by the rebuild
    if (store.parent / "commitlog").is_dir() and min(damaged.data.iterdir()).name != FIRST_OF_MIXED:
        return  # of the store alone, as it would be after retention
    options = {"path": str(store), "decode": "message", "pollMs": "1", "fetchRetryMs": "1"}
    reader = DLedgerBatchReader(DLedgerOptions.for_reading(options))
    try:
        parts = [batch for part in reader.partitions() for batch in reader.read(part)]
    except DLedgerError:
        return
    assert pa.Table.from_batches(parts).column("error").null_count < sum(part.num_rows for part in parts)
