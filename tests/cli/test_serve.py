"""``dledger serve``: its settings from options, a TOML file and a broker's file, and starts that fail."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from dledger_core import Client
from dledger_core.cli.settings import read_settings
from dledger_core.cluster import free_ports
from dledger_core.config import parse_peers
from dledger_core.errors import ConfigError
from dledger_core.rocketmq.store.broker_conf import read_broker_conf
from dledger_core.server.config import ServerConfig, spread_leaders
from dledger_core.server.maintenance.retention import RetentionPolicy
from tests.cli.command import DLEDGER, error_of, run
from tests.rocketmq.golden import MIXED, extract, members

PEERS = "n2-h:3;n0-h:1;n1-h:2"
BASE = {"peers": PEERS, "self_id": "n0"}


def config(**flags: object) -> ServerConfig:
    return read_settings(None, BASE | flags).server_config()


def test_options_override_file(tmp_path: Path) -> None:
    file = tmp_path / "n0.toml"
    file.write_text(
        f'peers = "{PEERS}"\nself-id = "n0"\ngroup = ["a", "b"]\n'
        'data-segment-bytes = "1MiB"\ndurability = "page-cache"\n'
    )
    options = ("--self-id", "n1", "--durability", "fsync", "--check", "--insecure", "--format", "json")
    shown = json.loads(run("serve", "--config", file, *options).stdout)
    assert shown["self-id"] == "n1"
    assert (shown["group"], shown["data-segment-bytes"], shown["durability"]) == ("a,b", str(1 << 20), "fsync")


def test_second_port_off_loopback_needs_insecure_or_security() -> None:
    local = BASE | {"peers": "n0-127.0.0.1:1"}
    assert not read_settings(None, local | {"http": "9095"}).server_config().is_exposed
    exposed = read_settings(None, local | {"http": "0.0.0.0:9095"}).server_config()
    with pytest.raises(ConfigError):
        exposed.check_exposure()
    read_settings(None, local | {"http": "0.0.0.0:9095", "insecure": "true"}).server_config().check_exposure()


def test_retention_is_off_and_quarter_gibibyte_stays_free_by_default() -> None:
    assert not config().retention.enabled
    assert config().reserve_bytes == 256 << 20
    assert config(disk_full_bytes="0").reserve_bytes == 0


def test_options_equal_those_of_file(tmp_path: Path) -> None:
    flags = {
        "file_reserved_hours": "72",
        "delete_when": "04;16",
        "retain_bytes": "5GiB",
        "enable_disk_force_clean": "true",
        "disk_space_ratio_to_check_expired": "0.6",
        "disk_space_ratio_to_force_clean": "0.9",
        "disk_full_bytes": "1GiB",
        "on_role_change": "true 'two words'",
    }
    found = config(**flags)
    assert found.retention == RetentionPolicy(
        file_reserved_hours=72,
        delete_when=frozenset({4, 16}),
        retain_bytes=5 << 30,
        force_clean=True,
        check_ratio=0.6,
        clean_ratio=0.9,
    )
    assert (found.reserve_bytes, found.role_command) == (1 << 30, ("true", "two words"))
    lines = [f'{name.replace("_", "-")} = "{value}"' for name, value in (BASE | flags).items()]
    (tmp_path / "n0.toml").write_text("\n".join(lines))
    assert read_settings(tmp_path / "n0.toml", {}).server_config() == found


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("file_reserved_hours", "long"),
        ("delete_when", ""),
        ("retain_bytes", "0"),
        ("disk_space_ratio_to_check_expired", "0.3"),
        ("disk_space_ratio_to_force_clean", "1"),
        ("disk_full_bytes", "-1"),
        ("preferred_leaders", ("default=n9",)),
        ("on_role_change", "true 'x"),
    ],
)
def test_wrong_setting_names_its_option(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**{name: value})
    assert name.replace("_", "-") in f"{caught.value.what} {caught.value.where}"


def test_more_groups_than_a_connection_attaches_are_an_error() -> None:
    names = tuple(f"g{number}" for number in range(4097))
    assert len(config(group=names[:4096]).groups) == 4096
    with pytest.raises(ConfigError) as caught:
        config(group=names)
    assert caught.value.values == {"groups": 4097, "limit": 4096}


@pytest.mark.parametrize(
    ("groups", "lines", "expected"),
    [
        (("a",), (), {"a": ()}),
        (("a",), ("n1",), {"a": ("n1",)}),
        (("a", "b"), ("n1,n0",), {"a": ("n1", "n0"), "b": ("n1", "n0")}),
        (("a", "b"), ("n1", "n0"), {"a": ("n1", "n0"), "b": ("n1", "n0")}),
        (("c", "a", "b"), (), {"a": ("n0",), "b": ("n1",), "c": ("n2",)}),
        (("a", "b", "c"), ("none",), {"a": (), "b": (), "c": ()}),
        (("a", "b", "c"), ("b=n2, n1", " c = n0 "), {"a": (), "b": ("n2", "n1"), "c": ("n0",)}),
        (("a", "b", "c"), ("n1", "b=n2"), {"a": ("n1",), "b": ("n2",), "c": ("n1",)}),
        (("a", "b"), ("n1", "b=none"), {"a": ("n1",), "b": ()}),
        (("a", "b"), ("b=n1", "b=n0"), {"a": (), "b": ("n1", "n0")}),
    ],
)
def test_preferred_leaders_apply_per_group(
    groups: tuple[str, ...], lines: tuple[str, ...], expected: dict[str, tuple[str, ...]]
) -> None:
    found = config(group=groups, preferred_leaders=lines)
    assert {group: found.preferred(group) for group in groups} == expected


@pytest.mark.parametrize("groups", [2, 3, 7, 30])
def test_leaders_spread_evenly_in_any_order_of_groups(groups: int) -> None:
    names = [f"group{number}" for number in range(groups)]
    peers = parse_peers(PEERS)
    found = spread_leaders(names, peers)
    assert found == spread_leaders(names[::-1], peers[::-1])
    counts = Counter(leader for (leader,) in found.values())
    assert max(counts.values()) - min(counts[peer.node_id] for peer in peers) <= 1


@pytest.fixture
def broker(tmp_path: Path) -> Path:
    """The file of a golden broker, with its unpacked store and a free port."""
    extract(MIXED, "n0/commitlog", tmp_path)
    extract(MIXED, "n0/dledger-n0/data", tmp_path)
    (content,) = members(MIXED, "broker-n0.conf").values()
    path = tmp_path / "broker.conf"
    path.write_text(content.decode().replace("STORE", str(tmp_path / MIXED)).replace("42211", str(free_ports(1)[0])))
    return path


def test_broker_is_served_after_conversion_command_of_the_error(broker: Path) -> None:
    refused = run("serve", "--broker-conf", broker, "--check", code=3)
    assert refused.stdout == ""
    command = shlex.split(refused.stderr.splitlines()[-1].partition("convert it: ")[2].rpartition("; or use")[0])
    run(*command[1:])
    checked = run("serve", "--broker-conf", broker, "--check", "--format", "json")
    assert str(broker) in checked.stderr
    assert "autoCreateTopicEnable" in checked.stderr
    conf = read_broker_conf(broker)
    serve = [*DLEDGER, "serve", "--broker-conf", str(broker)]
    with subprocess.Popen(serve, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as node:
        try:
            with Client(conf.peers, conf.group, timeout_ms=60_000) as client:
                client.append([b"one more"])
                assert client.read(0, 588).num_rows == 588
        finally:
            node.terminate()
            node.communicate()


def test_options_and_file_override_broker(broker: Path, tmp_path: Path) -> None:
    conf = read_broker_conf(broker)
    file = tmp_path / "n0.toml"
    file.write_text(f"dir = '{tmp_path / 'other'}'\ndata-segment-bytes = '1MiB'\n")
    settings = read_settings(file, {"data_segment_bytes": "2MiB"}, conf)
    assert (settings.dir, settings.data_segment_bytes, settings.group) == (tmp_path / "other", 2 << 20, ("RaftNode00",))
    assert (settings.peers, settings.self_id) == (conf.peers, "n0")
    assert settings.server_config().storage.data_segment_bytes == 2 << 20
    with pytest.raises(ConfigError) as caught:
        read_settings(None, {}, conf)
    assert caught.value.where == str(conf.broker_store)


def test_wrong_broker_file_is_reported_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "b.conf").write_text("dLegerGroup=g\ndLegerPeers=n0-h:1\ndLegerSelfId=n7\n")
    line = error_of("serve", "--broker-conf", tmp_path / "b.conf")
    assert "dLegerSelfId" in line
    assert "'n7'" in line
    assert f"{tmp_path / 'b.conf'} line 3" in line
