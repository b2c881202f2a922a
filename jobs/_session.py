"""The one place where a SparkSession is built.

Usage::

    from jobs._session import spark_session

    with spark_session("ingest") as spark:
        register(spark)
        ...

It works alike under plain ``python`` and ``spark-submit``: in both Delta's jar is there, without ``--packages``.
Settings given to ``spark-submit``, in ``spark-defaults.conf`` or in ``PYSPARK_SUBMIT_ARGS`` win over the defaults here.
A session that is already active (a notebook, a test) is used as it is and left running. Versions are checked before a
JVM starts, or first of all in the one that spark-submit has started, so that what is missing is one clear
``ConfigError`` and not a Java stack trace.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dledger_core.errors import ConfigError
from jobs._settings import AT_START, DELTA_EXTENSION, JVM_OPTIONS, LOG_LEVEL, TOLD_TWICE, defaults_for, is_local

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = [
    "JAVA_VERSIONS",
    "SPARK_VERSION",
    "SYSTEM_JAVA",
    "check_running_java",
    "check_versions",
    "delta_jars",
    "find_java",
    "spark_session",
]

SPARK_VERSION: Final = "4.2"
JAVA_VERSIONS: Final = (17, 21)
SYSTEM_JAVA: Final = Path("/usr/lib/jvm")
_ROOT: Final = Path(__file__).resolve().parent.parent


@contextmanager
def spark_session(
    app_name: str, *, driver_memory: str | None = None, settings: Mapping[str, str] | None = None
) -> Iterator[SparkSession]:
    """Yields a session with Delta, in UTC, and stops it at the end if it was made here.

    Args:
        app_name: name of the application.
        driver_memory: heap of the driver; with a local master it runs the tasks too. Ignored under spark-submit,
            which has started the JVM already.
        settings: more Spark settings; they win over the defaults, spark-submit's own win over both.

    Raises:
        ConfigError: PySpark, delta-spark or Java is missing or of a version that was not tried.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="PySpark does not yet fully support pandas")
        check_versions()
        from pyspark.sql import SparkSession

        active = SparkSession.getActiveSession()
        if active is not None:
            yield active
            return
        wanted = {"spark.driver.memory": driver_memory} if driver_memory else {}
        # Spark would leave a folder spark-warehouse in the working directory.
        with tempfile.TemporaryDirectory(prefix="dledger-warehouse-", ignore_cleanup_errors=True) as warehouse:
            spark = _start(app_name, {**wanted, **(settings or {})}, {"spark.sql.warehouse.dir": warehouse})
            try:
                yield spark
            finally:
                spark.stop()


def check_versions() -> None:
    """Checks what a session needs and points JAVA_HOME at a fitting Java if it does not yet.

    Raises:
        ConfigError: one line that says what is missing.
    """
    install = "install the project with its extra 'spark'"
    try:
        import pyspark
    except ImportError as error:
        raise ConfigError(f"{error.name} is not installed", "Python environment", install) from None
    if not pyspark.__version__.startswith(SPARK_VERSION + "."):
        found = {"found": pyspark.__version__}
        raise ConfigError(f"PySpark {SPARK_VERSION}.x is needed", "Python environment", install, found)
    try:
        import delta  # after that: it imports parts of PySpark that another version may lack
    except ImportError as error:
        raise ConfigError(f"{error.name} is not installed", "Python environment", install) from None
    del delta
    if not _under_spark_submit():
        os.environ["JAVA_HOME"] = str(find_java())
        return
    from pyspark import SparkContext

    SparkContext._ensure_initialized()  # connects to spark-submit's JVM, which knows what it was given
    runtime: Any = SparkContext._jvm  # PySpark has no public way to the JVM before a context exists
    check_running_java(int(runtime.java.lang.Runtime.version().feature()))


def check_running_java(version: int) -> None:
    """Refuses the JVM that spark-submit has started if it is of a version that was not tried.

    Raises:
        ConfigError: it is.
    """
    if version not in JAVA_VERSIONS:
        remedy = "point JAVA_HOME at a Java 17 or 21 and run spark-submit again"
        raise ConfigError("Java 17 or 21 is needed", "JAVA_HOME and PATH", remedy, {"running": version})


def find_java() -> Path:
    """Returns the home of a Java 17 or 21: JAVA_HOME, then ``java`` on PATH, then the system's usual folder.

    Raises:
        ConfigError: there is none; names what was found instead.
    """
    found: dict[str, Any] = {}
    for home in _java_homes():
        version = _java_version(home)
        if version in JAVA_VERSIONS:
            return home
        if version is not None:
            found[str(home)] = version
    raise ConfigError(
        "Java 17 or 21 is needed",
        "JAVA_HOME and PATH",
        "install one (Debian, Ubuntu: apt-get install openjdk-17-jre-headless) or point JAVA_HOME at it",
        found,
    )


def _java_homes() -> Iterator[Path]:
    if os.environ.get("JAVA_HOME"):
        yield Path(os.environ["JAVA_HOME"])
    on_path = shutil.which("java")
    if on_path is not None:
        yield Path(on_path).resolve().parent.parent
    yield from sorted(SYSTEM_JAVA.glob("*"))


