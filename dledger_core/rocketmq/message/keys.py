"""The keys under which a broker finds messages: the unique key of each, and the words of its KEYS."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dledger_core.rocketmq.message.columns import text_column
from dledger_core.rocketmq.message.properties import java_hash, parse_properties
from dledger_core.rocketmq.message.records import Located

_I64 = npt.NDArray[np.int64]
_ROLLED_BACK: Final = 0xC


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys under which a broker finds messages; columns have shape (k,), in log order.

    Attributes:
        hashes: int64: Java's hash of ``topic#key``.
        positions: int64: of the messages.
        stored_ms: int64: their store time.
    """

    hashes: _I64
    positions: _I64
    stored_ms: _I64


def keys_of(located: Located, positions: _I64) -> Keys:
    """Return the keys of messages: each one's unique key, then each word of its KEYS; none of a rollback.

    Args:
        located: the messages.
        positions: int64, shape (m,): their physical offsets.
    """
    pairs = parse_properties(located.data, located.properties, located.properties_bytes)
    unique, words = pairs.values_of("UNIQ_KEY"), pairs.values_of("KEYS")
    indexed = pa.array((located.sys_flags & _ROLLED_BACK) != _ROLLED_BACK)
    lists = pc.split_pattern(pc.fill_null(words, ""), " ")
    rows = np.repeat(np.arange(located.count), np.asarray(pc.list_value_length(lists)))
    texts = pa.concat_arrays([unique.filter(indexed), lists.flatten()])
    owners = np.concatenate([np.flatnonzero(np.asarray(indexed)), rows])
    good = np.asarray(pc.greater(pc.fill_null(pc.binary_length(texts), 0), 0)) & np.asarray(indexed)[owners]
    # A unique key may be empty text: a broker indexes it only if it is there, and no client writes an empty one.
    texts, owners = texts.filter(pa.array(good)), owners[good]
    order = np.argsort(owners, kind="stable")  # the unique key stays first
    owners, texts = owners[order], texts.take(pa.array(order))
    topics = text_column(located.data, located.topic, located.topic_bytes).take(pa.array(owners))
    hashes = java_hash(pc.binary_join_element_wise(topics, texts, "#"))
    hashes = np.where(hashes == -(1 << 31), 0, np.abs(hashes))
    stored: npt.NDArray[Any] = located.number("store_timestamp")
    return Keys(hashes, positions[owners], stored[owners])
