from __future__ import annotations

import pytest

from dledger_core import ConfigError, parse_duration, parse_groups


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("500ms", 0.5),
        ("0.5 seconds", 0.5),
        ("10 seconds", 10),
        ("1 Second", 1),
        ("30s", 30),
        (" 15m ", 900),
        ("2 minutes", 120),
        ("1h 30m", 5400),
        ("1h30m", 5400),
        ("7d", 604_800),
        ("2w", 1_209_600),
    ],
)
def test_duration_is_read_with_each_unit(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text",
    ["", "10", "s", "-1s", "1 fortnight", "1e3s", "nan s", "inf s", "1s x", "0s", "0", "101 d 1", "99999d", "\u0661s"],
)
def test_duration_is_rejected_when_malformed_or_out_of_range(text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_duration(text, "--every")
    assert raised.value.what.startswith("--every: ")


@pytest.mark.parametrize("text", ["0", "0s", "0 seconds"])
def test_zero_duration_is_accepted_on_request(text: str) -> None:
    assert parse_duration(text, allow_zero=True) == 0


def test_groups_keep_their_order() -> None:
    assert parse_groups("orders, payments,audit") == ("orders", "payments", "audit")


@pytest.mark.parametrize("text", ["", " , ", "a,b,a", "a,../b"])
def test_groups_are_rejected_when_empty_repeated_or_malformed(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_groups(text)
