"""Contract of a job: bad input, dry run, signal and resume, exit codes, the JSON summary. Every job keeps it."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from dledger_core import Client, LocalCluster
from dledger_core.rocketmq import encode_messages
from jobs import archive, audit_replicas, demo, ingest, rebuild_consume_queue
from tests.support.run_job import run_in_process, start_job, wait_for
from tests.support.slow_elections import SLOW_ELECTIONS

COMMANDS: dict[str, click.Command] = {
    "ingest": ingest.command,
    "rebuild_consume_queue": rebuild_consume_queue.command,
    "audit_replicas": audit_replicas.command,
    "archive": archive.command,
    "demo": demo.command,
}
DOWN = ("--peers", "n0-127.0.0.1:1;n1-127.0.0.1:2")
TABLE = ("--table", "table")
INGEST, REBUILD, AUDIT, ARCHIVE = "ingest", "rebuild_consume_queue", "audit_replicas", "archive"
NEEDED = (*DOWN, *TABLE, "--checkpoint", "checkpoint")
STORE = (*TABLE, "--store", "s")
STORES = (*TABLE, "--replica", "a=/x", "--replica", "b=/y")
OUTPUTS: dict[str, tuple[str, ...]] = {INGEST: (*TABLE, "--checkpoint", "checkpoint"), REBUILD: TABLE, AUDIT: TABLE}
OUTPUTS[ARCHIVE] = (*TABLE, "--write")
UNUSABLE = ("file", "file/t", "file/a/b", "photos", "/proc/dledger")
"""Directories that a job cannot write to, or that have files of another program; ``work`` makes the first ones."""
SAME = (("x", "x/"), ("x", "./y/../x"), ("x", "x/c"), ("x/t", "x"), ("x", "link"), ("x", "link/c"))
"""Two names of one directory, or of one inside the other."""

BAD_INPUT: list[tuple[str, tuple[str, ...], list[str]]] = [
    ("demo", ("--keep", "photos"), ["photos"]),
    ("demo", ("--events", "5"), ["--events"]),
    (INGEST, (), ["--table"]),
    (INGEST, (*NEEDED, "--trigger", "now"), ["--trigger"]),
    (INGEST, (*NEEDED, "--peers", "nonsense"), ["nonsense"]),
    (INGEST, (*NEEDED, "--groups", ","), ["--groups"]),
    (INGEST, (*NEEDED, "--starting-offsets", "newest"), ["startingOffsets"]),
    (INGEST, (*NEEDED, "--starting-offsets", "@absent"), ["absent"]),
    *((INGEST, (*NEEDED, "--table", path), ["--table", path.split("/")[0]]) for path in UNUSABLE),
    *((INGEST, (*NEEDED, "--checkpoint", path), ["--checkpoint", path.split("/")[0]]) for path in UNUSABLE),
    (INGEST, (*NEEDED, "--table", "spark"), ["--table"]),
    (INGEST, (*NEEDED, "--checkpoint", "delta"), ["--checkpoint"]),
    *((INGEST, (*NEEDED, "--table", one, "--checkpoint", other), ["--table", "--checkpoint"]) for one, other in SAME),
    *((INGEST, (*NEEDED, "--table", one, "--checkpoint", other), ["--table", "--checkpoint"]) for other, one in SAME),
    (INGEST, (*NEEDED, "--table", "s3a://b/x", "--checkpoint", "s3a://b/x/"), ["--table", "--checkpoint"]),
    (INGEST, (*NEEDED, "--table", "s3a://b/x", "--checkpoint", "s3a://b/x/c"), ["--table", "--checkpoint"]),
    (INGEST, (*NEEDED, "--retry-for", "0"), ["--retry-for"]),
    (INGEST, (*NEEDED, "--max-bytes-per-trigger", "0"), ["--max-bytes-per-trigger"]),
    (INGEST, (*NEEDED, "--lag-json", "absent/lag.jsonl"), ["--lag-json"]),
    (INGEST, (*NEEDED, "--lag-prometheus", "nonsense"), ["nonsense"]),
    (INGEST, (*NEEDED, "--lag-prometheus", "absent/lag.prom"), ["--lag-prometheus"]),
    (INGEST, (*NEEDED, "--lag-prometheus", "0.0.0.0:9408"), ["0.0.0.0", "--insecure"]),
    (INGEST, (*NEEDED, "--lag-table", "lag"), ["--lag-table", "--lag-json"]),
    (REBUILD, (), ["--table"]),
    (REBUILD, (*STORE, *DOWN), ["--peers", "--store"]),
    (REBUILD, (*TABLE, "--peers", "nonsense"), ["nonsense"]),
    (REBUILD, (*STORE, "--groups", "a"), ["--groups"]),
    (REBUILD, (*TABLE, "--store", "/nowhere"), ["/nowhere"]),
    (REBUILD, (*STORE, "--unknown", "s"), ["--unknown"]),
    (REBUILD, (*STORE, "--report", "report.html"), ["--report", "--compare"]),
    (REBUILD, (*STORE, "--broker-end-index", "3"), ["--broker-end-index"]),
    (REBUILD, (*TABLE, *DOWN, "--groups", "a,b", "--broker-end-index", "3"), ["--broker-end-index"]),
    (REBUILD, (*TABLE, *DOWN, "--trigger", "1s"), ["--trigger", "--checkpoint"]),
    (REBUILD, (*STORE, "--delay-levels", "soon"), ["--delay-levels"]),
    (REBUILD, ("--table", "t/u", *DOWN, "--checkpoint", "t"), ["--table", "--checkpoint"]),
    (REBUILD, ("--table", "s/t", "--store", "s"), ["--table", "--store"]),
    (REBUILD, ("--table", "t", "--store", "t/s"), ["--table", "--store"]),
    (REBUILD, ("--table", "c/t", "--commitlog", "c"), ["--table", "--commitlog"]),
    (REBUILD, (*STORE, "--files", "table"), ["--table", "--files"]),
    (REBUILD, (*STORE, "--files", "s"), ["--files", "--store"]),
    (REBUILD, ("--table", "q/t", "--store", "s", "--compare", "q"), ["--table", "--compare"]),
    (REBUILD, (*TABLE, *DOWN, "--commitlog", "c"), ["--commitlog"]),
    (REBUILD, (*STORE, "--files", "file"), ["--files"]),
    (REBUILD, (*STORE, "--files", "/proc"), ["--files"]),
    (REBUILD, (*STORE, "--compare", "/nowhere"), ["--compare", "/nowhere"]),
    (REBUILD, (*TABLE, "--commitlog", "/nowhere"), ["/nowhere"]),
    (REBUILD, (*TABLE, "--commitlog", "photos"), ["photos"]),
    (REBUILD, (*TABLE, "--commitlog", "s", "--checkpoint", "c"), ["CommitLog"]),
    (REBUILD, (*STORE, "--checkpoint", "c", "--trigger", "9s"), ["--trigger"]),
    (REBUILD, (*TABLE, *DOWN, "--checkpoint", "c", "--trigger", "soon"), ["--trigger", "'soon'"]),
    (REBUILD, (*TABLE, *DOWN, "--groups", "a,b", "--files", "f"), ["--files"]),
    (REBUILD, ("--table", "file", "--store", "s"), ["--table"]),
    (REBUILD, (*STORE, "--archive", "true"), ["--archive", "--peers"]),
    (REBUILD, (*TABLE, "--commitlog", "c", "--archive", "true"), ["--archive", "--peers"]),
    (REBUILD, (*TABLE, *DOWN, "--archive", "table"), ["--table", "--archive"]),
    (REBUILD, (*TABLE, *DOWN, "--archive", "true", "--archive-storage", "file"), ["--archive-storage", "file"]),
    (ARCHIVE, DOWN, ["--table"]),
    (ARCHIVE, (*TABLE, "--peers", "nonsense"), ["nonsense"]),
    (ARCHIVE, (*DOWN, *TABLE, "--group", "a b"), ["a b"]),
    (ARCHIVE, (*DOWN, *TABLE, "--end", "--write"), ["--end"]),
    (ARCHIVE, (*DOWN, *TABLE, "--verify", "--every", "10m"), ["--verify", "--every"]),
    (ARCHIVE, (*DOWN, *TABLE, "--every", "soon"), ["'soon'"]),
    (ARCHIVE, (*DOWN, *TABLE, "--until", "-1"), ["--until"]),
    (ARCHIVE, (*DOWN, *TABLE, "--storage", "file"), ["--storage", "file"]),
    (ARCHIVE, (*DOWN, *TABLE, "--report", "absent/x.html"), ["--report"]),
    (ARCHIVE, (*DOWN, "--table", "photos"), ["--table", "photos"]),
    (ARCHIVE, (*DOWN, "--table", "empty"), ["empty"]),
    (AUDIT, DOWN, ["--table"]),
    (AUDIT, (*STORES, *DOWN), ["--peers", "--replica"]),
    (AUDIT, (*TABLE, "--peers", "nonsense"), ["nonsense"]),
    (AUDIT, (*TABLE, *DOWN, "--groups", ","), ["--groups"]),
    (AUDIT, (*TABLE, "--replica", "a=/x"), ["--replica"]),
    (AUDIT, (*TABLE, "--replica", "a=", "--replica", "b=y"), ["'a='"]),
    (AUDIT, STORES, ["/x"]),
    (AUDIT, (*STORES, "--groups", "g"), ["--groups"]),
    (AUDIT, (*TABLE, *DOWN, "--mode", "thorough"), ["--mode"]),
    (AUDIT, (*TABLE, *DOWN, "--archive", "table"), ["--table", "--archive"]),
    (AUDIT, (*TABLE, *DOWN, "--archive-storage", "storage.json"), ["--archive"]),
    (AUDIT, (*TABLE, *DOWN, "--against", "x"), ["'x'"]),
    (AUDIT, (*TABLE, *DOWN, "--against", DOWN[1]), ["--against"]),
    (AUDIT, (*TABLE, *DOWN, "--skip-proven", "soon"), ["'soon'"]),
    (AUDIT, (*TABLE, *DOWN, "--skip-proven", "7d", "--dry-run"), ["--skip-proven"]),
    (AUDIT, (*TABLE, *DOWN, "--resume", "../x"), ["--resume"]),
    (AUDIT, (*TABLE, *DOWN, "--skip-proven", "-1d"), ["--skip-proven"]),
    (AUDIT, (*TABLE, *DOWN, "--reread-share", "101"), ["--reread-share"]),
    (AUDIT, (*TABLE, *DOWN, "--max-bytes-per-second", "0"), ["--max-bytes-per-second"]),
    *(
        (AUDIT, (*TABLE, *DOWN, "--report", path), ["--report", path])
        for path in ("/nowhere/x.html", "/proc/x.html", "photos", "file/x.html")
    ),
    *((AUDIT, (*DOWN, "--table", path), ["--table", path.split("/")[0]]) for path in UNUSABLE),
    (AUDIT, ("--replica", "a=/x", "--replica", "b=y", "--table", "y/t"), ["--table", "--replica b"]),
    (AUDIT, ("--replica", "a=x", "--replica", "b=y", "--table", "x"), ["--table", "--replica a"]),
]


NEW = ("new", "new/below/it", "empty", "s3a://bucket/x", "hdfs://name/x")
GOOD_INPUT: list[tuple[str, tuple[str, ...]]] = [
    *((job, arguments) for job, arguments in OUTPUTS.items()),
    *((REBUILD, ("--table", path)) for path in (*NEW, "delta")),
    *((REBUILD, (*TABLE, "--checkpoint", path)) for path in (*NEW, "spark", "stream")),
    *((AUDIT, ("--table", path)) for path in (*NEW, "audit")),
    *((AUDIT, (*TABLE, "--report", path)) for path in ("file", "new.html")),
    (REBUILD, ("--table", "x", "--checkpoint", "x.checkpoint")),
    (REBUILD, ("--table", "s3a://b/x", "--checkpoint", "b/x")),
]
"""Paths that a job may write to: it ends at nodes that do not answer, and has not made anything."""


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, empty."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


@pytest.fixture
def used(work: Path) -> Path:
    """The same with a file, a link, the photos of another program, and outputs of earlier runs."""
    others = ("empty", "photos/holidays", "delta/_delta_log")
    for path in (*others, "spark/metadata", "stream/offsets", "audit/audit_runs"):
        (work / path).mkdir(parents=True)
    (work / "file").write_text("kept")
    (work / "storage.json").write_text('{"aws_region": "eu-central-1"}')
    (work / "link").symlink_to("x")
    return work


def content(directory: Path) -> dict[Path, str]:
    return {path: path.read_text() if path.is_file() else "" for path in directory.rglob("*")}


@pytest.mark.parametrize(("job", "arguments", "names"), BAD_INPUT)
def test_bad_input_is_named_in_one_line_and_writes_nothing(
    job: str, arguments: tuple[str, ...], names: list[str], used: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(used)
    code, summary, err = run_in_process(COMMANDS[job], capsys, *arguments)
    assert (code, summary["status"]) == (3, "error")
    [line] = err.splitlines()
    assert line.startswith("error: ")
    assert [name for name in names if name not in line] == []
    assert content(used) == before


@pytest.mark.integration
@pytest.mark.parametrize(("job", "arguments"), GOOD_INPUT)
def test_unreachable_nodes_are_reported_before_jvm_starts(
    job: str, arguments: tuple[str, ...], used: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(used)
    soon = ("--retry-for", "2") if job == INGEST else ()
    code, summary, _ = run_in_process(COMMANDS[job], capsys, *DOWN, *soon, *arguments)
    assert (code, summary["error"]) == (2, "UNREACHABLE")
    assert content(used) == before


MISSING = "raise ModuleNotFoundError(\"No module named '{0}'\", name='{0}')"
OTHER_PYSPARK = """
import sys
from pathlib import Path

