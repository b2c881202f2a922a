"""A record without a body has no CRC that would betray a torn header: its append time does.

The time's last byte is never zero there, so that a write that stopped inside the time, before the zeros of a fresh
segment, shows.
"""

from __future__ import annotations

import pytest

from dledger_core.ids import Term
from dledger_core.raft import HardState
from dledger_core.record import HEADER_BYTES, segment_name
from tests.support.faulty_files import FaultyFiles
from tests.support.logs import STORE, append, open_log, place

DATA = STORE / "data" / segment_name(0)
TIMES = [1, 0x18BCFE50000, 0x18C00000000, 0x18BCFE56800, 0x18BCFE568FF]


@pytest.mark.slow
@pytest.mark.parametrize("now_ms", TIMES)
@pytest.mark.parametrize("kind", ["NOOP", "empty body", "empty body last"])
def test_a_torn_time_is_a_torn_tail(kind: str, now_ms: int) -> None:
    files = FaultyFiles()
    log = open_log(files)
    log.persist(HardState(Term(1), None), None, ())
    append(log, [b"before"], now_ms=1)
    bodies = {"NOOP": [], "empty body": [b""], "empty body last": [b"some", b""]}[kind]
    batch = place(log, 1, bodies, control=b"" if kind == "NOOP" else None, now_ms=now_ms)
    log.persist(None, None, [batch])
    end = int(log.staged_end)
    files.kill()
    whole = bytes(files.content(DATA)[:end])
    for kept in range(HEADER_BYTES):
        torn = files.clone()
        at = end - HEADER_BYTES + kept
        torn.content(DATA)[at:end] = bytes(end - at)
        found = open_log(torn)
        if bytes(torn.content(DATA)[:end]) == whole:
            assert found.last_index() == batch.last_index
        else:
            assert found.last_index() == 0, f"{kept} bytes of the last header were believed"


def test_the_time_still_never_falls() -> None:
    files = FaultyFiles()
    log = open_log(files)
    now_ms = 0x18BCFE50000
    for bodies in ([b"a"], [b""], [b"b"], [b""]):
        append(log, bodies, now_ms=now_ms)
    times = [int(mark) & ((1 << 48) - 1) for mark in log.read(0, 4, 1 << 20).headers["flags"]]
    assert times == sorted(times)
    assert max(times) - now_ms <= 1
