"""A store that loses the end of its log but not its tables: which index does it acknowledge to producers that repeat?

The one replica that continues a log: each append is committed at once, and the tables are stored with it. A producer
repeats its newest append until the response arrives. What is checked: an acknowledged index has the entry of that
append, and an append is in the log once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from dledger_core.control import pack
from dledger_core.errors import DLedgerError
from dledger_core.ids import Index
from dledger_core.storage.tables.tables import LogTables
from tests.sim.search.breadth import Result, search
from tests.sim.search.votes import with_at

OTHER_ENTRY = "an append is acknowledged at an index that has another entry"
TWICE = "an append is in the log twice"


class State(NamedTuple):
    """The store and its producers.

    Attributes:
        log: (producer, sequence) of each entry, the control entry of an append before its data.
        rows: the stored tables.
        sent: newest sequence of each producer.
        losses: lost ends that may still happen.
    """

    log: tuple[tuple[int, int], ...]
    rows: tuple[tuple[bytes, bytes], ...]
    sent: tuple[int, ...]
    losses: int


SEQUENCES = 3


def run(*, producers: int = 2, entries: int = 6, losses: int = 2) -> Result:
    """Search; a log has at most this many entries, and a producer sends three appends."""
    start = State((), tuple(LogTables().rows()), (-1,) * producers, losses)
    return search([start], lambda state: _steps(state, entries))


def _steps(state: State, entries: int) -> Iterator[tuple[str, State, str]]:
    for producer, newest in enumerate(state.sent):
        for sequence in (newest, newest + 1):
            if 0 <= sequence < SEQUENCES and len(state.log) + 2 <= entries:
                yield _append(state, producer, sequence)
    for length in range(0, len(state.log), 2) if state.losses else ():  # a log ends with a complete batch
        tables = LogTables.from_rows(state.rows)
        tables.forget_after(Index(length - 1))
        lost = state._replace(log=state.log[:length], rows=tuple(tables.rows()), losses=state.losses - 1)
        yield f"the end is lost after {length} entries", lost, ""


def _append(state: State, producer: int, sequence: int) -> tuple[str, State, str]:
    event = f"producer {producer} sends {sequence}"
    tables, name, crc = LogTables.from_rows(state.rows), f"producer {producer}", sequence + 1
    sent = state._replace(sent=with_at(state.sent, producer, max(state.sent[producer], sequence)))
    try:
        found = tables.producers.check(name, 0, sequence, crc)
    except DLedgerError as error:
        return f"{event}: {error.name}", sent, ""
    if found is not None:
        entry = sent.log[found.first_index] if found.first_index < len(sent.log) else None
        return f"{event} again", sent, "" if entry == (producer, sequence) else OTHER_ENTRY
    index = len(state.log)
    body = pack({"k": "producer", "p": name, "e": 0, "s": sequence, "n": 1, "c": crc})
    tables.apply(Index(index), 0, body)
    broken = TWICE if (producer, sequence) in state.log[1::2] else ""
    after = sent._replace(log=(*state.log, (-1, -1), (producer, sequence)), rows=tuple(tables.rows()))
    return event, after, broken
