"""DLedger's request and response codes, and the errors that they mean."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from dledger_core.errors import (
    BadRequestError,
    BehindError,
    BusyError,
    CorruptRecordError,
    DiskFailedError,
    DiskFullError,
    DLedgerError,
    IndexOutOfRangeError,
    LeadershipLostError,
    NoLeaderError,
    NotLeaderError,
    ProposalDroppedError,
    RequestTimedOutError,
    StorageError,
    TransferringError,
    UnknownGroupError,
)


class RequestCode(IntEnum):
    """Kind of a request, in the frame's header."""

    METADATA = 50000
    APPEND = 50001
    GET = 50002
    VOTE = 51001
    HEART_BEAT = 51002
    PULL = 51003
    PUSH = 51004
    LEADERSHIP_TRANSFER = 51005
    INSTALL_SNAPSHOT = 51006
    USER_DEFINE = 59999


class HeaderCode(IntEnum):
    """Code in the header of a response; a handled request has its result in the body."""

    SYSTEM_ERROR = 1
    SYSTEM_BUSY = 2
    NOT_SUPPORTED = 3
    HANDLED = 200


class ResponseCode(IntEnum):
    """Result, in the body of a response."""

    UNKNOWN = -1
    SUCCESS = 200
    TIMEOUT = 300
    METADATA_ERROR = 301
    NETWORK_ERROR = 302
    UNSUPPORTED = 303
    UNKNOWN_GROUP = 400
    UNKNOWN_MEMBER = 401
    UNEXPECTED_MEMBER = 402
    EXPIRED_TERM = 403
    NOT_LEADER = 404
    INCONSISTENT_TERM = 407
    INCONSISTENT_LEADER = 409
    INDEX_OUT_OF_RANGE = 410
    UNEXPECTED_ARGUMENT = 411
    DISK_ERROR = 414
    DISK_FULL = 415
    FALL_BEHIND_TOO_MUCH = 417
    TAKE_LEADERSHIP_FAILED = 418
    INDEX_LESS_THAN_LOCAL_BEGIN = 419
    REQUEST_WITH_EMPTY_BODYS = 420
    INTERNAL_ERROR = 500
    TERM_CHANGED = 501
    WAIT_QUORUM_ACK_TIMEOUT = 502
    LEADER_PENDING_FULL = 503
    ILLEGAL_MEMBER_STATE = 504
    LEADER_NOT_READY = 505
    LEADER_TRANSFERRING = 506


