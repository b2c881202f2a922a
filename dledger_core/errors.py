"""All errors that users and programs receive, as one tree.

::

    DLedgerError                      code, retriable, outcome_unknown, exit_code (2 if retriable or unknown)
    |- ConfigError (ValueError)       an option, a peers string, a file of settings
    |  '- UnsupportedError            the group's protocol lacks the operation
    |- RaftError
    |  |- NotLeaderError              retriable; leader_id
    |  |- ProposalDroppedError        retriable; nothing was appended
    |  |- LeadershipLostError         outcome_unknown
    |  |- TransferringError           retriable; leadership is being transferred
    |  |- MemberChangeRefusedError    reason; the group's members are unchanged
    |  |- ArchiveRefusedError         reason; nothing was recorded
    |  |- UnknownGroupError
    |  |- FoundingRefusedError        a store refuses a bootstrap record or an admission
    |  |- RecoveryRefusedError        a store refuses to retire its log, or to continue it
    |  '- LogContestedError           a store of the continued log has committed more; nothing was appended
    |- ProducerError
    |  |- FencedError                 a newer epoch or run exists
    |  |- ProducerUnknownError        sequence > 0 of a producer that is not in the log
    |  |- ProducersFullError          the table of producers is full; known ones continue
    |  |- SequenceGapError            a sequence was skipped
    |  |- SequenceConflictError       a repeated sequence with other content
    |  |- TransactionError            aborted, or committed with other content
    |  |- QueryUnknownError           micro-batch > 0 of a query that no group knows
    |  |- QueriesFullError            the table of transactions is full; known queries continue
    |  '- OpenTransactionsError       too many open transactions; limit
    |- StorageError                   exit code 4
    |  |- CorruptRecordError          path, position: damaged bytes, never served
    |  |- StoreMismatchError          another group's, node's or log's store; exit code 3
    |  |- StoreBusyError              another process holds the store; exit code 3
    |  |- StoreIncompleteError        a conversion into the store is not finished; exit code 3
    |  |- QuarantinedError            a broken invariant; until dledger repair
    |  |- IdentityLostError            forgotten votes: until it is replaced
    |  |- EndLostError                 forgotten entries: it recovers
    |  |- DiskFailedError             the first write or sync error stops the replica
    |  '- DiskFullError               retriable
    |- ArchiveDamagedError            rows of an archive are not those that were proved
    |- ArchiveTableError              a Delta table cannot be read, or is not an archive
    |- ProtocolError                  the other side sent invalid data; the connection is closed
    '- ClientError
       |- NoLeaderError               retriable
       |- UnreachableError            retriable; no peer responded
       |- DuplicateStoreError         another node holds the same store
       |- UnknownFeatureError         the group uses a feature that the other node does not know
       |- OtherLogError               the node has another log of the group than the request names
       |  '- LogContinuedError        retriable; that log continues the named one
       |- RequestTimedOutError        outcome_unknown
       |- BusyError                   retriable; retry_after_ms
       |  |- OverloadedError          more is appended than the log commits; nothing was appended
       |  '- QuotaExceededError       the principal uses too much; quota, limit
       |- BehindError                 retriable; the replica has not reached min_commit
       |- UnauthenticatedError        no valid certificate or token
       |- ForbiddenError              the principal lacks a permission on the group
       |- IndexOutOfRangeError        first_index, last_index
       '- BadRequestError             the request itself is wrong

    InvariantViolationError (AssertionError)   not a DLedgerError, so that no retry loop hides it

An error has a statement (*what*), a file, address or group (*where*), *values*, and an action (*remedy*). All are in
``args``, so errors can be pickled (Spark workers) and sent (``to_wire``, ``error_from_wire``).
"""

from __future__ import annotations

import json
from typing import Any, ClassVar, Final

from dledger_core.exit_codes import EXIT_INCOMPLETE, EXIT_STORAGE, EXIT_USAGE

