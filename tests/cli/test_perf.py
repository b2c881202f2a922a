"""``dledger perf``: each command measures own nodes, or a group that the user names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dledger_core import Client, LocalCluster
from tests.cli.command import error_of, result_of

pytestmark = pytest.mark.integration
SHORT = ("--seconds", "0.3")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(3, tmp_path_factory.mktemp("cluster"), ("default", "empty")) as nodes:
        yield nodes


def given(cluster: LocalCluster, group: str = "default") -> tuple[str, ...]:
    return "--peers", cluster.peers, "--group", group


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), {"entries_per_request": 10485, "single": None, "in_flight": 6, "producers": 0}),
        (("--singles",), {"entries_per_request": 1, "single": "joined"}),
        (("--separate", "--in-flight", "2"), {"entries_per_request": 1, "single": "separate", "in_flight": 2}),
        (("--producers", "3", "--request-bytes", "1000"), {"entries_per_request": 10, "in_flight": 3, "producers": 3}),
    ],
    ids=["requests", "singles", "separate", "producers"],
)
def test_append_reports_rates_and_latencies(
    cluster: LocalCluster, options: tuple[str, ...], expected: dict[str, object]
) -> None:
    with Client(cluster.peers) as client:
        before = client.bounds().end
        found = result_of("perf", "append", *given(cluster), *SHORT, *options)
        assert client.bounds().end - before >= found["entries"] > 0  # and those of the warm-up
    assert found.items() >= expected.items()
    assert found["p50_ms"] <= found["p99_ms"] <= found["p99_99_ms"] <= found["max_ms"]


def test_rate_is_kept_and_latency_counts_from_the_due_time(cluster: LocalCluster) -> None:
    found = result_of("perf", "append", *given(cluster), "--separate", "--rate", "50", "--seconds", "1")
    assert 25 <= found["entries"] <= 51  # the last one may be due just before the end


def test_own_nodes_show_cost_syncs_and_groups() -> None:
    found = result_of("perf", "append", *SHORT, "--separate", "--groups", "2", "--tls")
    assert (found["groups"], found["nodes"]) == (2, 3)
    assert {f"cpu_us_per_entry_{name}" for name in ("client", "n0", "n1", "n2")} <= found.keys()
    assert found["syncs"] > 0
    assert found["bytes_written_per_byte"] >= 0  # 0 in memory


def test_read_returns_the_entries_of_own_nodes_and_of_a_group(cluster: LocalCluster) -> None:
    own = result_of("perf", "read", *SHORT, "--entries", "1000", "--groups", "2", "--in-flight", "3")
    assert own["entries"] >= 1000
    assert (own["size"], own["groups"], own["in_flight"]) == (100, 2, 3)
    with Client(cluster.peers) as client:
        client.append([bytes(100)] * 10)
        end = client.bounds().end
        assert result_of("perf", "read", *given(cluster), *SHORT)["entries"] >= end // 2
        assert client.bounds().end == end, "it appends nothing"


@pytest.mark.parametrize("fault", ["kill", "freeze", "transfer"])
def test_failover_is_measured_and_nothing_is_lost(fault: str, tmp_path: Path) -> None:
    options = ("--fault", fault, "--rounds", "1", "--rate", "100", "--dir", tmp_path)
    found = result_of("perf", "failover", *options)
    assert found["acknowledged"] > 50
    assert (found["rounds"], found["lost"], found["repeated"]) == (1, 0, 0)
    assert 0 < found["median_ms"] <= found["max_ms"]


@pytest.mark.parametrize(
    "call",
    [
        ("append", "--peers", "{peers}"),
        ("append", "--peers", "{peers}", "--group", "default", "--groups", "2"),
        ("append", "--peers", "{peers}", "--group", "default", "--tls"),
        ("append", "--singles", "--separate"),
        ("append", "--singles", "--producers", "2"),
        ("read", "--peers", "{peers}"),
        ("read", "--peers", "{peers}", "--group", "default", "--entries", "5"),
        ("read", "--peers", "{peers}", "--group", "empty"),
        ("failover", "--fault", "flood"),
    ],
    ids=" ".join,
)
def test_options_that_contradict_are_refused(cluster: LocalCluster, call: tuple[str, ...]) -> None:
    with Client(cluster.peers) as client:
        end = client.bounds().end
        error_of("perf", *(each.format(peers=cluster.peers) for each in call))
        assert client.bounds().end == end
