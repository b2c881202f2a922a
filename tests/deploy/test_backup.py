"""The guide's backup of one node's directory, and the five commands that make it a group again, as printed."""

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
SECTION = GUIDE.partition("\n## Backing up and restoring\n")[2].partition("\n## ")[0]
BACKUP, RESTORE = re.findall(r"^```\n(.*?)^```$", SECTION, re.DOTALL | re.MULTILINE)


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


def test_copy_of_one_node_becomes_a_group_again(tmp_path: Path) -> None:
    ports = dict(zip(("n0", "n1", "n2"), free_ports(3), strict=True))
    peers = ";".join(f"{name}-127.0.0.1:{port}" for name, port in ports.items())
    environment = {"DLEDGER_PEERS": peers, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    (tmp_path / "backup").mkdir()

    def type_line(line: str, code: int = 0) -> str:
        for printed, actual in (
            ("/var/lib/dledger", str(tmp_path / "n2")),
            ("/backup", str(tmp_path / "backup")),
            ("10.0.0.1:40911", f"127.0.0.1:{ports['n0']}"),
            ("10.0.0.2:40911", f"127.0.0.1:{ports['n1']}"),
        ):
            line = line.replace(printed, actual)
        done = subprocess.run(["bash", "-c", line], check=False, env=os.environ | environment, capture_output=True)
        assert done.returncode == code, (line, done.stderr)
        return done.stderr.decode()

    stop, copy, start = BACKUP.splitlines()
    assert (stop, start) == ("systemctl stop dledger", "systemctl start dledger")
    with (
        node("n0", peers, tmp_path / "n0"),
        node("n1", peers, tmp_path / "n1"),
        Client(peers, timeout_ms=60_000) as client,
    ):
        with node("n2", peers, tmp_path / "n2"):
            client.append([b"%d" % number for number in range(100)])
            soon(lambda: {each.last_index for each in client.metadata().nodes} == {100})
        type_line(copy)
        with node("n2", peers, tmp_path / "n2"):
            client.append([b"after the copy"])
    for name in ports:
        shutil.rmtree(tmp_path / name)
    restore, start, recover, *add = RESTORE.splitlines()
    type_line(restore)
    assert start == "systemctl start dledger"
    assert "n2" in type_line(recover, code=2)  # it is not there yet
    with ExitStack() as stack:
        stack.enter_context(node("n2", peers, tmp_path / "n2"))
        type_line(recover)
        for name in ("n0", "n1"):
            stack.enter_context(node(name, peers, tmp_path / name))
        for line in add:
            type_line(line)
        with Client(f"127.0.0.1:{ports['n0']}", timeout_ms=60_000) as client:
            assert client.append([b"new"]).term == 2
            bodies = client.read(0, client.bounds().end)["body"].to_pylist()
            assert bodies == [*(b"%d" % number for number in range(100)), b"new"]
            assert [each.role for each in client.members().members] == ["voter"] * 3
