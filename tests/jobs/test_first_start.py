"""The first start of a job, which fetches Delta's jars: without a network, from a mirror, and two of them at once."""

from __future__ import annotations

import http.server
import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from dledger_core.cluster import free_ports
from jobs import _delta_jars
from jobs._cli import StoppedError
from tests.jobs.first_start import ROWS

CHECKOUT = Path(__file__).resolve().parents[2]
IVY_SETTINGS = """
<ivysettings>
  <settings defaultResolver="only"/>
  <resolvers><ibiblio name="only" m2compatible="true" root="{}"/></resolvers>
</ivysettings>
"""


def start(directory: Path, name: str, repository: str, **environment: str) -> subprocess.Popen[str]:
    """Start a job of a user whose home is ``directory``/home, with Ivy's cache, and who has this repository alone."""
    home, settings = directory / "home", directory / f"{name}.xml"
    settings.write_text(IVY_SETTINGS.format(repository))
    given = [f"spark.jars.ivy={home / 'ivy'}", f"spark.jars.ivySettings={settings}"]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.jobs.first_start", str(directory / name), *given],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=CHECKOUT,
        env=os.environ | {"XDG_CACHE_HOME": str(home / "cache"), "SPARK_MASTER": "local[1]"} | environment,
    )


def ended(job: subprocess.Popen[str]) -> tuple[int, dict[str, Any], list[str]]:
    """Return exit code, summary and the lines of stderr."""
    out, err = job.communicate(timeout=400)
    return job.returncode, json.loads(out.splitlines()[-1]), err.splitlines()


def closed_port() -> str:
    return f"http://127.0.0.1:{free_ports(1)[0]}/"


class Mirror(http.server.ThreadingHTTPServer):
    """A Maven repository on loopback with the content of this user's Ivy cache; counts the requests of each jar."""

    def __init__(self, directory: Path) -> None:
        super().__init__(("127.0.0.1", 0), partial(_Handler, directory=str(directory)))
        self.requests = Counter[str]()
        [cache] = list(Path.home().glob(".ivy2*/cache"))[:1]
        for pom in cache.glob("*/*/ivy-*.xml.original"):
            group, name = pom.parts[-3:-1]
            version = pom.name.removeprefix("ivy-").removesuffix(".xml.original")
            place = directory / group.replace(".", "/") / name / version
            place.mkdir(parents=True)
            (place / f"{name}-{version}.pom").symlink_to(pom)
            for jar in pom.parent.glob(f"*/{name}-{version}.jar"):
                (place / jar.name).symlink_to(jar)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"


class _Handler(http.server.SimpleHTTPRequestHandler):
    server: Mirror

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.server.requests[self.path] += 1
        super().do_GET()


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[Mirror]:
    with Mirror(tmp_path / "mirror") as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.spark
def test_first_start_without_network_says_how_to_fetch_jars(tmp_path: Path) -> None:
    code, summary, lines = ended(start(tmp_path, "offline", closed_port()))
    assert (code, summary["error"]) == (3, "CONFIG")
    assert lines[:-1] == ["starting Spark; its first start fetches Delta's jars"]
    for part in ("io.delta#delta-spark", "Connection refused", "--repositories"):
        assert part in lines[-1]
    assert not (tmp_path / "offline").exists()


@pytest.mark.spark
@pytest.mark.soak
def test_remedy_of_first_start_without_network_works_once_typed(tmp_path: Path, mirror: Mirror) -> None:
    _, summary, _ = ended(start(tmp_path, "offline", closed_port()))
    [printed] = re.findall(r"export (.*)", summary["message"])
    [variable] = shlex.split(printed.replace("https://HOST/maven2", mirror.url))
    name, _, value = variable.partition("=")
    code, summary, lines = ended(start(tmp_path, "mirrored", closed_port(), **{name: value}))
    assert (code, summary.get("rows")) == (0, ROWS), lines


@pytest.mark.spark
@pytest.mark.soak
def test_two_first_starts_at_once_fetch_jars_once_and_later_ones_offline(tmp_path: Path, mirror: Mirror) -> None:
    jobs = [start(tmp_path, name, mirror.url) for name in ("one", "two")]
    for code, summary, lines in map(ended, jobs):
        assert (code, summary.get("rows")) == (0, ROWS), lines
    [record] = (tmp_path / "home" / "cache" / "dledger").glob("*.jars")
    assert _delta_jars.recorded_jars(record)
    fetched = {path: count for path, count in mirror.requests.items() if path.endswith(".jar")}
    assert fetched
    assert set(fetched.values()) == {1}
    code, summary, lines = ended(start(tmp_path, "three", closed_port()))
    assert (code, summary.get("rows")) == (0, ROWS), lines


def test_job_that_waits_for_jars_continues_after_other_one_or_signal(tmp_path: Path) -> None:
    record, order = tmp_path / "cache" / "delta.jars", list[str]()

    def wait(name: str, stop: Event) -> None:
        try:
            with _delta_jars.only_one_fetches(record, stop, announce=False):
                order.append(name)
        except StoppedError:
            order.append(f"{name} stopped")

    stop = Event()
    with _delta_jars.only_one_fetches(record, Event(), announce=False):
        stopped, waiting = Thread(target=wait, args=("first", stop)), Thread(target=wait, args=("second", Event()))
        stopped.start()
        waiting.start()
        stop.set()
        stopped.join()
        assert order == ["first stopped"]
    waiting.join()
    assert order == ["first stopped", "second"]


def test_job_does_not_wait_where_cache_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for _ in range(2):
        with _delta_jars.only_one_fetches(tmp_path / "file" / "delta.jars", Event(), announce=False):
            pass
