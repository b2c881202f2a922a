"""Tags codes in ``consumequeue_ext``, by the addresses in a consume queue's units."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from dledger_core.rocketmq import ext_tags_codes


def test_addresses_are_replaced_by_the_tags_codes_of_their_units(tmp_path: Path) -> None:
    """Two files of 64 bytes: a file ends with a size of -1 where a unit does not fit; a bit map makes units longer."""
    queue, ext = tmp_path / "consumequeue" / "T" / "3", tmp_path / "consumequeue_ext" / "T" / "3"
    ext.mkdir(parents=True)
    first = struct.pack(">hqqh", 20, 1, 9, 0) + struct.pack(">hqqh4s", 24, -2, 9, 4, b"bits") + struct.pack(">h", -1)
    (ext / f"{64:020d}").write_bytes(first.ljust(64, b"\0"))
    (ext / f"{128:020d}").write_bytes(struct.pack(">hqqh", 20, 3, 9, 0).ljust(30, b"\0"))
    offsets = [64, 84, 108, 128, 148, 140, 0, 4000]
    codes = np.array([5, -7, *(offset - (1 << 63) for offset in offsets)], np.int64)
    found, lost = ext_tags_codes(queue, codes)
    assert found[~lost].tolist() == [5, -7, 1, -2, 3]
    assert lost.tolist() == [False, False, False, False, True, False, True, True, True, True]
    assert ext_tags_codes(tmp_path / "consumequeue" / "U" / "0", codes)[1].sum() == len(offsets)