__all__ = [
    "ArchiveDamagedError",
    "ArchiveRefusedError",
    "ArchiveTableError",
    "BadRequestError",
    "BehindError",
    "BusyError",
    "ClientError",
    "ConfigError",
    "CorruptRecordError",
    "DLedgerError",
    "DiskFailedError",
    "DiskFullError",
    "DuplicateStoreError",
    "EndLostError",
    "FencedError",
    "ForbiddenError",
    "FoundingRefusedError",
    "IdentityLostError",
    "IndexOutOfRangeError",
    "InvariantViolationError",
    "LeadershipLostError",
    "LogContestedError",
    "LogContinuedError",
    "MemberChangeRefusedError",
    "NoLeaderError",
    "NotLeaderError",
    "NotUnderstoodError",
    "OpenTransactionsError",
    "OtherLogError",
    "OverloadedError",
    "ProducerError",
    "ProducerUnknownError",
    "ProducersFullError",
    "ProposalDroppedError",
    "ProtocolError",
    "QuarantinedError",
    "QueriesFullError",
    "QueryUnknownError",
    "QuotaExceededError",
    "RaftError",
    "RecoveryRefusedError",
    "RequestTimedOutError",
    "SequenceConflictError",
    "SequenceGapError",
    "StorageError",
    "StoreBusyError",
    "StoreIncompleteError",
    "StoreMismatchError",
    "TransactionError",
    "TransferringError",
    "UnauthenticatedError",
    "UnknownFeatureError",
    "UnknownGroupError",
    "UnreachableError",
    "UnsupportedError",
    "error_from_wire",
    "in_words",
    "invariant",
    "one_line",
    "quoted",
]


_LINE_CHARACTERS: Final = 2000
_WHAT_CHARACTERS: Final = 1000
"""So that a long value in *what* does not push the place and the remedy out of the line."""
_VALUE_CHARACTERS: Final = 300


def in_words(value: object) -> str:
    """Return a value as people and other programs read it, without Python's literals: words, commas, JSON."""
    match value:
        case None:
            return "none"
        case bool():
            return "true" if value else "false"
        case str():
            return str(value)
        case list() | tuple() | set() | frozenset():
            items = sorted(map(in_words, value)) if isinstance(value, set | frozenset) else map(in_words, value)
            return ", ".join(items) or "none"
        case dict():
            return json.dumps(value, default=str, ensure_ascii=False)
        case bytes() | bytearray() | memoryview():
            return bytes(value).hex()
    return str(value)


def quoted(value: object) -> str:
    """Return a given value for a sentence: text in quotes, everything else as ``in_words`` returns it."""
    return repr(value) if isinstance(value, str) else in_words(value)


def one_line(text: str, limit: int = _LINE_CHARACTERS) -> str:
    """Return a text, which may be a stranger's, for one line of a log: cut, and without control characters."""
    if len(text) > limit:
        text = f"{text[:limit]}... [{len(text)} characters]"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class DLedgerError(Exception):
    """Base of all errors; ``str(error)`` is one line.

    Args:
        what: complete statement of the failure with the offending value, without a trailing period.
        where: file, address or group; may be empty. The name of an option belongs to ``what``.
        remedy: action for the user; may be empty.
        values: numbers and names for programs, which msgpack can encode.
    """

    code: ClassVar[int] = 500
    name: ClassVar[str] = "INTERNAL"
    retriable: ClassVar[bool] = False
    outcome_unknown: ClassVar[bool] = False
    exit_code: ClassVar[int] = EXIT_USAGE

    def __init_subclass__(cls) -> None:
        """Set the exit code of errors after which the same call may succeed: no node answers, or none can serve it."""
        super().__init_subclass__()
        if "exit_code" not in vars(cls) and (cls.retriable or cls.outcome_unknown):
            cls.exit_code = EXIT_INCOMPLETE

    def __init__(self, what: str, where: str = "", remedy: str = "", values: dict[str, Any] | None = None) -> None:
        super().__init__(what, where, remedy, values or {})

    @property
    def what(self) -> str:
        """Statement of the failure."""
        return str(self.args[0])

    @property
    def where(self) -> str:
        """File, address or group of the failure; may be empty."""
        return str(self.args[1])

    @property
    def remedy(self) -> str:
        """Action for the user; may be empty."""
        return str(self.args[2])

    @property
    def values(self) -> dict[str, Any]:
        """Numbers and names of the message."""
        values: dict[str, Any] = self.args[3]
        return values

    def __str__(self) -> str:
        shown = " ".join(f"{key}={one_line(in_words(value), _VALUE_CHARACTERS)}" for key, value in self.values.items())
        text = f"[{self.name}] {one_line(self.what, _WHAT_CHARACTERS)}"
        if self.where:
            text += f" at {self.where}"
        if shown:
            text += f" ({shown})"
        return one_line(f"{text}; {self.remedy}" if self.remedy else text)

    def report(self) -> dict[str, Any]:
        """Return the error for programs that read JSON: its name, its sentences, and whether the outcome is unknown."""
        return {
            "error": self.name,
            "what": self.what,
            "where": self.where,
            "remedy": self.remedy,
            "values": self.values,
            "retriable": self.retriable,
            "outcome_unknown": self.outcome_unknown,
        }

    def to_wire(self) -> dict[str, Any]:
        """Return the msgpack map that ``error_from_wire`` turns back into this error."""
        return {
            "code": self.code,
            "what": self.what,
            "where": self.where,
            "remedy": self.remedy,
            "values": self.values,
        }


