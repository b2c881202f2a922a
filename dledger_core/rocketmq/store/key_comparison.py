"""Compares a broker's index files with those rebuilt from its log; changes nothing.

A unit is matched by the position and the hash of its key, so the files need not begin and end at the same messages.
Units before the log's first message are left over by retention, and those of messages that a running broker stored
after the log was read are newer: neither is a difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dledger_core.errors import CorruptRecordError
from dledger_core.rocketmq.store.key_files import KeyFileSize, KeyUnits, key_file_paths

_I64 = npt.NDArray[np.int64]

_REPLACE: Final = "stop the broker in an orderly way, replace its index directory by the rebuilt one, and start it"
INDEX_CAUSES: Final = {
    "INDEX_MISSING": "the message is in the log, its key is not in the index files: a query by key or by unique id "
    "does not find it",
    "INDEX_EXTRA": "the index files point at a position without a message of this key in the log",
    "INDEX_WRONG_TIME": "the time of the key is not that of its message: a query with times may not find it",
    "INDEX_WRONG_LINK": "a slot or a key of the file does not point to the previous key of its slot: queries do not "
    "find the keys before it",
    "INDEX_UNREADABLE": "the file has another size than the broker's index files, or an impossible header",
}
"""Cause of each class of difference."""
_NEXT: Final = {
    "INDEX_EXTRA": f"check that this is the broker of that log; if its log was truncated, {_REPLACE}",
}
_FINDINGS_MAX: Final = 1000
_WINDOW_UNITS: Final = 1 << 20
_HASH_BITS: Final = 31
_TIME_MS: Final = 1000
"""Both times are cut to whole seconds after different starts."""


@dataclass(slots=True)
class KeyComparison:
    """The result of a comparison.

    Attributes:
        directory: the broker's index directory.
        files: number of its files.
        keys: number of their keys.
        counts: differing keys per class; of INDEX_UNREADABLE the files.
        newer: keys of messages that were appended after the log was read.
        findings: at most 1000: class, first and last position, count, file, cause and next step.
    """

    directory: str
    files: int = 0
    keys: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    newer: int = 0
    findings: list[dict[str, Any]] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Return the fields of the JSON summary."""
        return {
            "directory": self.directory,
            "files": self.files,
            "keys": self.keys,
            "differences": dict(sorted(self.counts.items())),
            "newer_keys": self.newer,
            "findings": self.findings,
            "findings_cut": len(self.findings) >= _FINDINGS_MAX,
        }

    def add(self, kind: str, count: int, first: int | None, last: int | None, file: str | None = None) -> None:
        """Add a finding of ``count`` keys at positions ``first`` to ``last``."""
        self.counts[kind] += count
        if len(self.findings) < _FINDINGS_MAX:
            place = {"kind": kind, "position": first, "last_position": last, "count": count, "file": file}
            self.findings.append(place | {"cause": INDEX_CAUSES[kind], "next": _NEXT.get(kind, _REPLACE)})


def compare_key_files(
    rebuilt: Path,
    broker: Path,
    size: KeyFileSize,
    log: tuple[int, int],
    *,
    now: Callable[[], int],
    unread: Sequence[tuple[int, int]],
) -> KeyComparison:
    """Compare a broker's index files with rebuilt ones.

    Args:
        rebuilt: ``index`` directory with the keys of every message that was read.
        broker: the broker's ``index`` directory; it may be missing.
        size: of the files.
        log: positions [start, end) of the log that was read.
        now: returns the present end of the log.
        unread: positions [start, end) of damage, whose messages are unknown.
    """
    paths = key_file_paths(broker)
    found = KeyComparison(str(broker), len(paths))
    theirs = _Files(paths, size)
    for path in paths:
        try:
            file = theirs.open(path)
        except FileNotFoundError:  # retention deleted it meanwhile
            theirs.drop(path)
            continue
        except CorruptRecordError as error:
            theirs.drop(path)
            found.add("INDEX_UNREADABLE", 1, None, None, f"{path}: {error.what}")
            continue
        found.keys += file.count
        wrong = file.wrong_links()
        if wrong:
            found.add("INDEX_WRONG_LINK", wrong, None, None, str(path))
    ours = _Files(key_file_paths(rebuilt), size)
    for start, stop in _windows(ours, theirs, log):
        _compare_window(found, ours.between(start, stop), theirs.between(start, stop), unread)
    later, _, _ = theirs.between(log[1], 1 << 62)
    ahead = later[later >= now()] if len(later) else later
    found.newer = len(later) - len(ahead)
    if len(ahead):
        found.add("INDEX_EXTRA", len(ahead), int(ahead[0]), int(ahead[-1]))
    return found


