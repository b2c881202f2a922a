"""``dledger serve --broker-conf``: from a broker's file and store to a node that serves its messages."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dledger_core import Client
from dledger_core.cli import main
from dledger_core.cli.settings import read_settings
from dledger_core.cluster import free_ports
from dledger_core.errors import ConfigError
from dledger_core.rocketmq.store.broker_conf import read_broker_conf
from tests.rocketmq.golden import MIXED, extract, members


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


@pytest.fixture
def broker(tmp_path: Path) -> Path:
    """The file of a golden broker, set to its unpacked store and to a free port."""
    extract(MIXED, "n0/commitlog", tmp_path)
    extract(MIXED, "n0/dledger-n0/data", tmp_path)
    (content,) = members(MIXED, "broker-n0.conf").values()
    path = tmp_path / "broker.conf"
    path.write_text(content.decode().replace("STORE", str(tmp_path / MIXED)).replace("42211", str(free_ports(1)[0])))
    return path


def test_a_broker_s_messages_are_served_after_the_command_that_the_error_names(broker: Path) -> None:
    refused = run("serve", "--broker-conf", str(broker), "--check")
    assert (refused.exit_code, refused.stdout) == (3, "")
    last = refused.stderr.splitlines()[-1]
    assert "the broker's own store lies here and was not converted" in last
    command = shlex.split(last.partition("convert it: ")[2].rpartition("; or give")[0])
    assert run(*command[1:]).exit_code == 0
    checked = run("serve", "--broker-conf", str(broker), "--check", "--format", "json")
    assert checked.exit_code == 0, checked.output
    assert f"{broker}: ignored: autoCreateTopicEnable" in checked.stderr
    conf = read_broker_conf(broker)
    with subprocess.Popen(
        [sys.executable, "-m", "dledger_core.cli", "serve", "--broker-conf", str(broker)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as node:
        try:
            with Client(conf.peers, conf.group, timeout_ms=60_000) as client:
                client.append([b"one more"])
                assert client.read(0, 588).num_rows == 588
        finally:
            node.terminate()
            _, errors = node.communicate()
    assert "ignored: autoCreateTopicEnable" in errors


def test_flags_and_the_settings_file_come_before_the_broker_s(broker: Path, tmp_path: Path) -> None:
    conf = read_broker_conf(broker)
    file = tmp_path / "n0.toml"
    file.write_text(f"dir = '{tmp_path / 'other'}'\ndata-segment-bytes = '1MiB'\n")
    settings = read_settings(file, {"data_segment_bytes": "2MiB"}, conf)
    assert (settings.dir, settings.data_segment_bytes, settings.group) == (tmp_path / "other", 2 << 20, ("RaftNode00",))
    assert (settings.peers, settings.self_id) == (conf.peers, "n0")
    with pytest.raises(ConfigError, match="was not converted"):
        read_settings(None, {}, conf)
    assert settings.server_config().storage.data_segment_bytes == 2 << 20


def test_a_wrong_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "b.conf").write_text("dLegerGroup=g\ndLegerPeers=n0-h:1\ndLegerSelfId=n7\n")
    result = run("serve", "--broker-conf", str(tmp_path / "b.conf"))
    assert (result.exit_code, result.stdout) == (3, "")
    (line,) = result.stderr.splitlines()
    assert f"dLegerSelfId = 'n7' is not in dLegerPeers at {tmp_path / 'b.conf'} line 3; use one of n0" in line
