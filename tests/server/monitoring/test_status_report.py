"""The report behind the status page: verdict, nodes, history, events, and the message browser with its limits."""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dledger_core.client.members import GroupMembers, MemberStatus
from dledger_core.client.verdict import GroupHealth, Level, reasons_of, verdict_of
from dledger_core.config import Limits, ListenAddress, StorageConfig
from dledger_core.ids import NodeId
from dledger_core.server.monitoring.cluster_probe import GroupProbe, NodeProbe
from dledger_core.server.monitoring.events import RecentEvents
from dledger_core.server.monitoring.history import SAMPLES_MAX, History
from dledger_core.server.monitoring.site import SiteOptions
from dledger_core.storage.files.file_system import DiskSpace
from tests.support.http import Fetched, afetch
from tests.support.server_group import ServerGroup, eventually

HTTP = ListenAddress("127.0.0.1", 0)


@asynccontextmanager
async def group_of(tmp_path, nodes=1, **options):
    async with ServerGroup(tmp_path, nodes, http=HTTP, **options) as group:
        yield group


async def status(group: ServerGroup, node: str = "n0") -> dict[str, Any]:
    found = await afetch(group.nodes[node].http_port, "/api/status")
    assert found.status == 200
    return found.json


async def messages(group: ServerGroup, **query: Any) -> Fetched:
    return await afetch(group.nodes["n0"].http_port, "/api/messages", **({"group": "default"} | query))


def indexes(page: Fetched) -> list[int]:
    assert page.status == 200, page.text
    return [row["index"] for row in page.json["rows"]]


# --- verdict ----------------------------------------------------------------------------------------------------------


def node(name: str, role: str = "follower", **options: Any) -> NodeProbe:
    known = {"answers": True, "term": 3, "leader_id": "n0"} if role not in ("silent", "quarantined") else {}
    known |= {"answers": True} if role == "quarantined" else {}
    return NodeProbe(node_id=NodeId(name), address="h:1", role=role, **(known | options))


def look(
    *nodes: NodeProbe,
    inactive: tuple[str, ...] = (),
    conditions: dict[str, tuple[str, ...]] | None = None,
    removed: tuple[str, ...] = (),
    members: bool = True,
    **options: Any,
) -> GroupHealth:
    def member(each: NodeProbe) -> MemberStatus:
        name, is_active = str(each.node_id), each.role != "silent" and str(each.node_id) not in inactive
        limits = (conditions or {}).get(name, ())
        return MemberStatus(name, "s", "h:1", "voter", False, None, is_active, 5, 0, 0, None, limits)

    named = tuple(member(node) for node in nodes if node.node_id not in removed)
    found = GroupMembers(-1, False, named) if members else None
    return GroupProbe(name="g", nodes=nodes, members=found, **options).health()


