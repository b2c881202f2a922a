"""Message numbers, header keys and bounds of our wire protocol; final in shape, later versions only add.

A connection starts with the preface ``DLGR`` + one version byte (1) from the side that dialled. Then frames, both
ways, integers big-endian::

    u32 length          bytes after this field
    u32 header length
    u32 header CRC-32
    header              msgpack map with string keys
    payload             the rest, raw

Every header has ``t`` (the message number); requests and their answers have ``r`` (request id, chosen by the
asker, above 0); most have ``g`` (group). Columns in payloads are little-endian uint32. An answer is either the
request's own ``*_OK`` or FAILURE.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

__all__ = [
    "FRAME_BYTES_MAX",
    "HEADER_BYTES_MAX",
    "HELLO_BYTES_MAX",
    "HELLO_TIMEOUT_S",
    "PREFACE",
    "VERSION",
    "Type",
]

PREFACE: Final = b"DLGR\x01"
VERSION: Final = 1
HELLO_BYTES_MAX: Final = 64 << 10
"""Bound on a frame before hello is accepted: it names every group of a node, with its log."""
HELLO_TIMEOUT_S: Final = 5.0
HEADER_BYTES_MAX: Final = 1 << 20
FRAME_BYTES_MAX: Final = 32 << 20


class Type(IntEnum):
    """Message numbers with header keys beyond ``t``, ``r``, ``g``; [x] marks what the payload holds.

    ======================  =====================================================================================
    HELLO                   v versions, f features, role client|peer, node id or nil, logs {group: uuid|nil}
    HELLO_OK                v version, f features, node, logs
    FAILURE                 e error map (DLedgerError.to_wire)
    METADATA                (g), pin [name, ms]|nil: for so long this node's retention keeps what this reader needs,
                            which is start and what follows; 0 gives it up; space bool (asks for orphaned)
    METADATA_OK             leader id|nil, term, log uuid|nil, self [id, role, first, last, commit, visible_end,
                            bytes of data], peers peers string, time ms of the last entry|nil, groups [names],
                            preferred [node ids that should lead, best first], orphaned [entries, bytes] that this
                            node stores, if asked for
    APPEND                  n count, p producer|nil, pe epoch, ps sequence, x transaction map|nil
                            [lengths u32 x n | crcs u32 x n | bodies]
    APPEND_OK               first, last, term (data entries only)
    READ                    start, end, max bytes, min_commit, wait ms, iso committed|uncommitted|records,
                            cons committed|linearizable, pin as in METADATA
    READ_OK                 n, next (where to go on), commit, visible (end of what read_committed shows),
                            first (first index of the log), skip [[start, end), ...] of losers within the range
                            [sizes u32 x n | records]
    TIME                    ms, min_commit (as READ)
    TIME_OK                 index (first entry appended at or after ms; the visible end if none)
    PRODUCER                p
    PRODUCER_OK             known bool, epoch, sequence (next expected), last [first, last] of the newest append|nil
    TRANSACTION             op state|commit|abort, x transaction map, parts [[first, last, rows, crc], ...],
                            i what it was made of|nil
    TRANSACTION_OK          state unknown|open|committed|aborted, parts of a committed one, index,
                            i what that one was made of, newest micro-batch the query has committed (-1 if none)
    DIGEST                  start, end, span (entries per range, a power of two)
    DIGEST_OK               ranges [[start, end, count, bytes, digest bytes, layout bytes], ...], next, commit,
                            damaged [indexes], cut bool (more are damaged in these ranges than are named)
    TRANSFER                node
    TRANSFER_OK             leader
    WATCH                   wait ms, seen [role, leader id|nil, term]|nil: answered when that is not the state
    WATCH_OK                role, leader id|nil, term, broker master|slave
    GROUPS                  (g is not looked at)
    GROUPS_OK               logs {group: uuid|nil} that the node hosts
    DESCRIBE                table terms|segments|producers, after key|nil (what record.descriptions calls so)
    DESCRIBE_OK             rows [[...], ...] of what is committed, behind that key; more bool
    AWAIT                   (g is not looked at) seen {group: end}, iso as in READ, wait ms: answered as soon as one of
                            these groups has more to read, or when the time is over
    AWAIT_OK                grown [groups]
    AT                      position, max bytes
    AT_OK                   index of the entry that the position lies in, or of the first one behind it; nil where it
                            lies in the CommitLog before the log, then: n, next (position to go on at)
                            [sizes u32 x n | messages]
    VOTE                    s sender, to, term, li last_index, lt last_term, pre, x transfer
    VOTE_OK                 s, to, term, ok granted, pre
    APPEND_ENTRIES          s, to, term, pi prev_index, pt prev_term, c commit_index,
                            b [[first, count, term], ...], n records, k CRC-32 of the payload
                            [sizes u32 x n | records]
    APPEND_ENTRIES_OK       s, to, term, ok, m match_index, ht hint_term, hi hint_first_index, l last_index
    HEARTBEATS              s, to, h [[group, term, commit_index, round], ...] of all groups
    HEARTBEATS_OK           s, to, h [[group, term, round, last_index], ...]
    TIMEOUT_NOW             s, to, term
    INSTALL_SNAPSHOT        s, to, term, nr number of the transfer, fi first_index, pt previous_term,
                            o offset, n bytes in all, k CRC-32 of the payload
                            [a chunk of the snapshot; empty: a question]
    INSTALL_SNAPSHOT_OK     s, to, term, nr, o bytes that have arrived (chunks are missing; else
                            APPEND_ENTRIES_OK)
    ======================  =====================================================================================
    """

    HELLO = 1
    HELLO_OK = 2
    FAILURE = 3
    METADATA = 10
    METADATA_OK = 11
    APPEND = 12
    APPEND_OK = 13
    READ = 14
    READ_OK = 15
    TIME = 16
    TIME_OK = 17
    PRODUCER = 18
    PRODUCER_OK = 19
    TRANSACTION = 20
    TRANSACTION_OK = 21
    DIGEST = 22
    DIGEST_OK = 23
    TRANSFER = 24
    TRANSFER_OK = 25
    WATCH = 26
    WATCH_OK = 27
    GROUPS = 28
    GROUPS_OK = 29
    DESCRIBE = 30
    DESCRIBE_OK = 31
    AWAIT = 32
    AWAIT_OK = 33
    AT = 34
    AT_OK = 35
    VOTE = 40
    VOTE_OK = 41
    APPEND_ENTRIES = 42
    APPEND_ENTRIES_OK = 43
    HEARTBEATS = 44
    HEARTBEATS_OK = 45
    TIMEOUT_NOW = 46
    INSTALL_SNAPSHOT = 47
    INSTALL_SNAPSHOT_OK = 48
