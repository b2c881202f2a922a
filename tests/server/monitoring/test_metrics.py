"""The metrics of a node: each one is documented, has values, and follows what the node does; alerts use no others."""

from __future__ import annotations

import json
import re
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from dledger_core import control
from dledger_core.config import LIMITS, Limits, ListenAddress
from dledger_core.errors import BusyError, QuotaExceededError
from dledger_core.net.limits.quotas import Quota
from dledger_core.record import ProposedBatch
from dledger_core.server.monitoring.measures import BOUNDS_S, Durations, quantile
from dledger_core.server.monitoring.metrics import METRICS
from dledger_core.server.monitoring.site import SiteOptions
from tests.support.http import afetch
from tests.support.server_group import ServerGroup, eventually, stall

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "dledger_core/server/monitoring/README.md").read_text()
ALERTS = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]
DASHBOARD = json.loads((ROOT / "deploy/grafana/dledger.json").read_text())
HTTP = ListenAddress("127.0.0.1", 0)
NAMES = {metric.name for metric in METRICS}
SERIES = {
    name
    for metric in METRICS
    for name in (
        [metric.name + end for end in ("_bucket", "_count", "_sum")] if metric.kind == "histogram" else [metric.name]
    )
}
WITH_ARCHIVE = {name for name in NAMES if name.startswith("dledger_archive")}
WITH_SECURITY = {"dledger_certificate_expiry_timestamp_seconds"}
PROCESS = set(re.findall(r"`(process_\w+)`", README))


class Scrape:
    """The samples of one response."""

    def __init__(self, text: str) -> None:
        self.samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        self.names = {sample.name for sample in self.samples}

    def value(self, name: str, **labels: str) -> float:
        (found,) = (s.value for s in self.samples if s.name == name and labels.items() <= s.labels.items())
        return found

    def of(self, name: str) -> dict[tuple[str, ...], float]:
        return {tuple(s.labels.values()): s.value for s in self.samples if s.name == name}


@asynccontextmanager
async def group_of(tmp_path, nodes=1, **options):
    async with ServerGroup(tmp_path, nodes, http=HTTP, **options) as group:
        yield group


async def scrape(group: ServerGroup, node: str = "n0") -> Scrape:
    found = await afetch(group.nodes[node].http_port, "/metrics")
    assert (found.status, found.headers["content-type"].split(";")[0]) == (200, "text/plain")
    return Scrape(found.text)


# --- the lists agree --------------------------------------------------------------------------------------------------


def test_readme_documents_each_metric_with_kind_labels_and_meaning() -> None:
    rows = re.findall(r"^\| `(dledger_\w+)` \| (\w+) \| ([\w, ]*) \| (.+) \|$", README, re.MULTILINE)
    assert rows == [(m.name, m.kind, ", ".join(m.labels), m.text) for m in METRICS]


