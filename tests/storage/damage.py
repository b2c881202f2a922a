"""Damage of a native store on the simulated disk: one table of what a start, ``verify`` and a repair find.

The store was closed cleanly, so its checkpoint covers every entry: nothing may be truncated. The kinds that every log
knows come from ``tests/support/damage.py``; the others need the fields of a native record, or its index rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from dledger_core.record import HEADER_BYTES, segment_name
from tests.storage.sample import DATA, INDEX, Sample
from tests.support.damage import KINDS, DataFiles, remove
from tests.support.logs import SMALL

SEGMENT, SECTOR = 2048, 512
CONFIG = dataclasses.replace(SMALL, data_segment_bytes=SEGMENT, index_segment_bytes=SECTOR)
INTACT = Sample.fill(
    CONFIG,
    (
        ([bytes([65 + n]) * (20 + 13 * at) for at in range(4)], 1 + n // 9, b"\x80" if n % 7 == 0 else None)
        for n in range(24)
    ),
)
"""Several data and index files, three terms, control entries, bodies of different sizes."""
LAST = INTACT.last
FILES = sorted(INTACT.content(DATA))
HEADS = [INTACT.positions.index(int(path.name)) for path in FILES]
"""The first entry of each file."""
HEAD = HEADS[1]
BLANK = INTACT.positions[HEAD - 1] + HEADER_BYTES + len(INTACT.entries[HEAD - 1][1])
"""The position after the last record of the first file."""

Damage = Callable[[Sample], object]


def flip(*places: tuple[int, int]) -> Damage:
    """Flip a bit of records: (index, byte) of each."""

    def damage(store: Sample) -> None:
        for index, byte in places:
            store.record(index)[byte] ^= 1

    return damage


def flip_row(index: int, byte: int) -> Damage:
    def damage(store: Sample) -> None:
        store.row(index)[byte] ^= 1

    return damage


def zero(position: int, length: int = SECTOR) -> Damage:
    """Zero bytes of one file; by default the sector of a position."""

    def damage(store: Sample) -> None:
        start = position - position % SECTOR if length == SECTOR else position
        store.at(start)[:length] = bytes(length)

    return damage


def zero_all(store: Sample) -> None:
    for path in FILES:
        zero(int(path.name), SEGMENT)(store)


def copy(source: int, target: int, length: int = SECTOR) -> Damage:
    """Put bytes of another position here, complete and with valid CRCs; by default the sector of a position."""

    def damage(store: Sample) -> None:
        begin, end = (at - at % SECTOR if length == SECTOR else at for at in (source, target))
        store.at(end)[:length] = bytes(store.at(begin)[:length])

    return damage


def resize(path: Path, size: int) -> Damage:
    def damage(store: Sample) -> None:
        content = store.files.content(path)
        content[:] = bytes(content[:size]) + bytes(max(size - len(content), 0))

    return damage


def lose(*paths: Path) -> Damage:
    """Lose files, and directories with their files."""

    def damage(store: Sample) -> None:
        store.files.directories.difference_update(paths)
        remove(store.files, *[name for name in store.files.names if name in paths or name.parent in paths])

    return damage


def put(path: Path, data: bytes) -> Damage:
    return lambda store: store.files.replace(path, data)


def set_byte(byte: int, value: int, *indexes: int, add: int = 0) -> Damage:
    def damage(store: Sample) -> None:
        for index in indexes:
            store.record(index)[byte] = store.record(index)[byte] * bool(add) + value

    return damage


def both(*parts: Damage) -> Damage:
    def damage(store: Sample) -> None:
        for part in parts:
            part(store)

    return damage


def overwrite_blank(store: Sample) -> None:
    store.at(BLANK)[:] = b"\x07" * (SEGMENT - BLANK)


def of_every_log(kind: str) -> Damage:
    return lambda store: KINDS[kind](DataFiles(DATA, store.positions[:-1], HEADER_BYTES, store.files))


class Case(NamedTuple):
    """A row.

    Attributes:
        damage: what happens to a closed store.
        found: kind, start and end of each finding of ``verify``.
        place: file and position that the start names; by default those of the first entry that is found damaged.
        is_repaired: whether a repair gets all of it back.
    """

    damage: Damage
    found: list[tuple[str, int, int]]
    place: tuple[Path, int | None] | None = None
    is_repaired: bool = True

    def named(self) -> tuple[Path, int | None]:
        if self.place is not None:
            return self.place
        position = INTACT.positions[next(start for kind, start, _ in self.found if kind != "INDEX_MISMATCH")]
        return DATA / segment_name(position - position % SEGMENT), position


def corrupt(*ranges: tuple[int, int]) -> list[tuple[str, int, int]]:
    return [("CORRUPT", start, end) for start, end in ranges]


def of_file(number: int) -> tuple[int, int]:
    """The entries of a file."""
    return HEADS[number], [*HEADS[1:], LAST + 1][number]


_P = INTACT.positions
CASES: dict[str, Case] = {
    "magic": Case(flip((20, 3)), corrupt((20, 21))),
    "size": Case(flip((20, 6)), corrupt((20, 21))),
    "index above the others": Case(flip((20, 15)), corrupt((20, 21))),
    "index below the others": Case(flip((21, 15)), corrupt((21, 22))),
    "index at a file's end": Case(flip((HEAD - 1, 15)), corrupt((HEAD - 1, HEAD))),
    "position": Case(flip((20, 31)), corrupt((20, 21))),
    "body": Case(flip((20, 60)), corrupt((20, 21))),
    "body in the last file": Case(flip((LAST - 2, 60)), corrupt((LAST - 2, LAST - 1))),
    "first record": Case(flip((0, 3)), corrupt((0, 1))),
    "last record": Case(flip((LAST, 60)), corrupt((LAST, LAST + 1))),
    "several bodies": Case(flip((17, 60), (18, 60), (40, 60)), corrupt((17, 19), (40, 41))),
    "term above the next": Case(flip((45, 23)), corrupt((45, 46))),
    "term below the previous one": Case(set_byte(23, 1, 45), [*corrupt((45, 46)), ("TERM_REGRESSION", 45, 46)]),
    "missing index": Case(  # an entry of another log, for which no replica has the record
        set_byte(15, 1, *range(35, LAST + 1), add=1),
        [("INDEX_GAP", 35, 36), ("INDEX_MISMATCH", 36, LAST + 2)],
        is_repaired=False,
    ),
    "magic of a row": Case(flip_row(33, 3), corrupt((33, 34))),
    "records zeroed": Case(zero(_P[9], _P[12] - _P[9]), corrupt((9, 12))),
    "a sector zeroed": Case(zero(_P[20]), corrupt((18, 23))),
    "the first sector of the log zeroed": Case(zero(0), corrupt((0, 7))),
    "a file's first sector zeroed": Case(zero(SEGMENT), corrupt((23, 29))),
    "first file zeroed": Case(zero(0, SEGMENT), corrupt(of_file(0))),
    "a file zeroed": Case(zero(SEGMENT, SEGMENT), corrupt(of_file(1))),
    "last file zeroed": Case(zero(int(FILES[-1].name), SEGMENT), corrupt(of_file(-1))),
    "all files zeroed": Case(zero_all, corrupt((0, LAST + 1))),
    "a misdirected record": Case(copy(_P[9], _P[13], _P[10] - _P[9]), corrupt((13, 14))),
    "a misdirected sector": Case(copy(_P[40], _P[20]), corrupt((18, 23))),
    "a misdirected sector of the same place in another file": Case(copy(SEGMENT + 600, 600), corrupt((6, 13))),
    "a complete file of another position": Case(copy(SEGMENT, 0, SEGMENT), corrupt(of_file(0))),
    "first file missing": Case(lose(FILES[0]), corrupt(of_file(0))),
    "all files missing": Case(lose(DATA), corrupt((0, LAST + 1)), (FILES[0], 0), is_repaired=False),
    "first file too short": Case(resize(FILES[0], 1000), corrupt((12, HEAD), (0, 0)), (FILES[0], 1000)),
    "a file too short": Case(resize(FILES[1], 700), corrupt((31, HEADS[2]), (HEAD, HEAD)), (FILES[1], SEGMENT + 700)),
    "last file empty": Case(resize(FILES[-1], 0), corrupt(of_file(-1))),
    "first file too long": Case(resize(FILES[0], 3000), corrupt((0, 0)), (FILES[0], SEGMENT)),
    "last file too long": Case(resize(FILES[-1], 3000), corrupt((HEADS[-1],) * 2), (FILES[-1], 5 * SEGMENT)),
    "two places, and all rows lost": Case(
        both(zero(600), zero(5000), lose(*INTACT.content(INDEX))),
        [
            ("INDEX_MISMATCH", 0, 6),
            *corrupt((6, 23)),
            ("INDEX_MISMATCH", 23, 52),
            *corrupt((52, 69)),
            ("INDEX_MISMATCH", 69, LAST + 1),
        ],
    ),
    "flipped_body": Case(of_every_log("flipped_body"), corrupt((57, 58))),
    "zeros": Case(of_every_log("zeros"), corrupt((57, 61))),
    "lost_file": Case(of_every_log("lost_file"), corrupt(of_file(2)), (FILES[2], None)),
    "lost_last_file": Case(of_every_log("lost_last_file"), corrupt(of_file(-1)), (FILES[-2], int(FILES[-2].name))),
    "lost_end": Case(of_every_log("lost_end"), corrupt((96, LAST + 1))),
    "swapped": Case(of_every_log("swapped"), corrupt((HEADS[2], HEADS[4]))),
    "old_copy": Case(of_every_log("old_copy"), corrupt((57, HEADS[3]))),
}
"""Damage that a start refuses and ``verify`` finds. ``overwrite_blank`` is not in it: it changes no record, and only a
repair checks it."""
