"""Bootstrap of groups, as a client of all nodes of a peers list: ask, decide, act, until the group is bootstrapped.

``dledger_core.bootstrap`` has the decisions. Nothing is kept between two rounds, so that an interrupted call may be
repeated, and several may run at once.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeVar

from dledger_core import bootstrap
from dledger_core.bootstrap import (
    BootstrapRecord,
    Complete,
    Decision,
    Exists,
    LogConstants,
    Refusal,
    Retire,
    StoreAnswer,
    Take,
    Wait,
)
from dledger_core.client.routing.channel import ChannelPool
from dledger_core.config import Peer
from dledger_core.errors import (
    DLedgerError,
    FoundingRefusedError,
    ProtocolError,
    UnauthenticatedError,
    UnreachableError,
)
from dledger_core.ids import NodeId
from dledger_core.net import messages
from dledger_core.net.codec import record_payload
from dledger_core.net.credentials import PLAINTEXT, Credentials
from dledger_core.net.dialing import WrongNodeError
from dledger_core.net.frame import Frame

_ROUNDS_MAX: Final = 20
"""Rounds without an end: concurrent inits, or stores that change."""
_PARALLEL: Final = 16
_T = TypeVar("_T")


class StoreAccess:
    """Requests to the stores of all listed nodes, one connection to each listed address.

    Args:
        peers: the list.
        timeout_s: timeout of a connection and of a request.
        credentials: TLS files and token.
    """

    def __init__(self, peers: Sequence[Peer], timeout_s: float, credentials: Credentials = PLAINTEXT) -> None:
        self.peers = tuple(sorted((peer.node_id, peer.address) for peer in peers))
        self._timeout_s = timeout_s
        self._pool = ChannelPool(peers, credentials=credentials)

    async def _request(self, node: NodeId, header: dict[str, Any], *payload: bytes) -> Frame:
        channel = await self._pool.channel(node, self._timeout_s)
        return await channel.request(header, *payload, timeout_s=self._timeout_s)

    async def send(
        self,
        node: NodeId,
        group: str,
        operation: str,
        record_id: str | None = None,
        record: BootstrapRecord | None = None,
    ) -> StoreAnswer:
        """Send an operation on a node's store of a group; return the store after it.

        Raises:
            FoundingRefusedError: the store refuses it.
            UnreachableError: the node does not respond, or does not serve the group's store now.
            DLedgerError: another response of the node.
        """
        header = messages.FOUND.encode(messages.BootstrapRequest(operation=operation, record_id=record_id), g=group)
        payload = [] if record is None else [record_payload(record)]
        response = messages.FOUND_OK.decode((await self._request(node, header, *payload)).header)
        answer = StoreAnswer.from_fields(response.answer)
        if answer is None:
            raise ProtocolError("the node's answer about its store is malformed", str(node))
        return answer

    async def admit(self, node: NodeId, group: str, log_uuid: str, constants: LogConstants) -> str:
        """Make a node's empty store one of a log that exists; return the uuid of the store. Idempotent.

        Raises:
            FoundingRefusedError: the address is another node's, or the store is not empty.
            UnreachableError: the node does not respond.
        """
        request = messages.AdmitRequest(node=str(node), log=log_uuid, constants=asdict(constants))
        frame = await self._request(node, messages.ADMIT.encode(request, g=group))
        return messages.ADMIT_OK.decode(frame.header).store

    async def groups(self) -> tuple[str, ...]:
        """Return the groups that the nodes were started with; raise UnreachableError if a node does not respond."""
        header = messages.GROUPS.encode(messages.GroupsRequest())
        frames, failures = await self._each({node: header for node, _ in self.peers})
        if failures:
            raise _unreachable(failures)
        responses = [messages.GROUPS_OK.decode(frame.header) for frame in frames.values()]
        return tuple(sorted({name for response in responses for name in (*response.logs, *(response.waiting or ()))}))

    async def _each(
        self, headers: Mapping[NodeId, dict[str, Any]]
    ) -> tuple[dict[NodeId, Frame], dict[NodeId, DLedgerError]]:
        return _sorted_out(await gathered({node: self._request(node, header) for node, header in headers.items()}))

    async def ask(self, group: str, operation: str) -> tuple[dict[NodeId, StoreAnswer], dict[NodeId, DLedgerError]]:
        """Ask all nodes at once; return the answers and the errors of the other nodes."""
        return _sorted_out(await gathered({node: self.send(node, group, operation) for node, _ in self.peers}))

    async def close(self) -> None:
        """Close the connections."""
        await self._pool.close()


async def gathered(calls: Mapping[NodeId, Any]) -> dict[NodeId, Any]:
    """Run a call for each node at once; return its result or DLedgerError."""
    results = await asyncio.gather(*calls.values(), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, DLedgerError):
            raise result
    return dict(zip(calls, results, strict=True))


def _sorted_out(results: Mapping[NodeId, _T | DLedgerError]) -> tuple[dict[NodeId, _T], dict[NodeId, DLedgerError]]:
    failures = {node: result for node, result in results.items() if isinstance(result, DLedgerError)}
    return {node: result for node, result in results.items() if not isinstance(result, DLedgerError)}, failures


def _unreachable(failures: Mapping[NodeId, DLedgerError]) -> DLedgerError:
    final = (UnauthenticatedError, WrongNodeError)
    refused = next((error for error in failures.values() if isinstance(error, final)), None)
    if refused is not None:
        return refused
    return UnreachableError(
        f"not all nodes answer: {', '.join(failures)}",
        "; ".join(f"{node}: {error}" for node, error in failures.items()),
        "start all nodes of the list, then run the command again",
        {"nodes": [str(node) for node in failures]},
    )


async def probe(access: StoreAccess, group: str, *, again: bool = False, ask: bool = False) -> Decision:
    """Ask all nodes about their stores of a group; return the next action of an init, and change nothing.

    Args:
        access: the nodes.
        group: the group.
        again: whether incomplete records that cannot be continued would be retired.
        ask: make store uuids where there are none.
    """
    answers, _ = await access.ask(group, "ask" if ask else "look")
    return bootstrap.decide(group, access.peers, answers, uuid.uuid4().hex, uuid.uuid4().hex, again=again)


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """A group that is bootstrapped.

    Attributes:
        group: its name.
        log_uuid: its log.
        is_new: whether this call has changed anything.
    """

    group: str
    log_uuid: str
    is_new: bool


async def bootstrap_group(access: StoreAccess, group: str, *, again: bool = False) -> Bootstrap:
    """Bootstrap a group, continue an incomplete bootstrap, or return the log that exists.

    Raises:
        FoundingRefusedError: the stores do not allow it; the remedy names the command.
        UnreachableError: a node does not answer.
    """
    is_new = False
    refused: DLedgerError | None = None
    for _ in range(_ROUNDS_MAX):
        answers, failures = await access.ask(group, "ask")
        decision = bootstrap.decide(group, access.peers, answers, uuid.uuid4().hex, uuid.uuid4().hex, again=again)
        if isinstance(decision, Exists):
            return Bootstrap(group, decision.log_uuid, is_new)
        if isinstance(decision, Wait):
            raise _unreachable(failures)
        if isinstance(decision, Refusal):
            raise FoundingRefusedError(decision.what, f"group {group}", decision.remedy)
        is_new = True
        try:
            await _act(access, group, decision)
        except FoundingRefusedError as error:  # another init was faster
            refused = error
    raise refused or FoundingRefusedError("the stores change all the time", f"group {group}", "run one init at a time")


async def complete(access: StoreAccess, group: str, action: Complete) -> None:
    """Complete the record that all its stores hold; raise as ``bootstrap_group``.

    Every init would do so, whichever node runs it, and the one that sent the record may have ended.
    """
    await _act(access, group, action)


async def _act(access: StoreAccess, group: str, action: Take | Complete | Retire) -> None:
    if isinstance(action, Take):
        record = action.record
        calls = {node: access.send(node, group, "take", record=record) for node in action.nodes}
    elif isinstance(action, Retire):
        calls = {node: access.send(node, group, "give-up", record_id) for node, record_id in action.records}
    else:
        # The node with the smallest id last: it repeats an init until its own store is complete.
        first, *others = sorted(action.nodes)
        calls = {node: access.send(node, group, "complete", action.record.record_id) for node in others}
        _, failures = _sorted_out(await gathered(calls))
        _raise(failures)
        calls = {first: access.send(first, group, "complete", action.record.record_id)}
    _, failures = _sorted_out(await gathered(calls))
    _raise(failures)


def _raise(failures: Mapping[NodeId, DLedgerError]) -> None:
    for error in failures.values():
        if not isinstance(error, FoundingRefusedError):
            raise error
    for error in failures.values():
        raise error


async def bootstrap_groups(
    peers: Sequence[Peer],
    groups: Sequence[str] | None,
    timeout_s: float,
    *,
    again: bool = False,
    credentials: Credentials = PLAINTEXT,
) -> tuple[Bootstrap, ...]:
    """Bootstrap groups, or all groups that the nodes were started with; raise as ``bootstrap_group``."""
    access = StoreAccess(peers, timeout_s, credentials)
    slots = asyncio.Semaphore(_PARALLEL)

    async def one(group: str) -> Bootstrap:
        async with slots:
            return await bootstrap_group(access, group, again=again)

    try:
        names = tuple(groups) if groups is not None else await access.groups()
        return tuple(await asyncio.gather(*map(one, names)))
    finally:
        await access.close()


async def probe_groups(
    peers: Sequence[Peer],
    groups: Sequence[str] | None,
    timeout_s: float,
    *,
    again: bool = False,
    credentials: Credentials = PLAINTEXT,
) -> dict[str, Decision]:
    """Return the next action of an init for each group; change nothing."""
    access = StoreAccess(peers, timeout_s, credentials)
    try:
        names = tuple(groups) if groups is not None else await access.groups()
        return {name: await probe(access, name, again=again) for name in names}
    finally:
        await access.close()
