"""Whose queue offsets the messages of a store carry: a broker's, or none yet."""

from __future__ import annotations

from dledger_core.errors import CorruptRecordError
from dledger_core.rocketmq.message.decode import decode_messages
from dledger_core.rocketmq.message.layout import PHYSICAL_OFFSET_DELTA
from dledger_core.storage.files.log_info import LogMeta
from dledger_core.storage.read.store_reader import StoreReader

__all__ = ["broker_end_of"]


def broker_end_of(reader: StoreReader, meta: LogMeta | None) -> int | None:
    """Returns below which index a broker gave the queue offsets; None: it gave all.

    One that goes on with a store that was converted back does not know our records of it; but unlike what servers of
    ours append, each of its messages says where it lies.

    Args:
        reader: of the store.
        meta: what the store records of itself, if it is one of ours.
    """
    if meta is None:
        return None
    behind = max(meta.broker_end_index, int(reader.first_index))
    if meta.profile == "B" or behind > reader.last_index:
        return meta.broker_end_index
    try:
        entry = reader.read(behind, behind + 1, max_bytes=1)
    except CorruptRecordError:  # whoever reads the log will say so
        return meta.broker_end_index
    said = decode_messages(entry.column("body"), ["physical_offset"]).column("physical_offset")[0].as_py()
    return None if said == entry.column("position")[0].as_py() + PHYSICAL_OFFSET_DELTA else meta.broker_end_index
