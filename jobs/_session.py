"""The session of a job, built by Spark's and Delta's documented means.

Usage::

    from jobs._session import spark_session

    with spark_session("ingest") as spark:
        register(spark)
        ...

Under plain ``python`` the first start fetches Delta's jars through ``spark.jars.packages``, and records their paths;
later starts name them with ``spark.jars``, which saves Ivy's run. Under spark-submit the user names Delta with
``--packages``, and the user's settings win over the ones here. A session that is already active (a notebook, a test) is
used as it is and left running.

``run_stoppable`` and ``follow`` end Spark jobs and streaming queries cleanly on SIGTERM and Ctrl-C. An exception that a
signal raises during a call into the JVM would leave Python's connection to it out of step, so the work runs in a thread
and the main thread waits for the work or the signal.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, nullcontext
from importlib import metadata
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, Final, TypeVar

from dledger_core import ConfigError, DLedgerError
from dledger_core.cli import say, stop_requests
from dledger_core.config import parse_duration
from dledger_core.environment import DELTA_SPARK_VERSIONS, DELTA_VERSION, SPARK_VERSION, find_java
from spark_connector import planned_offset
from spark_connector.reading.tracking import Tracker

from ._cli import StoppedError, find_failure
from ._delta_jars import (
    DELTA_JAR,
    check_jars,
    fetch_failure,
    has_own_jars,
    jars_record,
    only_one_fetches,
    own_packages,
    record_jars,
    recorded_jars,
)
from ._jvm_messages import held_back

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


_ROOT: Final = Path(__file__).resolve().parent.parent
_INSTALL: Final = f"pip install 'pyspark~={SPARK_VERSION}.0' 'delta-spark=={DELTA_VERSION}'"
_SETTINGS: Final = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.sql.session.timeZone": "UTC",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
_STACK_TRACES: Final = "spark.sql.pyspark.jvmStacktrace.enabled"
"""With it the text of an error contains its causes; otherwise a DLedgerError in a task is TASK_WRITE_FAILED only."""
_LOCAL: Final = {"spark.sql.shuffle.partitions": "4", "spark.databricks.delta.snapshotPartitions": "2"}
"""On one machine many small tasks cost more than they gain: with Delta's 50 an ingest took 22 % more processor time."""


@contextmanager
def spark_session(
    app_name: str, *, settings: Mapping[str, str] | None = None, verbose: bool = False, announce: bool = True
) -> Iterator[SparkSession]:
    """Yield a session with Delta, in UTC, and stop it at the end if it was started here.

    Args:
        app_name: name of the application.
        settings: more Spark settings; they win over the defaults here.
        verbose: show Spark's log, and the messages of its start. Otherwise Spark logs nothing, because the job reports
            errors in one line.
        announce: write a line to stderr before Spark starts.

    Raises:
        ConfigError: PySpark, delta-spark, Delta's jar or Java is missing or of another version.
        StoppedError: a signal arrived while Spark started.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="PySpark does not yet fully support pandas")
        check_versions()
        from pyspark.sql import SparkSession

        active = SparkSession.getActiveSession()
        if active is not None:
            yield active
            return
        # Spark would leave a directory spark-warehouse in the working directory.
        with tempfile.TemporaryDirectory(prefix="dledger-warehouse-", ignore_cleanup_errors=True) as warehouse:
            checkout = "" if Path(sysconfig.get_path("purelib")) == _ROOT else str(_ROOT)
            python_path = os.pathsep.join(filter(None, [checkout, os.environ.get("PYTHONPATH", "")]))
            defaults: dict[str, Any] = {
                **_SETTINGS,
                "spark.log.level": "WARN" if verbose else "OFF",
                "spark.sql.warehouse.dir": warehouse,
                "spark.executorEnv.PYTHONPATH": python_path,
                **(settings or {}),
            }
            # A signal during a call would leave Python's connection to the JVM out of step.
            with stop_requests() as stop:
                if _under_spark_submit():
                    spark = _start_submitted(app_name, defaults)
                else:
                    spark = _start(app_name, defaults, stop, verbose=verbose, announce=announce)
            try:
                if stop.is_set():
                    raise StoppedError
                yield spark
            finally:
                with stop_requests():
                    spark.stop()


def check_versions() -> None:
    """Check PySpark and delta-spark, and set PYSPARK_PYTHON; under plain python set JAVA_HOME to a supported Java.

    Raises:
        ConfigError: one of them is missing or of another version.
    """
    try:
        import pyspark
    except ImportError as error:
        raise ConfigError(f"{error.name} is not installed", sys.executable, _INSTALL) from None
    if _spark_version() not in DELTA_SPARK_VERSIONS:
        found, needed = {"found": pyspark.__version__}, " or ".join(f"{each}.x" for each in DELTA_SPARK_VERSIONS)
        raise ConfigError(f"PySpark {needed} is needed", sys.executable, _INSTALL, found)
    try:
        import delta  # after that: it imports parts of PySpark that another version may lack
    except ImportError as error:
        raise ConfigError(f"{error.name} is not installed", sys.executable, _INSTALL) from None
    del delta
    _check_delta()
    _check_spark_home()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if not _under_spark_submit():
        os.environ["JAVA_HOME"] = str(find_java())


def _check_delta() -> None:
    """Raise ConfigError for another delta-spark, which would fetch another jar; spark-submit has a jar of its own."""
    if _under_spark_submit():
        return
    try:
        found = metadata.version("delta-spark")
    except metadata.PackageNotFoundError:
        raise ConfigError("delta-spark is not installed", sys.executable, _INSTALL) from None
    if found != DELTA_VERSION:
        raise ConfigError(f"delta-spark {DELTA_VERSION} is needed", sys.executable, _INSTALL, {"found": found})


def _check_spark_home() -> None:
    """Raise ConfigError for a SPARK_HOME of another Spark, which PySpark would start, with Delta's jar for its own."""
    home = os.environ.get("SPARK_HOME")
    jar = next(Path(home).glob("jars/spark-core_*.jar"), None) if home else None
    found = None if jar is None else jar.stem.rpartition("-")[2]
    if home and found and not found.startswith(f"{_spark_version()}."):
        what = f"SPARK_HOME has Spark {found}, and PySpark is of {_spark_version()}"
        raise ConfigError(what, home, "unset SPARK_HOME")


