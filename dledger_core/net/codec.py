"""Raft messages and columns of entries to frames and back.

This module checks all input: field kinds, counts, lengths and checksums. It raises ProtocolError, so that its results
are safe for the core and the log.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any, Final, NamedTuple, TypeAlias

import msgpack
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dledger_core.bootstrap import BootstrapRecord
from dledger_core.checksum import Buffer, crc32
from dledger_core.control import Part, check_parts
from dledger_core.errors import BadRequestError, CorruptRecordError, DLedgerError, ProtocolError, in_words
from dledger_core.ids import NUMBER_MAX, Index, MemberId, Term
from dledger_core.lineage import RecoveryRecord
from dledger_core.net.fields import Field, Table, int_field
from dledger_core.net.frame import LARGE_PAYLOAD_BYTES, Frame, encode_frame
from dledger_core.net.protocol import Type
from dledger_core.raft.batch import Batch
from dledger_core.raft.messages import (
    UNKNOWN_END,
    AppendEntries,
    AppendEntriesResponse,
    Condition,
    Heartbeat,
    HeartbeatResponse,
    InstallSnapshot,
    InstallSnapshotResponse,
    Message,
    RequestVote,
    RequestVoteResponse,
    TimeoutNow,
)
from dledger_core.record import HEADER_BYTES, Columns, Records, records_of, total_and_smallest
from dledger_core.recovery import SurvivorAnswer

HEARTBEATS_MAX: Final = 1024
"""Heartbeats in one frame: even with the longest names of groups its header is well below its limit."""

_COUNT_MAX = 1 << 23
_NO_CONDITIONS: Final[Mapping[int, Condition]] = {}
_U32: Final = np.dtype("<u4")
SNAPSHOT_BYTES_MAX: Final = 1 << 30
"""Limit on a snapshot with all its chunks: the tables, of which 1,000,000 producers take 100 to 500 MB."""


# --- payloads -----------------------------------------------------------------------------------------------------


def records_payload(blocks: Sequence[Records]) -> list[Buffer]:
    """Return the payload of consecutive blocks of records: all sizes, then all records."""
    if not blocks:
        return []
    sizes = b"".join(np.ascontiguousarray(block.sizes, "<u4").tobytes() for block in blocks)
    return [sizes, *(block.data for block in blocks)]


def parse_records(payload: Buffer, n: int) -> Records:
    """Return ``n`` records that share the payload's memory; their headers are not checked.

    Raises:
        ProtocolError: the lengths do not add up.
    """
    view = memoryview(payload)
    if type(n) is not int or n < 0 or len(view) < 4 * n:
        raise ProtocolError("a payload is too short for its count", "records", "", {"bytes": len(view), "count": n})
    sizes = np.frombuffer(view, _U32, n)
    total, smallest = total_and_smallest(sizes)
    if total != len(view) - 4 * n or (n and smallest < HEADER_BYTES):
        values = {"bytes": len(view), "count": n, "sizes_sum": total}
        raise ProtocolError("record sizes do not add up", "records", "", values)
    return Records(sizes, view[4 * n :])


def fields_payload(batch: pa.RecordBatch) -> memoryview:
    """Return the payload of READ_OK with columns."""
    return memoryview(batch.serialize())


def parse_fields(payload: Buffer, schema: pa.Schema, crc: int) -> pa.RecordBatch:
    """Return the columns of READ_OK, which share the payload's memory.

    Raises:
        CorruptRecordError: the payload does not match its CRC.
        ProtocolError: it has no such columns.
    """
    if crc32(payload) != crc:
        raise CorruptRecordError("columns arrived damaged", "", "retry")
    try:
        # Arrow aligns to 8 bytes from the start, and a small payload starts anywhere in the receive buffer.
        memory = pa.py_buffer(payload if len(payload) > LARGE_PAYLOAD_BYTES else bytes(payload))
        batch = pa.ipc.read_record_batch(memory, schema)
        batch.validate(full=True)
    except (pa.ArrowException, OSError, EOFError) as error:
        raise ProtocolError(f"columns are malformed: {error}", "columns") from None
    return batch


def columns_payload(columns: Columns) -> list[Buffer]:
    """Return the payload of an append: lengths, CRCs, bodies."""
    lengths, crcs = np.ascontiguousarray(columns.lengths, _U32), np.ascontiguousarray(columns.crcs, _U32)
    return [lengths.tobytes() + crcs.tobytes(), columns.bodies]


def parse_columns(payload: Buffer, n: int) -> Columns:
    """Return the columns of ``n`` entries, sharing the payload's memory; CRCs are not checked.

    Raises:
        ProtocolError: the lengths do not add up.
    """
    view = memoryview(payload)
    if type(n) is not int or n < 0 or len(view) < 8 * n:
        raise ProtocolError("a payload is too short for its count", "columns", "", {"bytes": len(view), "count": n})
    lengths = np.frombuffer(view, _U32, n)
    total, _ = total_and_smallest(lengths)
    if total != len(view) - 8 * n:
        values = {"bytes": len(view), "count": n, "lengths_sum": total}
        raise ProtocolError("body lengths do not add up", "columns", "", values)
    return Columns(lengths, np.frombuffer(view, _U32, n, 4 * n), view[8 * n :])


def parse_appends(frames: Sequence[Frame]) -> Columns:
    """Return the columns of the entries of appends, whose headers are checked; one append as ``parse_columns`` does.

    Raises:
        ProtocolError: the lengths of one do not add up.
    """
    if len(frames) == 1:
        return parse_columns(frames[0].payload, frames[0].header["n"])
    lengths, crcs, bodies = [], [], []
    for header, payload in frames:
        end = 4 * header["n"]
        lengths.append(payload[:end])
        crcs.append(payload[end : 2 * end])
        bodies.append(payload[2 * end :])
    counts, column, crc_column = [header["n"] for header, _ in frames], b"".join(lengths), b"".join(crcs)
    found, sums = Columns.empty(), list[int]()
    # Each has all of its lengths and CRCs, else ``reduceat`` would count those of another one.
    if len(column) == len(crc_column) == 4 * sum(counts):
        found = Columns(np.frombuffer(column, _U32), np.frombuffer(crc_column, _U32), b"".join(bodies))
        sums = np.add.reduceat(found.lengths, np.cumsum([0, *counts[:-1]]), dtype=np.int64).tolist()
    if not found.count or sums != list(map(len, bodies)):
        raise ProtocolError("body lengths do not add up", "columns", "", {"appends": len(frames)})
    return found


def parts_payload(parts: Sequence[Part]) -> list[Buffer]:
    """Return the payload of a commit: its parts."""
    return [np.array(parts, "<i8").tobytes()]


def numbers_payload(numbers: Sequence[int] | npt.NDArray[np.int64]) -> list[Buffer]:
    """Return the payload of SPLIT, its positions, or of SPLIT_OK, its indexes."""
    return [np.array(numbers, "<i8").tobytes()]


def parse_numbers(payload: Buffer, n: int, error: type[DLedgerError] = ProtocolError) -> npt.NDArray[np.int64]:
    """Return the ``n`` numbers of such a payload; raise ``error`` if it has another length."""
    view = memoryview(payload)
    if len(view) != 8 * n:
        raise error("the payload has another length than its numbers", "", "", {"bytes": len(view), "numbers": n})
    return np.frombuffer(view, "<i8").astype(np.int64, copy=False)


def record_payload(record: BootstrapRecord) -> bytes:
    """Return the payload of FOUND with the operation take."""
    return bytes(msgpack.packb(record.to_fields()))


def parse_record(payload: Buffer) -> BootstrapRecord | None:
    """Return the bootstrap record of such a payload, None if it is malformed."""
    try:
        return BootstrapRecord.from_fields(msgpack.unpackb(payload))
    except (ValueError, msgpack.UnpackException):
        return None


def recovery_payload(found: RecoveryRecord | SurvivorAnswer) -> bytes:
    """Return the payload of CONTINUE with the operation take, or of CONTINUE_OK."""
    return bytes(msgpack.packb(found.to_fields()))


def parse_recovery_record(payload: Buffer) -> RecoveryRecord | None:
    """Return the record of such a payload, None if it is malformed."""
    return RecoveryRecord.from_fields(_map_of(payload))


def parse_survivor(payload: Buffer) -> SurvivorAnswer | None:
    """Return the answer of such a payload, None if it is malformed."""
    return SurvivorAnswer.from_fields(_map_of(payload))


def _map_of(payload: Buffer) -> object:
    try:
        return msgpack.unpackb(payload)
    except (ValueError, msgpack.UnpackException):
        return None


def parse_parts(payload: Buffer, n: int) -> list[Part]:
    """Return the ``n`` parts of a commit.

    Raises:
        BadRequestError: there are too many, or the payload has another length.
    """
    check_parts(range(n))
    if len(payload) != 32 * n:
        raise BadRequestError("the payload has another length than its parts", "parts", "", {"bytes": len(payload)})
    return [Part(*row) for row in np.frombuffer(payload, "<i8").reshape(-1, 4).tolist()]


class SeenLog(NamedTuple):
    """The end (exclusive) of a group's log that a client has seen, and the uuid of that log, None if not known."""

    end: int
    log_uuid: str | None = None


