"""Classic CommitLogs as a running or killed broker leaves them: read without Spark, as its tasks do."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from dledger_core import IndexOutOfRangeError
from dledger_core.rocketmq import commit_log_files
from dledger_core.rocketmq.store.commit_log import scan_records
from jobs._rebuild.plan import RebuildOptions, plan_for
from jobs._rebuild.source import reader
from jobs._rebuild.units import DAMAGED, EntryRules
from tests.rocketmq.golden import MIXED, extract

MESSAGES = 325


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return extract(MIXED, "n0/commitlog", tmp_path)


def units_of(log: Path, *, closed: bool = False) -> tuple[int, list[int]]:
    """Number of units, and positions of damage."""
    alone = plan_for(RebuildOptions.parse({"commitlog": str(log), "table": str(log.parent / "table")})).classic
    files = commit_log_files(log) if closed else alone
    read = reader(files, "g", EntryRules(header_bytes=0), closed=closed)
    rows = pa.Table.from_batches(read([pa.record_batch({"id": range(len(files))})]))
    damaged = [row["position"] for row in rows.to_pylist() if row["skipped"] == DAMAGED]
    return sum(
        pa.ipc.open_stream(batch).read_all().num_rows for batch in rows["batch"].drop_null().to_pylist()
    ), damaged


def cut(log: Path, messages: int, more: int = 0) -> int:
    """Take away the last messages, but for some bytes of the first of them; returns where that begins."""
    last = max(log.iterdir())
    content = last.read_bytes()
    begin = [at for at, _ in scan_records(content)][-messages]
    last.write_bytes(content[: begin + more].ljust(len(content), b"\0"))
    return int(last.name) + begin


def make_ahead(log: Path) -> None:
    last = max(log.iterdir())
    size = last.stat().st_size
    (log / f"{int(last.name) + size:020d}").write_bytes(bytes(size))


def test_log_that_ends_in_blank(log: Path) -> None:
    assert units_of(log) == units_of(log, closed=True) == (MESSAGES, [])


@pytest.mark.parametrize("more", [0, 6, 70])
def test_preallocated_file_and_partial_last_message_are_the_end(log: Path, more: int) -> None:
    cut(log, 40, more)
    make_ahead(log)
    assert units_of(log) == (MESSAGES - 40, [])


@pytest.mark.parametrize("more", [0, 6, 70])
def test_continued_log_must_be_complete(log: Path, more: int) -> None:
    end = cut(log, 40, more)
    assert units_of(log, closed=True) == (MESSAGES - 40, [end])


def test_short_file_before_others_is_damage(log: Path) -> None:
    first = min(log.iterdir())
    content = first.read_bytes()
    begin = [at for at, _ in scan_records(content)][-3]
    first.write_bytes(content[: begin + 70].ljust(len(content), b"\0"))
    assert units_of(log) == (MESSAGES - 3, [begin])


def test_file_that_broker_deletes_meanwhile_is_named(log: Path) -> None:
    files = commit_log_files(log)
    read = reader(files, "g", EntryRules(header_bytes=0), closed=False)
    min(log.iterdir()).unlink()
    with pytest.raises(IndexOutOfRangeError) as caught:
        list(read([pa.record_batch({"id": range(len(files))})]))
    assert caught.value.where == files[0].path
