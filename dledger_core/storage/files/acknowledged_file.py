"""``meta/acknowledged``: what a node remembers of the other stores of its group, written lazily."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dledger_core.ids import NO_INDEX, NO_TERM
from dledger_core.storage.files.file_system import Files, read_checked, write_checked
from dledger_core.storage.files.layout import Layout


@dataclass(frozen=True, slots=True)
class Remembered:
    """Newest state of another store, as its messages showed it.

    Attributes:
        term: the highest term that it showed, voted or led in.
        led: the highest term that it led in.
        acknowledged: the highest (term, index) that it acknowledged.
    """

    term: int = NO_TERM
    led: int = NO_TERM
    acknowledged: tuple[int, int] = (NO_TERM, NO_INDEX)


def save_acknowledged(files: Files, layout: Layout, known: Mapping[str, Remembered]) -> None:
    """Replace the memory of all other stores.

    Versions up to 0.2.0 read only ``stores``, as the newest term of each store and the index acknowledged in it.
    """
    pairs = {
        store: list(found.acknowledged if found.acknowledged[0] > NO_TERM else (found.term, NO_INDEX))
        for store, found in known.items()
    }
    terms = {store: [found.term, found.led] for store, found in known.items()}
    write_checked(files, layout.acknowledged, {"stores": pairs, "terms": terms})


def load_acknowledged(files: Files, layout: Layout) -> dict[str, Remembered]:
    """Return the memory of each other store; empty if the file is missing or damaged."""
    fields = read_checked(files, layout.acknowledged) or {}
    terms = _pairs(fields.get("terms"))
    return {
        store: Remembered(*terms.get(store, (pair[0], NO_TERM)), acknowledged=pair)
        for store, pair in _pairs(fields.get("stores")).items()
    }


def _pairs(rows: Any) -> dict[str, tuple[int, int]]:
    """Return the rows of two numbers by store."""
    if not isinstance(rows, dict):
        return {}
    found = [(store, row) for store, row in rows.items() if isinstance(row, list) and len(row) == 2]
    return {str(store): (row[0], row[1]) for store, row in found if type(row[0]) is int and type(row[1]) is int}
