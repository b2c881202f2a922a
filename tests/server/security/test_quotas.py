"""Quotas of principals: one principal at its limit, and another one that is served meanwhile."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from dledger_core.certificates import CertificateFiles, digest_of, write_certificates
from dledger_core.config import Limits
from dledger_core.connect import AsyncClient
from dledger_core.errors import QuotaExceededError
from dledger_core.net import messages
from dledger_core.net.protocol import Type
from dledger_core.server.maintenance.retention import Pins
from dledger_core.server.services.quotas import Quota, Quotas, Tenant
from tests.server.security.secure_group import SecureGroup
from tests.support.server_group import RawClient, eventually, run

pytest.importorskip("cryptography")

LIMITS = Limits(
    principal_connections=6,
    principal_append_bytes=1 << 20,
    principal_watches=3,
    principal_awaited_groups=3,
    principal_long_polls=3,
    principal_pins=2,
)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> CertificateFiles:
    files = write_certificates(tmp_path_factory.mktemp("tls"), [("n0", ["127.0.0.1"])])
    entries = [
        f'["{name}"]\ntoken-sha256 = ["{digest_of(name)}"]\nread = ["*"]\nappend = ["*"]\n' for name in ("a", "b")
    ]
    files.tokens.write_text("".join(entries))
    return files


class QuotaGroup(SecureGroup):
    """One node with small quotas."""

    def __init__(self, directory, made: CertificateFiles) -> None:
        super().__init__(directory, made, limits=LIMITS)

    @property
    def quotas(self) -> Quotas:
        return self.nodes["n0"].service.quotas


async def poll(client: RawClient):
    header = messages.READ.encode(messages.ReadRequest(start=1000, end=1001, wait_ms=20_000))
    return await client.ask(Type.READ, **{key: value for key, value in header.items() if key != "t"})


def test_waiting_reads_of_one_principal_are_limited_and_others_are_served(tmp_path, made) -> None:
    async def test() -> None:
        async with QuotaGroup(tmp_path, made) as group:
            await group.leader()
            greedy, other = await group.raw("a"), await group.raw("b")
            waiting = [asyncio.ensure_future(poll(greedy)) for _ in range(3)]
            tenant = group.quotas.tenant("a")
            assert tenant is not None
            await eventually(lambda: tenant.taken(Quota.LONG_POLLS) == 3)
            with pytest.raises(QuotaExceededError) as raised:
                await poll(greedy)
            assert raised.value.values["quota"] == "long_polls"
            assert group.quotas.refused[Quota.LONG_POLLS] == 1
            also = asyncio.ensure_future(poll(other))
            await eventually(lambda: group.quotas.tenant("b").taken(Quota.LONG_POLLS) == 1)
            for task in (*waiting, also):
                task.cancel()
            await greedy.channel.close()
            await eventually(lambda: tenant.taken(Quota.LONG_POLLS) == 0)

    run(test())


def test_connections_of_one_principal_are_limited(tmp_path, made) -> None:
    async def test() -> None:
        async with QuotaGroup(tmp_path, made) as group:
            clients = [await group.raw("a") for _ in range(LIMITS.principal_connections)]
            with pytest.raises(QuotaExceededError):
                await group.raw("a")
            await group.raw("b")
            await clients[0].channel.close()
            tenant = group.quotas.tenant("a")
            await eventually(lambda: tenant.taken(Quota.CONNECTIONS) < LIMITS.principal_connections)
            await group.raw("a")

    run(test())


def test_appends_over_the_quota_are_retried_by_the_client(tmp_path, made) -> None:
    async def test() -> None:
        async with (
            QuotaGroup(tmp_path, made) as group,
            AsyncClient(group.peers, tls=group.tls, token="a", timeout_ms=60_000) as client,
        ):
            done = await asyncio.gather(*(client.append([bytes(300_000)]) for _ in range(12)))
            assert len({each.first_index for each in done}) == 12
            assert group.quotas.tenant("a").taken(Quota.APPEND_BYTES) == 0

    run(test())


def test_pins_of_one_principal_are_limited_and_its_own() -> None:
    pins = Pins(LIMITS)
    pins.set(["x", 1000], 5, 0, "a")
    pins.set(["y", 1000], 6, 0, "a")
    pins.set(["x", 1000], 7, 0, "a")
    with pytest.raises(QuotaExceededError):
        pins.set(["z", 1000], 8, 0, "a")
    pins.set(["x", 0], 0, 0, "b")  # no pin of this name is b's
    pins.set(["x", 1000], 9, 0, "b")
    assert sorted(pins.starts(0)) == [6, 7, 9]


def test_one_request_above_a_quota_is_served_alone() -> None:
    tenant = Tenant("a", LIMITS, Counter())
    tenant.take(Quota.AWAITED_GROUPS, 100)
    with pytest.raises(QuotaExceededError):
        tenant.take(Quota.AWAITED_GROUPS)
    tenant.give(Quota.AWAITED_GROUPS, 100)
    assert tenant.is_idle


def test_connection_without_principal_has_no_quota() -> None:
    assert Quotas(LIMITS).tenant("") is None