def seen_payload(seen: Mapping[str, SeenLog]) -> list[Buffer]:
    """Return the payload of AWAIT: the end of each group's log that the client has seen."""
    texts = [name.encode() for name in seen] + [(log.log_uuid or "").encode() for log in seen.values()]
    ends = np.array([log.end for log in seen.values()], "<i8").tobytes()
    return [ends, np.array([len(text) for text in texts], "<u4").tobytes(), *texts]


def parse_seen(payload: Buffer, n: int, groups_max: int) -> dict[str, SeenLog]:
    """Return the end of each of ``n`` groups that a client has seen.

    Raises:
        BadRequestError: there are too many groups, or the lengths do not add up.
    """
    view = memoryview(payload)
    if n > groups_max:
        raise BadRequestError(f"AWAIT of more than {groups_max} groups", "", "ask for fewer groups", {"groups": n})
    lengths = np.frombuffer(view[8 * n : 16 * n], "<u4") if len(view) >= 16 * n else np.zeros(0, "<u4")
    ends_at = 16 * n + np.cumsum(lengths, dtype=np.int64)
    if len(lengths) != 2 * n or (n and int(ends_at[-1]) != len(view)):
        raise BadRequestError("the payload has another length than its groups", "seen", "", {"bytes": len(view)})
    try:
        texts = [
            str(view[end - size : end], "utf-8") for end, size in zip(ends_at.tolist(), lengths.tolist(), strict=True)
        ]
    except UnicodeDecodeError:
        raise BadRequestError("the name of a group is not UTF-8", "seen", "use the names of groups") from None
    ends = np.frombuffer(view[: 8 * n], "<i8").tolist()
    return {
        name: SeenLog(end, log_uuid or None) for name, log_uuid, end in zip(texts[:n], texts[n:], ends, strict=True)
    }


