"""Checks of directories raise one line and write nothing, also for root."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dledger_core.errors import ConfigError
from jobs._directories import (
    check_apart,
    check_audit_directory,
    check_checkpoint,
    check_file,
    check_table,
)

CHECKS = [check_table, check_checkpoint, check_audit_directory]
NOWHERE = "/proc/dledger"


def with_entries(directory: Path, *names: str) -> str:
    directory.mkdir(parents=True)
    for name in names:
        (directory / name).mkdir()
    return str(directory)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("path", ["new", "new/below/it", "empty", "s3a://bucket/x", "hdfs://name/x"])
def test_new_or_empty_directory_is_accepted_and_not_created(
    check: Callable[[str], None], path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    check(path)
    assert [found.name for found in tmp_path.rglob("*")] == ["empty"]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("below", ["", "/table", "/a/b"])
def test_file_is_rejected_as_directory(check: Callable[[str], None], below: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(ConfigError, match=r"--\w+ .*/file is a file"):
        check(f"{tmp_path}/file{below}")
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize("check", CHECKS)
def test_unwritable_directory_is_rejected(check: Callable[[str], None]) -> None:
    with pytest.raises(ConfigError, match=rf"--\w+ {NOWHERE}"):
        check(NOWHERE)


@pytest.mark.parametrize("check", CHECKS)
def test_directory_with_other_files_is_rejected(check: Callable[[str], None], tmp_path: Path) -> None:
    path = with_entries(tmp_path / "photos", "holidays")
    with pytest.raises(ConfigError, match=r"--\w+ .*/photos"):
        check(path)
    assert [found.name for found in tmp_path.rglob("*")] == ["photos", "holidays"]


@pytest.mark.parametrize(
    ("check", "names"),
    [
        (check_table, ["_delta_log"]),
        (check_table, ["_delta_log", "part-0.parquet"]),
        (check_checkpoint, ["metadata"]),
        (check_checkpoint, ["offsets", "commits", "sources"]),
        (check_audit_directory, ["audit_runs"]),
    ],
)
def test_output_of_earlier_run_is_accepted(check: Callable[[str], None], names: list[str], tmp_path: Path) -> None:
    check(with_entries(tmp_path / "earlier", *names))


def test_table_and_checkpoint_are_distinguished(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--checkpoint"):
        check_checkpoint(with_entries(tmp_path / "table", "_delta_log", "metadata"))
    with pytest.raises(ConfigError, match="--table"):
        check_table(with_entries(tmp_path / "checkpoint", "metadata", "offsets"))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("x", "x"),
        ("x", "x/"),
        ("x", "./y/../x"),
        ("x", "x/c"),
        ("x/t", "x"),
        ("x", "link"),
        ("x", "link/c"),
        ("s3a://b/x", "s3a://b/x/"),
        ("s3a://b/x", "s3a://b/x/c"),
    ],
)
def test_overlapping_directories_are_rejected(
    one: str, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "x")
    for written in ({"--table": one, "--checkpoint": other}, {"--checkpoint": other, "--table": one}):
        with pytest.raises(ConfigError, match=r"--\w+ and --\w+"):
            check_apart(written)
    with pytest.raises(ConfigError, match="--table and --store"):
        check_apart({"--table": one}, {"--store": other})


def test_separate_directories_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_apart({"--table": "x", "--checkpoint": "x.checkpoint", "--files": None}, {"--store": "y", "--compare": "y/c"})
    check_apart({"--table": "s3a://b/x", "--checkpoint": "/b/x", "--files": "s3a://c/x"})


@pytest.mark.parametrize("path", ["/nowhere/x.html", f"{NOWHERE}.html", "directory", "file/x.html"])
def test_unwritable_report_is_rejected(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--report"):
        check_file(path, "--report")


def test_writable_report_is_accepted_and_not_created(tmp_path: Path) -> None:
    (tmp_path / "old.html").write_text("old")
    check_file(str(tmp_path / "old.html"), "--report")
    check_file(str(tmp_path / "new.html"), "--report")
    assert [path.name for path in tmp_path.iterdir()] == ["old.html"]
