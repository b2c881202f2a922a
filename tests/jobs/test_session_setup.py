"""Missing or unfit parts of a Spark session are one clear line, found before a JVM starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

from dledger_core import ConfigError, environment
from jobs import _session

CHECKOUT = Path(__file__).resolve().parents[2]
JOBS = {
    "ingest": ["--peers", "n0-127.0.0.1:1", "--table", "t", "--checkpoint", "c"],
    "rebuild_consume_queue": ["--peers", "n0-127.0.0.1:1", "--table", "t"],
    "audit_replicas": ["--peers", "n0-127.0.0.1:1", "--table", "t"],
}


ANOTHER_PYSPARK = """
import sys
from pathlib import Path

others = (Path(folder) / "pyspark" for folder in sys.path)
real = next(folder for folder in others if folder != Path(__file__).parent and (folder / "__init__.py").is_file())
__path__ = [str(real)]
exec((real / "__init__.py").read_text())
__version__ = "3.5.1"
"""


@pytest.mark.parametrize("version", ["3.5.1", "4.1.0", "4.20.0", "5.0.0"])
def test_check_versions_rejects_another_pyspark(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pyspark, "__version__", version)
    with pytest.raises(ConfigError) as caught:
        _session.check_versions()
    assert caught.value.values == {"found": version}


def test_check_versions_rejects_another_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "SYSTEM_JAVA", tmp_path)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="no Java 17 or 21 found"):
        _session.check_versions()


@pytest.mark.integration
@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize(
    ("package", "text", "named"),
    [
        ("pyspark", ANOTHER_PYSPARK, "found=3.5.1"),
        ("delta", "raise ModuleNotFoundError(\"No module named 'delta'\", name='delta')", "delta is not installed"),
    ],
    ids=["pyspark", "delta"],
)
def test_job_without_fitting_package_reports_one_line(
    job: str, package: str, text: str, named: str, tmp_path: Path
) -> None:
    (tmp_path / "other" / package).mkdir(parents=True)
    (tmp_path / "other" / package / "__init__.py").write_text(text + "\n")
    (tmp_path / "work").mkdir()
    done = subprocess.run(
        [sys.executable, str(CHECKOUT / "jobs" / f"{job}.py"), *JOBS[job]],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path / "work",
        env={**os.environ, "PYTHONPATH": str(tmp_path / "other")},
        timeout=600,
    )
    [line] = done.stderr.splitlines()
    assert line.startswith("error: [CONFIG] ")
    assert named in line
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, summary["status"], summary["error"]) == (3, "error", "CONFIG")
    assert not list((tmp_path / "work").iterdir())


@pytest.mark.integration
def test_register_rejects_another_pyspark(tmp_path: Path) -> None:
    (tmp_path / "pyspark").mkdir()
    (tmp_path / "pyspark" / "__init__.py").write_text(ANOTHER_PYSPARK)
    program = "import spark_connector; spark_connector.register(None)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=CHECKOUT, env=environment
    )
    assert done.returncode != 0
    assert "[DLEDGER_SPARK_VERSION] PySpark 3.5.1 is installed" in done.stderr.splitlines()[-1]
