"""What the settings of ``serve`` become: preferred leaders per group, the command for role changes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from dledger_core.cli.settings import read_settings
from dledger_core.config import parse_peers
from dledger_core.errors import ConfigError
from dledger_core.server.config import ServerConfig, spread_leaders

PEERS = "n2-h:3;n0-h:1;n1-h:2"


def config(**flags: object) -> ServerConfig:
    return read_settings(None, {"peers": PEERS, "self-id": "n0"} | flags).server_config()


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
def test_preferred_leaders_per_group(
    groups: tuple[str, ...], lines: tuple[str, ...], expected: dict[str, tuple[str, ...]]
) -> None:
    found = config(group=groups, preferred_leaders=lines)
    assert {group: found.preferred(group) for group in groups} == expected


def test_a_settings_file_says_the_same(tmp_path: Path) -> None:
    file = tmp_path / "n0.toml"
    file.write_text(
        f'peers = "{PEERS}"\nself-id = "n0"\ngroup = ["a", "b"]\n'
        'preferred-leaders = ["n1", "b=n2,n0"]\non-role-change = "true \'two words\'"\n'
    )
    found = read_settings(file, {}).server_config()
    assert (found.preferred("a"), found.preferred("b")) == (("n1",), ("n2", "n0"))
    assert found.role_command == ("true", "two words")


@pytest.mark.parametrize("groups", [2, 3, 7, 30])
def test_the_spread_is_even_and_the_same_in_any_order(groups: int) -> None:
    names = [f"group{number}" for number in range(groups)]
    peers = parse_peers(PEERS)
    found = spread_leaders(names, peers)
    assert found == spread_leaders(names[::-1], peers[::-1])
    counts = Counter(leader for (leader,) in found.values())
    assert max(counts.values()) - min(counts[peer.node_id] for peer in peers) <= 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"preferred_leaders": ("n9",)}, "n9 is not in the peers string"),
        ({"preferred_leaders": ("default=n9",)}, "n9 is not in the peers string"),
        ({"preferred_leaders": ("other=n1",)}, "group other is not hosted"),
        ({"on_role_change": "/nowhere/command x"}, "there is no program '/nowhere/command'"),
        ({"on_role_change": "true 'x"}, "cannot be split"),
        ({"on_role_change": ""}, "the command is empty"),
    ],
)
def test_what_cannot_be_is_refused(flags: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config(**flags)