def test_names_follow_the_conventions_of_prometheus() -> None:
    for metric in METRICS:
        assert re.fullmatch(r"dledger_[a-z]+(_[a-z]+)*", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert not re.search(r"_(ms|mib|kb|percent)(_|$)", metric.name), "base units"
        assert metric.name.endswith("_seconds") or metric.kind != "histogram"
    assert len(NAMES) == len(METRICS)


async def test_each_documented_metric_has_values_and_no_other_one_exists(tmp_path: Path) -> None:
    async with group_of(tmp_path, 3) as group:
        client = await group.client()
        first, last, _ = await client.append([b"one", b"two"])
        await client.read(first, last + 1)
        with pytest.raises(BusyError):
            await too_busy(group)
        found = [await scrape(group, node) for node in group.nodes]
    present = set().union(*(each.names for each in found))
    named = {name for name in present if not name.endswith("_created")}
    assert named == SERIES - WITH_SECURITY - WITH_ARCHIVE | PROCESS


async def too_busy(group: ServerGroup) -> None:
    """Fill the memory for appends, so that the next one gets BUSY."""
    leader = group.nodes[await group.leader()]
    budget, client = leader.budget, await group.client()
    with budget.lend(300 << 20):
        await client.append([b"x"])


def expressions() -> list[str]:
    targets = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    variables = [each["definition"] for each in DASHBOARD["templating"]["list"] if each["type"] == "query"]
    return [rule["expr"] for rule in RULES] + targets + variables


def test_alerts_and_dashboard_use_only_metrics_that_exist() -> None:
    for expression in expressions():
        used = set(re.findall(r"\b(?:dledger|process)_\w+", re.sub(r'"[^"]*"', '""', expression)))
        assert used <= SERIES | PROCESS, expression
        assert used or expression.startswith("up{"), expression


def test_alerts_and_dashboard_use_only_labels_that_exist() -> None:
    labels = {label for metric in METRICS for label in metric.labels} | {"instance", "job", "le", "name"}
    for expression in expressions():
        for selector in re.findall(r"\{([^}]*)\}", expression):
            assert set(re.findall(r"(\w+)\s*(?:=~|!=|=)", selector)) <= labels, expression
        for by in re.findall(r"by \(([^)]*)\)", expression):
            assert set(by.replace(" ", "").split(",")) <= labels, expression
        assert expression.count("(") == expression.count(")"), expression


def test_each_alert_says_what_to_do() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES) >= 20
    for rule in RULES:
        assert set(rule["annotations"]) == {"summary", "action"}
        assert rule["labels"]["severity"] in ("warning", "critical")


def test_dashboard_has_ids_and_places_of_their_own() -> None:
    panels: list[dict[str, Any]] = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


# --- they follow the node ---------------------------------------------------------------------------------------------


async def test_appends_and_reads_are_counted_with_their_bytes_and_durations(tmp_path: Path) -> None:
    async with group_of(tmp_path) as group:
        client = await group.client()
        before = await scrape(group)
        first, _, _ = await client.append([b"x" * 1000] * 5)
        await client.read(first, first + 5)
        after = await scrape(group)

        def grown(name: str) -> float:
            return after.value(name, group="default") - before.value(name, group="default")

        assert (grown("dledger_appended_entries_total"), grown("dledger_append_batches_total")) == (5, 1)
        assert grown("dledger_appended_bytes_total") == 5 * 1048
        assert (grown("dledger_reads_total"), grown("dledger_read_entries_total")) == (1, 5)
        assert grown("dledger_read_bytes_total") == 5 * 1048
        assert grown("dledger_commit_duration_seconds_count") == 1
        assert grown("dledger_fsync_duration_seconds_count") >= 1
        assert grown("dledger_fsync_duration_seconds_sum") > 0
        assert grown("dledger_commit_index") == 5
        assert after.value("dledger_last_index") == first + 4


async def test_role_term_and_members_of_each_node_are_shown(tmp_path: Path) -> None:
    async with group_of(tmp_path, 3) as group:
        leader = await group.leader()
        await eventually(lambda: all(len(node.links.connected()) == 2 for node in group.nodes.values()))
        await eventually(lambda: all(group.hosted(node).replica.leader_node == leader for node in group.nodes))
        found = {node: await scrape(group, node) for node in group.nodes}
        for node, each in found.items():
            assert each.value("dledger_role", role="leader") == (node == leader)
            assert each.value("dledger_leader_known") == 1
            assert (each.value("dledger_voters"), each.value("dledger_learners")) == (3, 0)
            assert each.value("dledger_group_state", state="hosted") == 1
            assert set(each.of("dledger_peer_connected").values()) == {1}
        assert len({each.value("dledger_term") for each in found.values()}) == 1
        followers = {s.labels["follower"] for s in found[leader].samples if s.name == "dledger_follower_active"}
        assert followers == set(group.nodes) - {leader}
        assert found[leader].value("dledger_leader_changes_total") >= 1
        assert sum(each.value("dledger_elections_total") for each in found.values()) >= 1


