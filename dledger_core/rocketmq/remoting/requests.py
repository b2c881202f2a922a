"""What a client or a peer asks of a DLedger node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from dledger_core.errors import BadRequestError, ProtocolError
from dledger_core.rocketmq.remoting.bodies import SMALL_BODY_BYTES_MAX, Fields, dump, to_base64
from dledger_core.rocketmq.remoting.codes import RequestCode
from dledger_core.rocketmq.remoting.frame import FRAME_BYTES_MAX, RemotingFrame

__all__ = [
    "AppendRequest",
    "GetRequest",
    "MetadataRequest",
    "PeerRequest",
    "Request",
    "TransferRequest",
    "decode_request",
    "encode_request",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What every request says.

    Attributes:
        group: the group it is for.
        remote_id: the node it is for; one with another id refuses it.
        local_id: the peer that sends it.
        leader_id: whom the sender follows.
        term: the sender's term, -1 of a client.
    """

    code: ClassVar[RequestCode]
    group: str = ""
    remote_id: str = ""
    local_id: str | None = None
    leader_id: str | None = None
    term: int = -1

    def own_fields(self) -> dict[str, Any]:
        """Returns the JSON fields of this kind of request."""
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataRequest(Request):
    """Who leads, and which nodes there are."""

    code = RequestCode.METADATA


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendRequest(Request):
    """One entry, or with ``is_batch`` several that a Java server would take in-process only."""

    code = RequestCode.APPEND
    bodies: tuple[bytes, ...] = ()
    is_batch: bool = False

    def own_fields(self) -> dict[str, Any]:
        """See ``Request``."""
        encoded = [to_base64(body) for body in self.bodies]
        return {"batchMsgs": encoded} if self.is_batch else {"body": encoded[0]}


@dataclass(frozen=True, slots=True, kw_only=True)
class GetRequest(Request):
    """The entry at one index."""

    code = RequestCode.GET
    index: int = 0

    def own_fields(self) -> dict[str, Any]:
        """See ``Request``."""
        return {"beginIndex": self.index, "maxSize": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferRequest(Request):
    """Hand leadership over, from ``transfer_id`` to ``transferee_id``; also sent from the one to the other."""

    code = RequestCode.LEADERSHIP_TRANSFER
    transfer_id: str | None = None
    transferee_id: str | None = None
    ledger_index: int = 0

    def own_fields(self) -> dict[str, Any]:
        """See ``Request``."""
        return {
            "takeLeadershipLedgerIndex": self.ledger_index,
            "transferId": self.transfer_id,
            "transfereeId": self.transferee_id,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRequest(Request):
    """What only Java peers ask each other (VOTE, HEART_BEAT, PULL, PUSH ...): known well enough to be refused."""

    kind: RequestCode = RequestCode.PUSH


def encode_request(request: Request, opaque: int, *, language: str = "PYTHON") -> RemotingFrame:
    """Returns the frame of a request; of a peer's request only what all have."""
    base = {
        "code": 200,
        "group": request.group,
        "leaderId": request.leader_id,
        "localId": request.local_id,
        "remoteId": request.remote_id,
        "term": request.term,
    }
    code = request.kind if isinstance(request, PeerRequest) else request.code
    return RemotingFrame(code=code, opaque=opaque, body=dump(base | request.own_fields()), language=language)


def decode_request(frame: RemotingFrame) -> Request | None:
    """Returns the request of a frame; None if its code is none of DLedger's.

    Raises:
        ProtocolError: the body is malformed.
        BadRequestError: it is well formed and lacks what it must hold.
    """
    try:
        code = RequestCode(frame.code)
    except ValueError:
        return None
    if code == RequestCode.USER_DEFINE and not frame.body:
        return PeerRequest(kind=code)
    fields = Fields.parse(frame.body, code.name, max_bytes=_BYTES_MAX.get(code, SMALL_BODY_BYTES_MAX))
    base: dict[str, Any] = {
        "group": fields.text("group") or "",
        "remote_id": fields.text("remoteId") or "",
        "local_id": fields.text("localId"),
        "leader_id": fields.text("leaderId"),
        "term": fields.number("term", -1),
    }
    match code:
        case RequestCode.METADATA:
            return MetadataRequest(**base)
        case RequestCode.APPEND:
            return _append(fields, base)
        case RequestCode.GET:
            return GetRequest(**base, index=_index(fields))
        case RequestCode.LEADERSHIP_TRANSFER:
            return TransferRequest(
                **base,
                transfer_id=fields.text("transferId"),
                transferee_id=fields.text("transfereeId"),
                ledger_index=fields.number("takeLeadershipLedgerIndex", 0),
            )
    return PeerRequest(**base, kind=code)


_BYTES_MAX = {
    RequestCode.APPEND: FRAME_BYTES_MAX,
    RequestCode.PUSH: FRAME_BYTES_MAX,
    RequestCode.INSTALL_SNAPSHOT: FRAME_BYTES_MAX,
    RequestCode.USER_DEFINE: FRAME_BYTES_MAX,
}


def _append(fields: Fields, base: dict[str, Any]) -> AppendRequest:
    bodies = fields.list_of_data("batchMsgs")
    if bodies is not None:
        return AppendRequest(**base, bodies=tuple(bodies), is_batch=True)
    body = fields.data("body")
    if body is None:
        raise BadRequestError("an append without a body", "body", "send an empty text for an empty body")
    return AppendRequest(**base, bodies=(body,))


def _index(fields: Fields) -> int:
    try:
        return fields.number("beginIndex")
    except ProtocolError as error:
        raise BadRequestError(error.what, error.where) from None
