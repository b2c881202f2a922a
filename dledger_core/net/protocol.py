"""Message numbers and limits of the native wire protocol.

A connection starts with the preface ``DLGR`` + one version byte (1) from the side that connected. Then frames, both
ways, integers big-endian::

    u32 length          bytes after this field
    u32 header length
    u32 header CRC-32
    header              msgpack map with string keys
    payload             the rest, raw

Every header has ``t`` (the message number); requests and their responses have ``r`` (request id, chosen by the client,
above 0); most have ``g`` (group), and messages between replicas ``a`` (the number of an attach). Columns in payloads
are little-endian uint32. The response is either the request's own ``*_OK`` or FAILURE.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from dledger_core.config import BATCH_BYTES_MAX

PREFACE: Final = b"DLGR\x01"
VERSION: Final = 1
HELLO_BYTES_MAX: Final = 4 << 10
"""Limit on a frame before hello is accepted."""
HELLO_TIMEOUT_S: Final = 5.0
HEADER_BYTES_MAX: Final = 1 << 20
FRAME_BYTES_MAX: Final = 32 << 20
CLIENT_HEADER_BYTES_MAX: Final = 4 << 10
"""Limit on a client's header: anyone may be a client, and unpacking a header holds up the event loop."""
CLIENT_CONTAINERS_MAX: Final = 256
"""Limit on the lists and maps in a client's header: by their number Python decides when to look at all objects."""
CLIENT_FRAME_BYTES_MAX: Final = 2 * BATCH_BYTES_MAX


class Type(IntEnum):
    """Message numbers; ``hello``, ``attach``, ``messages`` and ``codec`` have their field tables.

    FAILURE has one field, ``e``: the map of ``DLedgerError.to_wire``. PIECE is a part of a large frame between nodes:
    its payload continues the pieces before it; the first one has the size of the frame in ``n``. GOAWAY has no field:
    the node stops, and a client sends no more requests on this connection and closes it once all have their response.
    """

    HELLO = 1
    HELLO_OK = 2
    FAILURE = 3
    GOAWAY = 4
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
    RECOVER = 36
    RECOVER_OK = 37
    FOUND = 38
    FOUND_OK = 39
    CONTINUE = 62
    CONTINUE_OK = 63
    BACKUP = 66
    BACKUP_OK = 67
    VOTE = 40
    VOTE_OK = 41
    APPEND_ENTRIES = 42
    APPEND_ENTRIES_OK = 43
    HEARTBEATS = 44
    HEARTBEATS_OK = 45
    TIMEOUT_NOW = 46
    INSTALL_SNAPSHOT = 47
    INSTALL_SNAPSHOT_OK = 48
    ATTACH = 50
    ATTACH_REFUSED = 51
    PIECE = 52
    ADMIT = 58
    ADMIT_OK = 59
    MEMBER = 60
    MEMBER_OK = 61
    PRODUCE = 68
    PRODUCE_OK = 69
    SPLIT = 70
    SPLIT_OK = 71
    RANGES = 72
    RANGES_OK = 73
    PROVE = 74
    PROVE_OK = 75
    ARCHIVE_RANGES = 76
    ARCHIVE_RANGES_OK = 77
    ARCHIVE_END = 78
    ARCHIVE_END_OK = 79
    ALIVE = 64
    ALIVE_OK = 65
