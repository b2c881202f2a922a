"""The guide's backups of one node, and the five commands that make one a group again, as printed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from dledger_core import Client
from dledger_core.cluster import free_ports
from tests.cli.command import DLEDGER
from tests.support.soon import soon

pytestmark = pytest.mark.integration
GUIDE = (Path(__file__).resolve().parents[2] / "deploy/OPERATIONS.md").read_text()
SECTION = GUIDE.partition("\n## Backing up and restoring\n")[2].partition("\n### A survivor is damaged\n")[0]
ONLINE, BACKUP, RESTORE, BEFORE_UPGRADE = re.findall(r"^```\n(.*?)^```$", SECTION, re.DOTALL | re.MULTILINE)
STOP, START = "systemctl stop dledger", "systemctl start dledger"


@contextmanager
def node(name: str, peers: str, directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A node that listens, as ``systemctl start`` returns then."""
    command = [*DLEDGER, "serve", "--self-id", name, "--peers", peers, "--dir", str(directory)]
    with (directory.parent / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        soon(lambda: b"listening" in (directory.parent / f"{name}.log").read_bytes())
        yield process
    finally:
        process.terminate()
        process.wait(60)


def test_backup_of_one_node_becomes_a_group_again(tmp_path: Path) -> None:
    ports = dict(zip(("n0", "n1", "n2"), free_ports(3), strict=True))
    peers = ";".join(f"{name}-127.0.0.1:{port}" for name, port in ports.items())
    environment = {"DLEDGER_PEERS": peers, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    (tmp_path / "backup").mkdir()

    def type_line(line: str, code: int = 0) -> str:
        actual = {
            "sudo -u dledger ": "",
            "/var/lib/dledger": str(tmp_path / "n2"),
            "/backup": str(tmp_path / "backup"),
            "10.0.0.1:40911": f"127.0.0.1:{ports['n0']}",
            "10.0.0.2:40911": f"127.0.0.1:{ports['n1']}",
        }
        line = re.sub("|".join(actual), lambda printed: actual[printed[0]], line)
        done = subprocess.run(["bash", "-c", line], check=False, env=os.environ | environment, capture_output=True)
        assert done.returncode == code, (line, done.stderr)
        return done.stderr.decode()

    def append_everywhere(numbers: range) -> None:
        last = client.append([b"%d" % number for number in numbers]).last_index
        soon(lambda: all(each.commit_index >= last for each in client.metadata().nodes))

    stop, backup, start = BACKUP.splitlines()
    assert (stop, start) == (STOP, START)
    with (
        node("n0", peers, tmp_path / "n0"),
        node("n1", peers, tmp_path / "n1"),
        Client(peers, timeout_ms=60_000) as client,
    ):
        with node("n2", peers, tmp_path / "n2"):
            append_everywhere(range(90))
            assert "STORE_BUSY" in type_line(backup, code=3)
        type_line(backup)
        with node("n2", peers, tmp_path / "n2"):
            append_everywhere(range(90, 100))
            type_line(ONLINE)
            append_everywhere(range(100, 110))
            for line in BEFORE_UPGRADE.splitlines():
                type_line(line)
            client.append([b"after the backup"])
    for name in ports:
        shutil.rmtree(tmp_path / name)
    restore, start, recover, *add = RESTORE.splitlines()
    type_line(restore)
    assert start == START
    assert "n2" in type_line(f"{recover} --yes", code=2)  # it is not there yet
    with ExitStack() as stack:
        stack.enter_context(node("n2", peers, tmp_path / "n2"))
        type_line(f"{recover} --yes")  # the answer to its question
        for name in ("n0", "n1"):
            stack.enter_context(node(name, peers, tmp_path / name))
        for line in add:
            type_line(line)
        with Client(f"127.0.0.1:{ports['n0']}", timeout_ms=60_000) as client:
            new = client.append([b"new"])
            assert new.term > 1
            bodies = client.read(0, new.last_index + 1)["body"].to_pylist()
            assert bodies == [*(b"%d" % number for number in range(110)), b"new"]
            assert [each.role for each in client.members().members] == ["voter"] * 3