class ConfigError(DLedgerError, ValueError):
    """Wrong setting; nothing was started or written."""

    code = 640
    name = "CONFIG"


class UnsupportedError(ConfigError):
    """The group's protocol lacks the operation; nothing was sent."""

    code = 641
    name = "UNSUPPORTED"

    @classmethod
    def of(cls, operation: str, protocol: str, group: str) -> UnsupportedError:
        """Return the error for an operation of a group."""
        remedy = "use a group of DLedger for Python nodes for it"
        values = {"operation": operation, "protocol": protocol}
        return cls(f"the protocol {protocol} does not support {operation}", f"group {group}", remedy, values)


class RaftError(DLedgerError):
    """The group cannot execute the request now."""


class NotLeaderError(RaftError):
    """The node is not the group's leader; ``leader_id`` in values may name it (or be None)."""

    code = 404
    name = "NOT_LEADER"
    retriable = True

    @property
    def leader_id(self) -> str | None:
        """Leader known to the responding node, or None."""
        return self.values.get("leader_id")


class ProposalDroppedError(RaftError):
    """The proposal was not appended."""

    code = 504
    name = "PROPOSAL_DROPPED"
    retriable = True


class LeadershipLostError(RaftError):
    """The leader stepped down after it appended: the batch may or may not commit."""

    code = 501
    name = "LEADERSHIP_LOST"
    outcome_unknown = True


class TransferringError(RaftError):
    """Leadership is being transferred; appends are rejected until then."""

    code = 506
    name = "LEADER_TRANSFERRING"
    retriable = True


class MemberChangeRefusedError(RaftError):
    """The leader refuses a change of members; nothing was appended. ``reason`` in values says why, for programs."""

    code = 507
    name = "MEMBER_CHANGE_REFUSED"

    @property
    def reason(self) -> str:
        """Constant name of the rule that refused it, such as ``change-pending``."""
        return str(self.values.get("reason", ""))


class ArchiveRefusedError(RaftError):
    """The leader does not record a range of the archive, or cuts none; nothing was appended. ``reason`` says why."""

    code = 508
    name = "ARCHIVE_REFUSED"

    @property
    def reason(self) -> str:
        """Constant name of the rule that refused it, such as ``not-next``."""
        return str(self.values.get("reason", ""))


class UnknownGroupError(RaftError):
    """The node does not host the group."""

    code = 400
    name = "UNKNOWN_GROUP"


class FoundingRefusedError(RaftError):
    """The group cannot be bootstrapped, or a store cannot be admitted, in the present state of its stores."""

    code = 660
    name = "FOUNDING_REFUSED"


