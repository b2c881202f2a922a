"""Token buckets, and lines of a log that strangers cause: limited in number, and each of them one line."""

from __future__ import annotations

import logging

import pytest

from dledger_core.errors import DLedgerError, ProtocolError, one_line
from dledger_core.net.hello import Hello
from dledger_core.net.limits.rates import BurstFilter, TokenBucket, TokenBuckets


def test_bucket_is_refilled_at_its_rate() -> None:
    bucket = TokenBucket(10, 5, 0.0)
    assert [bucket.take(0.0) for _ in range(5)] == [0.0] * 5
    wait_s = bucket.take(0.0)
    assert wait_s > 0
    assert bucket.take(wait_s) == 0.0


def test_one_key_does_not_use_up_the_tokens_of_others() -> None:
    buckets = TokenBuckets(2, 3)
    assert [buckets.take("10.0.0.1", 0.0) == 0 for _ in range(5)] == [True, True, True, False, False]
    assert buckets.take("10.0.0.2", 0.0) == 0
    assert buckets.take("10.0.0.1", 0.5) == 0


def test_many_keys_leave_no_unlimited_table() -> None:
    buckets = TokenBuckets(2, 3)
    assert not any(buckets.take(number, 0.0) for number in range(20_000))


def passed(filter_: BurstFilter, messages: list[str]) -> list[str]:
    records = [logging.LogRecord("x", logging.WARNING, "", 0, message, ("argument",), None) for message in messages]
    return [str(record.msg) for record in records if filter_.filter(record)]


def test_burst_of_one_kind_is_limited_and_others_pass() -> None:
    found = passed(BurstFilter(3), ["closed: %s"] * 1000 + ["refused: %s"])
    assert found == ["closed: %s"] * 3 + ["refused: %s"]


def test_lines_that_were_left_out_are_counted_in_the_next_one() -> None:
    now = 0.0
    limited = BurstFilter(3, period_s=10, clock=lambda: now)
    assert len(passed(limited, ["closed: %s"] * 8)) == 3
    now = 10.0
    assert passed(limited, ["closed: %s"] * 2) == ["closed: %s (5 more like this were not logged)", "closed: %s"]
    now = 20.0
    assert passed(limited, ["closed: %s"]) == ["closed: %s"]


@pytest.mark.parametrize("text", ["a\nb", "a\r\x1b[2Jb", "a\u2028b", "a\udcffb", "\0"])
def test_error_is_one_line_whatever_it_quotes(text: str) -> None:
    for error in (
        DLedgerError(text),
        DLedgerError("x", text),
        DLedgerError("x", "", text),
        DLedgerError("x", "", "", {"v": text}),
    ):
        assert str(error).isprintable()
        assert str(error).splitlines() == [str(error)]


def test_long_text_of_a_stranger_is_cut() -> None:
    assert len(str(DLedgerError("x" * 60_000, "y" * 60_000, "", {"v": "z" * 60_000}))) < 2100
    assert one_line("müßig") == "müßig"


@pytest.mark.parametrize("node_id", ["n0\nerror: forged", "n" * 65, "n-0", ""])
def test_hello_with_malformed_node_id_is_rejected(node_id: str) -> None:
    with pytest.raises(ProtocolError) as refused:
        Hello.from_header(Hello(role="peer", node_id=node_id).to_header())
    assert len(str(refused.value)) < 500
