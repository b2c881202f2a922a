"""Java's protocol on a node's own port: the connection, the session without I/O, and the node behind both."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, cast

from dledger_core.errors import BadRequestError, DLedgerError, NotLeaderError, ProtocolError
from dledger_core.ids import NodeId
from dledger_core.net.limits.rates import BurstFilter
from dledger_core.record import RECORD_SCHEMA, to_arrow
from dledger_core.rocketmq.remoting.codes import HeaderCode, RequestCode, ResponseCode, code_of
from dledger_core.rocketmq.remoting.frame import FrameDecoder, RemotingFrame, encode_frame
from dledger_core.rocketmq.remoting.messages import (
    AppendRequest,
    AppendResponse,
    GetRequest,
    GetResponse,
    MetadataRequest,
    MetadataResponse,
    PeerRequest,
    Request,
    Response,
    TransferRequest,
    WireEntry,
    decode_request,
    encode_response,
)

if TYPE_CHECKING:
    from dledger_core.server import PortGroup, PortNode


LARGE_BYTES: Final = 256 << 10
"""Larger bodies, a millisecond of work, are encoded and decoded one at a time, off the event loop."""

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class GroupState:
    """A node's view of its group: leader, term, and the nodes' addresses by id."""

    leader_id: str | None
    term: int
    peers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Appended:
    """Index, position and term of the last entry of an append."""

    index: int
    position: int
    term: int


class GroupService(Protocol):
    """One group of a node; its errors are DLedgerErrors."""

    async def state(self) -> GroupState:
        """Return the leader, the term and the addresses."""

    async def append(self, bodies: Sequence[bytes]) -> Appended:
        """Append bodies as one batch; return when it is committed. NotLeaderError names the leader."""

    async def get(self, index: int) -> WireEntry:
        """Return a committed entry, on the leader only. IndexOutOfRangeError has index and first_index."""

    async def transfer(self, node_id: str) -> None:
        """Transfer leadership; return when the node leads."""


class NodeService(Protocol):
    """A node."""

    node_id: str

    async def run_blocking(self, work: Callable[[], _Result]) -> _Result:
        """Run a blocking function off the event loop, one at a time, and return its result."""

    def group(self, name: str) -> GroupService | None:
        """Return a group that the node hosts; None if it does not."""


class RemotingSession:
    """One connection. Discard it after a ProtocolError."""

    def __init__(self, node: NodeService) -> None:
        self._node = node
        self._decoder = FrameDecoder()

    @property
    def has_partial_request(self) -> bool:
        """Whether a request was received in part."""
        return self._decoder.buffered_bytes > 0

    def receive_data(self, data: bytes) -> list[RemotingFrame]:
        """Return the complete requests; raise ProtocolError."""
        self._decoder.receive_data(data)
        found = []
        while (frame := self._decoder.next_frame()) is not None:
            if not frame.is_response:  # this side sends no requests
                found.append(frame)
        return found

    async def respond(self, frame: RemotingFrame) -> bytes:
        """Return the bytes of the response; empty for a one-way request.

        Raises:
            ProtocolError: the request's body is malformed.
        """
        try:
            request = await self._run(len(frame.body), partial(decode_request, frame))
        except BadRequestError as error:
            response = self._encoded(frame, Response(code=code_of(error)))
        else:
            if request is None:
                remark = f" request type {frame.code} not supported"  # Java's text
                response = encode_frame(frame.response(HeaderCode.NOT_SUPPORTED, remark=remark))
            else:
                found = await self._reply(request)
                nbytes = sum(len(entry.body) for entry in found.entries) if isinstance(found, GetResponse) else 0
                response = await self._run(nbytes, partial(self._encoded, frame, found, _extra(request)))
        return b"" if frame.is_oneway else response

    async def _run(self, nbytes: int, work: Callable[[], _Result]) -> _Result:
        """Run JSON and base64 work; for many bytes off the event loop, so that heartbeats are not delayed."""
        return work() if nbytes < LARGE_BYTES else await self._node.run_blocking(work)

    def _encoded(self, frame: RemotingFrame, response: Response, extra: Mapping[str, Any] | None = None) -> bytes:
        return encode_frame(frame.response(HeaderCode.HANDLED, encode_response(response, extra)))

    async def _reply(self, request: Request) -> Response:
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
        except Exception:  # noqa: BLE001 - the client gets a response, the log the traceback
            _LOG.exception("request failed: type=%s", type(request).__name__)
            code, named = ResponseCode.INTERNAL_ERROR, None
        leader_id = named or (await group.state()).leader_id
        return _kind(request)(code=code, leader_id=leader_id, **base)

    async def _handled(self, request: Request, group: GroupService) -> Response:
        match request:
            case MetadataRequest():
                state = await group.state()
                return MetadataResponse(group=request.group, leader_id=state.leader_id, peers=state.peers)
            case AppendRequest():
                if not request.bodies:
                    return AppendResponse(code=ResponseCode.REQUEST_WITH_EMPTY_BODYS, group=request.group)
                done = await group.append(request.bodies)
                at: dict[str, Any] = {"index": done.index, "position": done.position, "term": done.term}
                return AppendResponse(group=request.group, leader_id=self._node.node_id, **at)
            case GetRequest():
                return GetResponse(group=request.group, entries=(await group.get(request.index),))
            case TransferRequest():
                return await self._transferred(request, group)
        return Response(
            code=ResponseCode.UNSUPPORTED,
            group=request.group,
            remote_id=request.remote_id,
            leader_id=(await group.state()).leader_id,
        )

    async def _transferred(self, request: TransferRequest, group: GroupService) -> Response:
        state = await group.state()
        base: dict[str, Any] = {"group": request.group, "leader_id": state.leader_id, "term": state.term}
        if request.transferee_id == self._node.node_id and request.transfer_id != self._node.node_id:
            return Response(code=ResponseCode.UNSUPPORTED, **base)  # sent by a Java leader to its peer
        if request.transfer_id != self._node.node_id:
            return Response(code=ResponseCode.UNEXPECTED_ARGUMENT, **base)
        if request.transferee_id is None or request.transferee_id not in state.peers:
            return Response(code=ResponseCode.UNKNOWN_MEMBER, **base)
        if state.term != request.term:
            return Response(code=ResponseCode.INCONSISTENT_TERM, **base)
        if state.leader_id != self._node.node_id:
            return Response(code=ResponseCode.NOT_LEADER, **base)
        await group.transfer(request.transferee_id)
        return Response(group=request.group, term=(await group.state()).term)


def _kind(request: Request) -> type[Response]:
    kinds: dict[type[Request], type[Response]] = {
        MetadataRequest: MetadataResponse,
        AppendRequest: AppendResponse,
        GetRequest: GetResponse,
    }
    return kinds.get(type(request), Response)


def _extra(request: Request) -> Mapping[str, Any] | None:
    """Return the additional fields of Java's response class: an unknown vote result."""
    is_vote = isinstance(request, PeerRequest) and request.kind == RequestCode.VOTE
    return {"voteResult": "UNKNOWN"} if is_vote else None