class RecoveryRefusedError(RaftError):
    """The log cannot be continued by ``dledger recover --lost`` in the present state of its stores."""

    code = 661
    name = "RECOVERY_REFUSED"


class LogContestedError(RaftError):
    """The log continues another one that is still alive and has committed more; nothing was appended."""

    code = 662
    name = "LOG_CONTESTED"


class ProducerError(DLedgerError):
    """The producer or transaction table rejects the append; nothing was appended."""


class FencedError(ProducerError):
    """A newer epoch of the producer, or a newer run of the query, exists."""

    code = 601
    name = "FENCED"


class ProducerUnknownError(ProducerError):
    """A producer that is not in the log continues at a sequence above 0."""

    code = 602
    name = "PRODUCER_UNKNOWN"


class ProducersFullError(ProducerError):
    """The producer table is full, so a new id is rejected; nothing was appended. Known producers continue."""

    code = 606
    name = "PRODUCERS_FULL"


class SequenceGapError(ProducerError):
    """One or more sequences were skipped."""

    code = 603
    name = "SEQUENCE_GAP"


class SequenceConflictError(ProducerError):
    """A repeated sequence carries other content, or is too old to compare."""

    code = 604
    name = "SEQUENCE_CONFLICT"


class TransactionError(ProducerError):
    """The transaction is aborted, or committed with other content."""

    code = 605
    name = "TRANSACTION"


class QueryUnknownError(ProducerError):
    """A query that no group knows begins at a micro-batch above 0: its earlier ones may be lost, or another log's."""

    code = 608
    name = "QUERY_UNKNOWN"


class QueriesFullError(ProducerError):
    """The table of transactions is full, so a new query is rejected; nothing was appended. Known queries continue."""

    code = 607
    name = "QUERIES_FULL"


class OpenTransactionsError(ProducerError):
    """Too many transactions of the query, or of the log, are open."""

    code = 609
    name = "OPEN_TRANSACTIONS"


class StorageError(DLedgerError):
    """The store cannot read or write data."""

    code = 414
    name = "DISK_ERROR"
    exit_code = EXIT_STORAGE


class CorruptRecordError(StorageError):
    """Damaged records below the durable index; never served, never truncated."""

    code = 620
    name = "CORRUPT"


class StoreMismatchError(StorageError):
    """The directory belongs to another group, node, log or program."""

    code = 621
    name = "STORE_MISMATCH"
    exit_code = EXIT_USAGE


class StoreBusyError(StorageError):
    """Another process has the store open."""

    code = 622
    name = "STORE_BUSY"
    exit_code = EXIT_USAGE


class StoreIncompleteError(StorageError):
    """A conversion into the store is not finished."""

    code = 624
    name = "STORE_INCOMPLETE"
    exit_code = EXIT_USAGE


class QuarantinedError(StorageError):
    """A broken invariant was found in the replica: it does not participate until its store is repaired."""

    code = 625
    name = "QUARANTINED"


class NotUnderstoodError(StorageError):
    """An entry that every node must understand is of a later version; this node does not acknowledge it."""

    code = 626
    name = "NOT_UNDERSTOOD"


class IdentityLostError(StorageError):
    """The store has forgotten votes or acknowledgements, as another node remembers; it must not vote."""

    code = 627
    name = "IDENTITY_LOST"


class EndLostError(StorageError):
    """The store ends before an entry that it has acknowledged, as another node remembers."""

    code = 628
    name = "END_LOST"


class DiskFailedError(StorageError):
    """A write or sync failed, or a read without a repair; the replica stops and the store needs verification."""

    code = 623
    name = "DISK_FAILED"


class DiskFullError(StorageError):
    """The disk is nearly full; appends are rejected, reads continue."""

    code = 415
    name = "DISK_FULL"
    retriable = True


class ArchiveDamagedError(DLedgerError):
    """Rows of a range in an archive are not those that were proven; none of them was returned."""

    code = 705
    name = "DLEDGER_ARCHIVE_DAMAGED"
    exit_code = EXIT_STORAGE


class ArchiveTableError(DLedgerError):
    """A table cannot be read as an archive; nothing was proven or returned."""

    code = 706
    name = "DLEDGER_ARCHIVE_TABLE"