def _spark_version() -> str:
    """Return the major and minor version of PySpark."""
    import pyspark

    return ".".join(pyspark.__version__.split(".")[:2])


def _delta_package() -> str:
    return f"io.delta:delta-spark_{_spark_version()}_2.13:{DELTA_VERSION}"


def _under_spark_submit() -> bool:
    return "PYSPARK_GATEWAY_PORT" in os.environ


def _start(app_name: str, settings: dict[str, Any], stop: Event, *, verbose: bool, announce: bool) -> SparkSession:
    """Start Spark's JVM below this process, with Delta's recorded jars or through ``spark.jars.packages``."""
    from delta import configure_spark_with_delta_pip
    from pyspark.sql import SparkSession

    master = settings.get("spark.master", os.environ.get("SPARK_MASTER", "local[*]"))
    if master == "local" or master.startswith("local["):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        settings = _LOCAL | settings
    builder = SparkSession.builder.appName(app_name).config(map=settings).master(master).config(_STACK_TRACES, "true")
    packages = own_packages(settings)
    record = None if has_own_jars(settings) else jars_record()
    with ExitStack() as stack:
        jars = recorded_jars(record)
        if not jars and record is not None:
            stack.enter_context(only_one_fetches(record, stop, announce=announce))
            jars = recorded_jars(record)  # another job may have fetched them meanwhile
        if announce:
            say("starting Spark" if jars else "starting Spark; its first start fetches Delta's jars")
        builder = builder.config("spark.jars", jars) if jars else configure_spark_with_delta_pip(builder, packages)
        spark = _start_jvm(builder, verbose=verbose)
        if not jars:
            fetched = spark.conf.get("spark.jars", "") or ""
            try:
                check_jars(fetched)
                if DELTA_JAR not in fetched:
                    _require_delta(spark, settings, f"add {_delta_package()} to --packages of PYSPARK_SUBMIT_ARGS")
            except ConfigError:
                spark.stop()
                raise
            if record is not None:
                record_jars(record, fetched)
    return spark


def _start_jvm(builder: SparkSession.Builder, *, verbose: bool) -> SparkSession:
    from pyspark.errors import PySparkRuntimeError

    with nullcontext() if verbose else held_back() as messages:
        try:
            return builder.getOrCreate()
        except PySparkRuntimeError as error:
            if error.getCondition() != "JAVA_GATEWAY_EXITED":
                raise
            failure = None if messages is None else fetch_failure(messages.text())
            if messages is not None and failure is not None:
                messages.forget()
            raise failure or ConfigError(
                "Spark did not start, see its messages above",
                os.environ["JAVA_HOME"],
                "correct the setting that they name; dledger doctor checks Java and Spark",
            ) from None


