"""Retention: the rules of ``plan``, a node that trims its log, readers' pins, and groups with trimmed logs."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger_core.config import LIMITS, Limits, StorageConfig, format_peers, parse_peers
from dledger_core.connect import AsyncClient
from dledger_core.control import TransactionId
from dledger_core.errors import BadRequestError, BusyError, ConfigError, DiskFailedError, IndexOutOfRangeError
from dledger_core.ids import Index, NodeId
from dledger_core.net.protocol import Type
from dledger_core.server.config import ServerConfig
from dledger_core.server.maintenance.disk_rounds import DiskRounds
from dledger_core.server.maintenance.retention import ANY_HOUR, Pins, RetentionPolicy, parse_hours, plan
from dledger_core.storage import open_store
from dledger_core.storage.files.file_system import DiskSpace
from dledger_core.storage.read.log_queries import SegmentSummary
from tests.support.faulty_files import FaultyFiles
from tests.support.replica_group import Asker, HandDriven
from tests.support.server_group import RAFT, RawClient, ServerGroup, eventually

HOUR = 3_600_000
GIB = 1 << 30
ROOMY = DiskSpace(90 * GIB, 100 * GIB)
OLD = RetentionPolicy(file_reserved_hours=72)


def segments(count: int, last_bytes: int = GIB) -> list[SegmentSummary]:
    """Segments of ten entries each."""
    return [SegmentSummary(Index(10 * at), 1, GIB if at < count - 1 else last_bytes) for at in range(count)]


def decide(policy: RetentionPolicy, facts: list[SegmentSummary], **changes: object) -> int:
    arguments = {"keep_from": 10_000, "expired": 0, "hour": 4, "space": ROOMY} | changes
    return plan(policy, facts, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("count", "expired", "changes", "kept"),
    [
        pytest.param(4, 3, {}, 30, id="all that are old"),
        pytest.param(4, 1, {}, 10, id="one is old"),
        pytest.param(4, 4, {}, 30, id="never the last file"),
        pytest.param(1, 1, {}, 0, id="nor the only one"),
        pytest.param(4, 0, {}, 0, id="none is old"),
        pytest.param(4, 3, {"hour": 5}, 0, id="not at this hour"),
        pytest.param(4, 3, {"hour": 5, "space": DiskSpace(29, 100)}, 30, id="unless the disk fills"),
        pytest.param(4, 3, {"hour": 5, "space": DiskSpace(31, 100)}, 0, id="enough"),
        pytest.param(4, 3, {"keep_from": 25}, 20, id="the commit index's file stays"),
        pytest.param(4, 3, {"keep_from": 20}, 20, id="also if it begins there"),
        pytest.param(4, 3, {"keep_from": 19}, 10, id="and no further"),
        pytest.param(4, 3, {"keep_from": -1}, 0, id="nothing is committed"),
        pytest.param(4, 3, {"pins": [15, 40]}, 10, id="a reader's file stays"),
        pytest.param(30, 30, {}, 100, id="some at a time"),
    ],
)
def test_plan_deletes_by_age(count: int, expired: int, changes: dict[str, object], kept: int) -> None:
    assert decide(OLD, segments(count), expired=expired, **changes) == kept


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
    assert decide(policy, segments(5, last_bytes), **changes) == kept


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
    facts, space = segments(5), DiskSpace(free_gib * GIB, 100 * GIB)
    assert decide(RetentionPolicy(force_clean=True), facts, space=space, **changes) == kept
    assert decide(RetentionPolicy(), facts, space=space, **changes) == 0
    assert decide(OLD, facts, space=space, **changes) == 0, "young files are only deleted by force"


@given(
    count=st.integers(1, 20),
    expired=st.integers(0, 20),
    keep_from=st.integers(-1, 300),
    pins=st.lists(st.integers(0, 300), max_size=3),
    free=st.integers(0, 100),
)
def test_plan_never_deletes_pinned_or_uncommitted_entries(
    count: int, expired: int, keep_from: int, pins: list[int], free: int
) -> None:
    facts = segments(count)
    greedy = RetentionPolicy(file_reserved_hours=1, retain_bytes=1, force_clean=True, delete_when=ANY_HOUR)
    space = DiskSpace(free, 100)
    kept = decide(greedy, facts, expired=expired, keep_from=keep_from, pins=pins, space=space)
    assert kept in [segment.first_index for segment in facts]
    assert kept == 0 or kept <= min([keep_from, *pins])
    assert decide(RetentionPolicy(), facts, expired=expired, keep_from=keep_from, space=space) == 0


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


def test_age_limit_is_rejected_for_profile_a() -> None:
    settings = {"self_id": NodeId("n0"), "peers": parse_peers("n0-127.0.0.1:1"), "storage": StorageConfig(profile="A")}
    ServerConfig(**settings, retention=RetentionPolicy(retain_bytes=1))
    with pytest.raises(ConfigError):
        ServerConfig(**settings, retention=OLD)


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
            await DiskRounds(policy, lambda: [n0.replica], executor, lambda _: True).retain()

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


def test_trim_deletes_nothing_that_is_not_readable(tmp_path) -> None:
    with HandDriven(tmp_path, storage=STORAGE, voters=("n0", "n1", "n2")) as n0:
        filled(n0)
        start = n0.log.segment_summaries()[1].first_index

        def trimmed_to() -> Index:
            n0.replica.store.trim(start)
            n0.run()
            assert not n0.failures
            return n0.log.first_index()

        assert trimmed_to() == 0, "no other node has it"
        n0.acknowledge_as_of(start)
        n0.run()
        assert trimmed_to() == start


def test_retention_keeps_rows_of_open_transaction(tmp_path) -> None:
    with HandDriven(tmp_path, storage=STORAGE) as n0:
        transaction = TransactionId("q", 0, "run")
        ask = filled(n0, 2)
        ask.attempt(transaction, "a", b"row")
        append(n0, ask, 12)
        begin = n0.replica.tables.transactions.open["q", 0].first_index
        retain(n0, SMALL)
        assert n0.log.first_index() <= begin
        ask.transactions.abort(transaction, ask.answers.append)
        n0.run()
        orphaned = n0.replica.tables.transactions.orphaned.ranges
        assert len(orphaned) == 1
        retain(n0, SMALL)
        assert n0.log.first_index() > begin
        n0.replica.store.save_checkpoint()
        assert orphaned == [], "rows about trimmed entries are trimmed"


def test_pin_holds_back_retention_until_it_expires(tmp_path) -> None:
    with HandDriven(tmp_path, storage=STORAGE) as n0:
        filled(n0)
        n0.replica.pins.set(["tail", 24 * HOUR], 1, n0.replica.pin_time_ms)
        n0.wall_ms += 30 * 24 * HOUR
        n0.running_ms += 24 * HOUR - 1
        retain(n0, SMALL)
        assert n0.log.first_index() == 0, "no wall clock ends it"
        n0.running_ms += 1
        retain(n0, SMALL)
        assert n0.log.first_index() > 0


def test_pin_of_profile_a_expires_by_running_time_of_its_node(tmp_path) -> None:
    storage, raft = replace(STORAGE, profile="A"), replace(RAFT, noop_on_election=False)
    with HandDriven(tmp_path, storage=storage, raft=raft) as n0:
        filled(n0)
        n0.replica.pins.set(["tail", HOUR], 1, n0.replica.pin_time_ms)
        n0.running_ms += HOUR - 1
        retain(n0, SMALL)
        assert n0.log.first_index() == 0
        n0.running_ms += 1
        retain(n0, RetentionPolicy(file_reserved_hours=1, delete_when=ANY_HOUR))
        assert n0.log.first_index() == 0, "its log has no age"
        retain(n0, SMALL)
        assert n0.log.first_index() > 0


def test_data_file_is_as_old_as_first_log_time_after_it(tmp_path) -> None:
    with HandDriven(tmp_path, storage=STORAGE) as n0:
        ask = filled(n0)
        policy = RetentionPolicy(file_reserved_hours=2, delete_when=ANY_HOUR)
        files = [segment.first_index for segment in n0.log.segment_summaries()]
        n0.wall_ms += 30 * 24 * HOUR
        n0.running_ms += 3 * HOUR
        retain(n0, policy)
        assert n0.log.first_index() == 0, "no log time was recorded after it"
        append(n0, ask, 6)  # the first of them is preceded by the log time: 3 hours
        n0.running_ms += 2 * HOUR
        append(n0, ask, 6)
        retain(n0, policy)
        assert n0.log.first_index() == 0, "it is two hours old, not older"
        n0.running_ms += 1
        retain(n0, policy)
        assert n0.log.first_index() == files[-1], "files of the second hour stay"


def test_retention_by_age_waits_for_repair_of_damaged_log_time(tmp_path) -> None:
    files = FaultyFiles()
    with HandDriven(tmp_path, storage=STORAGE, files=files) as n0:
        ask = filled(n0)
        n0.running_ms += HOUR
        append(n0, ask, 1)
        (entry,) = [index for index, _, _ in n0.log.control_entries(1, 1 << 40)]
        n0.running_ms += 2 * HOUR
        policy = RetentionPolicy(file_reserved_hours=1, delete_when=ANY_HOUR)
        position = n0.log.position_of(entry)
        name = tmp_path / "data" / f"{position - position % SEGMENT:020}"
        files.content(name)[position % SEGMENT + 50] ^= 1
        retain(n0, policy)
        assert n0.log.first_index() == 0
        files.content(name)[position % SEGMENT + 50] ^= 1
        retain(n0, policy)
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
    replica = group.hosted(node_id).replica
    return replica.pins.starts(replica.pin_time_ms)


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


async def test_node_that_needs_trimmed_entries_gets_snapshot(tmp_path) -> None:
    async with group_of(tmp_path) as group:
        client = await group.client()
        produced = await client.append([b"first"], p="producer", pe=0, ps=0)
        last = (await client.append([b"second"], p="producer", pe=0, ps=1))[1]
        await everywhere(group, last)
        away = (await group.followers())[0]
        path = group.config(away).store_path("default")
        await group.stop(away)
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