class _Files:
    """Index files of which the newest opened one stays in memory."""

    def __init__(self, paths: Iterable[Path], size: KeyFileSize) -> None:
        self._size = size
        self._bounds: dict[Path, tuple[int, int]] = dict.fromkeys(paths, (0, 1 << 62))
        self._opened: KeyUnits | None = None

    def drop(self, path: Path) -> None:
        del self._bounds[path]

    def open(self, path: Path) -> KeyUnits:
        if self._opened is None or self._opened.path != path:
            self._opened = KeyUnits(path, self._size)
            positions = self._opened.positions
            self._bounds[path] = (int(positions.min()), int(positions.max()) + 1) if len(positions) else (0, 0)
        return self._opened

    def between(self, start: int, stop: int) -> tuple[_I64, _I64, _I64]:
        """Return position, hash and time of the units in [start, stop), see ``KeyUnits.between``."""
        near = [path for path, (low, high) in self._bounds.items() if low < stop and start < high]
        parts = [self.open(path).between(start, stop) for path in near]
        if not parts:
            return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64)
        position, key, time = (np.concatenate(column) for column in zip(*parts, strict=True))
        return position, key, time

    def edges(self, start: int, stop: int) -> Iterator[_I64]:
        """Yield the positions in [start, stop) at which windows may end."""
        for path in list(self._bounds):
            positions = np.sort(self.open(path).positions)
            yield positions[np.searchsorted(positions, start) : np.searchsorted(positions, stop)][::_WINDOW_UNITS]


def _windows(ours: _Files, theirs: _Files, log: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Yield ranges of positions that together are the log, each with a limited number of units."""
    edges = [*ours.edges(*log), *theirs.edges(*log)]
    starts = np.unique(np.concatenate(edges)) if edges else np.zeros(0, np.int64)
    yield from zip(starts.tolist(), [*starts[1:].tolist(), log[1]], strict=False)


def _compare_window(
    found: KeyComparison,
    ours: tuple[_I64, _I64, _I64],
    theirs: tuple[_I64, _I64, _I64],
    unread: Sequence[tuple[int, int]],
) -> None:
    places = np.unique(np.concatenate([ours[0], theirs[0]]))

    def unique(units: tuple[_I64, _I64, _I64]) -> tuple[_I64, _I64]:
        """Return each pair of position and hash once, as one number, and its row."""
        numbers, rows = np.unique((np.searchsorted(places, units[0]) << _HASH_BITS) + units[1], return_index=True)
        return numbers, rows

    (wanted, at), (present, there) = unique(ours), unique(theirs)
    _add_runs(found, "INDEX_MISSING", places, wanted, ~np.isin(wanted, present, assume_unique=True))
    extra = ~np.isin(present, wanted, assume_unique=True)
    for low, high in unread:
        positions = places[present >> _HASH_BITS]
        extra &= (positions < low) | (positions >= high)
    _add_runs(found, "INDEX_EXTRA", places, present, extra)
    both, left, right = np.intersect1d(wanted, present, assume_unique=True, return_indices=True)
    mine, other = ours[2][at[left]], theirs[2][there[right]]
    wrong = (mine >= 0) & (other >= 0) & (np.abs(mine - other) > _TIME_MS)
    _add_runs(found, "INDEX_WRONG_TIME", places, both, wrong)


def _add_runs(found: KeyComparison, kind: str, places: _I64, keys: _I64, chosen: npt.NDArray[np.bool_]) -> None:
    """Add a finding for each run of adjacent chosen keys."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], chosen, [False]]).astype(np.int8)))
    for begin, end in edges.reshape(-1, 2).tolist():
        first, last = places[keys[[begin, end - 1]] >> _HASH_BITS].tolist()
        found.add(kind, end - begin, first, last)
