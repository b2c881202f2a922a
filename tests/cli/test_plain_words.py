"""No command, error or log shows Python's literals: words or JSON instead of None, ['n1'] and {'op': 1}."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dledger_core import LocalCluster
from dledger_core.errors import BadRequestError, in_words
from tests.cli.command import run
from tests.support.soon import soon

LITERAL = re.compile(r"\bNone\b(?! of)|\bTrue\b|\bFalse\b|[\[({]'\w[^'\n]*'[\])},:]|\(\)|<[a-z_.]+ object")
SNAPSHOTS = Path(__file__).parent / "snapshots"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "none"),
        (True, "true"),
        ("a", "a"),
        (7, "7"),
        (["n1", "n2"], "n1, n2"),
        (("n1",), "n1"),
        ([], "none"),
        ({"b", "a"}, "a, b"),
        ({"op": "ask", "n": None}, '{"op": "ask", "n": null}'),
        (b"\x01\xff", "01ff"),
        ([["a", 1]], "a, 1"),
    ],
)
def test_value_is_shown_without_literals(value: Any, text: str) -> None:
    assert in_words(value) == text
    assert f"(value={text})" in str(BadRequestError("wrong", "", "", {"value": value}))


def test_error_snapshots_have_no_literals() -> None:
    found = [line for line in (SNAPSHOTS / "errors.txt").read_text().splitlines() if LITERAL.search(line)]
    assert found == []


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(3, memory=True) as nodes:
        with nodes.client() as client:
            client.append([b"one", b"two"])
        yield nodes


STORE = "STORE"
COMMANDS = (
    "status", "status --all-groups", "member list", "member remove n9", "member promote n0", "producer list",
    "transaction list", "recover --dry-run", "init --dry-run", "get 1", "get 99", "append three", "transfer n9",
    "tail --no-follow", f"dump {STORE}", f"verify {STORE}", f"look {STORE}", "serve --self-id n0 --check",
    "doctor --self-id n9",
)  # fmt: skip


@pytest.mark.integration
@pytest.mark.parametrize("typed", COMMANDS)
def test_command_shows_no_literals(typed: str, cluster: LocalCluster) -> None:
    words = typed.replace(STORE, str(cluster.store_path("n0"))).split()
    peers = () if words[0] in ("dump", "verify", "look") else ("--peers", cluster.peers)
    done = run(*words, *peers, code=None)
    assert LITERAL.findall(done.stdout + done.stderr) == [], done.output


@pytest.mark.integration
def test_recovery_and_logs_show_no_literals(cluster: LocalCluster) -> None:
    """Runs last: it kills two of the nodes that the tests share."""
    cluster.kill("n1")
    cluster.kill("n2")
    typed = ("recover", "--lost", "n1,n2", "--dry-run", "--peers", cluster.peers)
    soon(lambda: run(*typed, code=None).exit_code == 1)  # the leader resigns first
    done = run(*typed, code=1)
    assert "n1, n2" in done.stdout
    status = run("status", "--peers", cluster.peers, code=1)
    logs = "".join(cluster.log_path(node).read_text() for node in cluster.node_ids)
    assert LITERAL.findall(done.stdout + done.stderr + status.stdout + status.stderr + logs) == []
