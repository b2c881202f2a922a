"""Requests to a DLedger node, its responses, and the JSON bodies that carry both."""

from __future__ import annotations

import binascii
import json
import re
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dledger_core.config import RECORD_BYTES_MAX
from dledger_core.errors import BadRequestError, DLedgerError, ProtocolError
from dledger_core.record import HEADER_BYTES
from dledger_core.rocketmq.remoting.codes import HeaderCode, RequestCode, ResponseCode, error_of, header_error
from dledger_core.rocketmq.remoting.frame import FRAME_BYTES_MAX, RemotingFrame

SMALL_BODY_BYTES_MAX: Final = 64 << 10
"""Limit on a body without entries."""
PARTS_MAX: Final = 1 << 16
"""Limit on commas and brackets: a body with more would take many times its size once parsed."""
_NUMBERS: Final = re.compile(rb'"body":\[([-0-9,]*)\]')
_BASE64: Final = re.compile(rb'"body":"([^"]*)"')
"""A quotation mark inside a JSON text follows a backslash, so neither is ever part of a text."""
_LONG_MIN, _LONG_MAX = -(1 << 63), (1 << 63) - 1


def to_base64(data: bytes) -> str:
    """Return bytes as base64 text."""
    return b64encode(data).decode()


def dump(fields: Mapping[str, Any]) -> bytes:
    """Return a JSON object without its nulls, keys sorted as fastjson sorts them."""
    present = {name: fields[name] for name in sorted(fields) if fields[name] is not None}
    return json.dumps(present, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def _numbers_to_base64(found: re.Match[bytes]) -> bytes:
    if not found[1]:
        return b'"body":""'
    if found[1].count(b",") >= RECORD_BYTES_MAX:  # Java's limit on an entry
        return found[0]  # rejected for its number of elements
    try:  # columns: a list would take many times the body's size
        numbers = pc.cast(pc.split_pattern(pa.scalar(found[1].decode()), ",").values, pa.int8())
    except pa.ArrowInvalid:
        return found[0]  # not bytes: the check of the field names it
    return b'"body":"%b"' % b64encode(numbers.to_numpy().tobytes())


def _base64_to_numbers(found: re.Match[bytes]) -> bytes:
    numbers = pa.array(np.frombuffer(binascii.a2b_base64(found[1]), np.int8))
    texts = pa.ListArray.from_arrays([0, len(numbers)], pc.cast(numbers, pa.string()))
    return b'"body":[%b]' % pc.binary_join(texts, ",")[0].as_buffer().to_pybytes()


class Fields:
    """A JSON object; each access checks the type of the value and raises ProtocolError."""

    def __init__(self, found: Mapping[str, Any], what: str) -> None:
        self._found = found
        self._what = what

    @classmethod
    def parse(cls, body: bytes, what: str, *, max_bytes: int = SMALL_BODY_BYTES_MAX) -> Fields:
        """Parse a body.

        Raises:
            ProtocolError: it exceeds a limit, or is not a JSON object.
        """
        if len(body) <= max_bytes:
            body = _NUMBERS.sub(_numbers_to_base64, body)
        parts = sum(map(body.count, (b",", b"[", b"{")))
        if len(body) > max_bytes or parts > PARTS_MAX:
            values = {"bytes": len(body), "parts": parts, "limit": max_bytes}
            raise ProtocolError(f"the body of {what} is too large", "body", "", values)
        try:
            found = json.loads(body)
        except (ValueError, RecursionError):
            raise ProtocolError(f"the body of {what} is not JSON", "body") from None
        return cls.of(found, what)

    @classmethod
    def of(cls, found: Any, what: str) -> Fields:
        """Return a parsed value as fields; raise ProtocolError if it is not an object."""
        if not isinstance(found, dict):
            raise ProtocolError(f"the body of {what} is not a JSON object", "body")
        return cls(found, what)

    def _wrong(self, name: str, wanted: str) -> ProtocolError:
        return ProtocolError(f"field {name!r} of {self._what} is not {wanted}", "body")

    def number(self, name: str, default: int | None = None) -> int:
        """Return a 64-bit number; without a default it is required."""
        value = self._found.get(name)
        if value is None and default is not None:
            return default
        if type(value) is not int or not _LONG_MIN <= value <= _LONG_MAX:
            raise self._wrong(name, "a 64-bit number")
        return value

    def text(self, name: str) -> str | None:
        """Return a text, None if there is none."""
        value = self._found.get(name)
        if value is not None and not isinstance(value, str):
            raise self._wrong(name, "a text")
        return value

    def data(self, name: str) -> bytes | None:
        """Return bytes, None if there are none."""
        value = self._found.get(name)
        return None if value is None else self._decoded(name, value)

    def list_of_data(self, name: str) -> list[bytes] | None:
        """Return a list of bytes, None if there is none."""
        values = self._list(name)
        return None if values is None else [self._decoded(name, value) for value in values]

    def objects(self, name: str) -> list[Fields]:
        """Return a list of objects, empty if there is none."""
        return [Fields.of(value, f"{self._what}.{name}") for value in self._list(name) or ()]

    def texts_by_name(self, name: str) -> dict[str, str]:
        """Return a map of texts, empty if there is none."""
        value = self._found.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
            raise self._wrong(name, "a map of texts")
        return value

    def _list(self, name: str) -> list[Any] | None:
        value = self._found.get(name)
        if value is not None and not isinstance(value, list):
            raise self._wrong(name, "a list")
        return value

    def _decoded(self, name: str, value: Any) -> bytes:
        if not isinstance(value, str):
            raise self._wrong(name, "base64")
        try:
            return binascii.a2b_base64(value, strict_mode=True)
        except (binascii.Error, ValueError):
            raise self._wrong(name, "base64") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Fields of every request.

    Attributes:
        group: the group.
        remote_id: the receiving node; a node with another id rejects the request.
        local_id: the sending peer.
        leader_id: the leader that the sender follows.
        term: the sender's term, -1 of a client.
    """

    code: ClassVar[RequestCode]
    group: str = ""
    remote_id: str = ""
    local_id: str | None = None
    leader_id: str | None = None
    term: int = -1

    def own_fields(self) -> dict[str, Any]:
        """Return the JSON fields of this kind of request."""
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataRequest(Request):
    """Query of the leader and the nodes."""

    code = RequestCode.METADATA


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendRequest(Request):
    """One entry, or with ``is_batch`` several, which a Java server accepts in-process only."""

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
    """Transfer of leadership from ``transfer_id`` to ``transferee_id``; also sent from the former to the latter."""

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
    """A request between Java peers (VOTE, HEART_BEAT, PULL, PUSH ...); it is rejected."""

    kind: RequestCode = RequestCode.PUSH


def encode_request(request: Request, opaque: int, *, numbers: bool = False) -> RemotingFrame:
    """Return the frame of a request; for a peer request only the common fields.

    Args:
        request: the request.
        opaque: its number.
        numbers: write a body's bytes as an array of numbers, as DLedger 0.4.3 needs it, instead of base64.
    """
    base = {
        "code": 200,
        "group": request.group,
        "leaderId": request.leader_id,
        "localId": request.local_id,
        "remoteId": request.remote_id,
        "term": request.term,
    }
    code = request.kind if isinstance(request, PeerRequest) else request.code
    body = dump(base | request.own_fields())
    if numbers:
        body = _BASE64.sub(_base64_to_numbers, body)
    return RemotingFrame(code=code, opaque=opaque, body=body, language="PYTHON")


def decode_request(frame: RemotingFrame) -> Request | None:
    """Return the request of a frame; None if its code is not one of DLedger's.

    Raises:
        ProtocolError: the body is malformed.
        BadRequestError: it is well formed and lacks a required field.
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


_R = TypeVar("_R", bound="Response")


@dataclass(frozen=True, slots=True)
class WireEntry:
    """An entry in a response to GET, with the fields of its record."""

    index: int
    term: int
    magic: int
    position: int
    body: bytes
    channel: int = 0
    chain_crc: int = 0
    body_crc: int = 0

    def to_fields(self) -> dict[str, Any]:
        """Return its JSON object."""
        return {
            "body": to_base64(self.body),
            "bodyCrc": self.body_crc,
            "chainCrc": self.chain_crc,
            "channel": self.channel,
            "index": self.index,
            "magic": self.magic,
            "pos": self.position,
            "size": HEADER_BYTES + len(self.body),
            "term": self.term,
        }

    @classmethod
    def of(cls, fields: Fields) -> WireEntry:
        """Return the entry of a JSON object.

        Raises:
            ProtocolError: it is malformed.
        """
        body = fields.data("body") or b""
        size = fields.number("size")
        if size != HEADER_BYTES + len(body):
            values = {"size": size, "body_bytes": len(body)}
            raise ProtocolError("an entry's size does not match its body", "body", "", values)
        return cls(
            fields.number("index"),
            fields.number("term"),
            fields.number("magic"),
            fields.number("pos"),
            body,
            fields.number("channel", 0),
            fields.number("chainCrc", 0),
            fields.number("bodyCrc", 0),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """Fields of every response.

    Attributes:
        code: the result; SUCCESS or an error.
        group: the group.
        remote_id: the receiving node, in responses that repeat the request.
        leader_id: the leader known to the node.
        term: its term, -1 if the response has none.
    """

    code: int = ResponseCode.SUCCESS
    group: str | None = None
    remote_id: str | None = None
    leader_id: str | None = None
    term: int = -1

    def own_fields(self) -> dict[str, Any]:
        """Return the JSON fields of this kind of response."""
        return {}

    @staticmethod
    def read_own(fields: Fields) -> dict[str, Any]:
        """Return the fields of ``own_fields`` as arguments of this class."""
        del fields
        return {}

    def failure(self, where: str) -> DLedgerError | None:
        """Return the error for the code, None for SUCCESS."""
        return None if self.code == ResponseCode.SUCCESS else error_of(self.code, where, self.leader_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataResponse(Response):
    """The leader, and the nodes' addresses by id."""

    peers: Mapping[str, str] = field(default_factory=dict)

    def own_fields(self) -> dict[str, Any]:
        """See ``Response``."""
        return {"peers": dict(self.peers)}

    @staticmethod
    def read_own(fields: Fields) -> dict[str, Any]:
        """See ``Response``."""
        return {"peers": fields.texts_by_name("peers")}


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendResponse(Response):
    """Index and position of an entry; of a batch the last one."""

    index: int = -1
    position: int = -1

    def own_fields(self) -> dict[str, Any]:
        """See ``Response``."""
        return {"index": self.index, "pos": self.position}

    @staticmethod
    def read_own(fields: Fields) -> dict[str, Any]:
        """See ``Response``."""
        return {"index": fields.number("index", -1), "position": fields.number("pos", -1)}


@dataclass(frozen=True, slots=True, kw_only=True)
class GetResponse(Response):
    """One entry, or none with the reason in ``code``."""

    entries: tuple[WireEntry, ...] = ()

    def own_fields(self) -> dict[str, Any]:
        """See ``Response``."""
        return {"entries": [entry.to_fields() for entry in self.entries]}

    @staticmethod
    def read_own(fields: Fields) -> dict[str, Any]:
        """See ``Response``."""
        return {"entries": tuple(map(WireEntry.of, fields.objects("entries")))}


def encode_response(response: Response, extra: Mapping[str, Any] | None = None) -> bytes:
    """Return the body of a response; ``extra``: fields of responses without a class."""
    base = {
        "code": int(response.code),
        "group": response.group,
        "leaderId": response.leader_id,
        "remoteId": response.remote_id,
        "term": response.term,
    }
    return dump(base | response.own_fields() | dict(extra or {}))


def decode_response(kind: type[_R], frame: RemotingFrame, where: str) -> _R:
    """Return the response of a frame as the type that belongs to the request.

    Raises:
        ProtocolError: it is malformed.
        DLedgerError: the header reports that the request was not handled.
    """
    if frame.code != HeaderCode.HANDLED:
        raise header_error(frame.code, frame.remark, where)
    fields = Fields.parse(frame.body, kind.__name__, max_bytes=FRAME_BYTES_MAX)
    return kind(
        code=fields.number("code", ResponseCode.SUCCESS),
        group=fields.text("group"),
        remote_id=fields.text("remoteId"),
        leader_id=fields.text("leaderId"),
        term=fields.number("term", -1),
        **kind.read_own(fields),
    )