# --- tables of the Raft messages -----------------------------------------------------------------------------------


def _number(key: str, meaning: str, **limits: Any) -> Field:
    """Return the field of a term, an index or a count."""
    return Field(key, "int", meaning, **({"high": NUMBER_MAX} | limits))


_PREFIX: Final = (_number("term", "sender's term", name="term"),)
_CRC: Final = _number("k", "CRC-32 of the payload", name="crc", low=0)

VOTE: Final = Table(
    Type.VOTE,
    RequestVote,
    (
        *_PREFIX,
        _number("li", "candidate's last index", name="last_index"),
        _number("lt", "term of that entry", name="last_term"),
        Field("pre", "bool", "whether it is a pre-vote", name="pre"),
        Field("x", "bool", "whether a leader transfers leadership", name="transfer", default=False),
    ),
)
VOTE_OK: Final = Table(
    Type.VOTE_OK,
    RequestVoteResponse,
    (
        *_PREFIX,
        Field("ok", "bool", "whether the vote is granted", name="granted"),
        Field("pre", "bool", "whether it is a pre-vote", name="pre"),
    ),
)
APPEND_ENTRIES: Final = Table(
    Type.APPEND_ENTRIES,
    AppendEntries,
    (
        *_PREFIX,
        _number("pi", "index before the first entry", name="prev_index"),
        _number("pt", "term of that entry", name="prev_term"),
        _number("c", "leader's commit index", name="commit_index"),
        _number("l", "leader's last index", name="last_index", default=UNKNOWN_END),
        Field("b", "list", "[first index, count, term] of each batch", name="batches", low=0),
        _number("n", "number of records", name="count", low=0),
        _CRC,
    ),
    "sizes u32 x n, then the records as stored on disk",
)
APPEND_ENTRIES_OK: Final = Table(
    Type.APPEND_ENTRIES_OK,
    AppendEntriesResponse,
    (
        *_PREFIX,
        Field("ok", "bool", "whether the entries were accepted", name="accepted"),
        _number("m", "last index that matches the leader's log", name="match_index"),
        _number("ht", "term of the conflicting entry", name="hint_term"),
        _number("hi", "first index of that term", name="hint_first_index"),
        _number("l", "follower's last index", name="last_index"),
    ),
)
TIMEOUT_NOW: Final = Table(Type.TIMEOUT_NOW, TimeoutNow, _PREFIX)
INSTALL_SNAPSHOT: Final = Table(
    Type.INSTALL_SNAPSHOT,
    InstallSnapshot,
    (
        *_PREFIX,
        _number("nr", "number of the transfer", name="number", low=0),
        _number("fi", "first index of the leader's log", name="first_index", low=1),
        _number("pt", "term of the entry before it", name="previous_term"),
        _number("o", "offset of the chunk", name="offset", low=0),
        _number("n", "bytes of the snapshot", name="total", low=1, high=SNAPSHOT_BYTES_MAX),
        _CRC,
    ),
    "a chunk of the snapshot; empty asks for the offset, and confirms the transfer at its end",
)
INSTALL_SNAPSHOT_OK: Final = Table(
    Type.INSTALL_SNAPSHOT_OK,
    InstallSnapshotResponse,
    (
        *_PREFIX,
        _number("nr", "number of the transfer", name="number", low=0),
        _number("o", "bytes received; APPEND_ENTRIES_OK reports the restart", name="offset", low=0),
    ),
)
HEARTBEATS: Final = Table(
    Type.HEARTBEATS,
    Heartbeat,
    (
        Field("w", "int", "sender's wall clock, ms since the epoch", name="wall_ms", default=0),
        Field(
            "rb",
            "int",
            "bytes that the sender has received on this connection, while they delay heartbeats",
            name="received_bytes",
            default=0,
        ),
        Field("h", "list", "[number, term, commit index, round, log time in ms] of each group", name="beats", low=0),
    ),
)
HEARTBEATS_OK: Final = Table(
    Type.HEARTBEATS_OK,
    HeartbeatResponse,
    (
        Field("h", "list", "[number, term, round, last index] of each group", name="beats", low=0),
        Field(
            "cd",
            "list",
            "[number, flags] of each group whose replica is recovering (1), would reject appends because its disk is "
            "nearly full (2), or accepts no entries (4)",
            name="conditions",
            low=0,
            default=None,
            optional=True,
        ),
    ),
)
PEER_TABLES: Final[tuple[Table[Any], ...]] = (
    VOTE,
    VOTE_OK,
    APPEND_ENTRIES,
    APPEND_ENTRIES_OK,
    TIMEOUT_NOW,
    INSTALL_SNAPSHOT,
    INSTALL_SNAPSHOT_OK,
    HEARTBEATS,
    HEARTBEATS_OK,
)
"""All messages between replicas. Each but the heartbeats, which are of many groups, also has ``a``, its number."""
_PLAIN: Final[dict[int, Table[Any]]] = {
    table.number: table for table in (VOTE, VOTE_OK, APPEND_ENTRIES_OK, TIMEOUT_NOW, INSTALL_SNAPSHOT_OK)
}
"""Messages that are their header alone."""
_OF_CLASS: Final[dict[type, Table[Any]]] = {table.message: table for table in _PLAIN.values()}


