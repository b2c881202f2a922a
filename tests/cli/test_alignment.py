"""Nodes that are to begin behind a CommitLog wait for one another, and end where one has another."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from pathlib import Path

import pytest

from dledger_core.cli import alignment
from dledger_core.cli.alignment import _compare, aligned, identity_of
from dledger_core.config import Peer
from dledger_core.convert import Seal
from dledger_core.errors import ConfigError, StoreMismatchError, UnreachableError
from dledger_core.ids import NodeId
from dledger_core.net.transport import Hello, connect, serve
from dledger_core.server import ServerConfig
from dledger_core.server.node import STOP_WITH_STDIN
from tests.support.server_group import free_peers

SEAL = Seal(0, 1 << 30, "a" * 32)
OTHER = Seal(0, 1 << 30, "b" * 32)


def config_of(number: int, peers: tuple[Peer, ...], directory: Path) -> ServerConfig:
    return ServerConfig(self_id=peers[number].node_id, peers=peers, directory=directory, groups=("g",))


def test_the_identity_is_of_the_seal_the_group_and_the_peers_in_any_order() -> None:
    peers = free_peers(3)
    identity = identity_of(SEAL, "g", peers)
    assert len(identity) == 32
    assert identity == identity_of(Seal.parse(str(SEAL)), "g", peers[::-1])
    moved = (dataclasses.replace(peers[0], port=peers[0].port + 1), *peers[1:])
    others = [identity_of(OTHER, "g", peers), identity_of(SEAL, "h", peers), identity_of(SEAL, "g", moved)]
    assert len({identity, *others}) == 4


def test_nodes_wait_for_all_and_go_on_together(tmp_path: Path) -> None:
    peers = free_peers(3)

    async def main() -> None:
        first = [asyncio.create_task(_compare(SEAL, config_of(n, peers, tmp_path))) for n in range(2)]
        await asyncio.sleep(0.5)
        assert not any(task.done() for task in first)
        last = await _compare(SEAL, config_of(2, peers, tmp_path))
        # It has left already; a node that has begun tells the same in its hello.
        begun = await serving(peers[2], {"g": identity_of(SEAL, "g", peers)})
        assert [last, *await asyncio.gather(*first)] == [True] * 3
        await begun.close()

    asyncio.run(main())


async def serving(peer: Peer, logs: dict[str, str | None]):
    """A node that has begun."""
    hello = Hello(role="peer", node_id=peer.node_id, logs=logs)
    return await serve(peer.host, peer.port, accept=lambda _: hello, handler_for=lambda _: alignment._Nothing())


@pytest.mark.parametrize("theirs", [identity_of(OTHER, "g", ()), "0" * 32])
def test_another_commitlog_or_another_log_ends_it(tmp_path: Path, theirs: str) -> None:
    peers = free_peers(2)

    async def main() -> None:
        other = await serving(peers[1], {"g": theirs, "h": None})
        with pytest.raises(StoreMismatchError, match="n1 does not begin group g behind the same CommitLog") as found:
            await _compare(SEAL, config_of(0, peers, tmp_path))
        assert found.value.values["here"] == str(SEAL)
        await other.close()

    asyncio.run(main())


def test_a_node_whose_log_has_no_identity_yet_is_waited_for(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(alignment, "_TOLD_S", 0.0)
    peers = free_peers(2)

    async def main() -> None:
        logs: dict[str, str | None] = {}
        other = await serving(peers[1], logs)
        task = asyncio.create_task(_compare(SEAL, config_of(0, peers, tmp_path)))
        for known in ({}, {"g": None}):
            logs |= known
            await asyncio.sleep(0.3)
            assert not task.done()
        logs["g"] = identity_of(SEAL, "g", peers)
        assert await task
        await other.close()

    asyncio.run(main())
    assert "waiting for n1 to say which CommitLog" in capsys.readouterr().err


def test_peers_that_have_begun_are_told_to_come_again_and_frames_are_refused(tmp_path: Path) -> None:
    peers = free_peers(2)

    async def main() -> None:
        task = asyncio.create_task(_compare(SEAL, config_of(0, peers, tmp_path)))
        await asyncio.sleep(0.2)
        nothing, place = alignment._Nothing(), (peers[0].host, peers[0].port)
        with pytest.raises(UnreachableError, match="compares its CommitLog"):
            await connect(*place, Hello(role="peer", node_id=NodeId("n1")), nothing, timeout_s=10)
        connection = await connect(*place, Hello(), nothing, timeout_s=10)
        connection.send({"t": 10, "r": 1, "g": "g"})
        await connection.closed
        assert not task.done()
        task.cancel()

    asyncio.run(main())


def test_a_taken_port_is_an_error(tmp_path: Path) -> None:
    peers = free_peers(2)

    async def main() -> None:
        taken = await serving(peers[0], {})
        with pytest.raises(ConfigError, match="cannot listen"):
            await _compare(SEAL, config_of(0, peers, tmp_path))
        await taken.close()

    asyncio.run(main())


def test_it_ends_with_the_standard_input_of_a_child(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv(STOP_WITH_STDIN, "1")
    read, write = os.pipe()
    before = os.dup(0)
    os.dup2(read, 0)
    try:
        os.close(write)
        assert not aligned(SEAL, config_of(0, free_peers(2), tmp_path))
    finally:
        os.dup2(before, 0)
        os.close(before)
        os.close(read)
