"""Retention: the rules of ``plan``, a node that trims its log, readers' pins, and groups with trimmed logs."""

from __future__ import annotations

import asyncio
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger_core.config import LIMITS, Limits, StorageConfig, format_peers
from dledger_core.connect import AsyncClient
from dledger_core.control import TransactionId
from dledger_core.errors import BadRequestError, BusyError, ConfigError, DiskFailedError, IndexOutOfRangeError
from dledger_core.ids import Index
from dledger_core.net.protocol import Type
from dledger_core.server.maintenance.disk_rounds import DiskRounds
from dledger_core.server.maintenance.retention import ANY_HOUR, Pins, RetentionPolicy, parse_hours, plan
from dledger_core.storage import open_store
from dledger_core.storage.files.file_system import DiskSpace
from dledger_core.storage.read.log_queries import SegmentSummary
from tests.support.faulty_files import FaultyFiles
from tests.support.replica_group import Asker, HandDriven
from tests.support.server_group import RawClient, ServerGroup, eventually

HOUR = 3_600_000
NOW = 1_000 * HOUR
GIB = 1 << 30
ROOMY = DiskSpace(90 * GIB, 100 * GIB)
OLD = RetentionPolicy(file_reserved_hours=72)


def segments(*ages_h: float | None, last_bytes: int = GIB) -> list[SegmentSummary]:
    """Segments of ten entries each; an age of None is unknown."""
    facts = [
        SegmentSummary(Index(10 * at), 0 if age is None else int(NOW - age * HOUR), GIB)
        for at, age in enumerate(ages_h)
    ]
    return [*facts[:-1], SegmentSummary(facts[-1].first_index, facts[-1].last_time_ms, last_bytes)]


def decide(policy: RetentionPolicy, facts: list[SegmentSummary], **changes: object) -> int:
    arguments = {"keep_from": 10_000, "now_ms": NOW, "hour": 4, "space": ROOMY} | changes
    return plan(policy, facts, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ages", "changes", "kept"),
    [
        pytest.param((100, 90, 80, 10), {}, 30, id="all that are old"),
        pytest.param((100, 72, 71, 10), {}, 10, id="older, not as old"),
        pytest.param((100, 90, 80, 75), {}, 30, id="never the last file"),
        pytest.param((100,), {}, 0, id="nor the only one"),
        pytest.param((100, 10, 100, 10), {}, 10, id="it stops at the first young one"),
        pytest.param((100, 90, 80, 10), {"hour": 5}, 0, id="not at this hour"),
        pytest.param((100, 90, 80, 10), {"hour": 5, "space": DiskSpace(29, 100)}, 30, id="unless the disk fills"),
        pytest.param((100, 90, 80, 10), {"hour": 5, "space": DiskSpace(31, 100)}, 0, id="enough"),
        pytest.param((100, 90, 80, 10), {"keep_from": 25}, 20, id="the commit index's file stays"),
        pytest.param((100, 90, 80, 10), {"keep_from": 20}, 20, id="also if it begins there"),
        pytest.param((100, 90, 80, 10), {"keep_from": 19}, 10, id="and no further"),
        pytest.param((100, 90, 80, 10), {"keep_from": -1}, 0, id="nothing is committed"),
        pytest.param((100, 90, 80, 10), {"pins": [15, 40]}, 10, id="a reader's file stays"),
        pytest.param((None, None, 80, 10), {}, 30, id="of unknown age, before an old one"),
        pytest.param((None, None, 10, 5), {}, 0, id="of unknown age, before a young one"),
        pytest.param((None, None, None), {}, 0, id="all of unknown age"),
        pytest.param((100,) * 30, {}, 100, id="some at a time"),
    ],
)
def test_plan_deletes_by_age(ages: tuple[float | None, ...], changes: dict[str, object], kept: int) -> None:
    assert decide(OLD, segments(*ages), **changes) == kept


@pytest.mark.parametrize(
    ("retain", "last_bytes", "changes", "kept"),
    [
        pytest.param(3 * GIB, GIB, {}, 20, id="rest is large enough"),
        pytest.param(3 * GIB, GIB - 1, {}, 10, id="else one more stays"),
        pytest.param(9 * GIB, GIB, {}, 0, id="the log is smaller"),
        pytest.param(1, 1, {}, 40, id="the last file stays"),
        pytest.param(3 * GIB, GIB, {"hour": 12}, 20, id="at any hour"),
        pytest.param(3 * GIB, GIB, {"keep_from": 12}, 10, id="not beyond the commit index"),
        pytest.param(3 * GIB, GIB, {"pins": [3]}, 0, id="not under a reader"),
    ],
)
def test_plan_deletes_by_size(retain: int, last_bytes: int, changes: dict[str, object], kept: int) -> None:
    policy = RetentionPolicy(retain_bytes=retain)
    assert decide(policy, segments(1, 1, 1, 1, 1, last_bytes=last_bytes), **changes) == kept