# --- encode -------------------------------------------------------------------------------------------------------


class Ends(NamedTuple):
    """Group, sender and target of a message: what the number stands for that its target gave to the sender."""

    group: str
    sender: MemberId
    target: MemberId


EndsOf: TypeAlias = Callable[[int], Ends | None]
"""Returns the ends of the messages with a number; None if the number is unknown, and such messages are dropped."""


def message_to_frame(number: int, message: Message) -> list[Buffer]:
    """Return the frame of one message between replicas; ``number`` is that of the target's attach.

    The batches of AppendEntries have records.
    """
    match message:
        case AppendEntries():
            return _append_entries_frame(number, message)
        case InstallSnapshot():
            header = INSTALL_SNAPSHOT.encode(message, {"crc": crc32(message.data)}, a=number)
            return encode_frame(header, message.data)
        case Heartbeat():
            return heartbeats_frames([(number, message)])
        case HeartbeatResponse():
            return heartbeat_responses_frames([(number, message)])
    return encode_frame(_OF_CLASS[type(message)].encode(message, a=number))


# The CRC is over the payload as it leaves: the records have CRCs of their own, their sizes do not.
def _append_entries_frame(number: int, message: AppendEntries) -> list[Buffer]:
    blocks = [records_of(batch) for batch in message.batches]
    payload = records_payload(blocks)
    crc = blocks[0].payload_crc if len(blocks) == 1 else reduce(lambda value, part: crc32(part, value), payload, 0)
    rows = [(batch.first_index, batch.count, batch.term) for batch in message.batches]
    computed = {"batches": rows, "count": sum(block.count for block in blocks), "crc": crc}
    return encode_frame(APPEND_ENTRIES.encode(message, computed, a=number), *payload)