async def test_lag_of_stalled_follower_grows_in_entries_and_bytes(tmp_path: Path) -> None:
    async with group_of(tmp_path, 3) as group:
        leader, (slow, _) = await group.leader(), await group.followers()
        free = stall(group.hosted(slow).replica.store.run)
        try:
            client = await group.client()
            await client.append([b"x" * 1000] * 10)
            found = await scrape(group, leader)
            assert found.value("dledger_follower_lag_entries", follower=slow) >= 10
            assert found.value("dledger_follower_lag_bytes", follower=slow) >= 10 * 1048
        finally:
            free.set()


async def test_refusals_are_counted_by_the_name_of_their_error(tmp_path: Path) -> None:
    async with group_of(tmp_path) as group:
        with pytest.raises(BusyError):
            await too_busy(group)
        assert (await scrape(group)).of("dledger_requests_refused_total") == {("BUSY",): 1}


async def test_refused_connections_are_counted_too(tmp_path: Path) -> None:
    async with group_of(tmp_path, limits=Limits(connections=1)) as group:
        await eventually(lambda: not group.nodes["n0"].service.flows)  # of the bootstrap
        await group.channel("n0")
        with pytest.raises(BusyError):
            await group.channel("n0")
        found = await scrape(group)
        assert found.of("dledger_requests_refused_total") == {("BUSY",): 1}
        assert found.value("dledger_quota_refusals_total", quota="address_connections") == 0
        assert (found.value("dledger_client_connections"), found.value("dledger_client_connections_limit")) == (1, 1)


async def test_refusals_of_quotas_are_counted_by_quota(tmp_path: Path) -> None:
    async with group_of(tmp_path, limits=Limits(address_connections=1)) as group:
        await eventually(lambda: not group.nodes["n0"].service.flows)  # of the bootstrap
        await group.channel("n0")
        with pytest.raises(QuotaExceededError):
            await group.channel("n0")
        found = (await scrape(group)).of("dledger_quota_refusals_total")
        assert found.pop(("address_connections",)) == 1
        assert found == {(quota.value,): 0 for quota in Quota}


async def test_archive_is_shown_once_there_is_one(tmp_path: Path) -> None:
    async with group_of(tmp_path) as group:
        await (await group.client()).append([b"x" * 1000])
        replica = group.hosted("n0").replica
        row = [0, 1, 0, b"d" * 32, 0, 48, 0, 1, 7]
        replica.propose(ProposedBatch(control=control.pack({"k": "archived", "r": row, "u": "file:///a", "b": True})))
        await eventually(lambda: replica.tables.archive.is_active)
        await group.nodes["n0"].disk_rounds.check_space()
        found = await scrape(group)
        assert {name: found.value(name) > 0 for name in WITH_ARCHIVE} == {
            "dledger_archived_end": True,
            "dledger_archive_lag_bytes": True,
            "dledger_archive_lag_seconds": False,
            "dledger_archive_differs": False,
        }


async def test_full_disk_pins_tables_and_transactions_are_shown(tmp_path: Path) -> None:
    async with group_of(tmp_path) as group:
        client, replica = await group.client(), group.hosted("n0").replica
        await client.attempt([b"a"], {"q": "query", "b": 0, "r": "run"})
        await client.append([b"a"], p="producer", pe=0, ps=0)
        replica.pins.set(["reader", 60_000], 0, replica.pin_time_ms)
        found = await scrape(group)
        assert (found.value("dledger_open_transactions"), found.value("dledger_pins")) == (1, 1)
        assert found.value("dledger_table_rows", table="producers") == 1
        assert found.value("dledger_table_rows_limit", table="producers") == LIMITS.producers
        assert 0 < found.value("dledger_disk_free_bytes") < found.value("dledger_disk_size_bytes")
        assert found.value("dledger_disk_full") == 0
    async with group_of(tmp_path / "full", disk_full_bytes=1 << 60) as group:
        assert (await scrape(group)).value("dledger_disk_full") == 1


