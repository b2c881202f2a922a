"""What is missing for a Spark session is one clear line, found before a JVM starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyspark
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger_core.errors import ConfigError
from jobs import _session, _settings

CHECKOUT = Path(__file__).resolve().parents[2]
AS_USERS = {name: value for name, value in os.environ.items() if name != "SPARK_DIST_CLASSPATH"}
"""Without Delta's jars on the class path, where the tests' other JVMs have them."""
SUBMIT = ["bash", str(Path(pyspark.__file__).parent / "bin" / "spark-submit")]


def java(home: Path, version: str | None) -> Path:
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "java").write_text("#!/bin/sh\necho 'openjdk version \"21.0.1\"' >&2\n")
    (home / "bin" / "java").chmod(0o755)
    if version is not None:
        (home / "release").write_text(f'IMPLEMENTOR="x"\nJAVA_VERSION="{version}"\n')
    return home


@pytest.mark.parametrize("version", ["17.0.15", "21", None])
def test_java_of_java_home_is_taken(version: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(java(tmp_path / "jdk", version)))
    assert _session.find_java() == tmp_path / "jdk"


def test_a_fitting_java_is_found_behind_one_that_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    homes = [java(tmp_path / "old", "1.8.0_392"), java(tmp_path / "new", "25.0.1"), java(tmp_path / "fits", "21.0.2")]
    monkeypatch.setattr(_session, "_java_homes", lambda: iter(homes))
    assert _session.find_java() == homes[2]


def test_no_fitting_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    homes = [java(tmp_path / "old", "1.8.0_392"), tmp_path / "none"]
    monkeypatch.setattr(_session, "_java_homes", lambda: iter(homes))
    with pytest.raises(ConfigError, match=r"Java 17 or 21 is needed .*old=8.*JAVA_HOME") as caught:
        _session.find_java()
    assert "\n" not in str(caught.value)


JOBS = {
    "ingest": ["--peers", "n0-127.0.0.1:1", "--table", "t", "--checkpoint", "c"],
    "rebuild_consume_queue": ["--peers", "n0-127.0.0.1:1", "--table", "t"],
    "audit_replicas": ["--peers", "n0-127.0.0.1:1", "--table", "t"],
}


def run_job(
    name: str, work: Path, program: Sequence[str] = (sys.executable,), **environment: str | None
) -> subprocess.CompletedProcess[str]:
    """Runs a job in an empty working directory; an environment variable that is None is taken away."""
    work.mkdir()
    variables = {key: value for key, value in {**os.environ, **environment}.items() if value is not None}
    command = [*program, str(CHECKOUT / "jobs" / f"{name}.py"), *JOBS[name]]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=work, env=variables, timeout=600)


def assert_one_line(done: subprocess.CompletedProcess[str], work: Path, *said: str) -> None:
    printed = done.stderr + done.stdout  # spark-submit sends a program's stderr to its own stdout
    lines = [line for line in printed.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, printed
    for part in said:
        assert part in lines[0]
    assert "Traceback" not in printed
    assert "\tat " not in printed
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, summary["status"], summary["error"]) == (3, "error", "CONFIG")
    assert not list(work.iterdir())


@pytest.mark.parametrize("version", ["3.5.1", "4.1.0", "4.20.0", "5.0.0"])
def test_another_pyspark(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pyspark, "__version__", version)
    with pytest.raises(ConfigError, match=rf"PySpark 4\.2\.x is needed.*found={version}"):
        _session.check_versions()


@pytest.fixture
def other_pyspark(tmp_path: Path) -> str:
    """A folder for PYTHONPATH with another PySpark's outside: an old one has no ``pyspark.sql.datasource``."""
    package = tmp_path / "other" / "pyspark"
    (package / "sql").mkdir(parents=True)
    (package / "__init__.py").write_text('__version__ = "3.5.1"\n')
    (package / "sql" / "__init__.py").write_text("class SparkSession: ...\n")
    return str(package.parent)


@pytest.mark.integration
@pytest.mark.parametrize("job", JOBS)
def test_a_job_with_another_pyspark_is_one_line(job: str, other_pyspark: str, tmp_path: Path) -> None:
    done = run_job(job, tmp_path / "work", PYTHONPATH=other_pyspark)
    assert_one_line(done, tmp_path / "work", "PySpark 4.2.x is needed", "found=3.5.1", "install")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.integration
