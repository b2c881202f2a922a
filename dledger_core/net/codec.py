"""Raft messages and columns of entries to frames and back.

Everything that comes in is checked here: field kinds, counts, lengths and checksums; what is wrong is a
ProtocolError, so what comes out can be handed to the core and to the log.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from dledger_core.checksum import Buffer, crc32
from dledger_core.errors import CorruptRecordError, ProtocolError
from dledger_core.ids import Index, NodeId, Term
from dledger_core.net.fields import INT64_MAX, bool_field, int_field, str_field
from dledger_core.net.frame import Frame, encode_frame
from dledger_core.net.protocol import Type
from dledger_core.raft.batch import Batch
from dledger_core.raft.messages import (
    UNKNOWN_END,
    AppendEntries,
    AppendEntriesResponse,
    Heartbeat,
    HeartbeatResponse,
    InstallSnapshot,
    InstallSnapshotResponse,
    Message,
    RequestVote,
    RequestVoteResponse,
    TimeoutNow,
)
from dledger_core.record import HEADER_BYTES, Columns, Records, records_of

__all__ = [
    "HEARTBEATS_MAX",
    "alive_frame",
    "columns_payload",
    "frame_to_message",
    "frame_to_messages",
    "heartbeat_responses_frames",
    "heartbeats_frames",
    "int_field",
    "message_to_frame",
    "parse_columns",
    "parse_records",
    "records_payload",
    "str_field",
]

HEARTBEATS_MAX: Final = 1024
"""Heartbeats in one frame: even with the longest names of groups its header is well below its bound."""

_COUNT_MAX = 1 << 23
SNAPSHOT_BYTES_MAX: Final = 1 << 30
"""What a reset may carry in all its pieces: the tables, of at most 100,000 producers."""


# --- payloads -----------------------------------------------------------------------------------------------------


def records_payload(runs: Sequence[Records]) -> list[Buffer]:
    """Returns the payload of consecutive runs of records: all sizes, then all records."""
    if not runs:
        return []
    sizes = b"".join(np.ascontiguousarray(run.sizes, "<u4").tobytes() for run in runs)
    return [sizes, *(run.data for run in runs)]


def parse_records(payload: Buffer, n: int) -> Records:
    """Returns ``n`` records that share the payload's memory; their headers are not looked at.

    Raises:
        ProtocolError: the lengths do not add up.
    """
    view = memoryview(payload)
    if type(n) is not int or n < 0 or len(view) < 4 * n:
        raise ProtocolError("a payload is too short for its count", "records", "", {"bytes": len(view), "count": n})
    sizes = np.frombuffer(view, "<u4", n)
    total = int(sizes.sum(dtype=np.int64))
    if total != len(view) - 4 * n or (n and int(sizes.min()) < HEADER_BYTES):
        values = {"bytes": len(view), "count": n, "sizes_sum": total}
        raise ProtocolError("record sizes do not add up", "records", "", values)
    return Records(sizes, view[4 * n :])


def columns_payload(columns: Columns) -> list[Buffer]:
    """Returns the payload of an append: lengths, CRCs, bodies."""
    lengths = np.ascontiguousarray(columns.lengths, "<u4").tobytes()
    return [lengths + np.ascontiguousarray(columns.crcs, "<u4").tobytes(), columns.bodies]


def parse_columns(payload: Buffer, n: int) -> Columns:
    """Returns the columns of ``n`` entries, sharing the payload's memory; CRCs are not checked.

    Raises:
        ProtocolError: the lengths do not add up.
    """
    view = memoryview(payload)
    if type(n) is not int or n < 0 or len(view) < 8 * n:
        raise ProtocolError("a payload is too short for its count", "columns", "", {"bytes": len(view), "count": n})
    lengths = np.frombuffer(view, "<u4", n)
    total = int(lengths.sum(dtype=np.int64))
    if total != len(view) - 8 * n:
        values = {"bytes": len(view), "count": n, "lengths_sum": total}
        raise ProtocolError("body lengths do not add up", "columns", "", values)
    return Columns(lengths, np.frombuffer(view, "<u4", n, 4 * n), view[8 * n :])


# --- messages out -------------------------------------------------------------------------------------------------


def message_to_frame(group: str, message: Message) -> list[Buffer]:
    """Returns the frame of one message between replicas of ``group``.

    The batches of AppendEntries have records.
    """
    header: dict[str, Any] = {"t": 0, "g": group, "s": message.sender, "to": message.target, "term": message.term}
    match message:
        case AppendEntries():
            return _append_entries_frame(header, message)
        case AppendEntriesResponse():
            header |= {"t": Type.APPEND_ENTRIES_OK, "ok": message.accepted, "m": message.match_index}
            header |= {"ht": message.hint_term, "hi": message.hint_first_index, "l": message.last_index}
        case RequestVote():
            header |= {"t": Type.VOTE, "li": message.last_index, "lt": message.last_term}
            header |= {"pre": message.pre, "x": message.transfer}
        case RequestVoteResponse():
            header |= {"t": Type.VOTE_OK, "ok": message.granted, "pre": message.pre}
        case TimeoutNow():
            header["t"] = Type.TIMEOUT_NOW
        case InstallSnapshot():
            header |= {
                "t": Type.INSTALL_SNAPSHOT,
                "nr": message.number,
                "fi": message.first_index,
                "pt": message.previous_term,
            }
            header |= {"o": message.offset, "n": message.total, "k": crc32(message.data)}
            return encode_frame(header, message.data)
        case InstallSnapshotResponse():
            header |= {"t": Type.INSTALL_SNAPSHOT_OK, "nr": message.number, "o": message.offset}
        case Heartbeat():
            return heartbeats_frames([(group, message)])
        case HeartbeatResponse():
            return heartbeat_responses_frames([(group, message)])
    return encode_frame(header)


def _append_entries_frame(header: dict[str, Any], message: AppendEntries) -> list[Buffer]:
    runs = [records_of(batch) for batch in message.batches]
    payload = records_payload(runs)
    crc = 0
    for part in payload:
        crc = crc32(part, crc)
    header |= {"t": Type.APPEND_ENTRIES, "pi": message.prev_index, "pt": message.prev_term, "c": message.commit_index}
    header["l"] = message.last_index
    header |= {
        "b": [(b.first_index, b.count, b.term) for b in message.batches],
        "n": sum(run.count for run in runs),
        "k": crc,
    }
    return encode_frame(header, *payload)


def heartbeats_frames(beats: Sequence[tuple[str, Heartbeat]]) -> list[Buffer]:
    """Returns the heartbeats of all groups between two nodes, at least one: a frame, or a few of very many."""
    _, first = beats[0]
    rows = [(group, beat.term, beat.commit_index, beat.round) for group, beat in beats]
    return _beats_frames(Type.HEARTBEATS, first.sender, first.target, rows)


def heartbeat_responses_frames(beats: Sequence[tuple[str, HeartbeatResponse]]) -> list[Buffer]:
    """Returns the heartbeat responses of all groups between two nodes, as ``heartbeats_frames`` does."""
    _, first = beats[0]
    rows = [(group, beat.term, beat.round, beat.last_index) for group, beat in beats]
    return _beats_frames(Type.HEARTBEATS_OK, first.sender, first.target, rows)


def alive_frame(sender: NodeId, target: NodeId) -> list[Buffer]:
    """Returns a frame that only says that its sender is there: heartbeats of no group."""
    return _beats_frames(Type.HEARTBEATS, sender, target, [])


def _beats_frames(
    kind: Type, sender: NodeId, target: NodeId, rows: Sequence[tuple[str, int, int, int]]
) -> list[Buffer]:
    return [
        buffer
        for at in range(0, max(len(rows), 1), HEARTBEATS_MAX)
        for buffer in encode_frame({"t": kind, "s": sender, "to": target, "h": rows[at : at + HEARTBEATS_MAX]})
    ]


# --- messages in --------------------------------------------------------------------------------------------------

_Ends = tuple[NodeId, NodeId]


def frame_to_messages(frame: Frame) -> list[tuple[str, Message]]:
    """Returns the messages of one frame with their groups: one, or many in a frame of heartbeats.

    Raises:
        ProtocolError: the frame is no message between replicas, or malformed.
    """
    header = frame.header
    ends = NodeId(str_field(header, "s")), NodeId(str_field(header, "to"))
    kind = header["t"]
    if kind == Type.HEARTBEATS:
        return _heartbeats(header, ends)
    if kind == Type.HEARTBEATS_OK:
        return _heartbeat_responses(header, ends)
    parse = _PARSERS.get(kind)
    if parse is None:
        raise ProtocolError("not a message between replicas", "header", "", {"type": kind})
    return [(str_field(header, "g"), parse(frame, ends, Term(int_field(header, "term"))))]


def frame_to_message(frame: Frame) -> tuple[str, Message]:
    """Returns the one message of a frame; ``frame_to_messages`` where several heartbeats may come.

    Raises:
        ProtocolError: as ``frame_to_messages``, or not exactly one message.
    """
    messages = frame_to_messages(frame)
    if len(messages) != 1:
        raise ProtocolError("a frame does not hold exactly one message", "header", "", {"count": len(messages)})
    return messages[0]


def _vote(frame: Frame, ends: _Ends, term: Term) -> Message:
    header = frame.header
    return RequestVote(
        sender=ends[0],
        target=ends[1],
        term=term,
        last_index=Index(int_field(header, "li")),
        last_term=Term(int_field(header, "lt")),
        pre=bool_field(header, "pre"),
        transfer=bool_field(header, "x", default=False),
    )


def _vote_response(frame: Frame, ends: _Ends, term: Term) -> Message:
    granted, pre = bool_field(frame.header, "ok"), bool_field(frame.header, "pre")
    return RequestVoteResponse(sender=ends[0], target=ends[1], term=term, granted=granted, pre=pre)


def _append_entries_response(frame: Frame, ends: _Ends, term: Term) -> Message:
    header = frame.header
    return AppendEntriesResponse(
        sender=ends[0],
        target=ends[1],
        term=term,
        accepted=bool_field(header, "ok"),
        match_index=Index(int_field(header, "m")),
        hint_term=Term(int_field(header, "ht")),
        hint_first_index=Index(int_field(header, "hi")),
        last_index=Index(int_field(header, "l")),
    )


def _timeout_now(_frame: Frame, ends: _Ends, term: Term) -> Message:
    return TimeoutNow(sender=ends[0], target=ends[1], term=term)


def _reset(frame: Frame, ends: _Ends, term: Term) -> Message:
    header, data = frame.header, bytes(frame.payload)
    total = int_field(header, "n", 0)
    if crc32(data) != int_field(header, "k", 0) or total > SNAPSHOT_BYTES_MAX:
        raise ProtocolError("a reset is above its bound or does not match its CRC", "reset", "", {"total": total})
    return InstallSnapshot(
        sender=ends[0],
        target=ends[1],
        term=term,
        number=int_field(header, "nr", 0),
        first_index=Index(int_field(header, "fi", 1)),
        previous_term=Term(int_field(header, "pt")),
        offset=int_field(header, "o", 0),
        total=total,
        data=data,
    )


def _install_snapshot_response(frame: Frame, ends: _Ends, term: Term) -> Message:
    number, offset = int_field(frame.header, "nr", 0), int_field(frame.header, "o", 0)
    return InstallSnapshotResponse(sender=ends[0], target=ends[1], term=term, number=number, offset=offset)


def _append_entries(frame: Frame, ends: _Ends, term: Term) -> Message:
    header = frame.header
    prev_index = int_field(header, "pi")
    runs = _rows(header, "b", 3)
    expected, last_term = prev_index + 1, int_field(header, "pt")
    for first, count, batch_term in runs:
        contiguous = first == expected and 0 < count <= _COUNT_MAX and last_term <= batch_term <= term
        if not contiguous:
            raise ProtocolError("batches do not continue each other", "header", "", {"first": first, "count": count})
        expected, last_term = first + count, batch_term
    n = int_field(header, "n", 0)
    if n != expected - prev_index - 1:
        raise ProtocolError("batches and records differ in number", "header", "", {"count": n})
    return AppendEntries(
        sender=ends[0],
        target=ends[1],
        term=term,
        prev_index=Index(prev_index),
        prev_term=Term(int_field(header, "pt")),
        commit_index=Index(int_field(header, "c")),
        batches=_batches(frame, runs, n),
        last_index=Index(int_field(header, "l")) if "l" in header else UNKNOWN_END,
    )


def _batches(frame: Frame, runs: Sequence[Sequence[int]], n: int) -> tuple[Batch, ...]:
    if crc32(frame.payload) != int_field(frame.header, "k", 0):
        raise ProtocolError("a payload does not match its CRC", "append entries")
    records = parse_records(frame.payload, n)
    if not n:
        return ()
    try:
        records.check(runs[0][0], body_crc=False)
    except CorruptRecordError as error:
        raise ProtocolError(error.what, error.where, "", error.values) from None
    counts = [count for _, count, _ in runs]
    if not np.array_equal(records.headers["term"], np.repeat([run[2] for run in runs], counts)):
        raise ProtocolError("a record's term differs from its batch's", "append entries")
    batches, at = [], 0
    for first, count, batch_term in runs:
        part = records.slice(at, at + count)
        batches.append(Batch(Index(first), count, Term(batch_term), part.nbytes, part))
        at += count
    return tuple(batches)


def _rows(header: Mapping[str, Any], key: str, width: int) -> list[list[int]]:
    """Returns a list of lists of ``width`` integers."""
    rows = header.get(key)
    if not isinstance(rows, list):
        raise ProtocolError(f"field {key!r} is not a list", "header")
    for row in rows:
        well_formed = isinstance(row, list) and len(row) == width
        if not (well_formed and all(type(v) is int and -1 <= v <= INT64_MAX for v in row)):
            raise ProtocolError(f"field {key!r} holds a malformed row", "header", "", {"row": repr(row)[:80]})
    return rows


def _beats(header: Mapping[str, Any]) -> list[tuple[str, list[int]]]:
    """Returns each row of ``h`` as its group and its three integers."""
    rows = header.get("h")
    if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) == 4 for row in rows):
        raise ProtocolError("field 'h' is malformed", "header")
    if not all(type(row[0]) is str for row in rows):
        raise ProtocolError("field 'h' names no group", "header")
    numbers = _rows({"h": [row[1:] for row in rows]}, "h", 3)
    return [(row[0], three) for row, three in zip(rows, numbers, strict=True)]


def _heartbeats(header: Mapping[str, Any], ends: _Ends) -> list[tuple[str, Message]]:
    sender, target = ends
    return [
        (group, Heartbeat(sender=sender, target=target, term=Term(term), commit_index=Index(commit), round=number))
        for group, (term, commit, number) in _beats(header)
    ]


def _heartbeat_responses(header: Mapping[str, Any], ends: _Ends) -> list[tuple[str, Message]]:
    sender, target = ends
    return [
        (group, HeartbeatResponse(sender=sender, target=target, term=Term(term), round=number, last_index=Index(last)))
        for group, (term, number, last) in _beats(header)
    ]


_PARSERS: dict[int, Callable[[Frame, _Ends, Term], Message]] = {
    Type.VOTE: _vote,
    Type.VOTE_OK: _vote_response,
    Type.APPEND_ENTRIES: _append_entries,
    Type.APPEND_ENTRIES_OK: _append_entries_response,
    Type.TIMEOUT_NOW: _timeout_now,
    Type.INSTALL_SNAPSHOT: _reset,
    Type.INSTALL_SNAPSHOT_OK: _install_snapshot_response,
}
