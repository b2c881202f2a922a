from __future__ import annotations

import pytest

from spark_connector.times import parse_duration, parse_time


@pytest.mark.parametrize(
    ("text", "millis"),
    [
        ("0", 0),
        (" 1700000000123 ", 1_700_000_000_123),
        ("2023-11-14T22:13:20.123Z", 1_700_000_000_123),
        ("2023-11-14T23:13:20.123+01:00", 1_700_000_000_123),
        ("2023-11-14 22:13:20", 1_700_000_000_000),
        ("2023-11-14", 1_699_920_000_000),
    ],
)
def test_times(text: str, millis: int) -> None:
    assert parse_time(text) == millis


@pytest.mark.parametrize("text", ["", "now", "-5", "1.5", "12:00", "1969-12-31", "9" * 16])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(ValueError, match=r"milliseconds since the epoch|before 1970"):
        parse_time(text)


@pytest.mark.parametrize(
    ("text", "millis"), [("15m", 900_000), ("30s", 30_000), ("500 ms", 500), ("1h", 3_600_000), ("2 Days", 172_800_000)]
)
def test_durations(text: str, millis: int) -> None:
    assert parse_duration(text) == millis


@pytest.mark.parametrize("text", ["", "15", "0s", "1 week", "1m30s", "-1s"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="it must be a duration like 15m"):
        parse_duration(text)
