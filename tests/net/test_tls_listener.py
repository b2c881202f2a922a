"""Rates of handshakes."""

from __future__ import annotations

from dledger_core.net.tls_listener import HandshakeLimits, HandshakeRate

LIMITS = HandshakeLimits(per_s=10, burst=5, address_per_s=2, address_burst=3)


def test_handshakes_are_limited_in_total() -> None:
    rate = HandshakeRate(LIMITS, 0.0)
    assert [rate.wait_s(0.0) for _ in range(5)] == [0.0] * 5
    wait_s = rate.wait_s(0.0)
    assert wait_s > 0
    assert rate.wait_s(wait_s) == 0.0


def test_one_address_does_not_use_up_the_rate_of_others() -> None:
    rate = HandshakeRate(LIMITS, 0.0)
    assert [rate.admits("10.0.0.1", 0.0) for _ in range(5)] == [True, True, True, False, False]
    assert rate.admits("10.0.0.2", 0.0)
    assert rate.admits("10.0.0.1", 0.5)


def test_addresses_of_one_ipv6_network_count_as_one() -> None:
    rate = HandshakeRate(LIMITS, 0.0)
    assert [rate.admits(f"2001:db8::{number}", 0.0) for number in range(4)] == [True, True, True, False]
    assert rate.admits("2001:db8:0:1::1", 0.0)


def test_many_addresses_leave_no_unlimited_table() -> None:
    rate = HandshakeRate(LIMITS, 0.0)
    assert all(rate.admits(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}", 0.0) for number in range(20_000))
