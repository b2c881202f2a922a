"""The ingest job on a live group of real Java nodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dledger_core import Client
from jobs import ingest
from jobs._cli import run_job
from tests.interop.java_group import JavaGroup

pytestmark = [pytest.mark.spark, pytest.mark.integration, pytest.mark.slow]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    with pytest.raises(SystemExit) as stopped:
        run_job(ingest.command, arguments)
    return int(stopped.value.code or 0), json.loads(capsys.readouterr().out.splitlines()[-1])


def test_ingest_appends_new_entries_of_java_group(
    spark: Any, group_b: JavaGroup, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def append(*bodies: bytes) -> int:
        with Client(group_b.peers, "g", protocol="dledger-java", timeout_ms=60_000) as client:
            return client.append(list(bodies)).first_index

    def rows() -> list[tuple[bytes, Any]]:
        found = spark.read.format("delta").load(str(tmp_path / "table")).collect()
        return sorted((bytes(row["body"]), row["committed"]) for row in found)

    first = append(b"one", b"two")
    arguments = ["--peers", group_b.peers, "--groups", "g", "--protocol", "dledger-java", "--safety-lag", "500ms"]
    arguments += ["--table", str(tmp_path / "table"), "--checkpoint", str(tmp_path / "checkpoint")]
    arguments += ["--starting-offsets", json.dumps({"g": first})]
    code, told = run(capsys, *arguments, "--commit-probe", "--dry-run")
    assert (code, told["available"]["g"]["end"]) == (0, first + 2)
    assert append(b"three") == first + 2, "a dry run has appended a probe"
    code, told = run(capsys, *arguments)
    bodies = [b"one", b"three", b"two"]  # Java's servers keep no order of requests in flight
    assert (code, told["rows"], rows()) == (0, 3, [(body, None) for body in bodies])
    append(b"zero")
    code, told = run(capsys, *arguments)
    assert (code, told["rows"], rows()) == (0, 1, [(body, None) for body in (*bodies, b"zero")])
    code, told = run(capsys, *arguments[:4], *arguments[6:])
    assert (code, told["error"]) == (3, "DLEDGER_OPTION")