def _java_version(home: Path) -> int | None:
    """Major version of the Java at ``home``, or None if there is none."""
    java = home / "bin" / "java"
    if not java.is_file():
        return None
    try:
        text = (home / "release").read_text(encoding="utf-8", errors="replace")
        version = text.partition('JAVA_VERSION="')[2]
    except OSError:
        done = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30, check=False)
        version = done.stderr.partition('version "')[2]
    major = version.removeprefix("1.").partition('"')[0].partition(".")[0]
    return int(major) if major.isdigit() else None


def _under_spark_submit() -> bool:
    return "PYSPARK_GATEWAY_PORT" in os.environ


def _start(app_name: str, settings: dict[str, str], fallbacks: dict[str, str]) -> SparkSession:
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    # Workers import this project from where the driver found it, with the driver's interpreter.
    python_path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH", "")]))
    os.environ["PYTHONPATH"] = python_path
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    settings |= {"spark.pyspark.python": sys.executable, "spark.executorEnv.PYTHONPATH": python_path}
    under_submit = _under_spark_submit()
    if not under_submit:
        if "SPARK_MASTER" in os.environ:
            settings.setdefault("spark.master", os.environ["SPARK_MASTER"])
        local = is_local(settings.get("spark.master", "local"))
        if local:
            os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        # Only what the JVM must know at its start: the rest of what it then reports was given by the user.
        at_start = AT_START | settings
        with _java_options(JVM_OPTIONS if local else ""):
            SparkContext._ensure_initialized(conf=SparkConf(loadDefaults=False).setAll(list(at_start.items())))
    given = SparkConf()
    known = dict(given.getAll())
    if under_submit:
        settings = {key: value for key, value in settings.items() if key not in known}
    master = settings.get("spark.master") or known.get("spark.master", "local[*]")
    chosen = {**fallbacks, **defaults_for(master, known, started_here=not under_submit)}
    chosen = {key: value for key, value in chosen.items() if key not in known} | settings
    builder = SparkSession.builder.appName(app_name)
    for key, value in (chosen | _add_delta_jars(given, local=is_local(master))).items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    if LOG_LEVEL not in known | settings:
        _quieten(spark)
    return spark


@contextmanager
def _java_options(options: str) -> Iterator[None]:
    """Gives ``options`` to a JVM that starts now, before all that the user gave, which so wins."""
    name = "SPARK_SUBMIT_OPTS"
    given = os.environ.get(name)
    os.environ[name] = " ".join(filter(None, [options, given]))
    try:
        yield
    finally:
        os.environ.pop(name)
        if given is not None:
            os.environ[name] = given


def _quieten(spark: SparkSession) -> None:
    """Keeps stack traces of what the job itself reports off the terminal."""
    log4j: Any = spark.sparkContext._jvm.org.apache.logging.log4j  # type: ignore[union-attr]
    for name in TOLD_TWICE:
        log4j.core.config.Configurator.setLevel(name, log4j.Level.OFF)


def _add_delta_jars(given: Any, *, local: bool) -> dict[str, str]:
    """Loads Delta into the running JVM; returns the setting that gives it to executors, if they are other processes.

    spark-submit resolves ``spark.jars.packages`` before it starts the program, so setting it here would come too
    late. This does what spark-submit would have done, without its hundred lines of report: resolve through Ivy, add to
    the driver's class loader.
    """
    from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
    from pyspark import SparkContext

    jvm: Any = SparkContext._jvm  # PySpark has no public way to the JVM before a context exists
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    try:
        loader.loadClass(DELTA_EXTENSION)
        return {}
    except Py4JJavaError:
        pass
    paths = delta_jars(jvm, given.get("spark.jars.repositories", ""), given.get("spark.jars.ivy", ""))
    for path in paths:
        loader.addURL(jvm.java.io.File(path).toURI().toURL())
    if local:
        return {}  # Spark would copy all jars for itself, half a second
    earlier = given.get("spark.jars", "")
    return {"spark.jars": ",".join(filter(None, [earlier, *paths]))}


def delta_jars(jvm: Any, repositories: str = "", ivy: str = "") -> list[str]:
    """Returns the paths of Delta's jars, fetched on first use.

    Raises:
        ConfigError: they are not in Ivy's cache and cannot be fetched.
    """
    from delta import configure_spark_with_delta_pip
    from py4j.protocol import Py4JJavaError
    from pyspark.sql import SparkSession

    package = configure_spark_with_delta_pip(SparkSession.Builder())._options["spark.jars.packages"]
    submit = jvm.java.lang.Class.forName("org.apache.spark.deploy.SparkSubmit$").getField("MODULE$").get(None)
    printed = submit.printStream()
    getattr(submit, "printStream_$eq")(jvm.java.io.PrintStream(jvm.java.io.OutputStream.nullOutputStream()))
    try:
        jars = jvm.org.apache.spark.util.DependencyUtils.resolveMavenDependencies(
            True, "", package, repositories, ivy or None, jvm.scala.Option.apply(None)
        )
    except Py4JJavaError as error:
        raise ConfigError(
            f"Delta's jars ({package}) are not in the local Ivy cache and cannot be fetched",
            repositories or "Maven Central",
            "connect this machine to the network once, or pass a mirror to spark-submit as --repositories URL",
            {"reason": str(error.java_exception.getMessage()).partition("\n")[0]},
        ) from None
    finally:
        getattr(submit, "printStream_$eq")(printed)
    return [str(jars.apply(i)) for i in range(jars.size())]