@dataclass(frozen=True, slots=True)
class RemotingLimits:
    """Limits of one remoting connection: they protect the memory of the node.

    Attributes:
        requests: requests in progress.
        request_bytes: bytes of their bodies.
        gets: entries read at once; each may take 5.6 MB as base64 until the client has received it.
        first_request_s: seconds until a new connection must have sent a complete request.
        rest_of_request_s: seconds until an incomplete request must be complete.
    """

    requests: int = 512
    request_bytes: int = 32 << 20
    gets: int = 8
    first_request_s: float = 5.0
    rest_of_request_s: float = 60.0


_LOG = logging.getLogger(__name__)
_LOG.addFilter(BurstFilter())


class RemotingConnection(asyncio.Protocol):
    """One client's connection; requests except large ones start in their order, responses leave when they are ready.

    The connection stops reading while too many requests are in progress or the client does not receive its responses.

    Args:
        node: the node that handles the requests.
        limits: of the connection.
    """

    def __init__(self, node: NodeService, limits: RemotingLimits | None = None) -> None:
        self._limits = limits or RemotingLimits()
        self._session = RemotingSession(node)
        self._transport: asyncio.Transport = cast("asyncio.Transport", None)
        self._tasks: set[asyncio.Task[None]] = set()
        self._bytes = 0
        self._writable = asyncio.Event()
        self._writable.set()
        self._reading = True
        self._gets = asyncio.Semaphore(self._limits.gets)
        self._timer: asyncio.TimerHandle | None = None
        self._peer = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport and start the time limit of the first request."""
        self._transport = cast("asyncio.Transport", transport)
        self._peer = str(transport.get_extra_info("peername"))
        self._wait_for_request(self._limits.first_request_s)

    def _wait_for_request(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._expired, seconds)

    def _expired(self, seconds: float) -> None:
        if self._reading:
            self._close(ProtocolError("no request in time", self._peer, "", {"seconds": seconds}))
        else:  # reading was paused, so the client could not send
            self._wait_for_request(seconds)

    def data_received(self, data: bytes) -> None:
        """Start every complete request."""
        try:
            frames = self._session.receive_data(data)
        except ProtocolError as error:
            self._close(error)
            return
        for frame in frames:
            self._cancel_timer()
            self._bytes += len(frame.body)
            task = asyncio.create_task(self._respond(frame))
            self._tasks.add(task)
            task.add_done_callback(self._responded)
        if self._timer is None and self._session.has_partial_request:
            self._wait_for_request(self._limits.rest_of_request_s)
        self._read_or_pause()

    async def _respond(self, frame: RemotingFrame) -> None:
        try:
            if frame.code == RequestCode.GET:
                async with self._gets:
                    await self._write(await self._session.respond(frame))
            else:
                await self._write(await self._session.respond(frame))
        except ProtocolError as error:
            self._close(error)
        finally:
            self._bytes -= len(frame.body)

    def _responded(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._read_or_pause()

    async def _write(self, data: bytes) -> None:
        await self._writable.wait()
        if data and not self._transport.is_closing():
            self._transport.write(data)

    def _read_or_pause(self) -> None:
        limits = self._limits
        full = len(self._tasks) >= limits.requests or self._bytes >= limits.request_bytes
        busy = full or not self._writable.is_set()
        if busy != self._reading or self._transport.is_closing():
            return
        self._reading = not busy
        if busy:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _close(self, error: ProtocolError) -> None:
        if not self._transport.is_closing():
            _LOG.warning("closing remoting connection: peer=%s error=%s", self._peer, error)
            self._transport.abort()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def pause_writing(self) -> None:
        """Stop reading: the client does not receive its responses."""
        self._writable.clear()
        self._read_or_pause()

    def resume_writing(self) -> None:
        """Continue reading."""
        self._writable.set()
        self._read_or_pause()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the requests in progress."""
        del exc
        self._cancel_timer()
        self._writable.set()
        for task in self._tasks:
            task.cancel()