class ProtocolError(DLedgerError):
    """The other side sent something malformed or not allowed; the connection is closed."""

    code = 630
    name = "PROTOCOL"


class ClientError(DLedgerError):
    """A request failed."""


class NoLeaderError(ClientError):
    """No node leads the group at the moment."""

    code = 650
    name = "NO_LEADER"
    retriable = True


class UnreachableError(ClientError):
    """No peer responded."""

    code = 651
    name = "UNREACHABLE"
    retriable = True


class OtherLogError(ClientError):
    """The node has another log of this group than the one that was asked for; nothing was read or changed."""

    code = 652
    name = "OTHER_LOG"


class LogContinuedError(OtherLogError):
    """The other node has a log that continues the one of this store: its chain is in ``values``."""

    code = 655
    name = "LOG_CONTINUED"
    retriable = True


class DuplicateStoreError(ClientError):
    """Another node that answers holds the same store: a directory was copied."""

    code = 653
    name = "DUPLICATE_STORE"


class UnknownFeatureError(ClientError):
    """The group uses a feature that the other node does not know."""

    code = 654
    name = "UNKNOWN_FEATURE"


class RequestTimedOutError(ClientError):
    """No response in time: the request may or may not have taken effect."""

    code = 502
    name = "TIMED_OUT"
    outcome_unknown = True


class BusyError(ClientError):
    """The node has too much in flight; retry after ``retry_after_ms`` in values."""

    code = 503
    name = "BUSY"
    retriable = True


class OverloadedError(BusyError):
    """More is appended than the log commits in the time that the call has; nothing was appended."""

    code = 505
    name = "OVERLOADED"


class QuotaExceededError(BusyError):
    """A principal, or an address, uses too much of the node; values hold quota, limit and ``retry_after_ms``."""

    code = 672
    name = "QUOTA_EXCEEDED"


class BehindError(ClientError):
    """The replica has not reached the requested commit index."""

    code = 610
    name = "BEHIND"
    retriable = True


class UnauthenticatedError(ClientError):
    """One side has no certificate or token that the other side accepts; nothing was requested."""

    code = 670
    name = "UNAUTHENTICATED"


class ForbiddenError(ClientError):
    """The principal lacks the permission for a request; values hold principal, permission and group."""

    code = 671
    name = "FORBIDDEN"


class IndexOutOfRangeError(ClientError):
    """The index is not (or no longer) in the log; values hold first_index and last_index."""

    code = 410
    name = "INDEX_OUT_OF_RANGE"


class BadRequestError(ClientError, ValueError):
    """The request itself is wrong, for example a body above the limit."""

    code = 411
    name = "BAD_REQUEST"


class InvariantViolationError(AssertionError):
    """A safety property is violated: the replica stops at once."""


def invariant(condition: bool, message: str, **values: Any) -> None:
    """Raise InvariantViolationError unless ``condition``; not stripped by ``python -O``."""
    if not condition:
        shown = " ".join(f"{key}={in_words(value)}" for key, value in values.items())
        raise InvariantViolationError(f"{message} ({shown})" if shown else message)


def _tree(base: type[DLedgerError]) -> dict[int, type[DLedgerError]]:
    found: dict[int, type[DLedgerError]] = {}
    for kind in base.__subclasses__():
        if "code" in vars(kind):
            found[kind.code] = kind
        found.update(_tree(kind))
    return found


_BY_CODE = _tree(DLedgerError)


def error_from_wire(fields: dict[str, Any]) -> DLedgerError:
    """Return the error that ``to_wire`` encoded; an unknown code becomes a plain DLedgerError."""
    code = fields.get("code")
    kind = _BY_CODE.get(code, DLedgerError) if isinstance(code, int) else DLedgerError
    values = fields.get("values")
    return kind(
        str(fields.get("what", "unspecified error")),
        str(fields.get("where", "")),
        str(fields.get("remedy", "")),
        dict(values) if isinstance(values, dict) else {},
    )
