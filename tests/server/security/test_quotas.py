"""Quotas of principals: one principal at its limit, and another one that is served meanwhile."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from dledger_core.certificates import CertificateFiles, digest_of, write_certificates
from dledger_core.config import Limits
from dledger_core.connect import AsyncClient
from dledger_core.errors import ProducerUnknownError, QuotaExceededError
from dledger_core.net import codec, messages
from dledger_core.net.credentials import Credentials
from dledger_core.net.frame import encode_frame
from dledger_core.net.hello import Hello
from dledger_core.net.limits.quotas import Quota, Quotas, Tenant
from dledger_core.net.protocol import Type
from dledger_core.record import Columns
from dledger_core.server.maintenance.retention import Pins
from dledger_core.server.services.row_quotas import RowQuota
from tests.server.security.secure_group import SecureGroup
from tests.support.server_group import RawClient, eventually, run

pytest.importorskip("cryptography")

LIMITS = Limits(
    principal_connections=6,
    principal_append_bytes=1 << 20,
    principal_watches=3,
    principal_awaited_groups=20,
    principal_long_polls=3,
    principal_digests=2,
    digests_at_once=3,
    principal_pins=2,
    principal_producers=3,
    principal_open_transactions=2,
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


async def wait_for_entry(client: RawClient):
    header = messages.AWAIT.encode(messages.AwaitRequest(count=1, wait_ms=20_000))
    payload = codec.seen_payload({"default": codec.SeenLog(1000)})
    return await client.ask(Type.AWAIT, *payload, **{key: value for key, value in header.items() if key != "t"})


async def poll(client: RawClient):
    header = messages.READ.encode(messages.ReadRequest(start=1000, end=1001, wait_ms=20_000))
    return await client.ask(Type.READ, **{key: value for key, value in header.items() if key != "t"})


def check_waiting(directory, made, ask: Callable[[RawClient], Awaitable[Any]], quota: Quota, count: int, each: int):
    """Check that ``count`` requests of a principal wait, each with a share, no further one does, and others do."""

    async def test() -> None:
        async with QuotaGroup(directory, made) as group:
            await group.leader()
            greedy, other = await group.raw("a"), await group.raw("b")
            waiting = [asyncio.ensure_future(ask(greedy)) for _ in range(count)]
            tenant = group.quotas.tenant("a")
            assert tenant is not None
            await eventually(lambda: tenant[quota].taken == count * each)
            with pytest.raises(QuotaExceededError) as raised:
                await ask(greedy)
            assert raised.value.values["quota"] == quota.value
            assert group.quotas.refused[quota] == 1
            also = asyncio.ensure_future(ask(other))
            await eventually(lambda: group.quotas.tenant("b")[quota].taken == each)
            for task in (*waiting, also):
                task.cancel()
            await greedy.channel.close()
            await eventually(lambda: tenant[quota].taken == 0)

    run(test())


def test_small_awaits_of_one_principal_are_limited_in_number(tmp_path, made) -> None:
    """Each counts as eight groups, for the memory of its request."""
    check_waiting(tmp_path, made, wait_for_entry, Quota.AWAITED_GROUPS, count=2, each=8)


def test_waiting_reads_of_one_principal_are_limited_and_others_are_served(tmp_path, made) -> None:
    check_waiting(tmp_path, made, poll, Quota.LONG_POLLS, count=3, each=1)


def test_digests_of_one_principal_are_limited_and_others_are_served(tmp_path, made, monkeypatch) -> None:
    async def test() -> None:
        async with QuotaGroup(tmp_path, made) as group:
            await group.leader()
            greedy, other = await group.raw("a"), await group.raw("b")
            reads, begun, go_on = group.hosted("n0").reads, [], asyncio.Event()
            digest = reads.digest

            async def held(request: messages.DigestRequest):
                begun.append(request)
                await go_on.wait()
                return await digest(request)

            async def ask(client: RawClient) -> int:
                return (await client.ask(Type.DIGEST, start=0, end=1, span=1)).header["next"]

            with monkeypatch.context() as patch:
                patch.setattr(reads, "digest", held)
                asked = [asyncio.ensure_future(ask(greedy)) for _ in range(2)]
                await eventually(lambda: len(begun) == 2)
            with pytest.raises(QuotaExceededError) as raised:
                await ask(greedy)
            assert raised.value.values["quota"] == "digests"
            assert group.quotas.refused[Quota.DIGESTS] == 1
            assert await ask(other) == 1
            go_on.set()
            assert await asyncio.gather(*asked) == [1, 1]
            assert await ask(greedy) == 1

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
            await eventually(lambda: tenant[Quota.CONNECTIONS].taken < LIMITS.principal_connections)
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
            assert group.quotas.tenant("a")[Quota.APPEND_BYTES].taken == 0

    run(test())


async def produce(client: RawClient, producer: str, sequence: int = 0):
    return await client.append([b"a"], p=producer, pe=0, ps=sequence)


def test_producers_of_one_principal_are_limited_and_others_are_served(tmp_path, made) -> None:
    async def test() -> None:
        async with QuotaGroup(tmp_path, made) as group:
            await group.leader()
            greedy, other = await group.raw("a"), await group.raw("b")
            for number in range(LIMITS.principal_producers):
                await produce(greedy, f"p{number}")
            with pytest.raises(QuotaExceededError) as raised:
                await produce(greedy, "more")
            assert raised.value.values["quota"] == "producers"
            assert group.quotas.refused[Quota.PRODUCERS] == 1
            await produce(greedy, "p0", 1)
            await produce(other, "q0")
            await produce(greedy, "q0", 1)  # the row of another one adds none
            expired = asyncio.get_running_loop().create_future()
            group.hosted("n0").appends.expire_producer("p1", expired.set_result)
            await expired
            await produce(greedy, "more")
            with pytest.raises(QuotaExceededError):
                await produce(greedy, "p1")

    run(test())


def test_quota_of_producers_refuses_the_new_ones_of_a_shared_request_alone(tmp_path, made) -> None:
    async def test() -> None:
        async with QuotaGroup(tmp_path, made) as group:
            await group.leader()
            client, limit = await group.raw("a"), LIMITS.principal_producers
            found = await client.produce(*((f"p{number}", 0, 0, [b"x"]) for number in range(limit + 2)))
            assert [first >= 0 for first, _ in found] == [True] * limit + [False] * 2
            assert group.quotas.refused[Quota.PRODUCERS] == 2
            assert group.quotas.tenant("a")[Quota.APPEND_BYTES].taken == 0

    run(test())


def test_refused_appends_take_no_producers_quota(tmp_path, made) -> None:
    async def test() -> None:
        async with QuotaGroup(tmp_path, made) as group:
            await group.leader()
            client = await group.raw("a")
            for number in range(2 * LIMITS.principal_producers):
                with pytest.raises(ProducerUnknownError):
                    await produce(client, f"unknown{number}", 5)
            done = [produce(client, f"p{number}") for number in range(LIMITS.principal_producers)]
            await asyncio.gather(*done)

    run(test())


def test_open_transactions_of_one_principal_are_limited(tmp_path, made) -> None:
    async def test() -> None:
        async with QuotaGroup(tmp_path, made) as group:
            await group.leader()
            greedy, other = await group.raw("a"), await group.raw("b")

            async def attempt(client: RawClient, number: int) -> None:
                await client.attempt([b"a"], {"q": f"query{number}", "b": 0, "r": "run"})

            for number in (0, 1, 1):
                await attempt(greedy, number)
            with pytest.raises(QuotaExceededError) as raised:
                await attempt(greedy, 2)
            assert raised.value.values["quota"] == "open_transactions"
            assert group.quotas.refused[Quota.OPEN_TRANSACTIONS] == 1
            await attempt(other, 3)
            await greedy.ask(Type.TRANSACTION, op="abort", x={"q": "query0", "b": 0, "r": "run"})
            await attempt(greedy, 2)
            with pytest.raises(QuotaExceededError):
                await attempt(greedy, 4)

    run(test())


def test_aborts_of_one_principal_that_make_queries_known_are_limited(tmp_path, made) -> None:
    async def test() -> None:
        async with QuotaGroup(tmp_path, made) as group:
            await group.leader()
            greedy, other = await group.raw("a"), await group.raw("b")

            async def abort(client: RawClient, number: int) -> str:
                key = {"q": f"write{number}", "b": 0, "r": "run", "o": True}
                return (await client.ask(Type.TRANSACTION, op="abort", x=key)).header["state"]

            assert [await abort(greedy, number) for number in (0, 1, 1)] == ["aborted"] * 3
            with pytest.raises(QuotaExceededError) as raised:
                await abort(greedy, 2)
            assert raised.value.values["quota"] == "open_transactions"
            assert await abort(other, 2) == "aborted"
            await greedy.attempt([b"a"], {"q": "query", "b": 0, "r": "run"})
            key = {"q": "query", "b": 0, "r": "run"}
            assert (await greedy.ask(Type.TRANSACTION, op="abort", x=key)).header["state"] == "aborted"

    run(test())


def test_row_in_a_request_counts_although_the_table_lacks_it() -> None:
    quota: RowQuota[str] = RowQuota(Quota.PRODUCERS, 2, Counter(), "", 1)
    first, second = quota.take("a", "group", "x", ()), quota.take("a", "group", "y", ())
    with pytest.raises(QuotaExceededError):
        quota.take("a", "group", "z", ())
    quota.take("a", "other", "z", ())
    first(("x",))
    second(())  # y was refused
    quota.take("a", "group", "z", ("x",))(("x", "z"))
    assert quota.taken("a", "group") == 2
    quota.take("a", "group", "u", ("z",))  # x has left the table
    with pytest.raises(QuotaExceededError):
        quota.take("a", "group", "v", ("z",))


def test_pins_above_the_quota_are_counted(tmp_path, made) -> None:
    async def test() -> None:
        async with QuotaGroup(tmp_path, made) as group:
            await group.leader()
            client = await group.raw("a")
            for name in ("x", "y"):
                await client.ask(Type.METADATA, pin=[name, 1000])
            with pytest.raises(QuotaExceededError):
                await client.ask(Type.METADATA, pin=["z", 1000])
            assert group.quotas.refused[Quota.PINS] == 1

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
    tenant[Quota.AWAITED_GROUPS].take(100)
    with pytest.raises(QuotaExceededError):
        tenant[Quota.AWAITED_GROUPS].take()
    tenant[Quota.AWAITED_GROUPS].give(100)
    assert tenant.is_idle


def test_connection_without_principal_has_no_quota() -> None:
    assert Quotas(LIMITS).tenant("") is None


def test_unfinished_frames_count_from_their_first_byte(tmp_path, made) -> None:
    async def test() -> None:
        async with QuotaGroup(tmp_path, made) as group:
            await group.leader()
            greedy, other = await group.raw("a"), await group.raw("b")
            columns = Columns.from_bodies([bytes(600_000)])
            payload = codec.columns_payload(columns)
            unfinished = await group.dial(Hello(), Credentials(group.tls, "a"))
            begun = b"".join(map(bytes, encode_frame({"t": Type.APPEND, "r": 1, "g": "default", "n": 1}, *payload)))
            unfinished.send_buffers([begun[:-1]])
            tenant = group.quotas.tenant("a")
            await eventually(lambda: tenant[Quota.APPEND_BYTES].taken > 600_000)
            with pytest.raises(QuotaExceededError):
                await greedy.append([bytes(600_000)])
            await other.append([bytes(600_000)])
            unfinished.abort()
            await eventually(lambda: tenant[Quota.APPEND_BYTES].taken == 0)
            await greedy.append([bytes(600_000)])

    run(test())
