"""The dashboard of ``deploy/grafana`` with a real Prometheus and a real cluster: each query has values.

``python -m tests.deploy.test_dashboard FILE.png`` draws them, with a follower that is killed and a new leader.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from dledger_core import Client, LocalCluster
from dledger_core.cluster import free_ports
from dledger_core.control import TransactionId
from dledger_core.errors import LeadershipLostError, ProducerUnknownError
from tests.support.soon import soon

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
SCRAPE_S = 1
RATE = "10s"
DRAWN_S = 120


@dataclass(frozen=True)
class Panel:
    """One panel of the dashboard."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    """(PromQL, legend), the dashboard's variables replaced."""


def panels() -> list[Panel]:
    """Return the panels with queries, as the dashboard shows them for all groups and nodes."""
    dashboard = json.loads((DEPLOY / "grafana/dledger.json").read_text())
    found = []
    for panel in dashboard["panels"]:
        queries = [
            (target["expr"].replace("$__rate_interval", RATE).replace("$group", ".*").replace("$instance", ".*"),
             target.get("legendFormat", ""))
            for target in panel.get("targets", ())
        ]  # fmt: skip
        if queries:
            unit = panel.get("fieldConfig", {}).get("defaults", {}).get("unit", "")
            found.append(Panel(panel["title"], unit, tuple(queries)))
    return found


