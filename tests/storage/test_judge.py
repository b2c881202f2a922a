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

FIRST, TERM, POSITION, BAD = 10, 3, 4800, 2
BODIES = [b"one", b"two", b"three", b"four"]
NATIVE = Rules(marked_from=0, cross_checked_to=1 << 62)


def records(bodies: list[bytes] = BODIES, time_ms: int = 1001) -> Records:
    place = {"first_index": FIRST, "term": TERM, "position": POSITION, "segment_bytes": 1 << 20}
    return encode(Columns.from_bodies(bodies), timestamp_ms=time_ms, **place)


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
    return first_fault(found, FIRST, rules, positions=found.starts + POSITION, term=TERM, **more)


def at_bad(fault: Fault | None) -> tuple[int, Fault] | None:
    return None if fault is None else (BAD, fault)


JAVA_FIELDS = {"flags": 0, "crc": 0}


@pytest.mark.parametrize(
    ("fields", "rules", "fault"),
    [
        ({}, NATIVE, None),
        ({"magic": 2}, NATIVE, None),
        ({"magic": 0}, NATIVE, Fault.HEADER),
        ({"magic": 4}, NATIVE, Fault.HEADER),
        ({"size": 52}, NATIVE, Fault.HEADER),
        ({"length": 4}, NATIVE, Fault.HEADER),
        ({"length": -3}, NATIVE, Fault.HEADER),
        ({"term": -1}, NATIVE, Fault.HEADER),
        ({"index": -1}, NATIVE, Fault.HEADER),
        ({"position": POSITION}, NATIVE, Fault.HEADER),
        ({"flags": BATCH_END}, NATIVE, Fault.HEADER),
        ({"index": FIRST + BAD + 1}, NATIVE, Fault.INDEX),
        ({"index": FIRST + BAD - 1}, NATIVE, Fault.INDEX),
        ({"term": TERM - 1}, NATIVE, Fault.TERM),
        ({"crc": 5}, NATIVE, Fault.BODY),
        ({"crc": 0}, NATIVE, Fault.BODY),
        ({"position": 7}, JAVA_B, None),
        (JAVA_FIELDS, JAVA_B, None),
        (JAVA_FIELDS, NATIVE, Fault.HEADER),
        (JAVA_FIELDS, Rules(marked_from=FIRST + BAD + 1), None),
        ({"flags": 0, "crc": 5}, JAVA_B, Fault.BODY),
    ],
)
def test_first_fault_names_the_evidence_that_the_writer_left(
    fields: dict[str, int], rules: Rules, fault: Fault | None
) -> None:
    found = changed(**fields)
    assert fault_of(found, rules) == at_bad(fault)
    single = [Header.unpack(found.data, int(start)).is_well_formed for start in found.starts]
    assert found.well_formed().tolist() == single, "the rules of a header and of a column agree"


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
    assert fault_of(records(), rules, rows=rows) == at_bad(fault)


def test_first_fault_finds_the_earliest_of_several() -> None:
    data = bytearray(changed(magic=0).data)
    data[HEADER_BYTES] ^= 1
    wrong = Records(records().sizes, bytes(data))
    assert fault_of(wrong) == (0, Fault.BODY)
    assert fault_of(wrong, body_crc=False) == (BAD, Fault.HEADER)


@pytest.mark.parametrize(("fields", "fault"), [({}, None), (JAVA_FIELDS, Fault.PARTIAL)])
def test_first_fault_requires_a_crc_for_bytes_that_the_file_lacks(fields: dict[str, int], fault: Fault | None) -> None:
    in_file = int(records().starts[BAD]) + HEADER_BYTES
    assert fault_of(changed(**fields).slice(0, BAD + 1), JAVA_B, bytes_in_file=in_file) == at_bad(fault)


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
    assert verdict(position, covered_end=500, written_end=1000, unsynced_bytes_max=limit) is expected


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
    found = records(bodies, time_ms)
    headers = found.headers.copy()
    headers["flags"] = [time_ms | (BATCH_END if row in ends else 0) for row in range(len(bodies))]
    assert complete_end(Records(found.sizes, found.data, headers)) == expected


def test_batch_ends_are_all_records_without_flags() -> None:
    found = records()
    headers = found.headers.copy()
    headers["flags"] = np.uint64(0)
    assert batch_ends(Records(found.sizes, found.data, headers)).tolist() == [0, 1, 2, 3]