ALONE = node("n0", leader_id=None)
WELL = look(node("n0", "leader"), node("n1"), node("n2"))
CASES = [
    (WELL, Level.HEALTHY, ""),
    (look(node("n0", "leader")), Level.HEALTHY, ""),
    (look(node("n0", "leader"), node("n1")), Level.HEALTHY, ""),
    (look(node("n0", "leader"), node("n1"), node("n2", "silent")), Level.DEGRADED, "n2"),
    (look(node("n0", "leader"), node("n1"), node("n2", "quarantined")), Level.DEGRADED, "n2"),
    (look(node("n0", "leader"), node("n1"), node("n2", is_recovering=True)), Level.DEGRADED, "n2"),
    (look(node("n0", "leader"), node("n1", is_disk_full=True), node("n2")), Level.DEGRADED, "n1"),
    (look(node("n0", "leader"), node("n1"), node("n2"), inactive=("n1",)), Level.DEGRADED, "n1"),
    (look(node("n0", "leader"), node("n1"), node("n2"), conditions={"n1": ("stalled",)}), Level.DEGRADED, "n1"),
    (look(node("n0", "leader"), node("n1"), node("n2"), conditions={"n1": ("withholds",)}), Level.DEGRADED, "n1"),
    (look(node("n0", "leader"), node("n1"), node("n2"), node("n3", "pre-candidate"), removed=("n3",)), Level.DEGRADED,
     "n3 is not a member"),
    (look(node("n0", "leader"), node("n1"), node("n2"), node("n3", "waiting", term=None), removed=("n3",)),
     Level.DEGRADED, "member add n3"),
    (look(node("n0", "leader"), node("n1", is_disk_full=True), node("n2", "silent")), Level.UNAVAILABLE, "n0"),
    (look(node("n0", "leader"), node("n1"), node("n2", "silent"), conditions={"n1": ("stalled",)}), Level.UNAVAILABLE,
     "n0"),
    (look(node("n0", "leader", is_disk_full=True), node("n1"), node("n2")), Level.UNAVAILABLE, "n0"),
    (look(node("n0", "leader"), node("n1", is_disk_full=True, accepts_entries=True), node("n2", "silent")),
     Level.DEGRADED, "n2"),
    (look(node("n0", "leader"), node("n1", "silent"), node("n2", "silent"), members=False), Level.UNAVAILABLE, "n0"),
    (look(node("n0", "leader"), node("n1"), node("n2"), tables=(("queries", 8, 10),)), Level.DEGRADED, "queries"),
    (look(ALONE, node("n1", "silent"), node("n2", "silent"), members=False), Level.UNAVAILABLE, "g"),
    (look(ALONE, node("n1", leader_id=None), node("n2", "silent"), members=False), Level.UNAVAILABLE, "g"),
    (look(node("n1"), node("n2", "silent"), node("n0", "silent"), members=False), Level.UNAVAILABLE, "g"),
    (look(node("n0", "waiting", term=None), node("n1", "waiting", term=None), members=False), Level.UNAVAILABLE, "g"),
]  # fmt: skip


@pytest.mark.parametrize(("found", "level", "named"), CASES)
def test_verdict_is_the_worst_level_and_names_the_culprit(found: GroupHealth, level: Level, named: str) -> None:
    verdict = verdict_of([found], reasons_of(found))
    assert verdict.level is level
    assert named in " ".join(map(str, reasons_of(found)))
    assert bool(verdict.reasons) == (level is not Level.HEALTHY)


def test_leader_that_is_late_and_sends_heartbeats_still_leads() -> None:
    found = look(
        node("n0", "silent"), node("n1", leader_contact_ms=20), node("n2", leader_contact_ms=40), members=False
    )
    assert found.leader_id == "n0"
    assert verdict_of([found], reasons_of(found)).level is Level.DEGRADED


def test_damage_degrades() -> None:
    assert verdict_of([WELL], reasons_of(WELL, damaged=1)).level is Level.DEGRADED


def test_same_reason_in_many_groups_is_shown_once() -> None:
    found = look(node("n0", "leader"), node("n1"), node("n2", "silent"))
    reasons = [*reasons_of(found), *reasons_of(found)]
    assert len([text for text in verdict_of([found, found], reasons).reasons if text.startswith("n2")]) == 1


# --- nodes and groups -------------------------------------------------------------------------------------------------


async def test_each_node_reports_all_nodes_of_all_groups(tmp_path: Path) -> None:
    async with group_of(tmp_path, 3, groups=("a", "b")) as group:
        leaders = {name: await group.leader(name) for name in ("a", "b")}
        await eventually(lambda: all(len(node.links.connected()) == 2 for node in group.nodes.values()))
        for me in group.nodes:
            await eventually(lambda: all(group.hosted(n, g).replica.leader_node for n in group.nodes for g in leaders))
            found = await status(group, me)
            assert (found["node"]["id"], found["verdict"]["level"]) == (me, "healthy")
            for each in found["groups"]:
                assert each["leader"] == leaders[each["name"]]
                assert (each["survives"], each["voters"], each["change_pending"]) == (1, 3, False)
                assert [row["node_id"] for row in each["nodes"]] == ["n0", "n1", "n2"]
                assert all(row["answers"] and row["member"] == "voter" for row in each["nodes"])
                assert sorted(row["role"] for row in each["nodes"]) == ["follower", "follower", "leader"]


