"""Queues of topics of type BatchCQ: the units of records with several messages each, in log order.

A unit has the queue offset of its first message and their number. With both of the last unit a broker knows the next
queue offset, of the queue and of a pull. RocketMQ 5.3.3 in DLedger mode records 1 as the number of messages of each
batch: after a restart it assigns the queue offsets of the last batch again, and a pull that ends with a batch gets it
again. So the number here comes from the record. It is at most the distance to the next batch, because a pull would skip
that one otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dledger_core.rocketmq.message.layout import INNER_BATCH
from dledger_core.rocketmq.message.properties import parse_properties
from dledger_core.rocketmq.message.records import Located
from dledger_core.rocketmq.store.consume_queue import BATCH_UNIT

_I64 = npt.NDArray[np.int64]
_COUNT_MAX: Final = 32767
"""RocketMQ counts the messages of a batch in 16 bits."""


def batch_sizes(located: Located) -> _I64:
    """Return the number of messages that each record has by its property, 1 for a single message."""
    batched = (located.sys_flags & INNER_BATCH) != 0
    found = np.ones(located.count, np.int64)
    if batched.any():
        pairs = parse_properties(located.data, located.properties, located.properties_bytes)
        texts = pairs.values_of("INNER_NUM", batched)
        good = pc.fill_null(pc.match_substring_regex(texts, "^[0-9]{1,9}$"), False)
        numbers = np.asarray(pc.if_else(good, texts, pa.scalar("1")).cast(pa.int64()))
        found[batched] = np.clip(numbers[batched], 1, _COUNT_MAX)
    return found


@dataclass(slots=True)
class BatchTotals:
    """Totals of one queue, from the first read.

    Attributes:
        units: number of units.
        end: the queue offset after the highest one that starts a batch.
        repeated: units whose queue offset is not above those of all units before them.
        first_repeated: the queue offset of the first of them.
        shared: batches that have the queue offset of the next one.
        last_messages: number of messages of the last batch.
        last: its queue offset.
    """

    units: int = 0
    end: int = 0
    repeated: int = 0
    first_repeated: int = -1
    shared: int = 0
    last_messages: int = 0
    last: int = -1

    def add(self, units: npt.NDArray[Any]) -> None:
        """Add units in log order.

        Args:
            units: dtype BATCH_UNIT, shape (n,), n > 0.
        """
        offsets, numbers = units["queue_offset"].astype(np.int64), units["messages"].astype(np.int64)
        ends = np.maximum.accumulate(np.concatenate([[self.end], offsets + 1]))
        again = np.flatnonzero(offsets < ends[:-1])
        if len(again) and not self.repeated:
            self.first_repeated = int(offsets[again[0]])
        self.repeated += len(again)
        gaps = np.diff(offsets, prepend=self.last)
        before = np.concatenate([[self.last_messages], numbers[:-1]])
        self.shared += int(((gaps > 0) & (gaps < before)).sum())
        self.units, self.end = self.units + len(units), int(ends[-1])
        self.last, self.last_messages = int(offsets[-1]), int(numbers[-1])


@dataclass(slots=True)
class BatchSlots:
    """Slots of the units of one queue, in log order. The last unit is held until the next one or ``rest``.

    Attributes:
        on_duplicate: ``first``: a unit whose queue offset is not above the earlier ones gets no slot; ``last``: all
            units get one, as on a running broker.
        used: number of slots.
        end: the queue offset after the highest one that starts a batch.
        held: fields of the unit that has no slot yet; empty = none.
    """

    on_duplicate: Literal["first", "last"]
    used: int = 0
    end: int = 0
    held: tuple[int, ...] = ()

    def take(self, units: npt.NDArray[Any]) -> tuple[_I64, npt.NDArray[Any]]:
        """Return the slots of the next units, and the units.

        Args:
            units: dtype BATCH_UNIT, shape (n,), n > 0.
        """
        offsets = units["queue_offset"].astype(np.int64)
        ends = np.maximum.accumulate(np.concatenate([[self.end], offsets + 1]))
        self.end = int(ends[-1])
        if self.on_duplicate == "first":
            units = units[offsets >= ends[:-1]]
        joined = np.concatenate([self._held(), units])
        gaps = np.diff(joined["queue_offset"].astype(np.int64))
        shorter = np.flatnonzero((gaps > 0) & (gaps < joined["messages"][:-1]))
        joined["messages"][shorter] = gaps[shorter]
        self.held = tuple(joined[-1].item()) if len(joined) else ()
        return self._placed(joined[:-1])

    def rest(self) -> tuple[_I64, npt.NDArray[Any]]:
        """Return the slot of the last unit, and the unit."""
        units, self.held = self._held(), ()
        return self._placed(units)

    def _held(self) -> npt.NDArray[Any]:
        return np.array([self.held] if self.held else [], BATCH_UNIT)

    def _placed(self, units: npt.NDArray[Any]) -> tuple[_I64, npt.NDArray[Any]]:
        slots = self.used + np.arange(len(units))
        self.used += len(units)
        return slots, units
