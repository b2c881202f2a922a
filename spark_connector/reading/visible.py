"""Reading a range of a store in chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dledger_core import IndexOutOfRangeError
from spark_connector.reading.logs import Chunk

if TYPE_CHECKING:
    from dledger_core import StoreReader
    from spark_connector.reading.planning import Range

__all__ = ["read_chunk"]


def read_chunk(view: StoreReader, part: Range, start: int, max_bytes: int, *, uncommitted: bool) -> Chunk:
    """Read data entries from ``start`` on, up to the range's end or ``max_bytes``.

    Raises:
        IndexOutOfRangeError: the view does not contain ``start``.
        CorruptRecordError: a record is damaged.
    """
    if uncommitted:
        found = view.fetch(start, part.end, max_bytes=max_bytes, isolation="read_uncommitted", until="end")
    else:
        found = view.fetch(start, part.end, max_bytes=max_bytes)
    if found.next_index == start:
        values = {"first_index": found.first_index, "last_index": found.visible_end - 1}
        raise IndexOutOfRangeError(f"index {start} is not in the store yet", str(view.path), "", values)
    return Chunk(found.batch, found.next_index)