others = (Path(entry) / "pyspark" for entry in sys.path)
real = next(path for path in others if path != Path(__file__).parent and (path / "__init__.py").is_file())
__path__ = [str(real)]
exec((real / "__init__.py").read_text())
__version__ = "3.5.1"
"""


@pytest.mark.integration
@pytest.mark.parametrize(
    ("job", "package", "text", "name"),
    [
        *((job, "pyspark", MISSING.format("pyspark"), "pyspark") for job in COMMANDS),
        (INGEST, "pyspark", OTHER_PYSPARK, "3.5.1"),
        (REBUILD, "delta", MISSING.format("delta"), "delta"),
    ],
    ids=[*(f"no pyspark-{job}" for job in COMMANDS), "other pyspark", "no delta"],
)
def test_missing_package_is_one_line_with_install_command(
    job: str, package: str, text: str, name: str, tmp_path: Path, work: Path
) -> None:
    (tmp_path / "other" / package).mkdir(parents=True)
    (tmp_path / "other" / package / "__init__.py").write_text(text + "\n")
    arguments = [] if job == "demo" else [*DOWN, *OUTPUTS[job]]
    process = start_job(job, arguments, work, PYTHONPATH=str(tmp_path / "other"))
    out, err = process.communicate(timeout=400)
    [line] = err.splitlines()
    assert line.startswith("error: [CONFIG] ")
    assert name in line
    assert "pip install 'pyspark" in line
    assert (process.returncode, json.loads(out.splitlines()[-1])["error"]) == (3, "CONFIG")
    assert not list(work.iterdir())


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Three nodes with 2000 messages."""
    with LocalCluster(3, data_segment_bytes=1 << 20, **SLOW_ELECTIONS) as running:
        with Client(running.peers) as client:
            for _ in range(4):
                client.append(encode_messages("T", 0, [b"x" * 100] * 500))
        yield running


