"""What is missing for a Spark session is one clear line, found before a JVM starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

from dledger_core.errors import ConfigError
from jobs import _session

CHECKOUT = Path(__file__).resolve().parents[2]


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


def test_another_pyspark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pyspark, "__version__", "3.5.1")
    with pytest.raises(ConfigError, match=r"PySpark 4\.2\.x is needed.*found=3\.5\.1"):
        _session.check_versions()


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
        env={**os.environ, "SPARK_SUBMIT_OPTS": options},
        timeout=120,
    )
    assert done.returncode != 0
    assert "[CONFIG] Delta's jars" in done.stderr.strip().splitlines()[-1]
    assert ":: resolving dependencies" not in done.stdout + done.stderr
