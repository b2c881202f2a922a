"""Attaching a group to a connection between two nodes: each side shows its store, the other one takes or refuses it.

After hello each side sends one ATTACH per group that it hosts, with a number that it chose. Messages to that replica
carry this number in place of the group's name and of both members. A replica whose identity changes attaches again,
with a new number; the old one is void from then on, and a message with an unknown number is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, TypeGuard

from dledger_core.ids import NO_INDEX, NO_TERM, NUMBER_MAX, Index, Term
from dledger_core.net.fields import Table, table_of, wire
from dledger_core.net.protocol import Type
from dledger_core.raft.floor import Floor


def is_floor_row(row: object) -> TypeGuard[list[int]]:
    """Whether ``row`` is a floor as it travels: [term, index], [term] of one without an index, [] of none."""
    lows = (NO_TERM, NO_INDEX)
    return (
        type(row) is list
        and len(row) <= len(lows)
        and all(type(value) is int and low <= value <= NUMBER_MAX for value, low in zip(row, lows, strict=False))
    )


def floor_row(floor: Floor | None) -> list[int]:
    """Return a floor as it travels."""
    if floor is None:
        return []
    return [floor.term] if floor.index is None else [floor.term, floor.index]


def floor_of_row(row: object) -> Floor | None:
    """Return a floor that was received; None if it is none."""
    if not is_floor_row(row) or not row:
        return None
    return Floor(Term(row[0]), Index(row[1]) if len(row) > 1 else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attach:
    """Attach a group: show the store that receives the messages with this number."""

    group: str = wire("g", "str", "name of the group")
    number: int = wire("nr", "int", "number of the messages to this replica", low=1, high=NUMBER_MAX)
    log_uuid: str | None = wire("lu", "str", "uuid of the log, nil while it is not known", optional=True)
    store_uuid: str = wire("su", "str", "uuid of the store, empty while it has none")
    term: int = wire("term", "int", "the store's term", high=NUMBER_MAX)
    last_term: int = wire("lt", "int", "term of its last entry", high=NUMBER_MAX)
    last_index: int = wire("li", "int", "index of its last entry", high=NUMBER_MAX)
    commit_index: int = wire(
        "ci", "int", "index of the last entry that it knows to be committed", high=NUMBER_MAX, default=-1
    )
    commit_term: int | None = wire(
        "ct", "int", "term of the entry at the commit index, or of its last one if that is lower", high=NUMBER_MAX,
        default=None, optional=True,
    )  # fmt: skip
    version: int = wire("gv", "int", "highest group version that the node understands", low=0)
    floor: list[int] | None = wire(
        "fl",
        "list",
        "floor of its votes, [term, index], [term] of one without an index, or [] of none; nil = it is not known",
        low=0,
        high=2,
        default=None,
        optional=True,
        accepts=is_floor_row,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachRefused:
    """Refuse an attach; after a retriable error, as that of a group that waits to be bootstrapped, it is sent again."""

    number: int = wire("nr", "int", "number of the refused attach", low=1, high=NUMBER_MAX)
    error: dict[str, Any] = wire("e", "map", "the map of DLedgerError.to_wire", low=1)


ATTACH: Final = table_of(Attach, Type.ATTACH)
ATTACH_REFUSED: Final = table_of(AttachRefused, Type.ATTACH_REFUSED)
ATTACH_TABLES: Final[tuple[Table[Any], ...]] = (ATTACH, ATTACH_REFUSED)
