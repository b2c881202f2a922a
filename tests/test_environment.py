"""A Java that Spark runs on is found, or its absence is one clear error."""

from __future__ import annotations

from pathlib import Path

import pytest

from dledger_core import environment
from dledger_core.environment import find_java, java_version
from dledger_core.errors import ConfigError


def java(home: Path, version: str) -> Path:
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "java").write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2025-01-01' >&2\n")
    (home / "bin" / "java").chmod(0o755)
    return home


@pytest.fixture(autouse=True)
def no_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "SYSTEM_JAVA", tmp_path / "jvm")
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")


@pytest.mark.parametrize("version", ["17.0.15", "21", "21.0.2+3"])
def test_find_java_prefers_java_home_then_path(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, on_path = java(tmp_path / "given", version), java(tmp_path / "path", version)
    monkeypatch.setenv("PATH", str(on_path / "bin"))
    assert find_java() == on_path
    monkeypatch.setenv("JAVA_HOME", str(given))
    assert find_java() == given


def test_find_java_skips_other_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(java(tmp_path / "old", "1.8.0_392")))
    java(tmp_path / "jvm" / "a-new", "25.0.1")
    fits = java(tmp_path / "jvm" / "b-fits", "21.0.2")
    assert find_java() == fits


def test_find_java_names_unfit_versions_in_error(tmp_path: Path) -> None:
    home = java(tmp_path / "jvm" / "new", "25.0.1")
    with pytest.raises(ConfigError) as caught:
        find_java()
    assert caught.value.values == {str(home): 25}
    assert "\n" not in str(caught.value)


def test_java_version_is_none_without_java(tmp_path: Path) -> None:
    assert java_version(tmp_path) is None
