"""Consume queue units as RocketMQ keeps them on disk."""

from __future__ import annotations

from typing import Any

import numpy as np

from dledger_core.rocketmq.layout import UNIT

__all__ = ["encode_units"]


def encode_units(physical_offsets: Any, sizes: Any, tags_codes: Any) -> bytes:
    """Returns the units of one queue, slot by slot, 20 bytes each.

    Args:
        physical_offsets: integers, shape (n,); the entry's position + 48.
        sizes: integers, shape (n,); bytes of the message record.
        tags_codes: integers, shape (n,).
    """
    units = np.empty(len(sizes), UNIT)
    units["physical_offset"] = physical_offsets
    units["size"] = sizes
    units["tags_code"] = tags_codes
    return units.tobytes()
