"""Spark as processes of its own, as people deploy it: a standalone master, workers, spark-submit, a Connect server.

Their Python has the dependencies of the connector and not the connector, so that a test shows how it is shipped.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import sysconfig
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pyspark

from dledger_core.environment import DELTA_VERSION, SPARK_VERSION, find_java
from tests.support.spark_jvm import short_lived, short_lived_environment

CHECKOUT = Path(__file__).resolve().parents[2]
START_S = 240.0
STOP_S = 60.0
_SETTINGS = (
    "spark.driver.bindAddress=127.0.0.1",
    "spark.driver.host=127.0.0.1",
    "spark.driver.memory=1g",
    "spark.executor.memory=512m",
    f"spark.executor.extraJavaOptions={' '.join(short_lived())}",
    "spark.ui.enabled=false",
    "spark.log.level=WARN",
    "spark.sql.warehouse.dir=warehouse",
)

DELTA = (
    f"spark.jars.packages=io.delta:delta-spark_{SPARK_VERSION}_2.13:{DELTA_VERSION}",
    "spark.sql.extensions=io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog=org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.databricks.delta.snapshotPartitions=1",
)
"""Settings of a Spark with Delta, whose jar Ivy finds."""


def spark_home() -> Path:
    return Path(pyspark.__file__).parent


def make_package(directory: Path) -> Path:
    """The zip for ``--py-files``: what the wheel holds, as the README says to make it."""
    path = directory / "dledger.zip"
    with zipfile.ZipFile(path, "w") as package:
        for name in ("dledger_core", "spark_connector"):
            for file in sorted((CHECKOUT / name).rglob("*.py")):
                package.write(file, file.relative_to(CHECKOUT))
    return path


def make_python(directory: Path) -> Path:
    """An interpreter with all installed packages but this project."""
    packages = directory / "packages"
    packages.mkdir(parents=True)
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        ours = "dledger" in entry.name or entry.suffix == ".pth"
        if not ours:
            (packages / entry.name).symlink_to(entry)
    command = [sys.executable, "-m", "venv", "--without-pip", "--symlinks", str(directory / "python")]
    subprocess.run(command, check=True, capture_output=True)
    (site,) = (directory / "python").glob("lib/python*/site-packages")
    (site / "packages.pth").write_text(f"{packages}\n")
    return directory / "python" / "bin" / "python"


def environment(python: Path, local_dir: Path) -> dict[str, str]:
    """Environment of Spark's processes: loopback, their own directories, and no path to the checkout."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYSPARK_", "SPARK_", "PYTHON"))}
    return kept | {
        "JAVA_HOME": str(find_java()),
        "SPARK_HOME": str(spark_home()),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(local_dir),
        "PYSPARK_PYTHON": str(python),
        "PYSPARK_DRIVER_PYTHON": str(python),
        **short_lived_environment(),
    }


@contextmanager
def process(command: Sequence[object], directory: Path, env: dict[str, str], ready: str) -> Iterator[re.Match[str]]:
    """Run a process in its own folder until the end of the block; begins when its log shows ``ready``."""
    directory.mkdir(parents=True)
    log = directory / "log"
    with log.open("wb") as out:
        running = subprocess.Popen(
            [*map(str, command)], cwd=directory, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out
        )
    try:
        yield _wait(running, log, ready)
    finally:
        running.terminate()
        try:
            running.wait(STOP_S)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()


def _wait(running: subprocess.Popen[bytes], log: Path, ready: str) -> re.Match[str]:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and running.poll() is None:
        found = re.search(ready, log.read_text(errors="replace"))
        if found is not None:
            return found
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.wait(0.1)
    raise AssertionError(f"{running.args} did not begin:\n{log.read_text(errors='replace')[-4000:]}")


@dataclass(frozen=True)
class Standalone:
    """A standalone cluster.

    Attributes:
        master: its URL.
        workers: the workers' directories, the only ones that their executors can read.
    """

    master: str
    workers: tuple[Path, ...]


