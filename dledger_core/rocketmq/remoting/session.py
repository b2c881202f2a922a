"""A node's side of a remoting connection, without I/O: bytes in, requests, awaited answers, bytes out.

What the node does lies behind two small interfaces; which code an answer carries is decided here, as Java's
``DLedgerServer`` decides it: first whether this node is meant, then the group, then the request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from dledger_core.errors import BadRequestError, DLedgerError, NotLeaderError
from dledger_core.rocketmq.remoting.codes import HeaderCode, RequestCode, ResponseCode, code_of
from dledger_core.rocketmq.remoting.frame import FrameDecoder, RemotingFrame, encode_frame
from dledger_core.rocketmq.remoting.requests import (
    AppendRequest,
    GetRequest,
    MetadataRequest,
    PeerRequest,
    Request,
    TransferRequest,
    decode_request,
)
from dledger_core.rocketmq.remoting.responses import (
    AppendReply,
    GetReply,
    MetadataReply,
    Reply,
    WireEntry,
    encode_reply,
)

__all__ = ["Appended", "GroupService", "GroupState", "NodeService", "RemotingSession"]

LARGE_BYTES: Final = 256 << 10
"""From here on, about a millisecond's work, requests and answers wait for each other."""

_LOG = logging.getLogger(__name__)
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class GroupState:
    """What a node knows of its group: who leads, in which term, and the nodes' addresses by id."""

    leader_id: str | None
    term: int
    peers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Appended:
    """Where the last entry of an append lies."""

    index: int
    position: int
    term: int


class GroupService(Protocol):
    """One group of a node; what it cannot do it raises as a DLedgerError."""

    async def state(self) -> GroupState:
        """Returns who leads."""

    async def append(self, bodies: Sequence[bytes]) -> Appended:
        """Appends bodies as one batch; returns when it is committed. NotLeaderError names the leader."""

    async def get(self, index: int) -> WireEntry:
        """Returns a committed entry; only the leader does. IndexOutOfRangeError holds index and first_index."""

    async def transfer(self, node_id: str) -> None:
        """Hands leadership over; returns when the node leads."""


class NodeService(Protocol):
    """A node."""

    node_id: str

    async def beside(self, work: Callable[[], _Result]) -> _Result:
        """Does work of some ten milliseconds where it delays nobody else, one after the other."""

    def group(self, name: str) -> GroupService | None:
        """Returns a group that the node hosts."""


