"""The fixture ``dledger``, in a session of pytest as a user has it; clusters in memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dledger_core import Client, ConfigError, LocalCluster

pytestmark = [pytest.mark.integration, pytest.mark.slow]

TESTS = """
import json
import pytest
from pathlib import Path

@pytest.mark.parametrize("number", range(34))
def test_log_is_empty_and_new(dledger, number):
    assert dledger.client.read(0, 10).num_rows == 0
    index = dledger.client.append([b"%d" % number]).first_index
    with dledger.connect(timeout_ms=60_000) as other:
        assert other.get(index).body == b"%d" % number
    with Path("seen.jsonl").open("a") as file:
        file.write(json.dumps([dledger.peers, dledger.group]) + "\\n")
"""


def session(directory: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", *settings]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False, timeout=400)


def test_each_test_gets_a_log_of_its_own_from_few_clusters(tmp_path: Path) -> None:
    (tmp_path / "test_orders.py").write_text(TESTS)
    done = session(tmp_path)
    assert "34 passed" in done.stdout, done.stdout
    seen = [tuple(json.loads(line)) for line in (tmp_path / "seen.jsonl").read_text().splitlines()]
    assert len(set(seen)) == 34
    assert len({peers for peers, _ in seen}) == 2


def test_setting_gives_number_of_nodes(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\ndledger_nodes = 3\n")
    (tmp_path / "test_nodes.py").write_text(
        "def test_nodes(dledger):\n    assert len(dledger.client.metadata().nodes) == 3\n"
    )
    done = session(tmp_path)
    assert "1 passed" in done.stdout, done.stdout


def test_pytest_starts_without_loading_dledger_core(tmp_path: Path) -> None:
    (tmp_path / "test_modules.py").write_text(
        "import sys\n\n\ndef test_modules():\n"
        "    assert 'pytest_dledger' in sys.modules\n    assert 'dledger_core' not in sys.modules\n"
    )
    done = session(tmp_path)
    assert "1 passed" in done.stdout, done.stdout


def test_cluster_in_memory_leaves_nothing_and_takes_no_directory(tmp_path: Path) -> None:
    with LocalCluster(1, memory=True) as cluster, Client(cluster.peers) as client:
        client.append([b"one"])
        directory = cluster.directory
        assert directory.exists()
    assert not directory.exists()
    with pytest.raises(ConfigError):
        LocalCluster(1, tmp_path, memory=True)
