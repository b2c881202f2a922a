"""A directory that does not fit is one line, and nothing is written; also for root, whom no permission stops."""

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


def holding(directory: Path, *names: str) -> str:
    directory.mkdir(parents=True)
    for name in names:
        (directory / name).mkdir()
    return str(directory)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("place", ["new", "new/below/it", "empty", "s3a://bucket/x", "hdfs://name/x"])
def test_a_new_or_empty_directory_fits_and_is_not_made(
    check: Callable[[str], None], place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    check(place)
    assert [path.name for path in tmp_path.rglob("*")] == ["empty"]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("below", ["", "/table", "/a/b"])
def test_a_file_in_the_way(check: Callable[[str], None], below: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(ConfigError, match=r"file is a file at --\w+; name a directory"):
        check(f"{tmp_path}/file{below}")
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize("check", CHECKS)
def test_a_directory_that_cannot_be_written(check: Callable[[str], None]) -> None:
    with pytest.raises(ConfigError, match=f"{NOWHERE} cannot be written: .* at --\\w+; name a directory you may write"):
        check(NOWHERE)


@pytest.mark.parametrize("check", CHECKS)
def test_a_directory_of_something_else(check: Callable[[str], None], tmp_path: Path) -> None:
    place = holding(tmp_path / "photos", "holidays")
    with pytest.raises(ConfigError, match=r"photos holds files and .* at --\w+; name a new or empty directory"):
        check(place)
    assert [path.name for path in tmp_path.rglob("*")] == ["photos", "holidays"]


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
def test_what_an_earlier_run_left_fits(check: Callable[[str], None], names: list[str], tmp_path: Path) -> None:
    check(holding(tmp_path / "earlier", *names))


def test_a_table_is_no_checkpoint_and_a_checkpoint_no_table(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no checkpoint"):
        check_checkpoint(holding(tmp_path / "table", "_delta_log", "metadata"))
    with pytest.raises(ConfigError, match="is no Delta table"):
        check_table(holding(tmp_path / "checkpoint", "metadata", "offsets"))


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
def test_directories_that_overlap(one: str, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "x")
    for written in ({"--table": one, "--checkpoint": other}, {"--checkpoint": other, "--table": one}):
        with pytest.raises(ConfigError, match=r"at --\w+, --\w+; name two directories, neither inside the other"):
            check_apart(written)
    with pytest.raises(ConfigError, match="at --table, --store"):
        check_apart({"--table": one}, {"--store": other})


def test_directories_beside_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_apart({"--table": "x", "--checkpoint": "x.checkpoint", "--files": None}, {"--store": "y", "--compare": "y/c"})
    check_apart({"--table": "s3a://b/x", "--checkpoint": "/b/x", "--files": "s3a://c/x"})


@pytest.mark.parametrize("place", ["/nowhere/x.html", f"{NOWHERE}.html", "folder", "file/x.html"])
def test_a_report_that_cannot_be_written(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="at --report; name a file in a directory you may write to"):
        check_file(place, "--report")


def test_a_report_that_can(tmp_path: Path) -> None:
    (tmp_path / "old.html").write_text("old")
    check_file(str(tmp_path / "old.html"), "--report")
    check_file(str(tmp_path / "new.html"), "--report")
    assert [path.name for path in tmp_path.iterdir()] == ["old.html"]