@pytest.mark.parametrize(
    ("free_gib", "changes", "kept"),
    [
        pytest.param(14, {}, 10, id="one is enough"),
        pytest.param(13, {}, 20, id="as many as are needed"),
        pytest.param(0, {}, 40, id="all but the last"),
        pytest.param(15, {}, 0, id="not above the ratio"),
        pytest.param(0, {"pins": [25]}, 20, id="not under a reader, however full"),
        pytest.param(0, {"keep_from": 5}, 0, id="not beyond the commit index, however full"),
    ],
)
def test_plan_deletes_by_free_disk_space(free_gib: int, changes: dict[str, object], kept: int) -> None:
    facts, space = segments(1, 1, 1, 1, 1), DiskSpace(free_gib * GIB, 100 * GIB)
    assert decide(RetentionPolicy(force_clean=True), facts, space=space, **changes) == kept
    assert decide(RetentionPolicy(), facts, space=space, **changes) == 0
    assert decide(OLD, facts, space=space, **changes) == 0, "young files are only deleted by force"


@given(
    ages=st.lists(st.one_of(st.none(), st.integers(0, 200)), min_size=1, max_size=20),
    keep_from=st.integers(-1, 300),
    pins=st.lists(st.integers(0, 300), max_size=3),
    free=st.integers(0, 100),
)
def test_plan_never_deletes_pinned_or_uncommitted_entries(
    ages: list[int | None], keep_from: int, pins: list[int], free: int
) -> None:
    facts = segments(*ages)
    greedy = RetentionPolicy(file_reserved_hours=1, retain_bytes=1, force_clean=True, delete_when=ANY_HOUR)
    space = DiskSpace(free, 100)
    kept = decide(greedy, facts, keep_from=keep_from, pins=pins, space=space)
    assert kept in [segment.first_index for segment in facts]
    assert kept == 0 or kept <= min([keep_from, *pins])
    assert decide(RetentionPolicy(), facts, keep_from=keep_from, space=space) == 0


@pytest.mark.parametrize(
    ("text", "hours"), [("04", {4}), ("04;16", {4, 16}), (" 0 ; 23;", {0, 23}), ("any", set(range(24)))]
)
def test_parse_hours_returns_hours_for_valid_text(text: str, hours: set[int]) -> None:
    assert parse_hours(text) == hours


