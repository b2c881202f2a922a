"""The judge of records as tables: which evidence is which fault, which fault is damage, where a log ends."""

from __future__ import annotations

import numpy as np
import pytest

from dledger_core.record import BATCH_END, HEADER_BYTES, Columns, Header, Records, encode, index_records
from dledger_core.storage.check.judge import (
    JAVA_B,
    Fault,
    Rules,
    Verdict,
    batch_ends,
    complete_end,
    first_fault,
    verdict,
)

FIRST, TERM, POSITION = 10, 3, 4800
BODIES = [b"one", b"two", b"three", b"four"]
NATIVE = Rules(marked_from=0, cross_checked_to=1 << 62)
BAD = 2


def records(bodies: list[bytes] = BODIES, *, time_ms: int = 1001) -> Records:
    return encode(
        Columns.from_bodies(bodies),
        first_index=FIRST,
        term=TERM,
        position=POSITION,
        timestamp_ms=time_ms,
        segment_bytes=1 << 20,
    )


def changed(**fields: int) -> Records:
    """Return records of which record ``BAD`` has other values in its header."""
    good = records()
    headers = good.headers.copy()
    for name, value in fields.items():
        headers[name][BAD] = value
    data = bytearray(good.data)
    start = int(good.starts[BAD])
    data[start : start + HEADER_BYTES] = headers[BAD].tobytes()
    return Records(good.sizes, bytes(data))


def fault_of(found: Records, rules: Rules = NATIVE, **more: object) -> tuple[int, Fault] | None:
    positions = records().starts + POSITION
    return first_fault(found, FIRST, rules, positions=positions, term=TERM, **more)


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({}, None),
        ({"magic": 2}, None),
        ({"magic": 0}, Fault.HEADER),
        ({"magic": 4}, Fault.HEADER),
        ({"size": 52}, Fault.HEADER),
        ({"length": 4}, Fault.HEADER),
        ({"term": -1}, Fault.HEADER),
        ({"index": -1}, Fault.HEADER),
        ({"position": POSITION}, Fault.HEADER),
        ({"flags": BATCH_END}, Fault.HEADER),
        ({"index": FIRST + BAD + 1}, Fault.INDEX),
        ({"index": FIRST + BAD - 1}, Fault.INDEX),
        ({"term": TERM - 1}, Fault.TERM),
        ({"crc": 5}, Fault.BODY),
        ({"crc": 0}, Fault.BODY),
    ],
    ids=str,
)
def test_first_fault_names_the_evidence(fields: dict[str, int], fault: Fault | None) -> None:
    assert fault_of(changed(**fields)) == (None if fault is None else (BAD, fault))


@pytest.mark.parametrize(
    ("fields", "rules", "fault"),
    [
        ({"position": 7}, JAVA_B, None),
        ({"flags": 0, "crc": 0}, JAVA_B, None),
        ({"flags": 0, "crc": 0}, NATIVE, Fault.HEADER),
        ({"flags": 0, "crc": 0}, Rules(marked_from=FIRST + BAD + 1), None),
        ({"flags": 0, "crc": 5}, JAVA_B, Fault.BODY),
    ],
)
def test_first_fault_follows_the_rules_of_the_writer(fields: dict[str, int], rules: Rules, fault: Fault | None) -> None:
    assert fault_of(changed(**fields), rules) == (None if fault is None else (BAD, fault))


@pytest.mark.parametrize(
    ("column", "value", "rules", "fault"),
    [
        ("term", TERM + 1, NATIVE, Fault.ROW),
        ("magic", 2, NATIVE, Fault.ROW),
        ("position", 0, NATIVE, None),
        ("term", TERM + 1, Rules(cross_checked_to=FIRST + BAD), None),
    ],
)
def test_first_fault_compares_the_index_row(column: str, value: int, rules: Rules, fault: Fault | None) -> None:
    rows = index_records(records())
    rows[column][BAD] = value
    if column == "position":
        rows["term"][BAD] = TERM + 1  # a row with another place proves nothing
    assert fault_of(records(), rules, rows=rows) == (None if fault is None else (BAD, fault))


def test_first_fault_finds_the_earliest_of_several() -> None:
    wrong = bytearray(changed(magic=0).data)
    wrong[HEADER_BYTES] ^= 1
    assert fault_of(Records(records().sizes, bytes(wrong))) == (0, Fault.BODY)
    assert fault_of(Records(records().sizes, bytes(wrong)), body_crc=False) == (BAD, Fault.HEADER)


@pytest.mark.parametrize(("fields", "fault"), [({}, None), ({"flags": 0, "crc": 0}, Fault.PARTIAL)])
def test_first_fault_requires_a_crc_for_bytes_that_the_file_lacks(fields: dict[str, int], fault: Fault | None) -> None:
    in_file = int(records().starts[BAD]) + HEADER_BYTES
    found = changed(**fields)
    head = Records(found.sizes[: BAD + 1], found.data[: int(found.starts[BAD + 1])])
    positions = head.starts + POSITION
    result = first_fault(head, FIRST, JAVA_B, positions=positions, term=TERM, bytes_in_file=in_file)
    assert result == (None if fault is None else (BAD, fault))


@pytest.mark.parametrize(
    ("position", "limit", "expected"),
    [
        (499, 100, Verdict.DAMAGED),
        (500, 100, Verdict.DAMAGED),
        (899, 100, Verdict.DAMAGED),
        (900, 100, Verdict.TORN),
        (500, None, Verdict.TORN),
        (499, None, Verdict.DAMAGED),
    ],
)
def test_verdict_is_damage_where_the_record_was_durable(position: int, limit: int | None, expected: Verdict) -> None:
    found = verdict(position, covered_end=500, written_end=1000, unsynced_bytes_max=limit)
    assert found is expected


@pytest.mark.parametrize(
    ("ends", "bodies", "time_ms", "expected"),
    [
        ([3], BODIES, 1001, 3),
        ([1], BODIES, 1001, 1),
        ([], BODIES, 1001, None),
        ([1, 3], [b"a", b"b", b"c", b""], 1001, 3),
        ([1, 3], [b"a", b"b", b"c", b""], 0x1200, 1),
    ],
    ids=["complete", "incomplete rest", "no end", "empty body", "torn time"],
)
def test_complete_end_is_the_last_complete_batch(
    ends: list[int], bodies: list[bytes], time_ms: int, expected: int | None
) -> None:
    found = records(bodies, time_ms=time_ms)
    headers = found.headers.copy()
    headers["flags"] = [time_ms | (BATCH_END if row in ends else 0) for row in range(len(bodies))]
    assert complete_end(Records(found.sizes, found.data, headers)) == expected


def test_batch_ends_are_all_records_without_flags() -> None:
    found = records()
    headers = found.headers.copy()
    headers["flags"] = 0
    assert batch_ends(Records(found.sizes, found.data, headers)).tolist() == [0, 1, 2, 3]


def test_header_and_column_rules_agree() -> None:
    for fields in ({}, {"magic": 0}, {"size": 52}, {"length": -3}, {"index": -1}, {"term": -1}):
        found = changed(**fields)
        single = [Header.unpack(found.data, int(start)).is_well_formed for start in found.starts]
        assert found.well_formed().tolist() == single
        assert np.all(found.well_formed()) == (not fields)
