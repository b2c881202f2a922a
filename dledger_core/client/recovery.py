"""Recovery of a group whose majority is lost permanently, as a client of all nodes: ask, decide, act.

``dledger_core.recovery`` has the decisions. Nothing is kept between two rounds, so that an interrupted recovery may
be run again, and several may run at once.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Final

from dledger_core.client.routing.channel import ChannelPool
from dledger_core.config import Peer, format_peers, parse_peer
from dledger_core.errors import ConfigError, DLedgerError, ProtocolError, RecoveryRefusedError, UnreachableError
from dledger_core.ids import NodeId
from dledger_core.lineage import RecoveryRecord
from dledger_core.net import messages
from dledger_core.net.codec import parse_survivor, recovery_payload
from dledger_core.net.credentials import PLAINTEXT, Credentials
from dledger_core.recovery import (
    Action,
    CompleteRecord,
    CutLog,
    Electable,
    FillHoles,
    Holes,
    Recovered,
    Refused,
    RetireLog,
    SurvivorAnswer,
    TakeRecord,
    Unanswered,
    decide,
    holes_of,
    preview,
)

_LOG: Final = logging.getLogger(__name__)
_ROUNDS_MAX: Final = 20
"""Rounds without an end: concurrent recoveries, or stores that change."""
_ELECTION_S: Final = 10.0
"""Several longest election timeouts: a group that can elect a leader has one by then."""
_ELECTION_ROUNDS: Final = 20


class RecoveryNodes:
    """The nodes of one group: those of the list and those that the survivors' logs name."""

    def __init__(self, peers: Sequence[Peer], group: str, timeout_s: float, credentials: Credentials) -> None:
        self._pool = ChannelPool(peers, credentials=credentials)
        self._group = group
        self._timeout_s = timeout_s
        self.failures: dict[NodeId, DLedgerError] = {}

    async def ask(self) -> dict[NodeId, SurvivorAnswer]:
        """Return the answers of all nodes that answer."""
        answers: dict[NodeId, SurvivorAnswer] = {}
        self.failures = {}
        while left := [
            node for node in map(NodeId, self._pool.peers) if node not in answers and node not in self.failures
        ]:
            results = await asyncio.gather(*(self.send(node, "ask") for node in left), return_exceptions=True)
            for node, result in zip(left, results, strict=True):
                if isinstance(result, DLedgerError):
                    self.failures[node] = result
                elif isinstance(result, BaseException):
                    raise result
                else:
                    answers[node] = result
            for answer in answers.values():
                for member in answer.members:
                    if member.address:
                        peer = parse_peer(f"{member.node_id}-{member.address}")
                        self._pool.peers.setdefault(member.node_id, peer)
        return answers

    def addresses(self, nodes: Sequence[NodeId]) -> str:
        """Return a peers string of nodes."""
        return format_peers(tuple(self._pool.peers[node] for node in nodes))

    async def send(
        self,
        node: NodeId,
        operation: str,
        log: str | None = None,
        record: RecoveryRecord | None = None,
        *,
        start: int = 0,
        peers: str = "",
    ) -> SurvivorAnswer:
        """Send an operation on a node's store; return the store after it."""
        channel = await self._pool.channel(node, self._timeout_s)
        request = messages.RecoverLogRequest(operation=operation, log=log, start=start, peers=peers)
        header = messages.CONTINUE.encode(request, g=self._group)
        payload = () if record is None else (recovery_payload(record),)
        answer = parse_survivor((await channel.request(header, *payload, timeout_s=self._timeout_s)).payload)
        if answer is None:
            raise ProtocolError("the node's answer about its store is malformed", str(node))
        if answer.node_id != node:
            raise ConfigError(
                f"the node at {self._pool.peers[node].address} is {answer.node_id}, not {node}", "", "correct the peers"
            )
        return answer

    async def close(self) -> None:
        """Close the connections."""
        await self._pool.close()


@dataclass(frozen=True, slots=True)
class LostMajority:
    """A recovery, done or planned.

    Attributes:
        action: the next action; ``Recovered`` if all is done.
        preview: entries that are kept and that may be lost, as of before the first change.
        is_new: whether this call changed anything.
        cuts: node and first entry of each log that was ended before a hole; the bytes behind it are kept there.
    """

    action: Action
    preview: dict[str, Any]
    is_new: bool = False
    cuts: tuple[tuple[NodeId, int], ...] = ()