async def test_stopped_node_degrades_and_majority_loss_makes_unavailable(tmp_path: Path) -> None:
    async with group_of(tmp_path, 3) as group:
        leader = await group.leader()
        first, second = await group.followers()
        await group.stop(first)
        await eventually(lambda: not group.nodes[leader].links.connected().count(NodeId(first)))
        found = await status(group, leader)
        assert found["verdict"]["level"] == "degraded"
        assert first in found["verdict"]["text"]
        (row,) = (row for row in found["groups"][0]["nodes"] if row["node_id"] == first)
        assert (row["role"], row["answers"], row["commit_index"]) == ("silent", False, None)
        assert row["reason"]
        await group.stop(second)
        await eventually(lambda: not group.hosted(leader).replica.is_leader)
        found = await status(group, leader)
        assert (found["verdict"]["level"], found["groups"][0]["leader"]) == ("unavailable", None)


async def test_readers_transactions_and_queries_are_shown(tmp_path: Path) -> None:
    async with group_of(tmp_path) as group:
        client, replica = await group.client(), group.hosted("n0").replica
        key = {"q": "query", "b": 0, "r": "run"}
        await client.transact("commit", key, [])
        part = await client.attempt([b"a", b"b"], key | {"b": 1})
        replica.pins.set(["reader", 60_000], 0, replica.pin_time_ms)
        here = (await status(group))["groups"][0]["here"]
        assert here["transactions"][0] | {"inactive_s": 0} == {
            "query": "query", "batch": 1, "run": "run", "first_index": part.first - 1, "rows": 2, "inactive_s": 0,
        }  # fmt: skip
        (query,) = here["queries"]
        assert (query["query"], query["newest_batch"], query["open"]) == ("query", 0, [1])
        (pin,) = here["pins"]
        assert (pin["reader"], pin["start"], pin["lag"]) == ("reader", 0, here["visible_end"])


async def test_stream_that_writes_has_its_last_batch_and_time_since_its_commit(tmp_path: Path) -> None:
    async with group_of(tmp_path) as group:
        client = await group.client()

        async def query() -> dict[str, Any]:
            (found,) = (await status(group))["groups"][0]["here"]["queries"]
            return {"batch": found["newest_batch"], "open": found["open"], "since": found["committed_s"] is not None}

        key = {"q": "query", "b": 0, "r": "run"}
        await client.attempt([b"a"], key)
        assert await query() == {"batch": None, "open": [0], "since": False}
        await client.transact("abort", key, [])
        assert await query() == {"batch": None, "open": [], "since": False}
        await client.transact("commit", key | {"r": "again"}, [])
        assert await query() == {"batch": 0, "open": [], "since": True}
        await client.attempt([b"a"], key | {"b": 1, "r": "again"})
        assert await query() == {"batch": 0, "open": [1], "since": False}


async def test_newest_streams_are_shown_and_no_writes_used_once(tmp_path: Path) -> None:
    async with group_of(tmp_path) as group:
        client = await group.client()
        for number in range(52):
            await client.transact("commit", {"q": f"stream-{number}", "b": 0, "r": "run"}, [])
        for number in range(52):
            await client.transact("commit", {"q": f"write-{number}", "b": 0, "r": "run", "o": True}, [])
        found = (await status(group))["groups"][0]["here"]["queries"]
        assert [query["query"] for query in found] == [f"stream-{number}" for number in range(51, 1, -1)]


async def test_each_node_reports_the_disks_of_the_others(tmp_path: Path) -> None:
    async with group_of(tmp_path, 3, limits=Limits(space_s=0.02)) as group:
        await group.leader()
        log = group.hosted("n1").replica.log
        log.space = lambda: (log.staged_end, DiskSpace(1 << 39, 1 << 40))
        space = group.hosted("n1").replica.space
        await eventually(lambda: space.total_bytes == 1 << 40)
        await eventually(lambda: all(len(node.links.connected()) == 2 for node in group.nodes.values()))
        for me in group.nodes:
            rows = {row["node_id"]: row for row in (await status(group, me))["groups"][0]["nodes"]}
            assert (rows["n1"]["disk_free_bytes"], rows["n1"]["disk_size_bytes"]) == (1 << 39, 1 << 40)
            assert all(0 < row["disk_free_bytes"] < row["disk_size_bytes"] for row in rows.values())