_FASTJSON2: Final = "com.alibaba.fastjson2.JSONException"
_PEERS_REMEDY: Final = "use the group's own peers string, ids included"
_PLAIN: Final[dict[int, tuple[type[DLedgerError], str, str]]] = {
    ResponseCode.TIMEOUT: (RequestTimedOutError, "the node did not respond in time", ""),
    ResponseCode.NETWORK_ERROR: (RequestTimedOutError, "the node did not reach another node", ""),
    ResponseCode.UNSUPPORTED: (BadRequestError, "the node does not support this request", ""),
    ResponseCode.UNKNOWN_GROUP: (UnknownGroupError, "the node serves another group", "name the group of the node"),
    ResponseCode.UNKNOWN_MEMBER: (BadRequestError, "the node has another id", _PEERS_REMEDY),
    ResponseCode.UNEXPECTED_MEMBER: (BadRequestError, "the node has another id", _PEERS_REMEDY),
    ResponseCode.EXPIRED_TERM: (LeadershipLostError, "the term ended", ""),
    ResponseCode.INCONSISTENT_TERM: (NotLeaderError, "the term has changed", ""),
    ResponseCode.INCONSISTENT_LEADER: (NotLeaderError, "the leader has changed", ""),
    ResponseCode.INDEX_OUT_OF_RANGE: (IndexOutOfRangeError, "the index is not in the log", ""),
    ResponseCode.INDEX_LESS_THAN_LOCAL_BEGIN: (IndexOutOfRangeError, "the index is no longer in the log", ""),
    ResponseCode.UNEXPECTED_ARGUMENT: (BadRequestError, "the node rejects the content of the request", ""),
    ResponseCode.REQUEST_WITH_EMPTY_BODYS: (BadRequestError, "the request contains no bodies", ""),
    ResponseCode.DISK_ERROR: (StorageError, "the node's store cannot serve the request", "check the node's log"),
    ResponseCode.DISK_FULL: (DiskFullError, "the node's disk is full", ""),
    ResponseCode.FALL_BEHIND_TOO_MUCH: (TransferringError, "the new leader is too far behind", "retry later"),
    ResponseCode.TAKE_LEADERSHIP_FAILED: (TransferringError, "the node did not become leader", "retry"),
    ResponseCode.TERM_CHANGED: (LeadershipLostError, "the term changed before a majority acknowledged", ""),
    ResponseCode.WAIT_QUORUM_ACK_TIMEOUT: (RequestTimedOutError, "no majority acknowledged in time", ""),
    ResponseCode.LEADER_PENDING_FULL: (BusyError, "too many appends are pending at the leader", ""),
    ResponseCode.ILLEGAL_MEMBER_STATE: (ProposalDroppedError, "the node is in another state", ""),
    ResponseCode.LEADER_NOT_READY: (NoLeaderError, "the leader is not ready yet", ""),
    ResponseCode.LEADER_TRANSFERRING: (TransferringError, "leadership is being transferred", ""),
}
_WITHOUT_NUMBER: Final[tuple[tuple[type[DLedgerError], ResponseCode], ...]] = (
    (CorruptRecordError, ResponseCode.DISK_ERROR),
    (DiskFailedError, ResponseCode.DISK_ERROR),
    (NoLeaderError, ResponseCode.NOT_LEADER),
    (BehindError, ResponseCode.LEADER_NOT_READY),
)
"""Errors whose number DLedger does not have."""


def error_of(code: int, where: str, leader_id: str | None = None) -> DLedgerError:
    """Return the error for a response code other than SUCCESS.

    An unknown code means an unknown outcome.
    """
    if code == ResponseCode.NOT_LEADER:
        return NotLeaderError("the node does not lead", where, "", {"leader_id": leader_id})
    kind, what, remedy = _PLAIN.get(
        code, (RequestTimedOutError, "the node reported an internal error", "check the node's log")
    )
    return kind(what, where, remedy, {"code": code})


def rejects_base64(code: int, remark: str | None) -> bool:
    """Whether a node could not read a request, because its JSON library (since DLedger 0.4.3) does not accept base64.

    Such a request has had no effect.
    """
    return code == HeaderCode.SYSTEM_ERROR and (remark or "").lstrip().startswith(_FASTJSON2)


def header_error(code: int, remark: str | None, where: str) -> DLedgerError:
    """Return the error for a response whose header code is not HANDLED."""
    values = {"code": code, "remark": (remark or "").strip()[:200]}
    if code == HeaderCode.SYSTEM_BUSY:
        return BusyError("the node is overloaded", where, "retry later", values)
    if code == HeaderCode.NOT_SUPPORTED:
        return BadRequestError(
            "the node does not support DLedger's protocol", where, "name the port of a DLedger node", values
        )
    return RequestTimedOutError("the node reported an internal error", where, "check the node's log", values)


def code_of(error: DLedgerError) -> ResponseCode:
    """Return the response code that reports an error to a Java client."""
    if isinstance(error, IndexOutOfRangeError):
        below = int(error.values.get("index", -1)) < int(error.values.get("first_index", -1))
        return ResponseCode.INDEX_LESS_THAN_LOCAL_BEGIN if below else ResponseCode.INDEX_OUT_OF_RANGE
    for kind, code in _WITHOUT_NUMBER:
        if isinstance(error, kind):
            return code
    try:
        return ResponseCode(error.code)
    except ValueError:
        return ResponseCode.INTERNAL_ERROR
