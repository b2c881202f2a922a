"""Nodes that are to begin behind a CommitLog wait for one another, and end where one has another."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dledger_core.cli import alignment
from dledger_core.cli.alignment import _compare, aligned
from dledger_core.client import AsyncClient
from dledger_core.config import STOP_WITH_STDIN, Peer, format_peers
from dledger_core.errors import ConfigError, DLedgerError, StoreMismatchError, UnreachableError
from dledger_core.ids import NodeId
from dledger_core.net.transport import Hello, Server, connect, serve
from dledger_core.rocketmq.old_messages import Seal
from dledger_core.server import ServerConfig
from tests.support.server_group import free_peers

SEAL = Seal(0, 1 << 30, "a" * 32)
OTHER = Seal(0, 1 << 30, "b" * 32)
LATER = Seal(1 << 20, 1 << 30, "a" * 32)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alignment, "_TOLD_S", 0.0)
    monkeypatch.setattr(alignment, "_STAY_S", 0.3)


def config_of(number: int, peers: tuple[Peer, ...], directory: Path) -> ServerConfig:
    return ServerConfig(self_id=peers[number].node_id, peers=peers, directory=directory, groups=("g",))


async def serving(
    peer: Peer, logs: Mapping[str, str | None], behind: Mapping[str, str], name: str | None = None
) -> Server:
    """A node that has begun."""

    def accept(_: Hello) -> Hello:
        return Hello(role="peer", node_id=NodeId(name or peer.node_id), logs=logs, behind=behind)

    return await serve(peer.host, peer.port, accept=accept, handler_for=lambda _: alignment._Comparing())


def test_nodes_wait_for_all_and_go_on_together(tmp_path: Path) -> None:
    peers = free_peers(3)

    async def main() -> None:
        first = [asyncio.create_task(_compare(SEAL, config_of(n, peers, tmp_path))) for n in range(2)]
        await asyncio.sleep(0.5)
        assert not any(task.done() for task in first)
        last = await _compare(SEAL, config_of(2, peers, tmp_path))
        # It has left already; a node that has begun tells the same in its hello.
        begun = await serving(peers[2], {"g": None}, {"g": str(SEAL)})
        assert [last, *await asyncio.gather(*first)] == [True] * 3
        await begun.close()

    asyncio.run(main())


def test_nodes_that_differ_end_all_of_them(tmp_path: Path) -> None:
    peers = free_peers(3)

    async def main() -> None:
        seals = (SEAL, SEAL, OTHER)
        work = [_compare(seal, config_of(n, peers, tmp_path)) for n, seal in enumerate(seals)]
        found = await asyncio.gather(*work, return_exceptions=True)
        assert [type(error) for error in found] == [StoreMismatchError] * 3

    asyncio.run(main())


@pytest.mark.parametrize(
    ("logs", "behind", "name", "error", "words"),
    [
        ({"g": "u"}, {"g": str(OTHER)}, None, StoreMismatchError, "n1 does not begin group g behind the same"),
        ({"g": "u"}, {"g": str(LATER)}, None, StoreMismatchError, "n1 does not begin group g behind the same"),
        ({"g": "u"}, {}, None, StoreMismatchError, "n1 does not begin group g behind the same"),
        ({"g": None}, {"h": str(SEAL)}, None, StoreMismatchError, "n1 does not begin group g behind the same"),
        ({"g": "u"}, {"g": str(SEAL)}, "n7", ConfigError, "calls itself n7"),
    ],
    ids=["other", "later", "none", "of another group", "other node"],
)
def test_what_ends_it(
    tmp_path: Path,
    logs: Mapping[str, str | None],
    behind: Mapping[str, str],
    name: str | None,
    error: type[DLedgerError],
    words: str,
) -> None:
    peers = free_peers(2)

    async def main() -> None:
        other = await serving(peers[1], logs, behind, name)
        with pytest.raises(error, match=words) as found:
            await _compare(SEAL, config_of(0, peers, tmp_path))
        assert found.value.remedy
        await other.close()

    asyncio.run(main())


def test_a_store_that_a_trial_left_does_not_pass_for_a_beginning(tmp_path: Path) -> None:
    peers = free_peers(3)

    async def main() -> None:
        trial = await serving(peers[2], {"g": "of the trial"}, {"g": str(SEAL)})
        other = await serving(peers[1], {}, {"g": str(SEAL)})  # compares too
        with pytest.raises(StoreMismatchError, match="n2 holds a log of group g from before"):
            await _compare(SEAL, config_of(0, peers, tmp_path))
        await other.close()
        # Where most have begun, a log is to be expected.
        other = await serving(peers[1], {"g": None}, {"g": str(SEAL)})
        assert await _compare(SEAL, config_of(0, peers, tmp_path))
        await trial.close()
        await other.close()

    asyncio.run(main())


def test_all_tell_the_same_at_one_time(tmp_path: Path) -> None:
    """A node that told the right thing once, and came again with something else, is not taken for aligned."""
    peers = free_peers(3)

    async def main() -> None:
        changing = await serving(peers[1], {}, {"g": str(SEAL)})
        task = asyncio.create_task(_compare(SEAL, config_of(0, peers, tmp_path)))
        await asyncio.sleep(0.5)
        await changing.close()
        changing = await serving(peers[1], {}, {"g": str(OTHER)})
        last = await serving(peers[2], {}, {"g": str(SEAL)})
        with pytest.raises(StoreMismatchError):
            await task
        await changing.close()
        await last.close()

    asyncio.run(main())


def test_a_node_that_does_not_tell_yet_is_waited_for_and_the_reason_told(tmp_path: Path, capsys: Any) -> None:
    peers = free_peers(2)

    async def main() -> None:
        task = asyncio.create_task(_compare(SEAL, config_of(0, peers, tmp_path)))
        await asyncio.sleep(0.3)
        logs: dict[str, str | None] = {"h": "u"}
        behind: dict[str, str] = {}
        other = await serving(peers[1], logs, behind)
        await asyncio.sleep(0.5)
        assert not task.done()
        behind["g"] = str(SEAL)
        logs["g"] = None
        assert await task
        await other.close()

    asyncio.run(main())
    told = capsys.readouterr().err
    assert "n1 (cannot connect" in told
    assert "n1 (it hosts h, not g)" in told


def test_who_asks_meanwhile_is_told_to_come_again(tmp_path: Path) -> None:
    peers = free_peers(2)

    async def main() -> None:
        task = asyncio.create_task(_compare(SEAL, config_of(0, peers, tmp_path)))
        await asyncio.sleep(0.3)
        place = (peers[0].host, peers[0].port)
        with pytest.raises(UnreachableError, match="compares its CommitLog"):
            await connect(*place, Hello(role="peer", node_id=NodeId("n1")), alignment._Comparing(), timeout_s=10)
        async with AsyncClient(format_peers(peers[:1]), "g", timeout_ms=500) as client:
            with pytest.raises(UnreachableError):
                await client.metadata()
        assert not task.done()
        os.kill(os.getpid(), signal.SIGTERM)
        assert await task is False

    asyncio.run(main())


def test_a_taken_port_is_an_error(tmp_path: Path) -> None:
    peers = free_peers(2)

    async def main() -> None:
        taken = await serving(peers[0], {}, {})
        with pytest.raises(ConfigError, match="cannot listen"):
            await _compare(SEAL, config_of(0, peers, tmp_path))
        await taken.close()

    asyncio.run(main())


@pytest.mark.parametrize("how", ["stdin", "SIGTERM", "SIGINT"])
def test_it_ends_when_its_process_is_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    read, write = os.pipe()
    before = os.dup(0)
    os.dup2(read, 0)
    try:
        if how == "stdin":
            monkeypatch.setenv(STOP_WITH_STDIN, "1")
            os.close(write)
        else:
            number = getattr(signal, how)
            monkeypatch.setattr(alignment, "say", lambda text: os.kill(os.getpid(), number))
        assert not aligned(SEAL, config_of(0, free_peers(2), tmp_path))
    finally:
        os.dup2(before, 0)
        os.close(before)
        os.close(read)
        if how != "stdin":
            os.close(write)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