class RemotingSession:
    """One connection. After a ProtocolError it is of no further use."""

    def __init__(self, node: NodeService) -> None:
        self._node = node
        self._decoder = FrameDecoder()

    @property
    def holds_half(self) -> bool:
        """Whether part of a request was received, and the rest was not."""
        return self._decoder.buffered_bytes > 0

    def receive_data(self, data: bytes) -> list[RemotingFrame]:
        """Returns the requests that are complete now; raises ProtocolError."""
        self._decoder.receive_data(data)
        found = []
        while (frame := self._decoder.next_frame()) is not None:
            if not frame.is_reply:  # nothing was asked of the other side
                found.append(frame)
        return found

    async def answer(self, frame: RemotingFrame) -> bytes:
        """Returns the answer's bytes, none if nobody waits for it.

        Raises:
            ProtocolError: the request's body is malformed.
        """
        try:
            request = await self._apart(len(frame.body), partial(decode_request, frame))
        except BadRequestError as error:
            reply = self._encoded(frame, Reply(code=code_of(error)))
        else:
            if request is None:
                remark = f" request type {frame.code} not supported"  # as Java says it
                reply = encode_frame(frame.reply(HeaderCode.NOT_SUPPORTED, remark=remark))
            else:
                found = await self._reply(request)
                nbytes = sum(len(entry.body) for entry in found.entries) if isinstance(found, GetReply) else 0
                reply = await self._apart(nbytes, partial(self._encoded, frame, found, _extra(request)))
        return b"" if frame.is_oneway else reply

    async def _apart(self, nbytes: int, work: Callable[[], _Result]) -> _Result:
        """Does what takes long for many bytes, JSON and base64 of them, where it keeps no heartbeat waiting."""
        return work() if nbytes < LARGE_BYTES else await self._node.beside(work)

    def _encoded(self, frame: RemotingFrame, reply: Reply, extra: Mapping[str, Any] | None = None) -> bytes:
        return encode_frame(frame.reply(HeaderCode.HANDLED, encode_reply(reply, extra)))

    async def _reply(self, request: Request) -> Reply:
        base: dict[str, Any] = {"group": request.group, "remote_id": request.remote_id}
        if request.remote_id != self._node.node_id:
            return _kind(request)(code=ResponseCode.UNKNOWN_MEMBER, **base)
        group = self._node.group(request.group)
        if group is None:
            return _kind(request)(code=ResponseCode.UNKNOWN_GROUP, **base)
        try:
            return await self._handled(request, group)
        except DLedgerError as error:
            code, named = code_of(error), error.leader_id if isinstance(error, NotLeaderError) else None
        except Exception:  # noqa: BLE001 - the asker gets an answer, the log the traceback
            _LOG.exception("%s failed", type(request).__name__)
            code, named = ResponseCode.INTERNAL_ERROR, None
        leader_id = named or (await group.state()).leader_id
        return _kind(request)(code=code, leader_id=leader_id, **base)

    async def _handled(self, request: Request, group: GroupService) -> Reply:
        match request:
            case MetadataRequest():
                state = await group.state()
                return MetadataReply(group=request.group, leader_id=state.leader_id, peers=state.peers)
            case AppendRequest():
                if not request.bodies:
                    return AppendReply(code=ResponseCode.REQUEST_WITH_EMPTY_BODYS, group=request.group)
                done = await group.append(request.bodies)
                place: dict[str, Any] = {"index": done.index, "position": done.position, "term": done.term}
                return AppendReply(group=request.group, leader_id=self._node.node_id, **place)
            case GetRequest():
                return GetReply(group=request.group, entries=(await group.get(request.index),))
            case TransferRequest():
                return await self._transferred(request, group)
        return Reply(
            code=ResponseCode.UNSUPPORTED,
            group=request.group,
            remote_id=request.remote_id,
            leader_id=(await group.state()).leader_id,
        )

    async def _transferred(self, request: TransferRequest, group: GroupService) -> Reply:
        state = await group.state()
        base: dict[str, Any] = {"group": request.group, "leader_id": state.leader_id, "term": state.term}
        if request.transferee_id == self._node.node_id and request.transfer_id != self._node.node_id:
            return Reply(code=ResponseCode.UNSUPPORTED, **base)  # a Java leader asks its peer to take over
        if request.transfer_id != self._node.node_id:
            return Reply(code=ResponseCode.UNEXPECTED_ARGUMENT, **base)
        if request.transferee_id is None or request.transferee_id not in state.peers:
            return Reply(code=ResponseCode.UNKNOWN_MEMBER, **base)
        if state.term != request.term:
            return Reply(code=ResponseCode.INCONSISTENT_TERM, **base)
        if state.leader_id != self._node.node_id:
            return Reply(code=ResponseCode.NOT_LEADER, **base)
        await group.transfer(request.transferee_id)
        return Reply(group=request.group, term=(await group.state()).term)


def _kind(request: Request) -> type[Reply]:
    kinds: dict[type[Request], type[Reply]] = {
        MetadataRequest: MetadataReply,
        AppendRequest: AppendReply,
        GetRequest: GetReply,
    }
    return kinds.get(type(request), Reply)


def _extra(request: Request) -> Mapping[str, Any] | None:
    """Returns what Java's class of the reply has beside: a vote that is none."""
    is_vote = isinstance(request, PeerRequest) and request.kind == RequestCode.VOTE
    return {"voteResult": "UNKNOWN"} if is_vote else None