def _start_submitted(app_name: str, settings: dict[str, str]) -> SparkSession:
    """Start the session in the JVM of spark-submit; settings of the user override the ones here."""
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    SparkContext.setSystemProperty(_STACK_TRACES, "true")  # connects to the JVM, so that SparkConf reads its settings
    conf = SparkConf()
    for key, value in settings.items():
        conf.setIfMissing(key, value)
    if conf.get("spark.master", "").startswith("local"):
        for key, value in _LOCAL.items():
            conf.setIfMissing(key, value)
    spark = SparkSession.builder.config(conf=conf.setIfMissing("spark.app.name", app_name)).getOrCreate()
    try:
        _require_delta(spark, settings, f"spark-submit --packages {_delta_package()} ...")
    except ConfigError:
        spark.stop()
        raise
    return spark


def _require_delta(spark: SparkSession, settings: Mapping[str, str], remedy: str) -> None:
    """Raise ConfigError if the session lacks Delta's jar."""
    try:
        spark.read.format("delta").load(f"{settings['spark.sql.warehouse.dir']}/absent")
    except Exception as error:  # noqa: BLE001  (no such table: fine)
        if "DATA_SOURCE_NOT_FOUND" in str(error):
            raise ConfigError(
                "Delta's jar is missing: the packages that Spark got do not name it", "", remedy
            ) from None


_POLL_S: Final = 0.1

_Result = TypeVar("_Result")


def run_stoppable(spark: SparkSession, work: Callable[[], _Result], stopping: Event | None = None) -> _Result:
    """Run ``work``; on SIGTERM or Ctrl-C cancel its Spark jobs and raise StoppedError.

    Args:
        spark: the session that ``work`` uses.
        work: called in another thread. It must not continue after a failed Spark job.
        stopping: set on a signal, for a stream that runs no Spark job while it waits.
    """
    with stop_requests() as stop, ThreadPoolExecutor(1, "spark-job") as pool:
        future = pool.submit(work)
        while not wait([future], _POLL_S).done:
            if not stop.is_set():
                continue
            say("stopping")
            if stopping is not None:
                stopping.set()
            # A job that starts after the first call is cancelled by a later one.
            while not wait([future], _POLL_S).done:
                spark.sparkContext.cancelAllJobs()
            raise StoppedError
        return future.result()


AVAILABLE_NOW: Final = "available-now"

_QUERY_POLL_S: Final = 1
_STOP_TIMEOUT_S: Final = 120.0


def parse_trigger(text: str) -> dict[str, Any]:
    """Return the arguments of ``DataStreamWriter.trigger`` for ``available-now`` or a duration.

    Raises:
        ConfigError: neither of them.
    """
    if text == AVAILABLE_NOW:
        return {"availableNow": True}
    try:
        milliseconds = max(1, round(parse_duration(text) * 1000))
    except ConfigError as error:
        raise ConfigError(f"wrong --trigger {text!r}", "", f'use {AVAILABLE_NOW} or "10 seconds"') from error
    return {"processingTime": f"{milliseconds} milliseconds"}


def with_short_errors(write: Callable[[DataFrame, int], None]) -> Callable[[DataFrame, int], None]:
    """Return a function for ``foreachBatch`` whose errors of Spark have one line.

    Spark looks for an interruption in the text of such an error, with a regular expression that overflows its stack if
    the text is long. Then the query ends without an error, as if it had written everything.
    """

    def write_batch(rows: DataFrame, number: int) -> None:
        try:
            write(rows, number)
        except Exception as error:
            failure = None if isinstance(error, DLedgerError) else find_failure(error)
            if failure is None:
                raise
            raise RuntimeError(failure.text) from None

    return write_batch


def check_resume(checkpoint: str, tracker: Tracker) -> None:
    """Check, before a JVM starts, that a query of these logs can continue from the checkpoint; it may be missing.

    If the checkpoint is not a local directory, only Spark checks it, when the query starts.

    Raises:
        CheckpointError: the checkpoint belongs to another source, or is damaged.
        DataLossError: it does not match the logs, and ``failOnDataLoss`` is set.
    """
    offset = planned_offset(checkpoint)
    if offset is not None:
        tracker.adopt(offset, tracker.bounds())


def follow(query: StreamingQuery, stop: Event, report: Callable[[], None] = lambda: None) -> bool:
    """Wait until the query ends or ``stop`` is set; the running micro-batch is finished first.

    Args:
        query: the running query. It is not stopped here.
        stop: set by a signal.
        report: called every second.

    Returns:
        Whether ``stop`` ended the wait.

    Raises:
        StreamingQueryException: the query failed.
    """
    while not query.awaitTermination(_QUERY_POLL_S):
        report()
        if stop.is_set():
            say("stopping after the running micro-batch")
            last, deadline = query.lastProgress, time.monotonic() + _STOP_TIMEOUT_S
            while query.isActive and query.status["isTriggerActive"] and time.monotonic() < deadline:
                now = query.lastProgress
                if now is not None and (last is None or now["batchId"] != last["batchId"]):
                    break
                query.awaitTermination(_QUERY_POLL_S)
            return True
    return False