def absolute(arguments: tuple[str, ...], work: Path) -> list[str]:
    """Name the outputs by absolute paths: a JVM that runs already keeps the directory in which it started."""
    return [str(work / each) if each in {"table", "checkpoint"} else each for each in arguments]


@pytest.mark.spark
@pytest.mark.integration
@pytest.mark.parametrize("job", OUTPUTS)
def test_dry_run_writes_nothing(
    job: str, cluster: LocalCluster, spark: Any, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    del spark  # the audit compares in a dry run too
    code, summary, _ = run_in_process(
        COMMANDS[job], capsys, "--peers", cluster.peers, *absolute(OUTPUTS[job], work), "--dry-run"
    )
    assert (code, summary["status"]) == (0, "ok")
    assert not list(work.iterdir())


STREAMING: dict[str, tuple[str, ...]] = {
    INGEST: ("--trigger", "0.5 seconds", "--max-offsets-per-trigger", "50"),
    REBUILD: ("--checkpoint", "checkpoint", "--trigger", "0.5 seconds"),
    AUDIT: ("--max-bytes-per-second", "100"),
}
"""Arguments with which a job does not end soon."""


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize("job", [AUDIT, *(pytest.param(job, marks=pytest.mark.soak) for job in (INGEST, REBUILD))])
def test_sigterm_stops_job_and_next_run_completes(
    job: str, cluster: LocalCluster, spark: Any, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    del spark
    arguments = ["--peers", cluster.peers, *absolute(OUTPUTS[job], work)]
    process = start_job(job, [*arguments, *absolute(STREAMING[job], work)], work)
    try:
        if job == AUDIT:  # its first step takes longer than this test
            assert process.stderr is not None
            next(line for line in process.stderr if line.startswith("group "))
        else:
            wait_for(process, lambda: len(list((work / "table" / "_delta_log").glob("*.json"))) >= 2)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=400)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, json.loads(out.splitlines()[-1])["status"]) == (2, "stopped")
    assert "Traceback" not in err
    assert "\tat " not in err
    assert {path.name for path in work.iterdir()} <= {"table", "checkpoint"}
    again = absolute(("--checkpoint", "checkpoint"), work) if job == REBUILD else []
    code, summary, _ = run_in_process(COMMANDS[job], capsys, *arguments, *again)
    assert (code, summary["status"]) == (0, "ok")
    assert summary.get("verdict", "CONSISTENT") == "CONSISTENT"
