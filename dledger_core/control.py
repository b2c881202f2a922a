"""Bodies of control entries (magic 2): producers, transactions, archive, identity of the log, between data entries.

A msgpack map, or empty. Its key ``t`` is the group's log time in ms (see ``LogTime``); ``k`` names its kind, without
which it is a no-op::

    log           u   uuid of the log (the first control entry of a log), c the logs that it continues, as maps with
                  the fields of ``AncestorLog``
    producer      p id, e epoch, s sequence, n data entries that follow in the batch, c CRC-32 of their CRC column,
                  o true if the id is used once
    expire        p id of a producer that is forgotten
    attempt       q query id, b batch id, r run id, a attempt uuid, n and c as above, f fingerprint of the entries,
                  o true for a query that is used once, w newest micro-batch of the query in the other groups.
                  With n 0 before an abort in one batch: the run appears only to be aborted
    commit        q, b, r, o, w, parts [[first, last, rows, crc], ...]: the winning ranges of a transaction
    abort         q, b, r
    archived      r the values of an ``ArchivedRange``, u URI of the archive, b true if it begins an archive. It counts
                  only if the range starts where the archive ends when it is applied
    archive-end   the log has no archive any longer

Later versions add kinds and keys; readers ignore unknown ones. An entry whose flag ``MUST_UNDERSTAND`` is set is
acknowledged only by a node that knows its kind (``is_known``). The body of a configuration entry (magic 3) is such a
map too, with the keys of ``raft.Configuration`` and ``t``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgpack
import numpy as np
import numpy.typing as npt

from dledger_core import checksum
from dledger_core.checksum import Buffer
from dledger_core.errors import BadRequestError, CorruptRecordError
from dledger_core.ids import NUMBER_MAX

_KINDS: Final = frozenset({None, "log", "producer", "expire", "attempt", "commit", "abort", "archived", "archive-end"})
PARTS_MAX: Final = 16_000
"""Parts of one transaction: request, control entry and response fit their limits (1 MiB, 16,384 elements)."""


# SplitMix64's increment and multipliers.
_GAMMA: Final = np.uint64(0x9E3779B97F4A7C15)
_FIRST: Final = np.uint64(0xBF58476D1CE4E5B9)
_SECOND: Final = np.uint64(0x94D049BB133111EB)


class TransactionId(NamedTuple):
    """A Spark micro-batch: ``query_id`` and ``batch_id`` name it, ``run_id`` is the run of the query that writes."""

    query_id: str
    batch_id: int
    run_id: str = ""

    @property
    def values(self) -> dict[str, Any]:
        """The micro-batch in the values of an error."""
        return {"query_id": self.query_id, "batch_id": self.batch_id}


class Part(NamedTuple):
    """A range of data entries appended by one attempt: [first, last] inclusive, with the CRC of its CRC column."""

    first: int
    last: int
    rows: int
    crc: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivedRange:
    """A range of the log that the archive was proved to have, as the log records it.

    Attributes:
        start: first index.
        end: index after the last one.
        rows: number of the data entries that ``read_committed`` shows; 0 if it shows none.
        digest: of these rows (``digest.rows_digest``).
        position: of the entry at ``start``.
        nbytes: bytes of the log from there to the end of the entry at ``end - 1``.
        last_time_ms: append time of the entry at ``end - 1``, ms since the epoch; 0 if it has none. No earlier entry
            of the log has a later one.
        term: term of the entry at ``end - 1``.
        check: check of that entry; a control entry has one too.
    """

    start: int
    end: int
    rows: int
    digest: bytes
    position: int
    nbytes: int
    last_time_ms: int
    term: int
    check: int

    def row(self) -> list[Any]:
        """Return the values in the order of the attributes, as they are stored and sent."""
        return [getattr(self, name) for name in self.__slots__]

    @classmethod
    def of_row(cls, row: Any) -> ArchivedRange:
        """Return the range of such values; raise TypeError or ValueError if they are malformed."""
        found = cls(**dict(zip(cls.__slots__, row, strict=True)))
        numbers = [value for value in row if type(value) is int and 0 <= value <= NUMBER_MAX]
        if type(found.digest) is not bytes or len(numbers) != len(row) - 1 or not found.start < found.end:
            raise ValueError("not a range of an archive")
        return found


def check_parts(parts: Sequence[object]) -> None:
    """Raise BadRequestError if a transaction has too many parts."""
    if len(parts) > PARTS_MAX:
        raise BadRequestError(
            f"a transaction of {len(parts)} parts exceeds the limit",
            "parts",
            f"commit at most {PARTS_MAX}: append larger chunks, or smaller micro-batches",
            {"parts": len(parts), "limit": PARTS_MAX},
        )


_SMALL_BYTES: Final = 256
"""So few bytes cannot claim more than half a MiB of elements, whatever they are: each level has as many as bytes."""


def pack(fields: dict[str, Any]) -> bytes:
    """Return the body of a control entry."""
    return bytes(msgpack.packb(fields, use_bin_type=True))


def unpack(body: Buffer) -> dict[str, Any]:
    """Return the map of a control entry's body; an empty body is ``{}``.

    Raises:
        CorruptRecordError: not a msgpack map of the expected kind.
    """
    if not len(body):
        return {}
    try:
        if len(body) > _SMALL_BYTES:
            unpacker = msgpack.Unpacker(max_buffer_size=len(body))
            unpacker.feed(body)
            unpacker.skip()  # rejects, without building anything, arrays that claim more elements than follow
        fields = msgpack.unpackb(body, raw=False, strict_map_key=False)
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise CorruptRecordError(f"a control entry is not msgpack: {error}") from None
    if not isinstance(fields, dict):
        raise CorruptRecordError("a control entry is not a map")
    return fields


def is_known(body: Buffer) -> bool:
    """Whether this version knows the kind of a control entry; raise CorruptRecordError as ``unpack``."""
    kind = unpack(body).get("k")
    return isinstance(kind, str | None) and kind in _KINDS


def log_time(fields: dict[str, Any]) -> int | None:
    """Return the log time of a control entry, in ms; None if it holds none.

    Raises:
        CorruptRecordError: it is not a time.
    """
    found = fields.get("t")
    if found is not None and (type(found) is not int or not 0 <= found <= NUMBER_MAX):
        raise CorruptRecordError(f"a control entry has an impossible log time: {str(found)[:40]}")
    return found


def column_crc(crcs: npt.NDArray[Any]) -> int:
    """Return the CRC-32 of a column of CRCs, as little-endian uint32: identifies a batch's content."""
    return checksum.crc32(np.ascontiguousarray(crcs, "<u4").tobytes())


def fingerprint(lengths: npt.NDArray[Any], crcs: npt.NDArray[Any]) -> int:
    """Return a number that identifies entries by their content, in any order: the sum of a hash of each.

    The hash mixes length and CRC of a body, which every writer has. Sums of parts add up (``fingerprint_sum``), however
    the entries were divided into them.
    """
    mixed = (lengths.astype(np.uint64) << np.uint64(32)) + crcs.astype(np.uint64) + _GAMMA
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _FIRST
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND
    mixed ^= mixed >> np.uint64(31)
    return int(mixed.sum(dtype=np.uint64)) & NUMBER_MAX


def fingerprint_sum(fingerprints: Iterable[int]) -> int:
    """Return the fingerprint of all entries from those of disjoint parts of them."""
    return sum(fingerprints) & NUMBER_MAX


def places_of(parts: Sequence[Part]) -> int:
    """Return a number that identifies a list of parts, in any order."""
    return checksum.crc32(np.array(sorted(parts), "<i8").tobytes())