async def test_history_has_rates_and_durations_and_stays_small(tmp_path: Path) -> None:
    async with group_of(tmp_path) as group:
        seen = group.nodes["n0"]
        history = History(seen.observed(), interval_s=3600)
        history.take()
        client = await group.client()
        first, _, _ = await client.append([b"x"] * 50)
        await client.read(first, first + 50)
        history.take()
        found = history.series(["default"])
        assert found["entries_per_s"][0] > 0
        assert found["read_per_s"][0] > 0
        assert found["commit_p99_ms"][0] > 0
        assert found["sync_p99_ms"][0] > 0
        for _ in range(SAMPLES_MAX + 5):
            history.take()
        found = history.series(["default"])
        assert {len(values) for values in found.values()} == {SAMPLES_MAX}
        assert (found["entries_per_s"][-1], found["commit_p99_ms"][-1]) == (0, None)


async def test_events_of_node_reach_the_report(tmp_path: Path) -> None:
    logging.getLogger("dledger_core").setLevel(logging.INFO)
    try:
        async with group_of(tmp_path) as group:
            await group.leader()
            events = (await status(group))["events"]
            (won,) = (e for e in events if e["event"] == "role changed" and e["fields"]["role"] == "leader")
            assert won["fields"] | {"term": 1} == {
                "group": "default", "node": "n0", "role": "leader", "term": 1, "leader": "n0",
            }  # fmt: skip
            assert [each["time"] for each in events] == sorted((each["time"] for each in events), reverse=True)
    finally:
        logging.getLogger("dledger_core").setLevel(logging.NOTSET)


def test_events_are_limited_and_those_of_other_groups_hidden() -> None:
    log, events = logging.getLogger("dledger_core.test"), RecentEvents(events_max=3)
    events.start()
    try:
        for number in range(5):
            log.warning("numbered: group=%s number=%d text=%s", "a", number, "x" * 10_000)
        log.warning("elsewhere: group=%s", "b")
    finally:
        events.stop()
    log.warning("after: group=%s", "a")
    assert [event.fields["number"] for event in events.newest(frozenset({"a"}))] == [4, 3]
    assert [event.event for event in events.newest(frozenset({"b"}))] == ["elsewhere"]
    assert all(len(str(event.fields.get("text"))) < 1000 for event in events.newest(frozenset({"a"})))


# --- messages ---------------------------------------------------------------------------------------------------------


