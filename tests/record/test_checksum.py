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
@given(st.integers(1, 300), st.integers(1, 70), st.integers(0, 70), st.booleans(), st.randoms(use_true_random=False))
def test_first_mismatch_checks_a_column(count: int, length: int, first: int, vary: bool, chance: object) -> None:
    """Of one length, of one but the first (a control entry), of any."""
    bodies = [chance.randbytes(first), *(chance.randbytes(length + vary * chance.randrange(9)) for _ in range(count))]
    blob, lengths, crcs = column(bodies)
    assert checksum.crc32_column(blob, lengths).tolist() == crcs.tolist()
    assert checksum.first_mismatch(blob, lengths, crcs) is None
    at = chance.randrange(len(bodies))
    crcs[at] ^= 1 << chance.randrange(32)
    assert checksum.first_mismatch(blob, lengths, crcs) == at


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 3, 700_000])
@pytest.mark.parametrize("length", [4, 1000, 700_000])
def test_first_mismatch_checks_columns_larger_than_a_chunk(first: int, length: int) -> None:
    count = max(70, 2_000_000 // length)
    blob, lengths, crcs = column([bytes([n % 251]) * (length if n else first) for n in range(count)])
    view = memoryview(blob)
    assert checksum.first_mismatch(view, lengths, crcs) is None
    for at in (0, 1, 2, count // 2, count - 1):
        wrong = crcs.copy()
        wrong[at] += 1
        assert checksum.first_mismatch(view, lengths, wrong) == at


def test_match_gathers_bodies() -> None:
    for length in (4, 100, 700_000):
        bodies = np.random.default_rng(1).integers(0, 256, (70, length + 9), np.uint8)[:, 9:]
        crcs = np.array([zlib.crc32(body.tobytes()) for body in bodies], np.uint32)
        out = np.zeros_like(bodies, order="C")
        assert checksum.match(bodies, crcs, out)
        assert (out == bodies).all()
        crcs[41] ^= 1
        assert not checksum.match(bodies, crcs, out)


def test_first_mismatch_calls_no_crc_per_body(monkeypatch: pytest.MonkeyPatch) -> None:
    for spread in (1, 50):
        blob, lengths, crcs = column([bytes(8) * (5 + n % spread) for n in range(1000)])
        with monkeypatch.context() as patched:
            patched.setattr(checksum, "crc32_column", None)
            assert checksum.first_mismatch(blob, lengths, crcs) is None


@pytest.mark.parametrize("width", [3, 5])
@pytest.mark.parametrize("count", [63, 64, 65, 128, 131])
def test_first_mismatch_finds_each_flipped_byte(count: int, width: int) -> None:
    bodies = [bytes([n, n ^ 255, 7, 3, 2][:width]) for n in range(count)]
    blob, lengths, crcs = column(bodies)
    for at in range(len(blob)):
        damaged = bytearray(blob)
        damaged[at] ^= 1 << at % 8
        assert checksum.first_mismatch(damaged, lengths, crcs) == at // width
    for at in range(count):
        wrong = crcs.copy()
        wrong[at] ^= 1 << at % 32
        assert checksum.first_mismatch(blob, lengths, wrong) == at


def test_first_mismatch_finds_swapped_crcs() -> None:
    blob, lengths, crcs = column([bytes([n]) * 4 for n in range(100)])
    crcs[[3, 90]] = crcs[[90, 3]]
    assert checksum.first_mismatch(blob, lengths, crcs) == 3
    blob, lengths, crcs = column([b""] * 100)
    assert checksum.first_mismatch(blob, lengths, crcs) is None
    crcs[50] = 1
    assert checksum.first_mismatch(blob, lengths, crcs) == 50
