"""Unsupported versions of PySpark and Java are rejected before a JVM starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

from dledger_core import ConfigError, environment
from jobs import _session

CHECKOUT = Path(__file__).resolve().parents[2]


ANOTHER_PYSPARK = """
import sys
from pathlib import Path

others = (Path(entry) / "pyspark" for entry in sys.path)
real = next(path for path in others if path != Path(__file__).parent and (path / "__init__.py").is_file())
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
    with pytest.raises(ConfigError, match="Java 17 or 21"):
        _session.check_versions()


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
