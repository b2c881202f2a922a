"""Before a group begins behind a CommitLog, all of its nodes compare what they have.

Each tells the seal of its CommitLog in its hello. A node that has begun goes on telling it, and refuses a peer with
another one; so nodes may come in any order, and one that lost its store may come later. Nothing begins before every
peer has told the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from dledger_core.cli.progress import say
from dledger_core.config import STOP_WITH_STDIN, Peer
from dledger_core.errors import ConfigError, DLedgerError, StoreMismatchError, UnreachableError
from dledger_core.net.connection import Connection
from dledger_core.net.frame import Frame
from dledger_core.net.protocol import Type
from dledger_core.net.transport import Hello, connect, serve
from dledger_core.rocketmq.old_messages import Seal
from dledger_core.server import ServerConfig

__all__ = ["aligned"]

_ASK_S: Final = 1.0
_AGAIN_S: Final = 0.1
_TOLD_S: Final = 2.0
_STAY_S: Final = 2.0
"""How long a node that is to end goes on telling what it has, so that the others hear of it too."""


def aligned(seal: Seal, config: ServerConfig) -> bool:
    """Waits until every other node has told that it has the same CommitLog. For the main thread.

    Args:
        seal: of this node's.
        config: its settings; of one group.

    Returns:
        False if this process is to end first: by SIGTERM, Ctrl-C, or its standard input where that is to end it.

    Raises:
        StoreMismatchError: a node has another one, or its group did not begin behind one.
        ConfigError: the port cannot be had, or another node than the peers string says answers there.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return asyncio.run(_compare(seal, config))
    finally:
        for number, handler in before.items():  # the loop takes its own away, and leaves the system's
            signal.signal(number, handler)


class _Comparing:
    """Answers who asks for more than hello says."""

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        """Refuses requests; the connection stays."""
        error = UnreachableError("the node compares its CommitLog with the others'", "", "retry when all are there")
        number = frame.header.get("r")
        if isinstance(number, int):
            connection.send({"t": Type.FAILURE, "r": number, "e": error.to_wire()})

    def on_close(self, connection: Connection, error: Exception | None) -> None:
        """Has nothing to do."""


async def _compare(seal: Seal, config: ServerConfig) -> bool:
    [group], me = config.groups, config.me

    def accept(hello: Hello) -> Hello:
        if hello.role == "peer":
            raise UnreachableError(f"{config.self_id} compares its CommitLog with the others'", "", "retry")
        return Hello(role="peer", node_id=config.self_id, behind={group: str(seal)})

    server = await serve(config.host or me.host, me.port, accept=accept, handler_for=lambda _: _Comparing())
    with _ending() as ended:
        try:
            await _wait_for_all(seal, config, ended)
        finally:
            await server.close()
        return not ended.is_set()


async def _wait_for_all(seal: Seal, config: ServerConfig, ended: asyncio.Event) -> None:
    """Asks all nodes again and again, until all of them tell the same in one round."""
    [group] = config.groups
    others = [peer for peer in config.peers if peer.node_id != config.self_id]
    told = time.monotonic()
    say(f"CommitLog {seal}: comparing it with {', '.join(str(peer.node_id) for peer in others)}")
    while not ended.is_set():
        try:
            answers = await asyncio.gather(*(_ask(peer, group, seal) for peer in others))
            waiting = [f"{answer.name} ({answer.waits})" for answer in answers if answer.waits]
            if not waiting:
                _check_first_beginning(answers, group, len(config.peers) // 2 + 1)
                return
        except (ConfigError, StoreMismatchError):
            await asyncio.sleep(_STAY_S)
            raise
        if time.monotonic() - told > _TOLD_S:
            told = time.monotonic()
            say(f"waiting for all nodes to say which CommitLog they have: {'; '.join(waiting)}")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), _AGAIN_S)


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a node told: why it cannot yet (empty: it has the same CommitLog), whether it has begun, its log's uuid."""

    name: str
    waits: str = ""
    begun: bool = False
    log_uuid: str | None = None


async def _ask(peer: Peer, group: str, seal: Seal) -> _Answer:
    """Raises StoreMismatchError if the node has another CommitLog, ConfigError if it is another node."""
    name = str(peer.node_id)
    try:
        connection = await connect(peer.host, peer.port, Hello(), _Comparing(), timeout_s=_ASK_S)
    except DLedgerError as error:
        return _Answer(name, error.what)
    connection.close()
    await connection.closed
    hello = connection.peer_hello
    if hello.node_id != peer.node_id:
        raise ConfigError(f"the node there calls itself {hello.node_id}", peer.address, "correct the peers string")
    theirs = hello.behind.get(group)
    if theirs == str(seal):
        return _Answer(name, "", group in hello.logs, hello.logs.get(group))
    if theirs is None and group not in hello.logs:
        named = sorted({*hello.logs, *hello.behind})
        return _Answer(name, f"it hosts {', '.join(named) or 'nothing'}, not {group}")
    raise StoreMismatchError(
        f"{name} does not begin group {group} behind the same CommitLog",
        peer.address,
        "audit the copies of the CommitLog, and copy the files from a node that has them whole; where they lack only "
        "older files, give --commitlog-seal as --check shows it",
        {"here": str(seal), "there": theirs},
    )


def _check_first_beginning(answers: Sequence[_Answer], group: str, majority: int) -> None:
    """A log has a uuid once a majority has begun: where fewer have, a node with one has an older log, as of a trial."""
    older = [answer.name for answer in answers if answer.log_uuid is not None]
    if older and sum(answer.begun for answer in answers) < majority:
        raise StoreMismatchError(
            f"{', '.join(older)} holds a log of group {group} from before, and most nodes have not begun",
            "",
            "move its store away; if it is this group's and the others lost theirs, give --commitlog-seal to these",
        )


@contextlib.contextmanager
def _ending() -> Iterator[asyncio.Event]:
    """Gives what is set when the process is to end."""
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    with_stdin = bool(os.environ.get(STOP_WITH_STDIN))

    def read() -> None:
        if not os.read(0, 4096):
            loop.remove_reader(0)
            ended.set()

    if with_stdin:
        loop.add_reader(0, read)
    try:
        yield ended
    finally:
        if with_stdin:
            loop.remove_reader(0)