def remoting_port(node: PortNode) -> Callable[[], RemotingConnection]:
    """Return the factory of a node's remoting connections; a ``ForeignPort`` of ``NodeServer``."""
    return partial(RemotingConnection, RemotingNode(node))


class RemotingNode:
    """A NodeService for a node of this project."""

    def __init__(self, node: PortNode) -> None:
        self.node_id = str(node.node_id)
        self._node = node
        self._large = asyncio.Lock()

    async def run_blocking(self, work: Callable[[], _Result]) -> _Result:
        """Run a blocking function off the event loop, one at a time, and return its result."""
        async with self._large:
            return await asyncio.to_thread(work)

    def group(self, name: str) -> GroupService | None:
        """Return a group that the node hosts; None if it does not."""
        group = self._node.group(name)
        return None if group is None else _RemotingGroup(group, self._node.addresses)


class _RemotingGroup:
    """A GroupService for a group of this project."""

    def __init__(self, group: PortGroup, peers: Mapping[str, str]) -> None:
        self._group, self._peers = group, peers

    async def state(self) -> GroupState:
        leader = self._group.leader_id
        return GroupState(None if leader is None else str(leader), self._group.term, self._peers)

    async def append(self, bodies: Sequence[bytes]) -> Appended:
        found = await self._group.append(bodies)
        return Appended(found.last_index, self._group.position_of(found.last_index), found.term)

    async def get(self, index: int) -> WireEntry:
        [row] = to_arrow(await self._group.read(index), schema=RECORD_SCHEMA).to_pylist()
        return WireEntry(row["index"], row["term"], row["magic"], row["position"], row["body"])

    async def transfer(self, node_id: str) -> None:
        await self._group.transfer_leadership(NodeId(node_id))
