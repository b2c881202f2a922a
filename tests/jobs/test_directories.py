"""Checks of directories raise one line and write nothing, also for root."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dledger_core.errors import ConfigError
from jobs._directories import check_apart, check_audit_directory, check_checkpoint, check_file, check_table

Check = Callable[[str], None]
CHECKS = pytest.mark.parametrize("check", [check_table, check_checkpoint, check_audit_directory])
EARLIER = {
    check_table: [["_delta_log"], ["_delta_log", "part-0.parquet"]],
    check_checkpoint: [["metadata"], ["offsets", "commits", "sources"]],
    check_audit_directory: [["audit_runs"]],
}
"""Directories in the output of an earlier run."""


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a file, a link and directories of other programs."""
    monkeypatch.chdir(tmp_path)
    for directory in (
        "empty",
        "photos/holidays",
        "table/_delta_log",
        "table/metadata",
        "spark/metadata",
        "spark/offsets",
    ):
        (tmp_path / directory).mkdir(parents=True)
    (tmp_path / "file").write_text("kept")
    (tmp_path / "link").symlink_to("x")
    return tmp_path


@CHECKS
@pytest.mark.parametrize("path", ["new", "new/below/it", "empty", "s3a://bucket/x", "hdfs://name/x"])
def test_new_or_empty_directory_is_accepted_and_not_created(check: Check, path: str, work: Path) -> None:
    before = sorted(work.rglob("*"))
    check(path)
    assert sorted(work.rglob("*")) == before


@CHECKS
@pytest.mark.parametrize("path", ["file", "file/table", "file/a/b", "photos", "/proc/dledger"])
def test_path_that_cannot_be_used_is_rejected_unchanged(check: Check, path: str, work: Path) -> None:
    before = sorted(work.rglob("*"))
    with pytest.raises(ConfigError, match=r"--\w+ .*(file|photos|dledger)"):
        check(path)
    assert sorted(work.rglob("*")) == before
    assert (work / "file").read_text() == "kept"


@CHECKS
def test_output_of_earlier_run_is_accepted(check: Check, work: Path) -> None:
    for number, names in enumerate(EARLIER[check]):
        for name in names:
            (work / str(number) / name).mkdir(parents=True)
        check(str(number))


@pytest.mark.parametrize(
    ("check", "path", "option"), [(check_checkpoint, "table", "--checkpoint"), (check_table, "spark", "--table")]
)
def test_table_and_checkpoint_are_distinguished(check: Check, path: str, option: str) -> None:
    with pytest.raises(ConfigError, match=option):
        check(path)


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
def test_overlapping_directories_are_rejected(one: str, other: str) -> None:
    for written in ({"--table": one, "--checkpoint": other}, {"--checkpoint": other, "--table": one}):
        with pytest.raises(ConfigError, match=r"--\w+ and --\w+"):
            check_apart(written)
    with pytest.raises(ConfigError, match="--table and --store"):
        check_apart({"--table": one}, {"--store": other})


def test_separate_directories_are_accepted() -> None:
    check_apart({"--table": "x", "--checkpoint": "x.checkpoint", "--files": None}, {"--store": "y", "--compare": "y/c"})
    check_apart({"--table": "s3a://b/x", "--checkpoint": "/b/x", "--files": "s3a://c/x"})


@pytest.mark.parametrize("path", ["/nowhere/x.html", "/proc/dledger.html", "photos", "file/x.html"])
def test_unwritable_report_is_rejected(path: str) -> None:
    with pytest.raises(ConfigError, match="--report"):
        check_file(path, "--report")


@pytest.mark.parametrize("path", ["file", "new.html"])
def test_writable_report_is_accepted_and_not_created(path: str, work: Path) -> None:
    check_file(path, "--report")
    assert (work / "file").read_text() == "kept"
    assert not (work / "new.html").exists()