def heartbeats_frames(beats: Sequence[tuple[int, Heartbeat]], wall_ms: int = 0) -> list[Buffer]:
    """Return the frames of the heartbeats of all groups between two nodes, at least one; 0 = no wall clock."""
    rows = [(number, beat.term, beat.commit_index, beat.round, beat.log_time_ms) for number, beat in beats]
    return _beats_frames(HEARTBEATS, {"wall_ms": wall_ms, "received_bytes": 0}, rows)


def heartbeat_responses_frames(beats: Sequence[tuple[int, HeartbeatResponse]]) -> list[Buffer]:
    """Return the frames of the heartbeat responses of all groups between two nodes, as ``heartbeats_frames`` does."""
    return [
        buffer
        for at in range(0, max(len(beats), 1), HEARTBEATS_MAX)
        for buffer in _responses_frame(beats[at : at + HEARTBEATS_MAX])
    ]


def _responses_frame(beats: Sequence[tuple[int, HeartbeatResponse]]) -> list[Buffer]:
    rows = [(number, beat.term, beat.round, beat.last_index) for number, beat in beats]
    conditions = [(number, int(beat.condition)) for number, beat in beats if beat.condition]
    return encode_frame(HEARTBEATS_OK.encode(None, {"beats": rows, "conditions": conditions or None}))


