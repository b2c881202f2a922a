"""The further queues that a message names (multi-dispatch), as units next to the one of its own queue.

RocketMQ's broker adds a message to further queues (``%LMQ%`` queues and others) that its property
INNER_MULTI_DISPATCH lists. In a broker's log INNER_MULTI_QUEUE_OFFSET lists the message's offsets there. If it is
missing, or has another number of offsets or an invalid one, a broker adds the message to none. If a message names a
queue more than once, a broker adds it once but increments the queue's offset for each name. It still fills contiguous
slots, so from there on offsets run ahead of slots until the broker restarts.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dledger_core.rocketmq.message.layout import SCHEDULE_TOPIC

NAMED_AGAIN: Final = "named_again"
"""Reason of a skipped unit: its message is in the queue already, and took one more queue offset."""

_SEPARATOR: Final = ","
_NUMBERS: Final = r"^[+-]?[0-9]{1,18}(,[+-]?[0-9]{1,18})*$"
_LMQ: Final = "%LMQ%"
_EXCLUDED: Final = ("%RETRY%", "rmq_sys_")

_Bools = npt.NDArray[np.bool_]
_Ints = npt.NDArray[np.int64]


def with_further_units(units: pa.RecordBatch, carried: _Bools) -> tuple[pa.RecordBatch, _Bools]:
    """Return the units, each followed by one for each further queue of its message.

    A unit that is NAMED_AGAIN is skipped: it only records that the queue's offsets run ahead of its slots.

    Args:
        units: columns topic, queue_id, queue_offset, skipped, dispatch_queues, dispatch_offsets and any others.
        carried: shape (n,): messages whose queue offsets a broker assigned.

    Returns:
        The units without the last two columns, and ``carried`` for them.
    """
    names, offsets = units.column("dispatch_queues"), units.column("dispatch_offsets")
    plain = units.drop_columns(["dispatch_queues", "dispatch_offsets"])
    if names.null_count == len(names):
        return plain, carried
    wanted = _wanted(units)
    numbered = np.asarray(pc.fill_null(pc.match_substring_regex(offsets, _NUMBERS), False))
    recorded = _further(units, np.flatnonzero(wanted & carried & numbered), offsets)
    fresh = _further(units, np.flatnonzero(wanted & ~carried), None)
    parents = np.concatenate([recorded[0], fresh[0]])
    if not len(parents):
        return plain, carried
    source = np.concatenate([np.arange(units.num_rows), parents])
    order = np.argsort(source, kind="stable")
    made = {
        name: pa.chunked_array([units.column(name), *(part[i] for part in (recorded, fresh))])
        for i, name in enumerate(("topic", "queue_id", "queue_offset", "skipped"), 1)
    }
    rows = plain.take(pa.array(source[order]))
    columns = [
        made[name].combine_chunks().take(pa.array(order)) if name in made else rows.column(name)
        for name in plain.schema.names
    ]
    return pa.RecordBatch.from_arrays(columns, schema=plain.schema), carried[source[order]]


def _wanted(units: pa.RecordBatch) -> _Bools:
    """Return the messages for which a broker reads INNER_MULTI_DISPATCH."""
    topics, names = units.column("topic"), units.column("dispatch_queues")
    wanted = np.asarray(names.is_valid()) & np.asarray(units.column("skipped").is_null())
    wanted &= ~np.asarray(pc.fill_null(pc.equal(topics, SCHEDULE_TOPIC), True))
    for prefix in _EXCLUDED:
        wanted &= ~np.asarray(pc.fill_null(pc.starts_with(topics, prefix), True))
    return np.asarray(wanted, np.bool_)


def _lists(texts: pa.StringArray) -> pa.ListArray:
    """Split as Java does: empty parts at the end do not count."""
    return pc.split_pattern(pc.utf8_rtrim(texts, _SEPARATOR), _SEPARATOR)


def _further(units: pa.RecordBatch, rows: _Ints, offsets: Any) -> tuple[_Ints, Any, Any, Any, Any]:
    """Return parent row, queue name, queue id, offset (0 if ``offsets`` is None) and the reason if skipped."""
    lists = _lists(units.column("dispatch_queues").take(pa.array(rows)))
    counts = np.asarray(pc.list_value_length(lists), np.int64)
    values = None
    if offsets is not None:
        values = _lists(offsets.take(pa.array(rows)))
        same = counts == np.asarray(pc.list_value_length(values), np.int64)
        rows, counts = rows[same], counts[same]
        lists, values = lists.filter(pa.array(same)), values.filter(pa.array(same))
    parents, names = np.repeat(rows, counts), lists.flatten()
    lmq = np.asarray(pc.starts_with(names, _LMQ), np.bool_)
    ids = np.where(lmq, 0, np.asarray(units.column("queue_id").fill_null(0))[parents]).astype(np.int32)
    numbers = np.zeros(len(parents), np.int64) if values is None else np.asarray(values.flatten().cast(pa.int64()))
    found, first = _entered(units, parents, names, ids)
    again = (found != first) & (numbers[found] == numbers[first]) & (values is not None) & lmq[found]
    kept, again = found[(found == first) | again], again[(found == first) | again]
    skipped = pc.if_else(pa.array(again), NAMED_AGAIN, pa.scalar(None, pa.string()))
    return parents[kept], names.take(pa.array(kept)), pa.array(ids[kept]), pa.array(numbers[kept]), skipped


def _entered(
    units: pa.RecordBatch, parents: _Ints, names: pa.StringArray, ids: npt.NDArray[np.int32]
) -> tuple[_Ints, _Ints]:
    """Return the further queues with valid names, and for each the first time that its message names it."""
    own = units.column("topic").take(pa.array(parents))
    own_ids = np.asarray(units.column("queue_id").fill_null(0))[parents]
    good = ~np.asarray(pc.match_substring(names, "/")) & (np.asarray(pc.binary_length(names)) > 0)
    good &= ~(np.asarray(pc.equal(names, own)) & (ids == own_ids))
    found = np.flatnonzero(good)
    if not len(found):
        return found, found
    codes = np.asarray(names.dictionary_encode().indices, np.int64)
    keys = np.stack([parents[found], codes[found], ids[found].astype(np.int64)], axis=1)
    _, first, same = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    return found, found[first[same.reshape(-1)]]
