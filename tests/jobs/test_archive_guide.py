"""The guide "years of history": its commands, as printed, on real nodes.

The command with object storage is run by ``test_deployment.py``, the blocks of Python by ``test_archive_job.py`` and
``tests/spark_connector/test_archived.py``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from dledger_core import Client, LocalCluster
from dledger_core.rocketmq import encode_messages
from tests.cli.command import run
from tests.support.run_job import run_in_process
from tests.support.slow_elections import SLOW_ELECTIONS
from tests.support.soon import soon
from tests.test_guides import blocks

GUIDE = Path(__file__).parents[2] / "spark_connector" / "HISTORY.md"
JOB = re.compile(r"jobs/(\w+)\.py")


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Nodes that keep the entries before the first proof, and half of those after it."""
    with LocalCluster(3, data_segment_bytes=1 << 16, retain_bytes=1 << 20, **SLOW_ELECTIONS) as running:
        yield running


def commands() -> list[str]:
    guide = GUIDE.read_text()
    sections = re.findall(r"^## (.*)$", guide, re.MULTILINE)
    lines = [line for section in sections for block in blocks(guide, section, "") for line in block.splitlines()]
    return [line for line in lines if "s3a://" not in line]


def append(client: Client, first: int, count: int) -> None:
    for at in range(first, first + count, 100):
        bodies = [b"%06d" % number + b"x" * 500 for number in range(at, at + 100)]
        client.append(encode_messages(["T"] * 100, [0] * 100, bodies).to_pylist())


@pytest.mark.soak
@pytest.mark.spark
@pytest.mark.integration
def test_commands_of_the_guide_do_what_it_says(
    spark: Any,
    cluster: LocalCluster,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DLEDGER_PEERS", cluster.peers)
    store = str(cluster.store_path("n0"))
    results: dict[str, list[Any]] = {}
    with Client(cluster.peers) as client:
        append(client, 0, 1000)
        for number, line in enumerate(commands()):
            printed = line.replace("$DLEDGER_PEERS", cluster.peers).replace("$STORE", store)
            words = shlex.split(printed.replace(" /tmp/", f" {tmp_path}/"))
            if (job := JOB.search(line)) is None:
                assert words[0] == "dledger"
                results.setdefault(words[1], []).append(run(*words[1:]).stdout)
                continue
            arguments = words[words.index(job[0]) + 1 :]
            if "--every" in arguments:  # it would not end
                at = arguments.index("--every")
                del arguments[at : at + 2]
            command = partial(run_in_process, import_module(f"jobs.{job[1]}").command)
            code, done, _ = command(capsys, *arguments)
            assert (code, done["status"]) == (0, "ok"), line
            results.setdefault(job[1], []).append(done)
            if number == 0:
                append(client, 1000, 2000)
                soon(lambda: client.bounds().first_index > 500, every_s=0.5)
        first = client.bounds().first_index
    written, kept_up, verified = results["archive"]
    assert (written["archived_end"], kept_up["archived_end"], verified["ranges"]) == (1000, 1000, written["ranges"])
    assert first > 42
    assert len(results["tail"][0].splitlines()) == 1 + written["rows"]  # and a heading
    assert "000041" in results["get"][0]
    assert list((tmp_path / "exported").rglob("*.parquet"))
    [rebuilt], [audited] = results["rebuild_consume_queue"], results["audit_replicas"]
    assert (rebuilt["start"], rebuilt["rows"], rebuilt["dense"]) == (0, 3000, True)
    assert audited["verdict"] == "CONSISTENT"
    assert {page.name for page in tmp_path.glob("*.html")} == {"audit.html", "verify.html"}
