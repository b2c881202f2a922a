"""The messages between clients and nodes, each declared once: a dataclass whose attributes are its field table.

``str(table)`` documents a message; ``TABLES`` has all of them. A request's header also has ``r`` (request id) and, if
it concerns one group, ``g`` (the group) and, once the client has learned it, ``lu`` (uuid of the log): a node with
another log refuses the request with OTHER_LOG. The response then has ``cv``, the index of the configuration entry in
force, if there is one: a client with an older configuration asks for METADATA. It also has ``hl``, the ms since the
replica was in contact with a leader, -1 if it knows none: its reads may lack what others have. A request that does not
fit its table gets BAD_REQUEST; a response that does not fit raises ProtocolError in the client.

A field whose values are rows by position (``self`` and ``members`` of METADATA, ``members`` of MEMBER, ``ranges`` of
DIGEST) keeps the positions of 0.2.0: its readers refuse a row of another length. A new value goes into a field of its
own, a map or pairs by name as ``conditions`` of MEMBER: earlier readers ignore a key that they do not know.
``tests/compatibility`` fails otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

from dledger_core.config import parse_peer
from dledger_core.errors import BadRequestError, ConfigError
from dledger_core.net.fields import INT64_MAX, Table, all_of, table_of, wire
from dledger_core.net.protocol import Type

Q = TypeVar("Q")
A = TypeVar("A")
Isolation = Literal["committed", "uncommitted", "records"]
ISOLATIONS: Final = ("committed", "uncommitted", "records")
_ISOLATION: Final = "committed: as read_committed shows them; uncommitted: all data; records: all entries, also damaged"
_MIN_COMMIT: Final = "wait until this entry is committed and durable on the node, else BEHIND"
_PIN: Final = "[reader's name, ms]: retention on this node keeps entries from start on for this long; 0 ms ends it"
_TRANSACTION: Final = (
    "transaction: q query id ('' = see r), b batch id, r run id (without q its start, if that names one open "
    "transaction), a attempt (APPEND only), o whether the query is used once, w newest micro-batch that it has "
    "committed in other groups"
)
_PARTS: Final = "first, last, rows and CRC of each committed attempt: i64 x 4 x n"
_SEEN: Final = (
    "end (exclusive) of the entries seen in each group i64 x n, lengths of the groups' names u32 x n, lengths of the "
    "logs' uuids u32 x n (0 = not known), names, uuids"
)
_COLUMNS: Final = "lengths u32 x n, CRCs u32 x n, bodies"
_TOGETHER: Final = 64
"""Appends in one PRODUCE."""
_POSITIONS: Final = "positions i64 x n, ascending"
SPLIT_MAX: Final = 1 << 13
"""Positions in one SPLIT: 64 KiB, for which no memory of its own is taken (LARGE_PAYLOAD_BYTES)."""
_RECORDS: Final = "sizes u32 x n, then the records as stored on disk"
_FIELDS: Final = (
    "respond with these columns instead of records, where they are smaller: of entries index, term, position, "
    "timestamp, magic, length and crc of the body, and those of RocketMQ messages in the bodies, a row per message"
)
_FIELDS_MAX: Final = 64
_FIELDS_PAYLOAD: Final = "; with crc: the columns, a record batch in Arrow's IPC format without its schema"


ARCHIVE_RANGES_MAX: Final = 1000
"""Ranges in one RANGES_OK or ARCHIVE_RANGES_OK, which must fit a header."""
_ARCHIVE: Final = (
    "the archive: start and end of what is proved, table (its URI); where it was measured also bytes and ms: how much "
    "log, and log time, it lacks up to the visible end; nil = the log has no archive"
)


def _row(*kinds: type) -> Any:
    return lambda row: type(row) is list and tuple(map(type, row)) == kinds


def _rows(*kinds: type) -> Any:
    fits = _row(*kinds)
    return lambda rows: all(map(fits, rows))


def _counts(values: list[Any]) -> bool:
    return all(type(value) is int and value > 0 for value in values)


def _numbers(values: list[Any]) -> bool:
    return all(type(value) is int and 0 <= value <= INT64_MAX for value in values)


def _are_addresses(rows: list[Any]) -> bool:
    try:
        return all(_row(str, str)(row) and bool(parse_peer(f"{row[0]}-{row[1]}")) for row in rows)
    except ConfigError:
        return False


def _are_members(rows: list[Any]) -> bool:
    try:
        return all(
            _row(str, str, str, str)(row) and row[3] in ("voter", "learner") and bool(parse_peer(f"{row[0]}-{row[2]}"))
            for row in rows
        )
    except ConfigError:
        return False


def _is_transaction(value: dict[str, Any]) -> bool:
    kinds = {"q": str, "b": int, "r": str, "a": str, "o": bool, "w": int}
    is_named = value.keys() >= {"q", "b", "r"} and all(type(value[key]) is kinds.get(key) for key in value)
    return is_named and value["b"] >= -1 and value.get("w", -1) >= -1


def _is_archive(value: dict[str, Any]) -> bool:
    return (
        type(value.get("table")) is str
        and _numbers([value.get("start"), value.get("end")])
        and _numbers([value[key] for key in ("bytes", "ms") if value.get(key) is not None])
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataRequest:
    """Ask a node about a group: leader, terms, indexes, members."""

    pin: list[Any] | None = wire("pin", "any", _PIN, default=None, optional=True)
    start: int = wire("start", "int", "first index that a pin keeps", low=0, default=0)
    space: bool = wire("space", "bool", "whether to count the space of orphaned attempts", default=False)
    seen: list[Any] | None = wire(
        "seen", "list", "[uuid of the client's log, index and term of an entry of it, -1 and -1 = none]", low=3, high=3,
        accepts=_row(str, int, int), default=None, optional=True,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataResponse:
    """A node's view of a group."""

    leader: str | None = wire("leader", "str", "leader's node id, nil if none is known", optional=True)
    term: int = wire("term", "int", "current term")
    log: str | None = wire("log", "str", "uuid of the log, nil while it is not known here", optional=True)
    chain: list[list[Any]] | None = wire(
        "chain", "list", "[log uuid, index, term, check or -1] where this log continues another one, oldest first",
        accepts=_rows(str, int, int, int), default=None, optional=True,
    )  # fmt: skip
    follows: bool | None = wire(
        "follows", "bool", "whether this log continues the one that was seen, with that entry", default=None,
        optional=True,
    )  # fmt: skip
    node: list[Any] = wire(
        "self",
        "list",
        "[id, role, term, first index, last index, commit index, visible end, data bytes]",
        accepts=_row(str, str, int, int, int, int, int, int),
    )
    peers: str = wire("peers", "str", "peers string")
    members: list[list[Any]] = wire(
        "members", "list", "[node id, store uuid or '', address, voter|learner] of each member of the log", low=0,
        accepts=_are_members,
    )  # fmt: skip
    configuration: int = wire(
        "configuration", "int", "index of the configuration entry in force, -1 if bootstrapped with"
    )
    groups: list[str] = wire("groups", "list", "groups of the node", low=0, accepts=all_of(str))
    preferred: list[str] = wire(
        "preferred", "list", "node ids that should lead, best first", low=0, accepts=all_of(str)
    )
    time: int | None = wire("time", "int", "append time of the last entry in ms, nil if not known", optional=True)
    is_recovering: bool = wire("is_recovering", "bool", "whether the node is a recovering voter")
    is_disk_full: bool = wire("is_disk_full", "bool", "whether the node's disk is nearly full", default=False)
    acknowledges: bool | None = wire(
        "acknowledges", "bool", "whether the disk has space for the entries of a leader", default=None, optional=True
    )
    disk: list[int] | None = wire(
        "disk", "list", "[free bytes, size] of the disk with the node's store", low=2, high=2,
        accepts=all_of(int), default=None, optional=True,
    )  # fmt: skip
    orphaned: list[int] | None = wire(
        "orphaned", "list", "[entries, bytes] of orphaned attempts stored here, if requested", low=2, high=2,
        accepts=all_of(int), default=None, optional=True,
    )  # fmt: skip
    tables: list[list[Any]] | None = wire(
        "tables", "list", "[table, rows, limit on them] of each table about the log's writers", low=0,
        accepts=_rows(str, int, int), default=None, optional=True,
    )  # fmt: skip
    archive: dict[str, Any] | None = wire("archive", "map", _ARCHIVE, accepts=_is_archive, default=None, optional=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendRequest:
    """Append entries: plain, as a producer's next append, or as part of a transaction's attempt."""

    count: int = wire("n", "int", "number of entries", low=1)
    producer_id: str | None = wire("p", "str", "producer id", default=None, optional=True)
    epoch: int | None = wire("pe", "int", "producer's epoch", low=0, default=None, optional=True)
    sequence: int | None = wire("ps", "int", "number of this append in the epoch", low=0, default=None, optional=True)
    once: bool = wire("po", "bool", "whether the producer id is used once, so that it expires sooner", default=False)
    transaction: dict[str, Any] | None = wire(
        "x", "map", _TRANSACTION, low=3, high=6, accepts=_is_transaction, default=None, optional=True
    )
    traceparent: str | None = wire(
        "tp", "str", "the client's span as W3C traceparent, if it traces appends", default=None, optional=True
    )


_PLAIN_KEYS: Final = frozenset({"t", "r", "g", "lu", "n"})


def is_plain_append(header: Mapping[str, Any]) -> bool:
    """Whether a request is a well-formed append with no field but its number of entries, and names its group."""
    if header["t"] != Type.APPEND or not header.keys() <= _PLAIN_KEYS:
        return False
    number, count = header.get("r"), header.get("n")
    return (
        type(number) is int
        and 0 < number <= INT64_MAX
        and type(count) is int
        and 0 < count <= INT64_MAX
        and type(header.get("g")) is str
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProduceRequest:
    """The next appends of several producers, one of each, in the order of their entries."""

    count: int = wire("n", "int", "number of entries of all appends", low=1)
    counts: list[int] = wire("ns", "list", "number of entries of each append", low=1, high=_TOGETHER, accepts=_counts)
    ids: list[str] = wire("p", "list", "producer id of each", low=1, high=_TOGETHER, accepts=all_of(str))
    epochs: list[int] = wire("pe", "list", "producer's epoch of each", low=1, high=_TOGETHER, accepts=_numbers)
    sequences: list[int] = wire(
        "ps", "list", "number of each append in its epoch", low=1, high=_TOGETHER, accepts=_numbers
    )
    once: list[bool] = wire(
        "po", "list", "whether the producer id is used once", low=1, high=_TOGETHER, accepts=all_of(bool)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProduceResponse:
    """The outcome of each append; one that failed is sent again alone, and gets its error then."""

    firsts: list[int] = wire("first", "list", "index of the first data entry, -1 = it failed", accepts=all_of(int))
    lasts: list[int] = wire("last", "list", "index of the last data entry", accepts=all_of(int))
    terms: list[int] = wire("term", "list", "term of the entries, -1 if they are deleted", accepts=all_of(int))


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendResponse:
    """An append was committed."""

    first: int = wire("first", "int", "index of the first data entry", low=0)
    last: int = wire("last", "int", "index of the last data entry", low=0)
    term: int = wire("term", "int", "term of the entries, -1 if they are deleted")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRequest:
    """Read records from ``start`` on."""

    start: int = wire("start", "int", "first index", low=0)
    end: int = wire("end", "int", "end (exclusive)", low=0)
    max_bytes: int = wire("max", "int", "bytes of records, but at least one", low=0, default=8 << 20)
    min_commit: int = wire("min_commit", "int", _MIN_COMMIT, default=-1)
    wait_ms: int = wire("wait", "int", "wait for the first entry, in ms", low=0, default=0)
    isolation: Isolation = wire("iso", "str", _ISOLATION, choices=ISOLATIONS, default="committed")
    consistency: str = wire(
        "cons", "str", "linearizable: only the leader, confirmed by a majority",
        choices=("committed", "linearizable"), default="committed",
    )  # fmt: skip
    pin: list[Any] | None = wire("pin", "any", _PIN, default=None, optional=True)
    fields: list[str] | None = wire(
        "fields", "list", _FIELDS, low=1, high=_FIELDS_MAX, accepts=all_of(str), default=None, optional=True
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadResponse:
    """Records of a range, or columns of them."""

    count: int = wire("n", "int", "number of records that were read", low=0)
    next_index: int = wire("next", "int", "index to continue from", low=0)
    commit_index: int = wire("commit", "int", "last entry that is committed and durable on the node")
    visible_end: int = wire("visible", "int", "end of the entries that read_committed shows", low=0)
    first_index: int = wire("first", "int", "first index of the log", low=0)
    skip: list[list[int]] = wire(
        "skip", "list", "[start, end) of orphaned attempts in the range; columns are without them", low=0,
        accepts=_rows(int, int),
    )  # fmt: skip
    crc: int | None = wire(
        "crc", "int", "CRC-32 of the payload if it has columns, nil if it has records", low=0, default=None,
        optional=True,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeRequest:
    """Find the first entry that was appended at or after a time."""

    time_ms: int = wire("ms", "int", "ms since the epoch", low=0)
    min_commit: int = wire("min_commit", "int", _MIN_COMMIT, default=-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeResponse:
    """The first such entry."""

    index: int = wire("index", "int", "its index, the visible end if there is none", low=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRequest:
    """Find the indexes at which to divide a range of entries, so that its parts have given sizes in bytes."""

    start: int = wire("start", "int", "first index", low=0)
    end: int = wire(
        "end", "int", "end (exclusive), which must be committed and durable on the node, else BEHIND", low=1
    )
    count: int = wire("n", "int", "number of positions", low=1, high=SPLIT_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitResponse:
    """For each position the index in [start, end] whose record starts nearest to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerRequest:
    """Ask for the state of a producer, or expire it."""

    producer_id: str = wire("p", "str", "producer id")
    operation: str = wire("op", "str", "the operation", choices=("state", "expire"), default="state")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerResponse:
    """The state of a producer, after the operation."""

    known: bool = wire("known", "bool", "whether the log has entries of it")
    epoch: int = wire("epoch", "int", "its newest epoch", low=0)
    sequence: int = wire("sequence", "int", "number of its next append", low=0)
    last: list[int] | None = wire(
        "last", "list", "[first, last] of its newest append", low=2, high=2, accepts=all_of(int), optional=True
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionRequest:
    """Ask for the state of a transaction, commit it or abort it."""

    operation: str = wire("op", "str", "the operation", choices=("state", "commit", "abort"))
    transaction: dict[str, Any] = wire("x", "map", _TRANSACTION, low=3, high=6, accepts=_is_transaction)
    count: int | None = wire("n", "int", "number of committed attempts", low=0, default=None, optional=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionResponse:
    """The state of a transaction."""

    state: str = wire("state", "str", "its state", choices=("unknown", "open", "committed", "aborted"))
    rows: int = wire("rows", "int", "number of rows of a committed one, else 0", low=0)
    fingerprint: int = wire("f", "int", "of the rows of a committed one, in any order, else 0", low=0)
    index: int = wire("index", "int", "index up to which the state holds")
    newest: int = wire("newest", "int", "newest batch id that the query has committed, -1 if none")


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestRequest:
    """Ask for digests of aligned ranges."""

    start: int = wire("start", "int", "first index", low=0)
    end: int = wire("end", "int", "end (exclusive)", low=0)
    span: int = wire("span", "int", "entries per range, a power of two", low=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestResponse:
    """Digests of ranges, computed from the node's files."""

    ranges: list[list[Any]] = wire(
        "ranges", "list", "[start, end, count, bytes, digest, layout digest]", low=0,
        accepts=_rows(int, int, int, int, bytes, bytes),
    )  # fmt: skip
    next_index: int = wire("next", "int", "index to continue from", low=0)
    commit_index: int = wire("commit", "int", "last entry that is committed and durable on the node")
    damaged: list[int] = wire("damaged", "list", "indexes of damaged entries", low=0, accepts=all_of(int))
    cut: bool = wire("cut", "bool", "whether more entries of these ranges are damaged than are listed")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferRequest:
    """Transfer leadership of a group."""

    node: str = wire("node", "str", "node id of the target")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferResponse:
    """The target leads."""

    leader: str = wire("leader", "str", "leader's node id")


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchRequest:
    """Wait for a change of role, leader or term on this node."""

    wait_ms: int = wire("wait", "int", "longest wait in ms", low=0)
    seen: list[Any] | None = wire(
        "seen",
        "list",
        "[role, leader id|nil, term] that the client has seen",
        low=3,
        high=3,
        default=None,
        optional=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchResponse:
    """The node's role in a group."""

    role: str = wire("role", "str", "leader, follower, learner, candidate or pre-candidate")
    leader: str | None = wire("leader", "str", "leader's node id, nil if none is known", optional=True)
    term: int = wire("term", "int", "current term")
    broker: str = wire("broker", "str", "the role in RocketMQ's words", choices=("master", "slave"))


@dataclass(frozen=True, slots=True, kw_only=True)
class AliveRequest:
    """Ask whether the node runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AliveResponse:
    """It runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsRequest:
    """Ask for the groups of a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsResponse:
    """The groups of a node."""

    logs: dict[str, str | None] = wire(
        "logs", "map", "uuid of each group's log, nil while it is not known", low=0,
        accepts=lambda logs: all(type(k) is str and (v is None or type(v) is str) for k, v in logs.items()),
    )  # fmt: skip
    waiting: list[str] | None = wire(
        "waiting", "list", "groups that wait to be bootstrapped or admitted", low=0, accepts=all_of(str), default=None,
        optional=True,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeRequest:
    """Ask for rows of a table about a log: terms, segments, producers or open transactions."""

    table: str = wire("table", "str", "the table")
    after: list[Any] | None = wire(
        "after", "any", "where to continue: the response before names it", default=None, optional=True
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeResponse:
    """Rows of a table."""

    rows: list[list[Any]] = wire(
        "rows", "list", "the rows after the key, of committed entries", low=0,
        accepts=lambda rows: all(type(row) is list and row for row in rows),
    )  # fmt: skip
    more: bool = wire("more", "bool", "whether there are more rows")
    after: list[Any] | None = wire(
        "after", "any", "where the next request continues; nil = after the key of the last row", default=None,
        optional=True,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitRequest:
    """Wait until any of several groups has new entries."""

    count: int = wire("n", "int", "number of groups", low=1)
    isolation: Isolation = wire("iso", "str", _ISOLATION, choices=ISOLATIONS, default="committed")
    wait_ms: int = wire("wait", "int", "longest wait in ms", low=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitResponse:
    """Groups with new entries; none if the wait timed out."""

    grown: list[str] = wire("grown", "list", "names of the groups", low=0, accepts=all_of(str))


@dataclass(frozen=True, slots=True, kw_only=True)
class AtRequest:
    """Find the entry, or read the messages of the CommitLog, at a position."""

    position: int = wire("position", "int", "byte offset", low=0)
    max_bytes: int = wire("max", "int", "bytes of messages, but at least one", low=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class AtResponse:
    """An entry's index, or messages of the CommitLog that precedes the log."""

    index: int | None = wire("index", "int", "entry at or after the position; nil for messages", low=0, optional=True)
    count: int = wire("n", "int", "number of messages", low=0, default=0)
    next_position: int = wire("next", "int", "position to continue from", low=0, default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverLogRequest:
    """Ask about, or change, a store of a group whose majority is lost: one step of ``dledger recover --lost``."""

    operation: str = wire(
        "op", "str", "the step", choices=("ask", "give-up", "fill", "read", "cut", "take", "complete")
    )
    log: str | None = wire("log", "str", "log to retire, or new log that is complete", default=None, optional=True)
    start: int = wire("start", "int", "read: first entry; cut: first entry of the hole", low=0, default=0)
    end: int = wire("end", "int", "read: end (exclusive)", low=0, default=0)
    peers: str = wire("peers", "str", "fill: the other survivors, as a peers string", default="")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverLogResponse:
    """The store after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupRequest:
    """Start a backup of the node's log, get a chunk of its tables, or end it; READ has the records."""

    operation: str = wire(
        "op", "str", "start: also pin all entries; tables: the bytes from offset on; end: also end the pin",
        choices=("start", "tables", "end"),
    )  # fmt: skip
    name: str = wire("name", "str", "of the backup, and of its pin")
    min_commit: int = wire("min_commit", "int", _MIN_COMMIT, default=-1)
    offset: int = wire("offset", "int", "tables: offset of the chunk", low=0, default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupResponse:
    """The log as of the start, or a chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BootstrapRequest:
    """Ask for the identity of a node's store of a group, or change it; the group need not be bootstrapped."""

    operation: str = wire(
        "op", "str", "look: only ask; ask: also make a store uuid; others change the bootstrap record",
        choices=("look", "ask", "take", "complete", "give-up"),
    )  # fmt: skip
    record_id: str | None = wire(
        "record", "str", "the bootstrap record to complete or to retire", default=None, optional=True
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BootstrapResponse:
    """The identity of a node's store of a group after the operation, which is durable."""

    answer: dict[str, Any] = wire("answer", "map", "the store: see StoreAnswer", low=0)
    node_uuid: str = wire("uuid", "str", "uuid of the node's data directory")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmitRequest:
    """Make a waiting node's empty store a store of a log that exists; the log's leader adds it as a learner then."""

    node: str = wire("node", "str", "node id that is meant")
    log: str = wire("log", "str", "uuid of the log")
    constants: dict[str, Any] = wire("constants", "map", "constants of the log: see LogConstants", low=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmitResponse:
    """The store is admitted, durably; the same request returns the same store."""

    store: str = wire("store", "str", "uuid of the store")
    node_uuid: str = wire("uuid", "str", "uuid of the node's data directory")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberRequest:
    """Ask a group's leader for the members, or change one of them."""

    operation: str = wire(
        "op",
        "str",
        "list: only ask; the others change a member",
        choices=("list", "add", "remove", "promote", "replace"),
    )
    node: str | None = wire("node", "str", "node id of the member; nil only for list", default=None, optional=True)
    address: str | None = wire(
        "address", "str", "HOST:PORT of the waiting node, for add; for replace nil is the known one", default=None,
        optional=True,
    )  # fmt: skip
    learner: bool = wire("learner", "bool", "for add: the member stays a learner", default=False)
    measures: bool = wire("measures", "bool", "whether to report how long commits took", default=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberResponse:
    """The members of a group as its leader knows them, after the change was committed."""

    configuration: int = wire(
        "configuration", "int", "index of the configuration entry in force, -1 if bootstrapped with"
    )
    is_change_pending: bool = wire("pending", "bool", "whether that entry is not committed yet")
    members: list[list[Any]] = wire(
        "members", "list",
        "of each member: node id, store uuid or '', address or '', voter|learner, whether it becomes a voter, store "
        "uuid that it replaces or '', whether it responded within an election timeout, last index there, missing "
        "entries and bytes, ms until it has them or -1",
        low=0, accepts=_rows(str, str, str, str, bool, str, bool, int, int, int, int),
    )  # fmt: skip
    voters_before: list[str] = wire(
        "before", "list", "while a change is pending: node ids of the voters before it", low=0, accepts=all_of(str),
    )  # fmt: skip
    warning: str | None = wire("warning", "str", "about the number of voters", default=None, optional=True)
    conditions: list[list[Any]] | None = wire(
        "conditions", "list", "[node id, recovering|disk-full|withholds|stalled] of members that are limited as voters",
        low=0, accepts=_rows(str, str), default=None, optional=True,
    )  # fmt: skip
    commits: list[int] | None = wire(
        "commits", "list",
        "p99 of commits in microseconds, of each interval of 5 s, oldest first, -1 without commits",
        low=0, accepts=all_of(int), default=None, optional=True,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RangesRequest:
    """Ask a group's leader how to cut what the archive lacks into ranges."""

    start: int = wire("start", "int", "first index; -1 = where the archive ends, or the log's first index", default=-1)
    until: int | None = wire(
        "until", "int", "end (exclusive): what is before it is cut although it is neither full nor old", low=0,
        default=None, optional=True,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RangesResponse:
    """Consecutive ranges that are full or closed."""

    ranges: list[list[int]] = wire(
        "ranges", "list", "[start, end, bytes]", low=0, high=ARCHIVE_RANGES_MAX, accepts=_rows(int, int, int)
    )
    start: int = wire("start", "int", "start of the first range, also of one that is not closed yet", low=0)
    visible_end: int = wire("visible", "int", "end of the entries that read_committed shows", low=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProveRequest:
    """Ask a group's leader to compare a range of the archive with the log, and to record it if they are equal."""

    start: int = wire("start", "int", "first index", low=0)
    end: int = wire("end", "int", "end (exclusive)", low=1)
    rows: int = wire("rows", "int", "number of the archive's rows", low=0)
    digest: bytes = wire("digest", "bytes", "their digest; empty = they are not such rows as the log has")
    table: str = wire("table", "str", "URI of the archive")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProveResponse:
    """Whether the rows are equal; then the range is recorded, and the entry that records it is committed."""

    equal: bool = wire("equal", "bool", "whether the archive has the log's rows")
    rows: int = wire("rows", "int", "number of the log's rows", low=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveRangesRequest:
    """Ask a group's leader for the recorded ranges of the archive."""

    start: int = wire("start", "int", "the first range is the one with this index", low=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveRangesResponse:
    """Recorded ranges, and the archive that they belong to."""

    ranges: list[list[Any]] = wire(
        "ranges", "list", "start, end, rows, digest, position, bytes, append time and term and check of the last entry",
        low=0, high=ARCHIVE_RANGES_MAX, accepts=_rows(int, int, int, bytes, int, int, int, int, int),
    )  # fmt: skip
    archive: dict[str, Any] | None = wire("archive", "map", _ARCHIVE, accepts=_is_archive, optional=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveEndRequest:
    """End the archive: retention does not wait for it any longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveEndResponse:
    """The log has no archive; the entry that ended it is committed."""


def _exchange(
    number: Type, request: type[Q], response: type[A], payload: str = "", response_payload: str = ""
) -> tuple[Table[Q], Table[A]]:
    """Return the tables of a request and of its response, whose number is the next one."""
    return (
        table_of(request, number, payload, error=BadRequestError),
        table_of(response, Type(number + 1), response_payload),
    )


METADATA, METADATA_OK = _exchange(Type.METADATA, MetadataRequest, MetadataResponse)
APPEND, APPEND_OK = _exchange(Type.APPEND, AppendRequest, AppendResponse, _COLUMNS)
PRODUCE, PRODUCE_OK = _exchange(Type.PRODUCE, ProduceRequest, ProduceResponse, _COLUMNS)
READ, READ_OK = _exchange(Type.READ, ReadRequest, ReadResponse, response_payload=_RECORDS + _FIELDS_PAYLOAD)
TIME, TIME_OK = _exchange(Type.TIME, TimeRequest, TimeResponse)
SPLIT, SPLIT_OK = _exchange(Type.SPLIT, SplitRequest, SplitResponse, _POSITIONS, "indexes i64 x n")
PRODUCER, PRODUCER_OK = _exchange(Type.PRODUCER, ProducerRequest, ProducerResponse)
TRANSACTION, TRANSACTION_OK = _exchange(Type.TRANSACTION, TransactionRequest, TransactionResponse, _PARTS)
DIGEST, DIGEST_OK = _exchange(Type.DIGEST, DigestRequest, DigestResponse)
TRANSFER, TRANSFER_OK = _exchange(Type.TRANSFER, TransferRequest, TransferResponse)
WATCH, WATCH_OK = _exchange(Type.WATCH, WatchRequest, WatchResponse)
ALIVE, ALIVE_OK = _exchange(Type.ALIVE, AliveRequest, AliveResponse)
GROUPS, GROUPS_OK = _exchange(Type.GROUPS, GroupsRequest, GroupsResponse)
DESCRIBE, DESCRIBE_OK = _exchange(Type.DESCRIBE, DescribeRequest, DescribeResponse)
AWAIT, AWAIT_OK = _exchange(Type.AWAIT, AwaitRequest, AwaitResponse, _SEEN)
AT, AT_OK = _exchange(Type.AT, AtRequest, AtResponse, "", "of messages: sizes u32 x n, then the messages")
CONTINUE, CONTINUE_OK = _exchange(
    Type.CONTINUE, RecoverLogRequest, RecoverLogResponse,
    "with take: the recovery record, msgpack", "the store's answer, msgpack",
)  # fmt: skip
BACKUP, BACKUP_OK = _exchange(
    Type.BACKUP, BackupRequest, BackupResponse, "",
    "of start: a msgpack map with the log and the size of the tables; of tables: bytes",
)  # fmt: skip
FOUND, FOUND_OK = _exchange(
    Type.FOUND, BootstrapRequest, BootstrapResponse, "of take: the bootstrap record, a msgpack map"
)
ADMIT, ADMIT_OK = _exchange(Type.ADMIT, AdmitRequest, AdmitResponse)
MEMBER, MEMBER_OK = _exchange(Type.MEMBER, MemberRequest, MemberResponse)
RANGES, RANGES_OK = _exchange(Type.RANGES, RangesRequest, RangesResponse)
PROVE, PROVE_OK = _exchange(Type.PROVE, ProveRequest, ProveResponse)
ARCHIVE_RANGES, ARCHIVE_RANGES_OK = _exchange(Type.ARCHIVE_RANGES, ArchiveRangesRequest, ArchiveRangesResponse)
ARCHIVE_END, ARCHIVE_END_OK = _exchange(Type.ARCHIVE_END, ArchiveEndRequest, ArchiveEndResponse)

TABLES: Final[tuple[Table[Any], ...]] = tuple(table for table in vars().values() if isinstance(table, Table))
"""All messages between clients and nodes, without hello and FAILURE."""