@pytest.mark.parametrize("text", ["", ";", "24", "-1", "4,16", "four", "²"])
def test_parse_hours_rejects_other_text(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_hours(text)


@pytest.mark.parametrize(
    "fields",
    [{"check_ratio": 0.4}, {"clean_ratio": 0.96}, {"file_reserved_hours": 0}, {"retain_bytes": 0}],
)
def test_retention_policy_rejects_wrong_values(fields: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        RetentionPolicy(**fields)  # type: ignore[arg-type]


# --- a node -----------------------------------------------------------------------------------------------------------

SEGMENT = 1 << 16
STORAGE = StorageConfig(data_segment_bytes=SEGMENT, index_segment_bytes=3200, preallocate_bytes=0)


def append(n0: HandDriven, ask: Asker, batches: int) -> None:
    for _ in range(batches):
        ask.plain(bytes(30_000))
        n0.run()


def filled(n0: HandDriven, batches: int = 12) -> Asker:
    n0.lead()
    ask = Asker(n0)
    append(n0, ask, batches)
    return ask


def retain(n0: HandDriven, policy: RetentionPolicy) -> None:
    """One round, as the node's timer begins it."""

    async def once() -> None:
        with ThreadPoolExecutor(1) as executor:
            await DiskRounds(policy, lambda: [n0.replica], executor).retain()

    asyncio.run(once())
    n0.run()


SMALL = RetentionPolicy(retain_bytes=3 * SEGMENT)


def test_node_trims_its_log_and_starts_again(tmp_path) -> None:
    with HandDriven(tmp_path, storage=STORAGE) as n0:
        filled(n0)
        first = n0.log.segment_summaries()[2].first_index
        retain(n0, SMALL)
        assert n0.log.first_index() == n0.replica.raft.first_index == first
        assert n0.log.data_bytes >= 3 * SEGMENT
        assert len(list((tmp_path / "data").iterdir())) == 4
        retain(n0, SMALL)
        assert n0.log.first_index() == first, "there is nothing more to do"
    with HandDriven(tmp_path, storage=STORAGE) as n0:
        assert (n0.log.first_index(), n0.replica.raft.first_index) == (first, first)
        ask = filled(n0, 1)
        assert ask.ranges


@pytest.mark.parametrize(
    ("policy", "voters"),
    [(RetentionPolicy(), ("n0",)), (RetentionPolicy(retain_bytes=1), ("n0", "n1", "n2"))],
    ids=["default", "uncommitted"],
)
def test_retention_deletes_nothing_by_default_and_nothing_uncommitted(tmp_path, policy, voters) -> None:
    with HandDriven(tmp_path, storage=STORAGE, voters=voters) as n0:
        filled(n0)
        assert len(n0.log.segment_summaries()) > 1
        retain(n0, policy)
        assert n0.log.first_index() == 0


def test_retention_keeps_rows_of_open_transaction(tmp_path) -> None:
    with HandDriven(tmp_path, storage=STORAGE) as n0:
        transaction = TransactionId("q", 0, "run")
        ask = filled(n0, 2)
        ask.attempt(transaction, "a", b"row")
        append(n0, ask, 12)
        begin = n0.replica.tables.transactions.open["q", 0].first_index
        retain(n0, SMALL)
        assert n0.log.first_index() <= begin
        ask.appends.abort(transaction, ask.answers.append)
        n0.run()
        retain(n0, SMALL)
        assert n0.log.first_index() > begin


def test_pin_holds_back_retention_until_it_expires(tmp_path) -> None:
    with HandDriven(tmp_path, storage=STORAGE) as n0:
        filled(n0)
        n0.replica.pins.set(["tail", 24 * HOUR], 1, now_ms := 1 << 50)
        retain(n0, SMALL)
        assert n0.log.first_index() == 0
        n0.replica.pins.set(["tail", 0], 1, now_ms)
        retain(n0, SMALL)
        assert n0.log.first_index() > 0


def test_failed_trim_stops_replica(tmp_path) -> None:
    files = FaultyFiles()
    n0 = HandDriven(tmp_path, storage=STORAGE, files=files)
    filled(n0)
    files.fail_at = files.operations + 1
    retain(n0, SMALL)
    (failure,) = n0.failures
    assert isinstance(failure, DiskFailedError)
    n0.log.close()


# --- pins -------------------------------------------------------------------------------------------------------------


def test_pin_expires_and_is_renewed() -> None:
    pins = Pins()
    pins.set(["a", 1000], 5, now_ms=0)
    pins.set(["b", 2000], 9, now_ms=0)
    assert sorted(pins.starts(999)) == [5, 9]
    pins.set(["a", 1000], 7, now_ms=999)
    assert sorted(pins.starts(1500)) == [7, 9]
    assert pins.starts(1999) == [9]
    assert pins.starts(2000) == []


def test_pin_of_zero_ms_is_removed() -> None:
    pins = Pins()
    for pin in (["a", 1000], ["a", 0], ["never there", 0], None):
        pins.set(pin, 5, now_ms=0)
    assert pins.starts(0) == []


@pytest.mark.parametrize(
    "pin",
    [
        5,
        [],
        ["a"],
        ["a", "1"],
        ["a", True],
        [1, 1],
        ["", 1],
        ["a", -1],
        ["a", LIMITS.pin_ms + 1],
        ["é" * LIMITS.pin_name_bytes, 1],
    ],
)
def test_malformed_pin_is_rejected(pin: object) -> None:
    pins = Pins()
    with pytest.raises(BadRequestError):
        pins.set(pin, 5, now_ms=0)
    assert pins.starts(0) == []


def test_pins_are_limited_in_number_until_some_expire() -> None:
    pins = Pins(Limits(pins=3))
    for at in range(3):
        pins.set([f"r{at}", 10], at, now_ms=0)
    with pytest.raises(BusyError):
        pins.set(["one more", 10], 1, now_ms=9)
    pins.set(["r0", 10], 1, now_ms=9)
    pins.set(["one more", 10], 1, now_ms=10)
    assert len(pins.starts(10)) == 2


async def test_client_pins_on_all_nodes_and_as_it_reads(tmp_path) -> None:
    async with ServerGroup(tmp_path) as group:
        client = await group.client()
        await client.append([b"x"] * 5)
        peers = format_peers(group.peers)
        async with AsyncClient(peers) as asking:
            assert await asking.pin("tail", 3, 60) == ("n0", "n1", "n2")
            assert [starts(group, node) for node in group.nodes] == [[3], [3], [3]]
            assert await asking.pin("tail", 3, 0) == ("n0", "n1", "n2")
            assert [starts(group, node) for node in group.nodes] == [[], [], []]
            with pytest.raises(BadRequestError):
                await asking.pin("", 3, 60)
        leader = await group.leader()
        await client.read(2, 5, pin=["stream", 60_000])
        assert starts(group, leader) == [2]
        await client.read(4, 5, pin=["stream", 60_000])
        assert starts(group, leader) == [4]
        with pytest.raises(BadRequestError):
            await client.read(4, 5, pin=["stream"])


def starts(group: ServerGroup, node_id: str) -> list[int]:
    return group.hosted(node_id).replica.pins.starts(int(time.time() * 1000))


# --- a group: each node trims its own log ---------------------------------------------------------------------------

LARGER = StorageConfig(data_segment_bytes=4 * SEGMENT, index_segment_bytes=3200, preallocate_bytes=0)
QUERY = {"q": "query", "b": 0, "r": "run"}


def group_of(tmp_path) -> ServerGroup:
    return ServerGroup(tmp_path, storage=LARGER, retention=RetentionPolicy(retain_bytes=8 * SEGMENT))


async def delete(group: ServerGroup) -> int:
    """Run retention on every node; return the lowest first index."""
    for node_id, node in group.nodes.items():
        log = group.hosted(node_id).replica.log
        await node.disk_rounds.retain()
        await eventually(lambda log=log: len(log.segment_summaries()) <= 4)
    return min(group.hosted(node_id).replica.log.first_index() for node_id in group.nodes)


async def fill(group: ServerGroup, batches: int = 60) -> None:
    client = await group.client()
    for _ in range(batches):
        await client.append([bytes(3000)] * 10)


async def everywhere(group: ServerGroup, index: int) -> None:
    await eventually(lambda: all(group.hosted(n).replica.readable_end > index for n in group.nodes))


@pytest.mark.parametrize("wiped", [False, True], ids=["a node that was away", "a node that lost its disk"])
async def test_node_that_needs_trimmed_entries_gets_snapshot(tmp_path, wiped) -> None:
    async with group_of(tmp_path) as group:
        client = await group.client()
        produced = await client.append([b"first"], p="producer", pe=0, ps=0)
        last = (await client.append([b"second"], p="producer", pe=0, ps=1))[1]
        await everywhere(group, last)
        away = (await group.followers())[0]
        path = group.config(away).store_path("default")
        await group.stop(away)
        if wiped:
            shutil.rmtree(path)
        await fill(group)
        begin = await delete(group)
        assert begin > last
        last = (await client.append([b"last"]))[1]
        await group.start(away)
        await everywhere(group, last)
        replica = group.hosted(away).replica
        assert replica.log.first_index() >= begin
        reader = RawClient(await group.channel(away))
        first = replica.log.first_index()
        with pytest.raises(IndexOutOfRangeError) as caught:
            await reader.read(0, 10)
        assert caught.value.values["first_index"] == first
        (_, rows) = await reader.read(last, last + 1)
        assert [body for _, _, body in rows] == [b"last"]
        # A repeat of what is deleted is still known, also by the node that never saw it.
        await group.stop(next(n for n in await group.followers() if n != away))
        await (await group.client()).ask(Type.TRANSFER, node=away)
        leader = await group.client()
        assert (await leader.append([b"first"], p="producer", pe=0, ps=0))[:2] == produced[:2]
    report = open_store(path).verify()
    assert (report.findings, report.first_index) == ((), first)


@pytest.mark.integration
async def test_open_transaction_holds_back_retention_on_every_node(tmp_path) -> None:
    async with group_of(tmp_path) as group:
        client = await group.client()
        part = await client.attempt([b"row"] * 3, QUERY)
        await fill(group)
        for node in group.nodes.values():
            await node.disk_rounds.retain()
        await asyncio.sleep(0)
        assert all(group.hosted(n).replica.log.first_index() < part.first for n in group.nodes)
        await client.transact("commit", QUERY, [part])
        _, rows = await client.read(part.first, part.last + 1)
        assert [body for _, _, body in rows] == [b"row"] * 3
        assert await delete(group) > part.last
