"""Bodies of control entries (magic 2): what the log itself needs to remember between data entries.

An empty body is a NOOP. Any other is a msgpack map whose key ``k`` names its kind::

    log           u   uuid of the log (the first control entry of a log)
    producer      p id, e epoch, s sequence, n data entries that follow in the batch, c CRC-32 of their CRC column
    attempt       q query id, b batch id, r run id, a attempt uuid, n and c as above
    commit        q, b, r, parts [[first, last, rows, crc], ...]: the winning ranges of a transaction,
                  i what the micro-batch was made of (a digest), if its writer knows that
    abort         q, b

Later versions add kinds and keys; readers ignore what they do not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgpack
import numpy as np
import numpy.typing as npt

from dledger_core import checksum
from dledger_core.checksum import Buffer
from dledger_core.errors import BadRequestError, CorruptRecordError

__all__ = ["PARTS_MAX", "Part", "TransactionId", "check_parts", "column_crc", "pack", "unpack"]

PARTS_MAX: Final = 16_000
"""Parts of one transaction: its request, its control entry and its answer fit their bounds (1 MiB, 16,384 elements)."""


class TransactionId(NamedTuple):
    """A Spark micro-batch: ``query_id`` and ``batch_id`` name it, ``run_id`` says which run of the query writes."""

    query_id: str
    batch_id: int
    run_id: str = ""


class Part(NamedTuple):
    """A range of data entries appended by one attempt: [first, last] inclusive, with the CRC of its CRC column."""

    first: int
    last: int
    rows: int
    crc: int


def check_parts(parts: Sequence[object]) -> None:
    """Raises BadRequestError if a transaction has too many parts."""
    if len(parts) > PARTS_MAX:
        raise BadRequestError(
            f"a transaction of {len(parts)} parts is above the bound",
            "parts",
            f"commit at most {PARTS_MAX}: append larger chunks, or smaller micro-batches",
            {"parts": len(parts), "bound": PARTS_MAX},
        )


def pack(fields: dict[str, Any]) -> bytes:
    """Returns the body of a control entry."""
    return bytes(msgpack.packb(fields, use_bin_type=True))


def unpack(body: Buffer) -> dict[str, Any]:
    """Returns the map of a control entry's body; an empty body is ``{}``.

    Raises:
        CorruptRecordError: not a msgpack map of the expected kind.
    """
    if not len(body):
        return {}
    try:
        unpacker = msgpack.Unpacker(max_buffer_size=len(body))
        unpacker.feed(body)
        unpacker.skip()  # builds nothing, and finds arrays that claim more elements than follow
        fields = msgpack.unpackb(body, raw=False, strict_map_key=False)
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise CorruptRecordError(f"a control entry is not msgpack: {error}") from None
    if not isinstance(fields, dict):
        raise CorruptRecordError("a control entry is not a map")
    return fields


def column_crc(crcs: npt.NDArray[Any]) -> int:
    """Returns the CRC-32 of a column of CRCs, as little-endian uint32: identifies a batch's content."""
    return checksum.crc32(np.ascontiguousarray(crcs, "<u4").tobytes())