def alive_frame(wall_ms: int = 0, received_bytes: int = 0) -> list[Buffer]:
    """Return a frame that only shows that its sender runs, its wall clock, and perhaps how much it has received."""
    return _beats_frames(HEARTBEATS, {"wall_ms": wall_ms, "received_bytes": received_bytes}, [])


def wall_clock(frame: Frame) -> int:
    """Return the sender's wall clock, ms since the epoch; 0 if a message that ``frame_to_messages`` took has none."""
    found = frame.header.get("w", 0) if frame.header["t"] == Type.HEARTBEATS else 0
    return int(found)


def received_bytes(frame: Frame) -> int:
    """Return how much the sender has received, 0 if a message that ``frame_to_messages`` took has no such number."""
    found = frame.header.get("rb", 0) if frame.header["t"] == Type.HEARTBEATS else 0
    return int(found)


def _beats_frames(table: Table[Any], fields: dict[str, Any], rows: Sequence[tuple[int, ...]]) -> list[Buffer]:
    return [
        buffer
        for at in range(0, max(len(rows), 1), HEARTBEATS_MAX)
        for buffer in encode_frame(table.encode(None, fields | {"beats": rows[at : at + HEARTBEATS_MAX]}))
    ]


# --- decode -------------------------------------------------------------------------------------------------------


Beats: TypeAlias = dict[int, tuple[list[int], tuple[str, Message]]]
"""The last row and message of each number in frames of heartbeats and of responses."""


def frame_to_messages(frame: Frame, ends_of: EndsOf, known: Beats | None = None) -> list[tuple[str, Message]]:
    """Return the messages of one frame with their groups: one, or many in a frame of heartbeats.

    Args:
        frame: the frame.
        ends_of: see there.
        known: of this connection, for numbers whose ends have not changed; a row that repeats is not decoded again.

    Raises:
        ProtocolError: the frame is not a message between replicas, or malformed.
    """
    kind = frame.header["t"]
    known = {} if known is None else known
    if kind == Type.HEARTBEATS:
        return _beats(HEARTBEATS.read(frame.header)["beats"], 5, _heartbeat, ends_of, known)
    if kind == Type.HEARTBEATS_OK:
        values = HEARTBEATS_OK.read(frame.header)
        if not values["conditions"]:
            return _beats(values["beats"], 4, _heartbeat_response, ends_of, known)
        conditions = {row[0]: _condition(row[1]) for row in (_ints(row, 2) for row in values["conditions"])}
        response = partial(_heartbeat_response, conditions=conditions)
        return _beats(values["beats"], 4, response, ends_of, {})  # a row does not show its condition
    read = _READERS.get(kind)
    if read is None:
        raise ProtocolError("not a message between replicas", "header", "", {"type": kind})
    # A number that is not known belongs to an attach that was replaced, so its messages are for another store or log
    # (``test_changed_identity_is_new_attach_and_old_number_is_dropped``).
    ends = ends_of(int_field(frame.header, "a"))
    return [] if ends is None else [(ends.group, read(frame, {"sender": ends.sender, "target": ends.target}))]


def _install_snapshot(frame: Frame, ends: Mapping[str, Any]) -> Message:
    values, data = INSTALL_SNAPSHOT.read(frame.header), bytes(frame.payload)
    if crc32(data) != values.pop("crc"):
        raise ProtocolError("a chunk of a snapshot does not match its CRC", "payload")
    return InstallSnapshot(data=data, **values, **ends)