async def test_scrub_position_reaches_the_end(tmp_path: Path) -> None:
    async with group_of(tmp_path, scrub_pause_s=0.05) as group:
        client = await group.client()
        _, last, _ = await client.append([b"x"] * 10)
        for _ in range(1000):
            found = await scrape(group)
            if found.value("dledger_scrub_index") == last + 1:
                break
        assert found.value("dledger_scrub_rounds_total") >= 1
        assert found.value("dledger_damaged_places") == found.value("dledger_repairs_total") == 0


# --- health -----------------------------------------------------------------------------------------------------------


async def test_quarantined_group_makes_node_unready_and_not_dead(tmp_path: Path) -> None:
    async with group_of(tmp_path, groups=("a", "b")) as group:
        node = group.nodes["n0"]
        assert [(await afetch(node.http_port, path)).status for path in ("/livez", "/readyz")] == [200, 200]
        node.groups["a"].quarantine(RuntimeError("a reason"))
        ready = await afetch(node.http_port, "/readyz")
        assert ready.status == 503
        assert "group a" in ready.text
        assert "group b" not in ready.text
        assert (await afetch(node.http_port, "/livez")).status == 200
        found = await scrape(group)
        assert found.value("dledger_group_state", group="a", state="quarantined") == 1
        assert found.value("dledger_ready") == 0


async def test_node_that_stops_is_not_ready(tmp_path: Path) -> None:
    async with group_of(tmp_path) as group:
        group.nodes["n0"].service.drain()
        assert (await afetch(group.nodes["n0"].http_port, "/readyz")).status == 503


async def test_node_that_waits_to_be_bootstrapped_is_ready(tmp_path: Path) -> None:
    group = ServerGroup(tmp_path, 3, http=HTTP)
    node = await group.start("n1")
    try:
        assert node.groups["default"].is_waiting
        assert (await afetch(node.http_port, "/readyz")).status == 200
        assert (await scrape(group, "n1")).value("dledger_group_state", state="waiting") == 1
    finally:
        await group.stop("n1")


# --- access -----------------------------------------------------------------------------------------------------------


async def test_request_that_names_another_host_is_refused(tmp_path: Path) -> None:
    async with group_of(tmp_path) as group:
        port = group.nodes["n0"].http_port
        for host, status in (("evil.example", 421), ("127.0.0.1.evil.example:80", 421), ("", 421), ("localhost", 200)):
            assert (await afetch(port, "/metrics", headers={"Host": host})).status == status, host
        assert (await afetch(port, "/livez", headers={"Host": "10.0.0.7"})).status == 200


class Reader:
    def __init__(self, *groups: str) -> None:
        self.groups = groups

    def may(self, action: str, group: str) -> bool:
        return action == "read" and group in self.groups


async def test_with_credentials_only_known_principals_that_may_read_get_in(tmp_path: Path) -> None:
    known = {"Bearer good": Reader("default"), "Bearer poor": Reader()}
    async with group_of(tmp_path, site=SiteOptions(principal_of=known.get)) as group:
        port = group.nodes["n0"].http_port
        for given, status in ((None, 401), ("Bearer wrong", 401), ("Bearer poor", 403), ("Bearer good", 200)):
            headers = {"Host": "node.example"} | ({} if given is None else {"Authorization": given})
            assert (await afetch(port, "/metrics", headers=headers)).status == status
        assert [(await afetch(port, path)).status for path in ("/livez", "/readyz")] == [200, 200]


# --- durations --------------------------------------------------------------------------------------------------------


def test_durations_show_quantiles_and_cumulative_buckets() -> None:
    durations = Durations()
    assert quantile(durations.counts, 0.99) is None
    for _ in range(99):
        durations.observe(0.001)
    durations.observe(5.0)
    low, high = quantile(durations.counts, 0.5), quantile(durations.counts, 1.0)
    assert low is not None
    assert high is not None
    assert 0.001 <= low <= 0.0015
    assert 5.0 <= high <= 7.5
    durations.observe(1e6)
    assert durations.cumulative()[-1] == ("+Inf", 101.0)
    assert [count for _, count in durations.cumulative(2)] == sorted(count for _, count in durations.cumulative(2))
    assert durations.cumulative()[len(BOUNDS_S) - 1][1] == 100
