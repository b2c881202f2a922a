"""Messages decoded a piece at a time: a few megabytes of compressed bodies may stand for gigabytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa

from dledger_core.rocketmq.message.compression import TooManyBytesError
from dledger_core.rocketmq.message.decode import decode_messages

__all__ = ["decode_chunks"]


def decode_chunks(
    batch: pa.RecordBatch, columns: Sequence[str], *, opened_bytes_max: int
) -> Iterator[tuple[pa.RecordBatch, pa.RecordBatch]]:
    """Decodes the column ``body`` of a batch, in pieces whose bodies stay below a bound.

    Args:
        batch: rows with a column ``body``, each a message record as a broker stores it.
        columns: as in ``decode_messages``.
        opened_bytes_max: what the decompressed bodies of a piece may grow to; a single body may be larger.

    Yields:
        A slice of the batch, and as many rows of messages; together the slices are the batch, in order.

    Raises:
        BadRequestError: as ``decode_messages``.
    """
    rest = [batch]
    while rest:
        piece = rest.pop()
        try:
            found = decode_messages(piece.column("body"), columns, opened_bytes_max=opened_bytes_max)
        except TooManyBytesError:
            half = piece.num_rows // 2
            rest += [piece.slice(half), piece.slice(0, half)]
            continue
        yield piece, found
