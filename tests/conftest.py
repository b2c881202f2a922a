"""What holds for every test run: no silent skips under CI, at least one test, no process and no file left behind.

A run on several workers (``-n 3``) gives a worker whole files; those that share a Spark session stay together, in two
groups.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Generator
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest
from xdist.scheduler import LoadScopeScheduling

CHECKOUT = Path(__file__).resolve().parents[1]
WITH_JVMS = frozenset({"demo", "interop", "jobs", "notebooks", "spark_connector"})
SHARED_SESSION = re.compile(r"\b(spark|dledger): Any\b")
"""What a test that takes the shared Spark session has among its arguments."""
OF_PROCESSES = ("integration", "spark", "notebook")
OF_SOCKETS = frozenset({"client", "net", "remoting", "server"})
"""Folders whose tests have real timers and connections, though all in one process."""
LONG = (*OF_PROCESSES, "sim", "slow")
RUN_MARK = "DLEDGER_TEST_RUN"
"""Every process started by the tests inherits this variable, so even one whose parent died is found."""

_ran = pytest.StashKey[set[str]]()
_before = pytest.StashKey[set[str]]()
_failed = pytest.StashKey[dict[str, float]]()
_remarks = pytest.StashKey[list[str]]()

SPARK_CLASSES = CHECKOUT / ".venv" / "spark-classes.jsa"
DELTA_JARS = CHECKOUT / ".venv" / "delta-jars"
"""Both made by ``.ci/spark``; a JVM that does not find them, or cannot use them, starts without."""
JVM_OPTIONS = (
    "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=256m -XX:+UseSerialGC -Xlog:disable"
    " -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
    " -Dspark.python.authenticate.socketTimeout=300s"
    " -Dspark.sql.codegen.wholeStage=false -Dspark.sql.codegen.factoryMode=NO_CODEGEN"
)
"""The JVMs of tests live for minutes: on two cores the optimising compiler takes more time than it saves, and so do a
collector's own threads. Without that compiler the JVM would reserve a code cache of 48 MB only, which a whole run of
Spark tests fills. Nor does Spark compile its queries, which have few rows, and nothing verifies its bytecode. What the
JVM itself logs would go to stdout, where tests expect a command's output. Spark gives a Python worker 15 s to connect,
too few for many that start at once on a slow machine."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("dledger")
    ci = os.environ.get("CI", "").lower() in {"1", "true"}
    group.addoption("--no-skips", action="store_true", default=ci, help="a skipped test fails (default under CI=true)")
    group.addoption("--retries", type=int, default=0, help="how often a test of real processes may fail and try again")
    group.addoption("--no-leftovers", action="store_true", help="fail if the run leaves new files in the checkout")


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def pytest_configure(config: pytest.Config) -> None:
    if not _is_worker(config):
        os.environ[RUN_MARK] = uuid.uuid4().hex
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy would start threads in each of hundreds of processes
    os.environ.setdefault("JDK_JAVA_OPTIONS", f"{JVM_OPTIONS} -XX:SharedArchiveFile={SPARK_CLASSES}")
    if DELTA_JARS.exists():
        os.environ.setdefault("SPARK_DIST_CLASSPATH", DELTA_JARS.read_text().strip())
    # A shell's background job ignores Ctrl-C, and so would all processes that the tests start and interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # A machine that is busy is no reason to fail.
    hypothesis.settings.register_profile("patient", deadline=None)
    hypothesis.settings.load_profile("patient")
    config.stash[_ran] = set()
    config.stash[_failed] = {}
    config.stash[_remarks] = []
    config.pluginmanager.register(_Count(config))
    if config.getoption("--no-leftovers"):
        config.stash[_before] = _files()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of processes or sockets may fail because the machine stands still for seconds; no others, nor chaos.

    Those that share a Spark session come first, then files with long tests: so no worker is left with one at the end.
    """
    long = {item.path for item in items if any(item.get_closest_marker(name) for name in LONG)}
    ranks = {path: _rank(path, is_long=path in long) for path in {item.path for item in items}}
    items.sort(key=lambda item: ranks[item.path])
    retries = config.getoption("--retries")
    for item in items:
        may_stand_still = any(item.get_closest_marker(name) for name in OF_PROCESSES)
        may_stand_still |= item.path.parent.name in OF_SOCKETS
        if retries and may_stand_still and item.path.parent.name != "chaos":
            item.add_marker(pytest.mark.flaky(reruns=retries, reruns_delay=2))


@pytest.fixture(scope="session")
def spark() -> Generator[Any, None, None]:
    """The one Spark session of a test run, with Delta; two tasks at a time, each tried up to three times."""
    from jobs._session import spark_session

    settings = {"spark.master": "local[2,3]", "spark.sql.shuffle.partitions": "2"}
    with spark_session("tests", settings=settings) as session:
        yield session


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and item.config.getoption("--no-skips"):
        report.outcome = "failed"
        report.longrepr = f"skipped, and --no-skips is set: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """Workers tell reports in UTF-8: half a surrogate pair in a log line would end the whole run."""
    return _encodable((yield))


def _encodable(data: Any) -> Any:
    match data:
        case str():
            return data.encode("utf-8", "backslashreplace").decode()
        case dict():
            return {key: _encodable(value) for key, value in data.items()}
        case list() | tuple():
            return type(data)(map(_encodable, data))
    return data


class _Count:
    """Notes which tests ran and when tries failed; reports of workers reach only the process that leads them."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and not report.skipped:
            self._config.stash[_ran].add(report.nodeid)
        if report.outcome in ("failed", "rerun"):
            self._config.stash[_failed][report.nodeid] = report.stop


