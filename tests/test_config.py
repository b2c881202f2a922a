from __future__ import annotations

import pytest

from dledger_core import ConfigError
from dledger_core.config import format_peers, parse_duration, parse_groups, parse_peers


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


ADDRESSES = [("127.0.0.1", 1), ("db-1.example.com", 2), ("::1", 3), ("localhost", 4)]


@pytest.mark.parametrize(
    ("text", "needs_ids", "expected"),
    [
        ("a-127.0.0.1:1; b-db-1.example.com:2;c-[::1]:3;d-localhost:4;", True, "abcd"),
        ("a-127.0.0.1:1,b-db-1.example.com:2,c-::1:3 , d-localhost:4", True, "abcd"),
        ("a-127.0.0.1:1,b-db-1.example.com:2;[::1]:3,d-localhost:4", False, "ab d"),
        ("127.0.0.1:1,[db-1.example.com]:2,::1:3,localhost:4", False, "    "),
    ],
)
def test_peers_have_ids_or_addresses_alone_in_their_order(text: str, needs_ids: bool, expected: str) -> None:
    found = parse_peers(text, needs_ids=needs_ids)
    assert [(peer.host, peer.port) for peer in found] == ADDRESSES
    assert [str(peer.node_id) if peer.has_id else " " for peer in found] == list(expected)
    assert parse_peers(format_peers(found[:1]), needs_ids=needs_ids) == found[:1]


@pytest.mark.parametrize(
    ("text", "needs_ids"),
    [
        *((text, needs_ids) for text in ("", " ;,", "a-h", "h:0", "h:x", "-h:1") for needs_ids in (True, False)),
        ("h:1", True),
        ("a-h:1;[h]:2", True),
        ("a:h:1", False),
        ("a-h:1 b-i:2", True),  # only spaces between them
        ("h:1 i:2", False),
        ("http://h:1", False),
        ("h:1,a-h:1", False),
        ("db-1.example.com:1,db-2.example.com:1", False),  # the id "db", twice
    ],
)
def test_peers_are_rejected_when_empty_malformed_or_repeated(text: str, needs_ids: bool) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_peers(text, needs_ids=needs_ids)
    assert raised.value.remedy


@pytest.mark.parametrize("text", ["0", "0s", "0 seconds"])
def test_zero_duration_is_accepted_on_request(text: str) -> None:
    assert parse_duration(text, allow_zero=True) == 0


def test_groups_keep_their_order() -> None:
    assert parse_groups("orders, payments,audit") == ("orders", "payments", "audit")


@pytest.mark.parametrize("text", ["", " , ", "a,b,a", "a,../b"])
def test_groups_are_rejected_when_empty_repeated_or_malformed(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_groups(text)
