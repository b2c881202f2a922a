"""Where a store that Java wrote seems to end, and does not: Java's recovery cuts there, and loses what follows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dledger_core.record import HEADER, HEADER_BYTES, MAGIC_DATA

if TYPE_CHECKING:
    from dledger_core import StoreReader

__all__ = ["damaged_end"]


def damaged_end(reader: StoreReader) -> tuple[int, int] | None:
    """Returns the entries [start, end) at a store's end that are damaged; None where it simply ends.

    Others follow them, or the last file is not whole: Java makes its files whole, and refuses a store of which one is
    not. They begin behind the last entry of the view, or with it. Of a store of ours the checkpoint tells.
    """
    if reader.writer == "dledger-python":
        return None
    found, end = reader.damaged_end(), reader.last_index + 1
    if found is not None:
        return found
    if _has_another_term(reader):
        return reader.last_index, end
    files = sorted(path for path in (reader.path / "data").iterdir() if path.name.isdigit())
    cut = len(files) > 1 and files[-1].stat().st_size < files[0].stat().st_size
    return (end, end + 1) if cut else None


def _has_another_term(reader: StoreReader) -> bool:
    """Whether the last entry's term is not the one that its row in the index has, and a lower one follows."""
    last = reader.last_index
    if last < reader.first_index:
        return False
    records = reader.records(last, last + 1, 1)
    if not reader.index_mismatches(records):
        return False
    position, size = reader.position_end, reader.segment_bytes[0]
    path = reader.path / "data" / f"{position - position % size:020d}"
    if not path.is_file():
        return False
    with path.open("rb") as file:
        file.seek(position % size)
        data = file.read(HEADER_BYTES)
    if len(data) < HEADER_BYTES:
        return False
    [behind] = np.frombuffer(data, HEADER)
    whole = behind["magic"] == MAGIC_DATA and behind["size"] == HEADER_BYTES + behind["length"]
    return bool(whole and behind["index"] == last + 1 and behind["term"] < records.headers["term"][0])
