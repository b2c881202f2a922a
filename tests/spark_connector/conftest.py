"""A registered session, and a cluster for each file of tests with real Spark; every test uses groups of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dledger_core import Client, LocalCluster
from spark_connector import register
from tests.rocketmq.remoting.fake_nodes import RunningGroup
from tests.spark_connector.store_writer import StoreWriter
from tests.support.slow_elections import SLOW_ELECTIONS

JAVA_COUNT = 200
SPARE = 4
"""Groups for tests that are run again. Each group costs its nodes an election, and ticks."""


@pytest.fixture(scope="session")
def dledger(spark: Any) -> Any:
    """The session, with the data source registered."""
    register(spark)
    return spark


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Three nodes that host a group for each ``log`` and ``target`` of the file's tests."""
    items = [item for item in request.session.items if item.path == request.path]
    used = [name for item in items for name in getattr(item, "fixturenames", ()) if name in ("log", "target")]
    groups = tuple(f"g{number}" for number in range(len(used) + SPARE))
    with LocalCluster(3, groups=groups, data_segment_bytes=1 << 20, **SLOW_ELECTIONS) as running:
        yield running


@pytest.fixture(scope="module")
def _fresh_groups(cluster: Any) -> Iterator[str]:
    return iter(cluster.groups)


@pytest.fixture
def new_group(_fresh_groups: Iterator[str]) -> Any:
    """Return a function that names a group which no other test uses."""
    return lambda: next(_fresh_groups)


@pytest.fixture
def log(cluster: Any, new_group: Any) -> Iterator[Any]:
    """A client of a fresh group; ``log.group`` names it."""
    with Client(cluster.peers, new_group()) as client:
        yield client


@pytest.fixture
def target(cluster: Any, new_group: Any) -> Iterator[Any]:
    """A client of another fresh group."""
    with Client(cluster.peers, new_group()) as client:
        yield client


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreWriter]:
    """A store without a node, to be read as files."""
    with StoreWriter(tmp_path) as writer:
        yield writer


@pytest.fixture
def java() -> Iterator[RunningGroup]:
    """Three nodes with JAVA_COUNT entries, in an event loop of their own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    running = RunningGroup()
    asyncio.run_coroutine_threadsafe(running.__aenter__(), loop).result()
    for number in range(JAVA_COUNT):
        running.group.write(b"%d" % number)
    try:
        yield running
    finally:
        asyncio.run_coroutine_threadsafe(running.__aexit__(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