async def recover_lost(
    peers: Sequence[Peer],
    group: str,
    lost: AbstractSet[NodeId],
    timeout_s: float,
    *,
    dry_run: bool = False,
    accepts_loss: bool = False,
    credentials: Credentials = PLAINTEXT,
) -> LostMajority:
    """Continue a log whose majority is lost in a new one, or continue an interrupted recovery.

    Args:
        peers: nodes of the group; the survivors name the others.
        group: its name.
        lost: the nodes that are lost permanently.
        timeout_s: timeout of a connection and of a request.
        dry_run: only ask, and return the next action.
        accepts_loss: end the log before a hole that no survivor fills.
        credentials: TLS files and token.

    Raises:
        RecoveryRefusedError: the state of the stores does not allow it; the remedy names the command.
        UnreachableError: a node that is not named lost does not answer.
    """
    nodes = RecoveryNodes(peers, group, timeout_s, credentials)
    first: dict[str, Any] = {}
    refused: DLedgerError | None = None
    tried: Holes | None = None
    cuts: list[tuple[NodeId, int]] = []
    try:
        for number in range(_ROUNDS_MAX):
            answers = await nodes.ask()
            action = decide(lost, answers, lambda: uuid.uuid4().hex, accepts_loss=accepts_loss, tried=tried)
            silent = tuple(sorted(nodes.failures.keys() - lost))
            if silent and not answers.keys() - lost:
                action = Unanswered(silent)  # no answer says what the silent nodes have
            first = first or preview(lost, answers)
            if isinstance(action, Refused):
                raise RecoveryRefusedError(action.what, f"group {group}", action.remedy)
            if isinstance(action, Unanswered):
                raise UnreachableError(
                    f"not all nodes that are left answer: {', '.join(action.nodes)}",
                    "; ".join(f"{node}: {error}" for node, error in nodes.failures.items() if node in action.nodes),
                    "start them; name a node in --lost only if its disk will never return",
                    {"nodes": [str(node) for node in action.nodes]},
                )
            if isinstance(action, Electable):
                await _await_election(nodes, action, group, lost)
                return LostMajority(action, first)
            if dry_run or isinstance(action, Recovered):
                return LostMajority(action, first, is_new=number > 0, cuts=tuple(cuts))
            if isinstance(action, FillHoles):
                tried = holes_of(lost, answers)
            try:
                await _act(nodes, action)
                if isinstance(action, CutLog):
                    cuts += [(node, action.start) for node in action.nodes]
            except RecoveryRefusedError as error:  # another recovery was faster
                refused = error
        raise refused or RecoveryRefusedError("the stores change all the time", f"group {group}", "run one recovery")
    finally:
        await nodes.close()


async def _await_election(nodes: RecoveryNodes, electable: Electable, group: str, lost: AbstractSet[NodeId]) -> None:
    """Wait until voters that can elect a leader have one.

    Raises:
        RecoveryRefusedError: nodes are lost, or have stores that never vote again, and a majority is left; or there is
            no leader after some time.
    """
    voters = ", ".join(electable.nodes)
    if electable.replaced:
        node = electable.replaced[0]
        raise RecoveryRefusedError(
            f"{voters} are a majority of the voters and can elect a leader; the store of {node} never votes again",
            f"group {group}",
            f"start {node} with an empty directory, then run dledger member replace {node}",
        )
    if lost:
        raise RecoveryRefusedError(
            f"{voters} are a majority of the voters and can elect a leader without {', '.join(sorted(lost))}",
            f"group {group}",
            f"run dledger member replace {min(lost)}",
        )
    if electable.leader is not None:
        return
    _LOG.info("waiting for the election of a leader: group=%s voters=%s", group, voters)
    for _ in range(_ELECTION_ROUNDS):
        await asyncio.sleep(_ELECTION_S / _ELECTION_ROUNDS)
        answers = await nodes.ask()
        if any(answers[node].leader is not None for node in electable.nodes if node in answers):
            return
    raise RecoveryRefusedError(
        f"{voters} can elect a leader, and have elected none in {_ELECTION_S:.0f} s",
        f"group {group}",
        "run dledger doctor, which names nodes that do not reach each other",
    )


async def _act(nodes: RecoveryNodes, action: RetireLog | FillHoles | CutLog | TakeRecord | CompleteRecord) -> None:
    """Send an action to its nodes in order: of two records, the first survivor takes one."""
    for node in action.nodes:
        match action:
            case RetireLog(log_uuid):
                await nodes.send(node, "give-up", log_uuid)
            case FillHoles(log_uuid, _, survivors):
                await nodes.send(node, "fill", log_uuid, peers=nodes.addresses(survivors))
            case CutLog(_, start):
                await nodes.send(node, "cut", start=start)
            case TakeRecord(record):
                await nodes.send(node, "take", record=record)
            case CompleteRecord(record):
                await nodes.send(node, "complete", record.log_uuid)