@contextmanager
def standalone(directory: Path, python: Path) -> Iterator[Standalone]:
    """A master and two workers of one core each, on loopback and free ports.

    Each worker has an address of its own: Spark starts no second attempt of a task on the same host.
    """
    spark_class = spark_home() / "bin" / "spark-class"
    ports = ["--port", "0", "--webui-port", "0"]
    with ExitStack() as stack:
        command = [spark_class, "org.apache.spark.deploy.master.Master", "--host", "127.0.0.1", *ports]
        env = environment(python, directory / "master" / "local")
        master = stack.enter_context(process(command, directory / "master", env, r"Starting Spark master at (\S+)"))
        folders = (directory / "worker-0", directory / "worker-1")
        for number, folder in enumerate(folders):
            command = [spark_class, "org.apache.spark.deploy.worker.Worker", "--host", f"127.0.0.{number + 1}", *ports]
            command += ["--cores", "1", "--memory", "1g", "--work-dir", folder / "work", master[1]]
            env = environment(python, folder / "local")
            stack.enter_context(process(command, folder, env, "Successfully registered with master"))
        yield Standalone(master[1], folders)


@contextmanager
def connect_server(directory: Path, python: Path, package: Path, *settings: str) -> Iterator[str]:
    """A server of Spark Connect whose Python finds the package; yields its URL. It makes three attempts of a task."""
    command = [spark_home() / "bin" / "spark-submit", "--master", "local[2,3]"]
    command += ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer"]
    binding = ("spark.connect.grpc.binding.address=127.0.0.1", "spark.connect.grpc.binding.port=0")
    # It says on which port it listens at level INFO only.
    command += [*_conf(*_SETTINGS, *binding, *settings, "spark.log.level=INFO"), "spark-internal"]
    env = environment(python, directory / "local") | {"PYTHONPATH": str(package)}
    with process(command, directory, env, r"Spark Connect server started at: (\S+)") as started:
        yield f"sc://{started[1]}"


def run_client(directory: Path, python: Path, package: Path, script: Path, *arguments: object) -> str:
    """Run a program that has the package and no Spark of its own; return its stdout."""
    env = environment(python, directory / "local") | {"PYTHONPATH": str(package)}
    return _run([python, "-W", "ignore::FutureWarning", script, *arguments], directory, env)


def submit(directory: Path, python: Path, options: Sequence[object], script: Path, *arguments: object) -> str:
    """Run ``spark-submit`` in a folder of its own; return its stdout."""
    command = [spark_home() / "bin" / "spark-submit", *_conf(*_SETTINGS), *options, script, *arguments]
    return _run(command, directory, environment(python, directory / "local"))


def kill_workers_of_tasks(pid: int) -> bool:
    """Kill the Python workers in which tasks below a process run, forks of Spark's daemon; return whether any ran."""
    killed = False
    for daemon in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if daemon.cmdline()[-2:] == ["pyspark.daemon", "pyspark.worker"]:
                for worker in daemon.children():
                    worker.kill()
                    killed = True
    return killed


@contextmanager
def while_stages_run(spark: Any, act: Callable[[int], None]) -> Iterator[None]:
    """Call ``act`` with the number of each stage whose tasks run, again and again, from another thread."""
    tracker, ended = spark.sparkContext.statusTracker(), threading.Event()

    def watch() -> None:
        while not ended.wait(0.05):
            for stage in tracker.getActiveStageIds():
                act(stage)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def workers_killed(spark: Any, pid: int, stages: int = 1) -> Iterator[Callable[..., None]]:
    """Yield a function that kills the Python workers of a stage, twice at most; check that tasks of ``stages`` failed.

    ``pid`` is the JVM's: only a task can find it, and tasks that wait for the test have all cores. The first time may
    be too early: workers of the last stage wait for the next one. A task may fail twice. Called without a stage, the
    function kills the workers of all tasks, and nothing is checked.
    """
    tracker, times = spark.sparkContext.statusTracker(), Counter[int]()

    def kill(stage: int = -1) -> None:
        if times[stage] < 2 and kill_workers_of_tasks(pid):
            times[stage] += 1

    yield kill
    seen = [info.numFailedTasks for stage in times if (info := tracker.getStageInfo(stage)) is not None]
    assert sum(map(bool, seen)) >= stages or -1 in times


def _run(command: Sequence[object], directory: Path, env: dict[str, str]) -> str:
    directory.mkdir(parents=True)
    done = subprocess.run(
        [*map(str, command)],
        cwd=directory,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout


def _conf(*settings: str) -> list[str]:
    return [part for setting in settings for part in ("--conf", setting)]
