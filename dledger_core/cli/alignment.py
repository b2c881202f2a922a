"""Before a group begins behind a CommitLog, all of its nodes compare what they have.

Each makes an identity of the seal of its CommitLog, and tells it in its hello, like that of a log, which it then is: a
node that has begun goes on telling it, and refuses a peer with another one. So nodes may come in any order, and one
that lost its store may come later; nothing begins before every peer has told the same.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Sequence
from typing import Final

from dledger_core.cli.output import say
from dledger_core.config import Peer
from dledger_core.convert import Seal
from dledger_core.errors import DLedgerError, ProtocolError, StoreMismatchError, UnreachableError
from dledger_core.net.connection import Connection
from dledger_core.net.frame import Frame
from dledger_core.net.transport import Hello, connect, serve
from dledger_core.server import ServerConfig
from dledger_core.server.node import STOP_WITH_STDIN

__all__ = ["aligned", "identity_of"]

_ASK_S: Final = 1.0
_AGAIN_S: Final = 0.1
_TOLD_S: Final = 2.0
_UUID_CHARS: Final = 32


def identity_of(seal: Seal, group: str, peers: Sequence[Peer]) -> str:
    """Returns the identity of a log that begins behind a CommitLog: the same on all nodes, another for other peers."""
    nodes = sorted((str(peer.node_id), peer.address) for peer in peers)
    return hashlib.sha256(repr((group, nodes, str(seal))).encode()).hexdigest()[:_UUID_CHARS]


def aligned(seal: Seal, config: ServerConfig) -> bool:
    """Waits until every other node has told that it has the same CommitLog.

    Args:
        seal: of this node's.
        config: its settings; of one group.

    Returns:
        False if this process is to end first: its standard input ended, and it was to stop then.

    Raises:
        StoreMismatchError: a node has another one, or its group did not begin behind one.
        ConfigError: the port cannot be had.
    """
    return asyncio.run(_compare(seal, config))


class _Nothing:
    """What a connection is good for while nodes compare: its hello has said all there is."""

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        """Refuses the frame; the connection is closed."""
        raise ProtocolError("the node compares its CommitLog with the others'", connection.peer_address, "retry")

    def on_close(self, connection: Connection, error: Exception | None) -> None:
        """Has nothing to do."""


async def _compare(seal: Seal, config: ServerConfig) -> bool:
    [group] = config.groups
    identity = identity_of(seal, group, config.peers)

    def accept(hello: Hello) -> Hello:
        if hello.role == "peer":
            raise UnreachableError(f"{config.self_id} compares its CommitLog with the others'", "", "retry")
        return Hello(role="peer", node_id=config.self_id, logs={group: identity})

    me = config.me
    server = await serve(config.host or me.host, me.port, accept=accept, handler_for=lambda _: _Nothing())
    left = {peer for peer in config.peers if peer.node_id != config.self_id}
    ended, told = _stdin_ended(), time.monotonic()
    say(f"CommitLog {seal}: comparing it with {_names(left)}")
    try:
        while left and not ended.is_set():
            found = await asyncio.gather(*(_ask(peer, group) for peer in left))
            answers = dict(zip(left, found, strict=True))
            for peer, answer in answers.items():
                if answer not in (None, identity):
                    raise _differs(peer, group, seal)
            left = {peer for peer, answer in answers.items() if answer is None}
            if left and time.monotonic() - told > _TOLD_S:
                told = time.monotonic()
                say(f"waiting for {_names(left)} to say which CommitLog they have")
            await asyncio.sleep(_AGAIN_S if left else 0)
    finally:
        await server.close()
        if os.environ.get(STOP_WITH_STDIN):
            asyncio.get_running_loop().remove_reader(0)
    return not ended.is_set()


async def _ask(peer: Peer, group: str) -> str | None:
    """Returns the identity of the group's log on a node; None if it does not answer, or has none yet."""
    try:
        connection = await connect(peer.host, peer.port, Hello(), _Nothing(), timeout_s=_ASK_S)
    except DLedgerError:
        return None
    connection.close()
    await connection.closed
    return connection.peer_hello.logs.get(group)


def _stdin_ended() -> asyncio.Event:
    """Returns what is set when the standard input ends, if that is to end the process."""
    ended, loop = asyncio.Event(), asyncio.get_running_loop()

    def read() -> None:
        if not os.read(0, 4096):
            loop.remove_reader(0)
            ended.set()

    if os.environ.get(STOP_WITH_STDIN):
        loop.add_reader(0, read)
    return ended


def _names(peers: set[Peer]) -> str:
    return ", ".join(sorted(str(peer.node_id) for peer in peers))


def _differs(peer: Peer, group: str, seal: Seal) -> StoreMismatchError:
    return StoreMismatchError(
        f"{peer.node_id} does not begin group {group} behind the same CommitLog",
        peer.address,
        "audit the copies of the CommitLog and copy the files from a node that has them whole; where the group has "
        "begun with --commitlog-seal, or with other peers, give the seal of then",
        {"here": str(seal)},
    )
