"""Where a store that Java wrote seems to end, and does not: Java's recovery cuts there, and loses what follows."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dledger_core import StoreReader

__all__ = ["damaged_end"]


def damaged_end(reader: StoreReader) -> tuple[int, int] | None:
    """Returns the entries [start, end) behind a store's last one that are damaged; None where it simply ends.

    Entries follow them, or the last file is not whole: Java makes its files whole, and refuses a store of which one is
    not. Of a store of ours the checkpoint tells.
    """
    if reader.writer == "dledger-python":
        return None
    files = sorted(path for path in (reader.path / "data").iterdir() if path.name.isdigit())
    cut = len(files) > 1 and files[-1].stat().st_size < files[0].stat().st_size
    return reader.damaged_end() or ((reader.last_index + 1, reader.last_index + 2) if cut else None)
