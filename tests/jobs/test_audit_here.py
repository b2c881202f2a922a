"""A little of stores is read by this process, more of them on Spark: both record the same."""

from __future__ import annotations

import shutil
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs._audit import run as audit_run
from jobs._audit.model import Replica
from jobs._audit.options import Options
from jobs._audit.passes import _ARROW_SCHEMA, _digest_rows, digest_pass, digests_here
from jobs._audit.plan import DigestTask, aligned, sections, shares
from jobs._audit.snapshot import store_replicas, stored_logs
from jobs._cli import StoppedError
from jobs.audit_replicas import command
from tests.jobs.auditing import overwrite
from tests.spark_connector.store_writer import StoreWriter
from tests.support.run_job import run_in_process

SPAN = 128
ENTRIES = 3000
ORDER = [("replica", "ascending"), ("start", "ascending")]
run = partial(run_in_process, command)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two stores, the second with a body that is damaged."""
    place = tmp_path_factory.mktemp("here")
    with StoreWriter(place / "a") as writer:
        writer.append_numbers(ENTRIES, "a body of some length")
    shutil.copytree(writer.path, place / "b")
    overwrite(sorted((place / "b" / "data").iterdir())[0], 5000, b"\xff\xff")
    return {"a": writer.path, "b": place / "b"}


@pytest.fixture(scope="module")
def tasks(stores: dict[str, Path]) -> list[DigestTask]:
    replicas = store_replicas(stores)
    return [DigestTask(r, part.start, part.end, SPAN) for part in sections(replicas) for r in part.replicas]


def without_time(rows: pa.Table) -> list[dict[str, Any]]:
    return rows.drop_columns("read_at").sort_by(ORDER).to_pylist()


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_threads_read_the_same_as_one_task(tasks: list[DigestTask], threads: int) -> None:
    expected = pa.Table.from_pylist([row for task in tasks for row in _digest_rows(task, "run", "x")], _ARROW_SCHEMA)
    found = digests_here(tasks, "run", threading.Event(), resumes="x", threads=threads)
    assert found.num_rows == 2 * -(-ENTRIES // SPAN)
    assert found.schema == _ARROW_SCHEMA
    assert without_time(found) == without_time(expected)
    assert [row["replica"] for row in found.to_pylist() if row["problem"] or row["damaged"]] == ["b"]


@pytest.mark.spark
@pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas")
def test_spark_reads_the_same(spark: Any, tasks: list[DigestTask]) -> None:
    there = digest_pass(spark, tasks, "run").toArrow()
    here = digests_here(tasks, "run", threading.Event())
    assert there.column_names == here.column_names
    assert without_time(there) == without_time(here)
    assert max(there["read_at"].to_pylist()) <= min(here["read_at"].to_pylist())


@pytest.mark.spark
def test_a_run_on_spark_goes_on_with_what_was_read_here_and_the_other_way(
    stores: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replicas = [f"--replica={name}={path}" for name, path in stores.items()]
    kinds = []
    for number, most in enumerate([audit_run.HERE_BYTES, -1, audit_run.HERE_BYTES]):
        monkeypatch.setattr(audit_run, "HERE_BYTES", most)
        more = ["--skip-proven", "1d"] if number else []
        code, summary, err = run(capsys, *replicas, "--table", str(tmp_path / "audit"), *more)
        kinds.append([finding["class"] for finding in summary["findings"]])
        assert (code, summary["coverage_percent"]) == (1, 100.0), err
        assert ("ranges were proven before" in err) == bool(number)
    assert kinds[0] == kinds[1] == kinds[2] != []


@pytest.mark.parametrize("table", [None, "audit"])
def test_a_run_that_is_stopped_records_nothing_more(stores: dict[str, Path], tmp_path: Path, table: str | None) -> None:
    directory = None if table is None else str(tmp_path / table)
    given = {"skip_proven": None, "reread_percent": 4, "resume": None, "rate": None, "report": None, "against": ""}
    audit = audit_run.Audit(stored_logs(stores), Options(mode="digest", table=directory, **given))
    audit.stopping.set()
    with pytest.raises(StoppedError):
        audit.run(_NoSession())  # type: ignore[arg-type]
    assert not any(tmp_path.iterdir())


class _NoSession:
    """Two cores, and nothing that Spark could be asked for."""

    defaultParallelism = 2  # noqa: N815 - Spark's name

    @property
    def sparkContext(self) -> _NoSession:
        return self


@given(
    st.lists(st.integers(0, 5000), min_size=2, max_size=2, unique=True), st.integers(1, 9), st.sampled_from([1, 8, 64])
)
def test_shares_cut_between_ranges_and_leave_nothing_out(bounds: list[int], count: int, span: int) -> None:
    start, end = sorted(bounds)
    replica = Replica(name="a", group="g")
    parts = list(shares([DigestTask(replica, start, end, span)], count))
    assert [edge for part in parts for edge in aligned(part.start, part.end, span)] == list(aligned(start, end, span))
    assert all(part.replica is replica and part.span == span for part in parts)
    assert len(parts) <= count + 1
