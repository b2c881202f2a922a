"""Settings: the TOML file of ``dledger serve`` and the peers string."""

from __future__ import annotations

import tempfile
from pathlib import Path

from dledger_core.cli.settings import read_settings
from dledger_core.config import format_peers, parse_peers
from dledger_core.errors import ConfigError
from tests.fuzz.finding import expect, memory_below


def run_config(data: bytes) -> None:
    """Input: the file."""
    with tempfile.NamedTemporaryFile(suffix=".toml") as file:
        file.write(data)
        file.flush()
        with memory_below((4 << 20) + 400 * len(data)):
            try:
                config = read_settings(Path(file.name), {}).server_config()
            except ConfigError as error:
                expect(bool(error.what and error.remedy), "the error does not say what to do", it=error)
                return
    expect(config.me.node_id == config.self_id, "another node's address")
    expect(config.storage.index_segment_bytes % 32 == 0 and bool(config.groups), "settings that fit nothing")
    for group in config.groups:
        path = config.store_path(group)
        expect(path.parent.parent == config.directory and ".." not in path.parts[-2:], "a store outside", it=path)


def run_peers(data: bytes) -> None:
    """Input: the text."""
    text = data.decode("utf-8", "replace")
    try:
        peers = parse_peers(text)
    except ConfigError as error:
        expect(type(error) is ConfigError and bool(error.remedy), "the error does not say what to do", it=error)
        return
    expect(parse_peers(format_peers(peers)) == peers, "the peers change when written again", it=peers)
    expect(len({peer.node_id for peer in peers}) == len(peers), "a node twice", it=peers)
    expect(all(peer.host and 0 < peer.port < 65536 for peer in peers), "a peer without an address", it=peers)
