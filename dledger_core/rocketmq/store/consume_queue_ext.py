"""Extensions of consume queues (``consumequeue_ext``), which a broker with ``enableConsumeQueueExt=true`` writes.

The tags code of a consume queue's unit is then an address: the unit's offset in the extension files - 2^63. There, all
integers are big-endian::

    0   2  size of the unit, 20 + bits
    2   8  tags code
    10  8  store time of the message
    18  2  bytes of the filter's bit map
    20  n  bit map

Source: RocketMQ's ``ConsumeQueueExt``. A broker that does not find a unit sends the message without a filter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dledger_core.record import is_segment_name

EXT_DIRECTORY: Final = "consumequeue_ext"
"""Directory next to ``consumequeue``."""
EXT_ADDRESS_MAX: Final = -(1 << 31) - 1
"""A tags code at or below is an address."""
_UNIT: Final = np.dtype([("size", ">i2"), ("tags_code", ">i8"), ("store_time", ">i8"), ("bits", ">i2")])

_Codes = npt.NDArray[np.int64]


def ext_tags_codes(queue: Path, tags_codes: _Codes) -> tuple[_Codes, npt.NDArray[np.bool_]]:
    """Return the tags codes with those of the extension in place of addresses, and which addresses have no unit.

    Args:
        queue: directory of the queue, ``consumequeue/TOPIC/QUEUE``.
        tags_codes: of its units, shape (n,).
    """
    found, lost = tags_codes.copy(), tags_codes <= EXT_ADDRESS_MAX
    rows = np.flatnonzero(lost)
    if not len(rows):
        return found, lost
    offsets = tags_codes[rows] + np.int64(-(1 << 63))  # wraps around: the address + 2^63
    files = _files(queue.parent.parent.parent / EXT_DIRECTORY / queue.parent.name / queue.name)
    starts = np.array([int(path.name) for path in files], np.int64)
    at = np.searchsorted(starts, offsets, side="right") - 1
    for number, path in enumerate(files):
        here = np.flatnonzero(at == number)
        if len(here):
            codes, intact = _read(path, offsets[here] - starts[number])
            found[rows[here[intact]]] = codes[intact]
            lost[rows[here[intact]]] = False
    return found, lost


def _files(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if is_segment_name(path.name) and path.is_file())


def _read(path: Path, places: Any) -> tuple[_Codes, npt.NDArray[np.bool_]]:
    """Return the tags codes of the units at these bytes of a file, and whether there is a unit."""
    data = np.fromfile(path, np.uint8)
    intact = places + _UNIT.itemsize <= len(data)
    codes = np.zeros(len(places), np.int64)
    if intact.any():
        bytes_of = data[places[intact][:, None] + np.arange(_UNIT.itemsize)]
        units = np.ascontiguousarray(bytes_of).view(_UNIT)[:, 0]
        codes[intact] = units["tags_code"]
        intact[intact] = units["size"] >= _UNIT.itemsize
    return codes, intact
