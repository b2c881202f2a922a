"""DLedger's request and response codes, and what a response code means as an error of ours."""

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

__all__ = ["HeaderCode", "RequestCode", "ResponseCode", "code_of", "error_of", "header_error"]


class RequestCode(IntEnum):
    """What a request asks, in the frame's header."""

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
    """What the header of a reply says; the result proper is in the body of those that were handled."""

    SYSTEM_ERROR = 1
    SYSTEM_BUSY = 2
    NOT_SUPPORTED = 3
    HANDLED = 200


class ResponseCode(IntEnum):
    """The result, in a reply's body."""

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


_PEERS_REMEDY: Final = "use the group's own peers string, ids included"
_PLAIN: Final[dict[int, tuple[type[DLedgerError], str, str]]] = {
    ResponseCode.TIMEOUT: (RequestTimedOutError, "the node had no answer in time", ""),
    ResponseCode.NETWORK_ERROR: (RequestTimedOutError, "the node did not reach another one", ""),
    ResponseCode.UNSUPPORTED: (BadRequestError, "the node does not support this request", ""),
    ResponseCode.UNKNOWN_GROUP: (UnknownGroupError, "the node is of another group", "name the group it serves"),
    ResponseCode.UNKNOWN_MEMBER: (BadRequestError, "the node has another id", _PEERS_REMEDY),
    ResponseCode.UNEXPECTED_MEMBER: (BadRequestError, "the node has another id", _PEERS_REMEDY),
    ResponseCode.EXPIRED_TERM: (LeadershipLostError, "the term ended", ""),
    ResponseCode.INCONSISTENT_TERM: (NotLeaderError, "the term has changed", ""),
    ResponseCode.INCONSISTENT_LEADER: (NotLeaderError, "the leader has changed", ""),
    ResponseCode.INDEX_OUT_OF_RANGE: (IndexOutOfRangeError, "the index is not in the log", ""),
    ResponseCode.INDEX_LESS_THAN_LOCAL_BEGIN: (IndexOutOfRangeError, "the index is no longer in the log", ""),
    ResponseCode.UNEXPECTED_ARGUMENT: (BadRequestError, "the node refuses the request's content", ""),
    ResponseCode.REQUEST_WITH_EMPTY_BODYS: (BadRequestError, "the request holds no bodies", ""),
    ResponseCode.DISK_ERROR: (StorageError, "the node's store cannot serve it", "look into the node's log"),
    ResponseCode.DISK_FULL: (DiskFullError, "the node's disk is full", ""),
    ResponseCode.FALL_BEHIND_TOO_MUCH: (TransferringError, "the node to lead is too far behind", "try again later"),
    ResponseCode.TAKE_LEADERSHIP_FAILED: (TransferringError, "the node did not take over", "try again"),
    ResponseCode.TERM_CHANGED: (LeadershipLostError, "the term changed before a majority held it", ""),
    ResponseCode.WAIT_QUORUM_ACK_TIMEOUT: (RequestTimedOutError, "no majority held it in time", ""),
    ResponseCode.LEADER_PENDING_FULL: (BusyError, "too many appends wait at the leader", ""),
    ResponseCode.ILLEGAL_MEMBER_STATE: (ProposalDroppedError, "the node is in another state", ""),
    ResponseCode.LEADER_NOT_READY: (NoLeaderError, "the leader is not ready yet", ""),
    ResponseCode.LEADER_TRANSFERRING: (TransferringError, "leadership is being handed over", ""),
}
_OURS: Final[tuple[tuple[type[DLedgerError], ResponseCode], ...]] = (
    (CorruptRecordError, ResponseCode.DISK_ERROR),
    (DiskFailedError, ResponseCode.DISK_ERROR),
    (NoLeaderError, ResponseCode.NOT_LEADER),
    (BehindError, ResponseCode.LEADER_NOT_READY),
)
"""Errors whose own number DLedger does not know."""


def error_of(code: int, where: str, leader_id: str | None = None) -> DLedgerError:
    """Returns the error that a response code other than SUCCESS means.

    A code that is not known leaves open what happened: its outcome is unknown.
    """
    if code == ResponseCode.NOT_LEADER:
        return NotLeaderError("the node does not lead", where, "", {"leader_id": leader_id})
    kind, what, remedy = _PLAIN.get(code, (RequestTimedOutError, "the node failed", "look into the node's log"))
    return kind(what, where, remedy, {"code": code})


def header_error(code: int, remark: str | None, where: str) -> DLedgerError:
    """Returns the error that a reply's header means when it is not HANDLED."""
    values = {"code": code, "remark": (remark or "").strip()[:200]}
    if code == HeaderCode.SYSTEM_BUSY:
        return BusyError("the node has too much to do", where, "", values)
    if code == HeaderCode.NOT_SUPPORTED:
        return BadRequestError("the node does not speak DLedger", where, "name the port of a DLedger node", values)
    return RequestTimedOutError("the node failed", where, "look into the node's log", values)


def code_of(error: DLedgerError) -> ResponseCode:
    """Returns the response code that tells a Java client of an error of ours."""
    if isinstance(error, IndexOutOfRangeError):
        below = int(error.values.get("index", -1)) < int(error.values.get("first_index", -1))
        return ResponseCode.INDEX_LESS_THAN_LOCAL_BEGIN if below else ResponseCode.INDEX_OUT_OF_RANGE
    for kind, code in _OURS:
        if isinstance(error, kind):
            return code
    try:
        return ResponseCode(error.code)
    except ValueError:
        return ResponseCode.INTERNAL_ERROR