def test_the_connector_with_another_pyspark_says_so(other_pyspark: str) -> None:
    program = "import spark_connector; spark_connector.register(None)"
    environment = {**os.environ, "PYTHONPATH": other_pyspark}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=CHECKOUT, env=environment
    )
    assert done.returncode != 0
    last = done.stderr.splitlines()[-1]
    assert "[DLEDGER_SPARK_VERSION] PySpark 3.5.1 is installed, this connector needs 4.2" in last


@pytest.mark.integration
@pytest.mark.parametrize("job", JOBS)
def test_a_job_without_delta_is_one_line(job: str, tmp_path: Path) -> None:
    broken = tmp_path / "broken" / "delta"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'delta'\", name='delta')\n")
    done = run_job(job, tmp_path / "work", PYTHONPATH=str(broken.parent))
    assert_one_line(done, tmp_path / "work", "delta is not installed", "extra 'spark'")


@pytest.mark.integration
@pytest.mark.parametrize("job", JOBS)
def test_a_job_without_a_fitting_java_is_one_line(job: str, tmp_path: Path) -> None:
    without = (
        "import runpy, sys; from pathlib import Path; import jobs._session as session;"
        "session.SYSTEM_JAVA = Path(sys.argv[1]); sys.argv = sys.argv[2:];"
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    program = [sys.executable, "-c", without, str(java(tmp_path / "jvm" / "new", "25.0.1").parent)]
    environment = {"PYTHONPATH": str(CHECKOUT), "PATH": "/nowhere", "JAVA_HOME": None}
    done = run_job(job, tmp_path / "work", program, **environment)
    assert_one_line(done, tmp_path / "work", "Java 17 or 21 is needed", "new=25", "apt-get install")


@pytest.mark.parametrize("version", [8, 11, 18, 25])
def test_the_java_of_spark_submit_must_fit(version: int) -> None:
    with pytest.raises(ConfigError, match=rf"17 or 21 is needed at JAVA_HOME and PATH \(running={version}\); point"):
        _session.check_running_java(version)
    for fits in (17, 21):
        _session.check_running_java(fits)


@pytest.mark.spark
def test_spark_submit_on_another_java_is_one_line(tmp_path: Path) -> None:
    # No second Java is at hand: the running one is made one that does not fit.
    job = tmp_path / "job.py"
    arguments = JOBS["ingest"]
    job.write_text(
        f"import sys; sys.path.insert(0, {str(CHECKOUT)!r})\n"
        "from jobs import _session, ingest\n"
        "_session.JAVA_VERSIONS = (99,)\n"
        "ingest.main()\n"
    )
    work = tmp_path / "work"
    work.mkdir()
    done = subprocess.run(
        [*SUBMIT, str(job), *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=work,
        env={**os.environ, "PYSPARK_PYTHON": sys.executable},
        timeout=600,
    )
    assert_one_line(done, work, "Java 17 or 21 is needed", "running=", "run spark-submit again")


def test_settings_of_one_machine_are_for_local_masters_only() -> None:
    ours = {"spark.driver.bindAddress", "spark.driver.host", "spark.sql.shuffle.partitions"}
    for master in ("local", "local[*]", "local[2]", "local[2,3]"):
        assert ours <= set(_settings.defaults_for(master, {}))
    for master in ("spark://host:7077", "yarn", "k8s://https://host", "local-cluster[2,1,1024]", "localhost"):
        found = _settings.defaults_for(master, {})
        assert not ours & set(found)
        assert found["spark.sql.extensions"] == _settings.DELTA_EXTENSION


@pytest.mark.parametrize("user", [None, "-Dmine=1"])
def test_java_options_come_before_the_users_and_only_while_the_jvm_starts(
    user: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPARK_SUBMIT_OPTS", raising=False)
    if user is not None:
        monkeypatch.setenv("SPARK_SUBMIT_OPTS", user)
    with _session._java_options("-Dours=1"):
        assert os.environ["SPARK_SUBMIT_OPTS"].split() == ["-Dours=1", *([user] if user else [])]
    assert os.environ.get("SPARK_SUBMIT_OPTS") == user


@pytest.mark.integration
def test_java_knows_the_options() -> None:
    command = [str(_session.find_java() / "bin" / "java"), *_settings.JVM_OPTIONS.split(), "-XX:+PrintFlagsFinal"]
    done = subprocess.run([*command, "-version"], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    for option in _settings.JVM_OPTIONS.split():
        name, value = option.removeprefix("-XX:").split("=")
        assert [name, "=", value] in [line.split()[1:4] for line in done.stdout.splitlines()]


@given(st.sets(st.sampled_from(sorted(_settings.defaults_for("local", {})))), st.sampled_from(["local[1]", "yarn"]))
def test_what_the_user_gave_is_never_among_our_defaults(names: set[str], master: str) -> None:
    found = _settings.defaults_for(master, dict.fromkeys(names, "mine"))
    assert not names & set(found)
    assert set(found) | names >= set(_settings.defaults_for(master, {}))


PROBE = """
import json, sys
sys.path.insert(0, {checkout!r})
from pathlib import Path
from jobs._session import spark_session
names = {names!r}
with spark_session("probe") as spark:
    spark.sql("create table kept using {table_format} as select 1 as id")
    found = {{name: spark.conf.get(name, None) or spark.sparkContext.getConf().get(name) for name in names}}
    found["rows"] = spark.table("kept").count()
    warehouse = Path(spark.conf.get("spark.sql.warehouse.dir").removeprefix("file:"))
    assert warehouse.is_dir()
print(json.dumps({{**found, "warehouse_left": warehouse.exists()}}))
"""
SEEN = ("spark.sql.shuffle.partitions", "spark.driver.host", "spark.ui.showConsoleProgress", "spark.log.level")


def probe(tmp_path: Path, program: Sequence[str], table_format: str, environment: dict[str, str]) -> dict[str, Any]:
    text = PROBE.format(checkout=str(CHECKOUT), names=SEEN, table_format=table_format)
    (tmp_path / "probe.py").write_text(text)
    work = tmp_path / "work"
    work.mkdir(exist_ok=True)
    done = subprocess.run(
        [*program, str(tmp_path / "probe.py")],
        capture_output=True,
        text=True,
        check=False,
        cwd=work,
        env={**environment, "PYSPARK_PYTHON": sys.executable},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert not list(work.iterdir())
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert (found.pop("rows"), found.pop("warehouse_left")) == (1, False)
    return found


@pytest.mark.spark
def test_spark_submit_with_settings_of_the_user(tmp_path: Path) -> None:
    given = ["--master", "local[1]", "--conf", "spark.sql.shuffle.partitions=7", "--conf", "spark.log.level=FATAL"]
    found = probe(tmp_path, [*SUBMIT, *given], "delta", AS_USERS)
    assert found == dict(zip(SEEN, ("7", "127.0.0.1", "false", "FATAL"), strict=True))


@pytest.mark.spark
def test_plain_python_with_settings_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "spark-defaults.conf").write_text("spark.sql.shuffle.partitions 9\nspark.master local[1]\n")
    arguments = "--conf spark.log.level=FATAL pyspark-shell"
    environment = {**os.environ, "SPARK_CONF_DIR": str(tmp_path / "conf"), "PYSPARK_SUBMIT_ARGS": arguments}
    found = probe(tmp_path, [sys.executable], "parquet", environment)
    assert found == dict(zip(SEEN, ("9", "127.0.0.1", "false", "FATAL"), strict=True))


@pytest.mark.spark
def test_delta_that_cannot_be_fetched_is_one_line_without_ivys_report(tmp_path: Path) -> None:
    program = (
        "from jobs._session import spark_session\n"
        f"with spark_session('offline', settings={{'spark.jars.ivy': {str(tmp_path / 'ivy')!r}}}): pass\n"
    )
    nowhere = " ".join(f"-D{scheme}.proxyHost=127.0.0.1 -D{scheme}.proxyPort=9" for scheme in ("http", "https"))
    options = f"{os.environ.get('SPARK_SUBMIT_OPTS', '')} {nowhere} -Duser.home={tmp_path}"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        cwd=CHECKOUT,
        env={**AS_USERS, "SPARK_SUBMIT_OPTS": options},
        timeout=600,
    )
    assert done.returncode != 0
    assert "[CONFIG] Delta's jars" in done.stderr.strip().splitlines()[-1]
    assert ":: resolving dependencies" not in done.stdout + done.stderr
