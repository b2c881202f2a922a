"""Rows of the tables that changed since they were last stored."""

from __future__ import annotations

from collections.abc import Iterable


class RowChanges:
    """Changed rows by key: the new value, or None for a removed row. Not thread-safe."""

    def __init__(self) -> None:
        self._rows: dict[bytes, bytes | None] = {}

    def add(self, key: bytes, value: bytes) -> None:
        """Record a row whose key never existed before."""
        self._rows[key] = value

    def remove(self, key: bytes) -> None:
        """Remove a row whose key is never used again."""
        if self._rows.pop(key, None) is None:
            self._rows[key] = None

    def put(self, key: bytes, value: bytes | None) -> None:
        """Record the value, or the end, of a row whose key may be used many times."""
        self._rows[key] = value

    def restart(self, rows: Iterable[tuple[bytes, bytes]]) -> None:
        """Forget the changes: these are all rows there are."""
        self._rows = dict(rows)

    def take(self) -> dict[bytes, bytes | None]:
        """Return the changes and forget them; takes no time, however many there are."""
        rows, self._rows = self._rows, {}
        return rows


def packed(index: int) -> bytes:
    """Return an index as a part of a key: keys are in the order of their indexes."""
    return index.to_bytes(8, "big")