class Prometheus:
    """A Prometheus that scrapes a cluster, with the scrape configuration and the rules of ``deploy/prometheus``.

    Args:
        cluster: the nodes.
        directory: an empty directory.
    """

    def __init__(self, cluster: LocalCluster, directory: Path) -> None:
        program = shutil.which("prometheus") or pytest.skip("needs prometheus: sudo apt-get install prometheus")
        config = yaml.safe_load((DEPLOY / "prometheus/scrape.yml").read_text())
        config["global"] = {"evaluation_interval": f"{SCRAPE_S}s"}
        config["rule_files"] = [str(DEPLOY / "prometheus" / name) for name in config["rule_files"]]
        (job,) = config["scrape_configs"]
        job["scrape_interval"] = job["scrape_timeout"] = f"{SCRAPE_S}s"
        job["static_configs"] = [
            {"targets": [urllib.parse.urlsplit(cluster.page(node)).netloc], "labels": {"instance": node}}
            for node in ("n0", "n1", "n2")
        ]
        (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
        (port,) = free_ports(1)
        self._url = f"http://127.0.0.1:{port}"
        options = {
            "config.file": directory / "prometheus.yml",
            "storage.tsdb.path": directory / "data",
            "web.listen-address": f"127.0.0.1:{port}",
        }
        self._process = subprocess.Popen(
            [program, *(f"--{name}={value}" for name, value in options.items())], stderr=subprocess.DEVNULL
        )

    def get(self, path: str, **parameters: object) -> list[dict[str, Any]]:
        """Return the series of a query; none while Prometheus starts."""
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as response:
                result: list[dict[str, Any]] = json.load(response)["data"]["result"]
                return result
        except urllib.error.HTTPError as error:
            if error.code == 503:
                return []
            raise AssertionError(error.read()) from None
        except urllib.error.URLError:
            return []

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(60)


@contextlib.contextmanager
def watched(directory: Path) -> Iterator[tuple[LocalCluster, Prometheus]]:
    """A cluster of three nodes and the Prometheus that scrapes them."""
    with LocalCluster(3, directory=directory / "cluster", http=True) as cluster:
        prometheus = Prometheus(cluster, directory)
        try:
            yield cluster, prometheus
        finally:
            prometheus.close()


def work(client: Client, number: int) -> None:
    """Append and read, with a request that is refused, a pin and a transaction in every twentieth call."""
    bodies = [b"x" * 200] * 50
    end = client.append(bodies).last_index + 1
    client.read(max(end - 100, 0), end)
    if number % 20 == 0:
        with contextlib.suppress(ProducerUnknownError):
            client.append([b"x"], producer_id=f"late-{number}", sequence=5)
        client.pin("reader", 0, 30)
        client.append_attempt(bodies, transaction=TransactionId(f"query-{number}", 0, "run"), attempt="a", once=True)
    if number % 20 == 10:  # readers wait before an open one
        client.abort_transaction(TransactionId(f"query-{number - 10}", 0, "run"))


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.soak
def test_each_query_of_dashboard_has_values_in_prometheus(tmp_path: Path) -> None:
    with watched(tmp_path) as (cluster, prometheus), Client(cluster.peers) as client:
        numbers = iter(range(1 << 30))
        for panel in panels():
            for query, _ in panel.queries:

                def has_value(query: str = query) -> bool:
                    work(client, next(numbers))
                    return any(series["value"][1] != "NaN" for series in prometheus.get("query", query=query))

                soon(has_value)


# --- the picture in the guide -----------------------------------------------------------------------------------------


def observe(prometheus: Prometheus, cluster: LocalCluster) -> tuple[float, float]:
    """Work for two minutes, kill a follower, restart it, and move leadership; return begin and end."""
    begin = time.time()
    with Client(cluster.peers, timeout_ms=60_000) as client:
        leader = str(client.metadata().leader_id)
        follower, other = (f"n{number}" for number in range(3) if f"n{number}" != leader)
        events = [
            (0.3, lambda: cluster.kill(follower)),
            (0.5, lambda: cluster.restart(follower)),
            (0.75, lambda: client.transfer_leadership(other)),
        ]
        number = 0
        while (share := (time.time() - begin) / DRAWN_S) < 1:
            while events and events[0][0] <= share:
                events.pop(0)[1]()
            with contextlib.suppress(LeadershipLostError):  # the killed node may lead by then
                work(client, number)
            number += 1
            time.sleep(0.01 + 0.02 * (share > 0.85))
    return begin + 10, time.time()


def drawn(series: dict[str, Any], begin: float) -> tuple[list[float], list[float]]:
    """Return seconds and values of a series, with a gap where it has none."""
    times: list[float] = []
    values: list[float] = []
    for at, value in series["values"]:
        if times and at - begin - times[-1] > 2 * SCRAPE_S:
            times.append(times[-1] + SCRAPE_S)
            values.append(float("nan"))
        times.append(at - begin)
        values.append(float(value))
    return times, values


def draw(prometheus: Prometheus, begin: float, end: float, path: Path) -> None:
    """Draw each panel's queries from begin to end."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot
    from matplotlib.ticker import EngFormatter

    found = panels()
    columns = 4
    rows = -(-len(found) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(19, 2.5 * rows), layout="constrained")
    formats = {"bytes": EngFormatter("B"), "Bps": EngFormatter("B/s"), "s": EngFormatter("s"), "percentunit": "{x:.1%}"}
    for axis, panel in zip(axes.flat, found, strict=False):
        for query, legend in panel.queries:
            for series in prometheus.get("query_range", query=query, start=begin, end=end, step=f"{SCRAPE_S}s"):
                label = legend
                for name, value in series["metric"].items():
                    label = label.replace(f"{{{{{name}}}}}", value)
                axis.plot(*drawn(series, begin), label=label or panel.title, lw=1.3)
        axis.set_title(panel.title, fontsize=10, loc="left", fontweight="bold")
        axis.set_xlim(0, end - begin)
        axis.set_ylim(0, max(axis.get_ylim()[1], 1e-3) * 1.35)
        axis.yaxis.set_major_formatter(formats.get(panel.unit, "{x:,g}"))
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.25)
        axis.legend(fontsize=7, frameon=False, loc="upper left", ncols=2)
    for axis in axes.flat[len(found) :]:
        axis.axis("off")
    for axis in axes[-1]:
        axis.set_xlabel("seconds", fontsize=8)
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as temporary, watched(Path(temporary)) as (nodes, collected):
        draw(collected, *observe(collected, nodes), Path(sys.argv[1]))
