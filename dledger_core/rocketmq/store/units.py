"""Consume queue units as RocketMQ keeps them on disk: 20 bytes a slot, all integers big-endian.

::

    0   8  physical offset of the message (entry position + 48)
    8   4  size of the message record
    12  8  tags code
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["PREFILL", "UNIT", "UNIT_BYTES", "decode_units", "encode_units"]

UNIT: Final = np.dtype([("physical_offset", ">i8"), ("size", ">i4"), ("tags_code", ">i8")])
"""One slot of a consume queue file."""
UNIT_BYTES: Final = UNIT.itemsize
PREFILL: Final = np.array((0, 0x7FFFFFFF, 0), UNIT)
"""RocketMQ's content of the slots before a queue's first unit."""


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


def decode_units(data: bytes | bytearray | memoryview) -> npt.NDArray[Any]:
    """Returns the complete units in ``data``, dtype UNIT, shape (n,); a last, partial one is left out."""
    return np.frombuffer(data, UNIT, len(data) // UNIT_BYTES)
