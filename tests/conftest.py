"""Rules of every test run: retries by mark, no skip under CI, at least one passed test, no process or handler left.

A run on several workers (``--dist loadfile``) gives a worker complete files, so the tests of a file share its fixtures.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest
import uvloop

from tests.support.spark_jvm import short_lived_environment

RETRIED = ("integration", "spark", "notebook")
"""Marks of tests of real processes or real Spark: a machine that stalls for seconds fails them."""
NEVER_RETRIED = "chaos"
"""The directory whose tests look for violated guarantees: a second run would hide one."""
LONG = (*RETRIED, "sim", "slow")
QUICK = frozenset({
    "raft", "record", "storage", "net", "sim/test_simulator.py", "server/services/test_appends.py",
    "server/replica/test_replica.py", "server/replica/test_recovering.py", "server/replica/test_acknowledged.py",
    "test_bootstrap.py", "test_lineage.py", "test_recovery_holes.py", "test_architecture.py",
})  # fmt: skip
"""Files and directories of the mark ``quick``: most of what a change can break, in two minutes on two cores.

Tests of real processes and Spark, and the slow ones, are left out there too; seeds of the simulation are not.
"""
HERE = Path(__file__).resolve().parent
LEFT_S = 60.0
LOGS_MAX, LOG_LINES = 9, 40
"""Of the nodes' logs, a failed test of real processes shows this much: it may not fail again."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def pytest_addoption(parser: pytest.Parser) -> None:
    ci = os.environ.get("CI", "").lower() in {"1", "true"}
    group = parser.getgroup("dledger")
    group.addoption("--no-skips", action="store_true", default=ci, help="a skipped test fails (default under CI=true)")
    group.addoption("--soak", action="store_true", help="select the tests marked soak too, which take long")


def pytest_configure() -> None:
    # A shell's background job ignores Ctrl-C, and so would every process that the tests start and interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for name, value in short_lived_environment().items():
        os.environ.setdefault(name, value)
    hypothesis.settings.register_profile("no deadline", deadline=None)  # a busy machine must not fail a test
    hypothesis.settings.load_profile("no deadline")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out soak runs, mark the quick tests, start the long files first, and retry the marks in ``RETRIED`` only.

    Unit, contract, property and simulation tests are never retried, because a retry hides a race. Neither are those of
    the directory ``NEVER_RETRIED``.
    """
    if not config.getoption("--soak"):
        left_out = {item for item in items if marked(item, ("soak",))}
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=list(left_out))
    for item in items:
        if is_quick(item):
            item.add_marker(pytest.mark.quick)
    spark = {item.path for item in items if "spark" in getattr(item, "fixturenames", ())}
    jvms = {item.path for item in items if marked(item, ("spark", "notebook"))}  # minutes each, of many processes
    long = {item.path for item in items if marked(item, LONG)}
    items.sort(key=lambda item: (item.path not in spark, item.path not in jvms, item.path not in long))
    for item in items:
        if not marked(item, RETRIED) or item.path.parent.name == NEVER_RETRIED:
            item.add_marker(pytest.mark.flaky(reruns=0))


def is_quick(item: pytest.Item) -> bool:
    if HERE not in item.path.parents or marked(item, (*RETRIED, "slow")):
        return False
    path = item.path.relative_to(HERE)
    return not QUICK.isdisjoint(str(part) for part in (path, *path.parents))


def marked(item: pytest.Item, names: tuple[str, ...]) -> bool:
    return any(item.get_closest_marker(name) for name in names)


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The Spark session of a worker, with Delta and an event log; two tasks at a time, at most three attempts each."""
    from jobs._session import spark_session

    settings = {"spark.master": "local[2,3]", "spark.sql.shuffle.partitions": "2"}
    settings["spark.databricks.delta.snapshotPartitions"] = "1"
    # Tests look for secrets in it. Its cost is that of a listener: no file is synced.
    settings |= {"spark.eventLog.enabled": "true", "spark.eventLog.compress": "false"}
    settings["spark.eventLog.dir"] = tmp_path_factory.mktemp("events").as_uri()
    with spark_session("tests", settings=settings) as session:
        yield session


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium for the pages of a file's tests; they run no coroutines meanwhile."""
    from tests.support.browser import open_browser

    with open_browser() as found:
        yield found


@pytest.fixture(scope="module", autouse=True)
def no_process_left() -> Iterator[None]:
    """Fails the last test of a file that leaves a child process; JVMs belong to the fixtures that started them."""
    before = children()
    yield
    _, left = psutil.wait_procs(children() - before, LEFT_S)
    assert not left, f"still running: {left}"


@pytest.fixture(scope="module", autouse=True)
def signal_handlers_restored() -> Iterator[None]:
    """Restore the signal handlers after each file, so that none of them changes the tests of the next file."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        if handler is not None and signal.getsignal(number) != handler:
            signal.signal(number, handler)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine: on uvloop, as the server runs, or on the loop of the fixture ``new_loop``."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    with asyncio.Runner(loop_factory=pyfuncitem.funcargs.get("new_loop", uvloop.new_event_loop)) as runner:
        runner.run(pyfuncitem.obj(**arguments))
    return True


def children() -> set[psutil.Process]:
    running = psutil.process_iter(["ppid", "name"])
    return {each for each in running if each.info["ppid"] == os.getpid() and each.info["name"] != "java"}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        refuse_skip(report, item.config)
    if report.failed and isinstance(directory := getattr(item, "funcargs", {}).get("tmp_path"), Path):
        for path in sorted(directory.rglob("n?.log"))[:LOGS_MAX]:  # the nodes of a LocalCluster
            lines = path.read_text(errors="replace").splitlines()[-LOG_LINES:]
            report.sections.append((f"end of {path.relative_to(directory)}", "\n".join(lines)))
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.skipped:
        refuse_skip(report, collector.config)
    return report


def refuse_skip(report: pytest.TestReport | pytest.CollectReport, config: pytest.Config) -> None:
    if config.getoption("--no-skips"):
        report.outcome = "failed"
        report.longrepr = f"skipped, and --no-skips is set: {report.longrepr}"


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or exitstatus != pytest.ExitCode.OK or session.config.option.collectonly:
        return
    if not reporter.getreports("passed"):
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List every retry: each may be a race."""
    retries = terminalreporter.getreports("rerun")
    if retries:
        terminalreporter.section(f"retries: {len(retries)}")
        for report in retries:
            crash = getattr(report.longrepr, "reprcrash", None)
            terminalreporter.write_line(f"{report.nodeid}: {crash.message.splitlines()[0] if crash else report.when}")