class TopicIsFirstWord:
    """A message is ``topic key body`` in this test."""

    def split(self, batch: pa.RecordBatch) -> list[list[str]]:
        return [body.decode("latin-1").split(" ", 2) for body in batch.column("body").to_pylist()]

    def matching(self, batch: pa.RecordBatch, topic: str | None, key: str | None) -> pa.RecordBatch:
        wanted = [topic in (None, words[0]) and key in (None, words[1:2] and words[1]) for words in self.split(batch)]
        return batch.filter(pa.array(wanted, pa.bool_()))

    def decoded(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        rows = [
            {"topic": words[0], "keys": words[1], "body": words[2].encode()} if len(words) == 3 else {}
            for words in self.split(batch)
        ]
        schema = pa.schema([("topic", pa.string()), ("keys", pa.string()), ("body", pa.binary())])
        return pa.RecordBatch.from_pylist(rows, schema)


SITE = SiteOptions(messages=TopicIsFirstWord())


async def test_browser_shows_the_newest_then_pages_both_ways(tmp_path: Path) -> None:
    async with group_of(tmp_path, site=SITE) as group:
        client = await group.client()
        first, last, _ = await client.append([b"t k %d" % n for n in range(60)])
        newest = await messages(group, rows=10)
        assert indexes(newest) == list(range(last - 9, last + 1))
        assert newest.json["next"] is None
        row = newest.json["rows"][-1]
        assert (row["topic"], row["keys"], row["body"], row["is_text"]) == ("t", "k", "59", True)
        page = await messages(group, **{"from": first, "rows": 25})
        assert indexes(page) == list(range(first, first + 25))
        assert indexes(await messages(group, **{"from": page.json["next"], "rows": 25}))[0] == first + 25
        assert indexes(await messages(group, **{"from": 10**18})) == []


async def test_browser_finds_by_topic_key_and_time(tmp_path: Path) -> None:
    async with group_of(tmp_path, site=SITE) as group:
        client = await group.client()
        first, _, _ = await client.append([b"t%d k%d body" % (n % 3, n) for n in range(30)])
        assert indexes(await messages(group, topic="t1")) == [first + n for n in range(30) if n % 3 == 1]
        assert indexes(await messages(group, key="k7")) == [first + 7]
        assert indexes(await messages(group, key="k7", topic="t2")) == []
        assert indexes(await messages(group, time="2000-01-01T00:00", rows=3)) == [first, first + 1, first + 2]
        assert indexes(await messages(group, time="2200-01-01T00:00")) == []


async def test_search_reads_a_limited_part_and_continues(tmp_path: Path) -> None:
    large = StorageConfig(data_segment_bytes=64 << 20, index_segment_bytes=1 << 20, preallocate_bytes=0)
    async with group_of(tmp_path, site=SITE, storage=large) as group:
        client = await group.client()
        for _ in range(6):
            await client.append([b"t k " + b"x" * (1 << 20)] * 4)
        _, last, _ = await client.append([b"wanted k body"])
        page = await messages(group, topic="wanted")
        assert indexes(page) == []
        assert page.json["next"] is not None
        assert indexes(await messages(group, topic="wanted", **{"from": page.json["next"]})) == [last]


async def test_browser_hides_uncommitted_transactions_and_cuts_bodies(tmp_path: Path) -> None:
    async with group_of(tmp_path) as group:
        client = await group.client()
        _, last, _ = await client.append([b"\xff\xfe" * 5000, "ä".encode() * 5000, b"x" * 5000])
        await client.attempt([b"hidden"], {"q": "query", "b": 0, "r": "run"})
        found = await messages(group)
        assert indexes(found)[-1] == last
        rows = found.json["rows"][-3:]
        assert [(row["is_text"], row["is_cut"], row["bytes"]) for row in rows] == [
            (False, True, 10_000), (True, True, 10_000), (True, True, 5000),
        ]  # fmt: skip
        assert max(len(row["body"]) for row in rows) <= 2048
        assert (await messages(group, topic="t")).status == 400


@pytest.mark.parametrize(
    "query", [{"from": "-1"}, {"from": "x"}, {"from": "9" * 30}, {"time": "soon"}, {"rows": "0"}, {"rows": "101"}]
)
async def test_wrong_search_is_status_400(query: dict[str, str], tmp_path: Path) -> None:
    async with group_of(tmp_path) as group:
        assert (await messages(group, **query)).status == 400


# --- access -----------------------------------------------------------------------------------------------------------


class Reader:
    def may(self, action: str, group: str) -> bool:
        return action == "read" and group == "a"


async def test_principal_sees_only_the_groups_that_it_may_read(tmp_path: Path) -> None:
    site = SiteOptions(principal_of={"Bearer good": Reader()}.get)
    async with group_of(tmp_path, groups=("a", "b"), site=site) as group:
        port, headers = group.nodes["n0"].http_port, {"Authorization": "Bearer good"}
        for path in ("/", "/api/status", "/api/messages"):
            assert (await afetch(port, path)).status == 401
        found = (await afetch(port, "/api/status", headers=headers)).json
        assert [each["name"] for each in found["groups"]] == ["a"]
        assert all(event["fields"].get("group", "a") == "a" for event in found["events"])
        for name, code in (("a", 200), ("b", 404), ("c", 404), ("", 404)):
            assert (await afetch(port, "/api/messages", headers=headers, group=name)).status == code


async def test_metrics_may_be_opened_alone(tmp_path: Path) -> None:
    site = SiteOptions(principal_of=lambda _: None, open_metrics=True)
    async with group_of(tmp_path, site=site) as group:
        port = group.nodes["n0"].http_port
        assert [(await afetch(port, path)).status for path in ("/metrics", "/", "/api/status")] == [200, 401, 401]