def _rank(path: Path, *, is_long: bool) -> int:
    if not is_long:
        return 3
    if path.parent.name not in WITH_JVMS:
        return 2
    return 0 if _shares_spark(path) else 1


@cache
def _shares_spark(path: Path) -> bool:
    return path.parent.name in WITH_JVMS and SHARED_SESSION.search(path.read_text()) is not None


class _ByFile(LoadScopeScheduling):  # type: ignore[misc]
    """Gives workers whole files; those of the jobs that share a Spark session to one, and all others that do."""

    def _split_scope(self, nodeid: str) -> str:
        name = nodeid.split("::", 1)[0]
        path = self.config.rootpath / name
        if not _shares_spark(path):
            return name
        return "session of jobs" if path.parent.name == "jobs" else "session"


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _ByFile:
    config.option.loadscopereorder = False  # it would give away files with few tests last, and some take a minute
    return _ByFile(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.skipped and collector.config.getoption("--no-skips"):
        report.outcome = "failed"
        report.longrepr = f"{collector.nodeid} skipped, and --no-skips is set: {report.longrepr}"
    return report


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    config = session.config
    if config.option.collectonly:
        return
    _stop_spark()
    if _is_worker(config):
        return  # the process that leads the workers looks when they are gone
    remarks = config.stash[_remarks]
    remarks += [f"ended, a failed try had left it: {process}" for process in _end_what_failed_tries_left(config)]
    problems = [f"still running: {process}" for process in _processes_left()]
    if _before in config.stash:
        problems += [f"left behind: {path}" for path in sorted(_files() - config.stash[_before])]
    if exitstatus == pytest.ExitCode.OK and not config.stash[_ran]:
        problems.append("no test ran: all were skipped")
    remarks += problems
    if problems and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> Generator[None, None, None]:
    """Last, because a log is often kept by its end alone: what failed the run, and what had to be tried again."""
    yield
    again = sorted({report.nodeid for report in terminalreporter.getreports("rerun")})
    for remark in [*(f"tried again: {test}" for test in again), *config.stash[_remarks]]:
        terminalreporter.write_line(remark, red=True)


def _files() -> set[str]:
    """Files that git neither tracks nor ignores; empty outside a git checkout."""
    command = ["git", "-C", str(CHECKOUT), "status", "--porcelain", "--untracked-files=all"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return {line[3:] for line in done.stdout.splitlines()}


def _stop_spark() -> None:
    """Ends the JVM that PySpark would keep until this interpreter exits."""
    import sys

    context = sys.modules.get("pyspark.core.context")
    gateway = getattr(getattr(context, "SparkContext", None), "_gateway", None)
    if gateway is None:
        return
    context.SparkContext._gateway = context.SparkContext._jvm = None
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(timeout=120)


def _end_what_failed_tries_left(config: pytest.Config) -> list[str]:
    """A test that fails half-way need not tidy up; one that passes must, whatever its first try did."""
    ended = []
    for process in _marked():
        try:
            test = process.environ().get("PYTEST_CURRENT_TEST", "").rsplit(" (", 1)[0]
            if process.create_time() <= config.stash[_failed].get(test, 0.0):
                ended.append(_describe(process))
                for one in (*process.children(recursive=True), process):
                    one.kill()
        except psutil.Error:
            continue
    return ended


def _processes_left(patience_s: float = 60.0) -> list[str]:
    """Processes of this run that outlive it; those that are just ending get a moment."""
    deadline = time.monotonic() + patience_s
    left = _marked()
    while left and time.monotonic() < deadline:
        psutil.wait_procs(left, timeout=0.2)
        left = _marked()
    return [_describe(process) for process in left]


def _marked() -> list[psutil.Process]:
    mine = os.environ[RUN_MARK]
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(RUN_MARK) == mine:
                found.append(process)
        except psutil.Error:
            continue
    return found


def _describe(process: psutil.Process) -> str:
    try:
        return f"pid {process.pid}: {' '.join(process.cmdline())[:200]}"
    except psutil.Error:
        return f"pid {process.pid}"