def _append_entries(frame: Frame, ends: Mapping[str, Any]) -> Message:
    values = APPEND_ENTRIES.read(frame.header)
    rows, n, crc, term = values.pop("batches"), values.pop("count"), values.pop("crc"), values["term"]
    prev_index, last_term = values["prev_index"], values["prev_term"]
    expected = prev_index + 1
    for row in rows:
        first, count, batch_term = _ints(row, 3)
        # The core and the log rely on it: indexes without a gap, and terms that never fall (Raft, section 5.3).
        if first != expected or not 0 < count <= _COUNT_MAX or not last_term <= batch_term <= term:
            raise ProtocolError("batches are not contiguous", "header", "", {"first": first, "count": count})
        expected, last_term = first + count, batch_term
    if n != expected - prev_index - 1:
        raise ProtocolError("batches and records differ in number", "header", "", {"count": n})
    return AppendEntries(batches=_batches(frame.payload, crc, rows, n), **values, **ends)


def _batches(payload: Buffer, crc: int, rows: Sequence[Sequence[int]], n: int) -> tuple[Batch, ...]:
    if crc32(payload) != crc:
        raise ProtocolError("a payload does not match its CRC", "append entries")
    records = parse_records(payload, n)
    if not n:
        return ()
    try:
        records.check(rows[0][0], body_crc=False)
    except CorruptRecordError as error:
        raise ProtocolError(error.what, error.where, "", error.values) from None
    batches, at = [], 0
    for first, count, batch_term in rows:
        part = records.slice(at, at + count)
        if not part.have_term(batch_term):
            raise ProtocolError("a record's term differs from its batch's", "append entries")
        batches.append(Batch(Index(first), count, Term(batch_term), part.nbytes, part))
        at += count
    return tuple(batches)


def _ints(row: Any, count: int) -> list[int]:
    # A term above NUMBER_MAX would be written and then refused by the next start
    # (``test_number_that_no_file_could_hold_is_rejected``).
    if type(row) is not list or len(row) != count or not all(type(v) is int and -1 <= v <= NUMBER_MAX for v in row):
        raise ProtocolError(f"a row is not {count} integers in range", "header", "", {"row": in_words(row)[:80]})
    return row


def _beats(
    rows: list[Any], count: int, message_of: Callable[[list[int], Ends], Message], ends_of: EndsOf, known: Beats
) -> list[tuple[str, Message]]:
    """Return the messages of the rows of ``h``; each row is checked to be a number and ``count - 1`` integers."""
    found = []
    for row in rows:
        number = row[0] if type(row) is list and row and type(row[0]) is int else -1
        before = known.get(number)
        if before is None or before[0] != row:
            ends = ends_of(_ints(row, count)[0])
            if ends is None:
                continue
            before = known[number] = row, (ends.group, message_of(row, ends))
        found.append(before[1])
    return found


def _heartbeat(row: list[int], ends: Ends) -> Heartbeat:
    _, term, commit, number, log_time_ms = row
    return Heartbeat(
        sender=ends.sender,
        target=ends.target,
        term=Term(term),
        commit_index=Index(commit),
        round=number,
        log_time_ms=log_time_ms,
    )


def _heartbeat_response(row: list[int], ends: Ends, conditions: Mapping[int, Condition] = _NO_CONDITIONS) -> Message:
    number, term, round_, last = row
    return HeartbeatResponse(
        sender=ends.sender,
        target=ends.target,
        term=Term(term),
        round=round_,
        last_index=Index(last),
        condition=conditions.get(number, Condition.NONE),
    )


def _condition(flags: int) -> Condition:
    """Return the flags that this version knows."""
    return Condition(flags & sum(Condition)) if flags > 0 else Condition.NONE


def _plain(table: Table[Any]) -> _Read:
    return lambda frame, ends: table.message(**table.read(frame.header), **ends)


_Read: TypeAlias = Callable[[Frame, Mapping[str, Any]], Message]
_READERS: Final[dict[int, _Read]] = {
    Type.APPEND_ENTRIES: _append_entries,
    Type.INSTALL_SNAPSHOT: _install_snapshot,
} | {number: _plain(table) for number, table in _PLAIN.items()}
