"""CRC columns against zlib, one body at a time."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dledger_core import checksum


def column(bodies: list[bytes]) -> tuple[bytes, np.ndarray, np.ndarray]:
    lengths = np.array([len(b) for b in bodies], np.uint32)
    return b"".join(bodies), lengths, np.array([zlib.crc32(b) for b in bodies], np.uint32)


@given(st.lists(st.binary(max_size=30), max_size=20))
def test_columns_equal_zlib(bodies: list[bytes]) -> None:
    blob, lengths, crcs = column(bodies)
    assert checksum.crc32_column(blob, lengths).tolist() == crcs.tolist()
    assert checksum.crc32_list(bodies).tolist() == crcs.tolist()
    assert checksum.crc32(blob) == zlib.crc32(blob)
    assert checksum.first_mismatch(blob, lengths, crcs) is None


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 70), st.randoms(use_true_random=False))
def test_the_fold_equals_zlib(count: int, length: int, chance: object) -> None:
    bodies = [chance.randbytes(length) for _ in range(count)]
    blob, lengths, crcs = column(bodies)
    assert checksum._fold(crcs, length) == zlib.crc32(blob)
    assert checksum.first_mismatch(blob, lengths, crcs) is None


@pytest.mark.parametrize("count", [63, 64, 65, 128, 131])
def test_each_flipped_byte_is_found(count: int) -> None:
    bodies = [bytes([n, n ^ 255, 7]) for n in range(count)]
    blob, lengths, crcs = column(bodies)
    for at in range(len(blob)):
        damaged = bytearray(blob)
        damaged[at] ^= 1 << at % 8
        assert checksum.first_mismatch(damaged, lengths, crcs) == at // 3
    for at in range(count):
        wrong = crcs.copy()
        wrong[at] ^= 1 << at % 32
        assert checksum.first_mismatch(blob, lengths, wrong) == at


def test_crcs_swapped_between_bodies_are_found() -> None:
    blob, lengths, crcs = column([bytes([n]) * 4 for n in range(100)])
    crcs[[3, 90]] = crcs[[90, 3]]
    assert checksum.first_mismatch(blob, lengths, crcs) == 3
    blob, lengths, crcs = column([b""] * 100)
    assert checksum.first_mismatch(blob, lengths, crcs) is None
    crcs[50] = 1
    assert checksum.first_mismatch(blob, lengths, crcs) == 50
