"""Directories with damaged, missing and wrong files: commands end in one line and a code, and change nothing."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from dledger_core.cli import main
from dledger_core.storage import CommitLog
from tests.cli.command import ErrorLine, last_error, run
from tests.rocketmq.convert.stores import PEERS, snapshot, store_of, unpacked
from tests.rocketmq.golden import MIXED, extract
from tests.support.damage import flip
from tests.support.only_reading import only_reading

WORDS = (b"\xff" * 4, b"\x7f\xff\xff\xff", b"\0" * 4, b"\x80\0\0\0", b"\xda\xa3\x20\xa7")
FIELDS = (0, 4, 8, 16, 24, 32, 44, 48, 52, 76, 124, 131)
"""Offsets of the numbers in the first record, and of its message's."""
CONVERT = ("--group", "g", "--self-id", "n0", "--peers", PEERS, "--dry-run")
KINDS = ("flip", "field", "shorter", "longer", "empty", "missing", "unexpected", "directory", "garbage", "name")


def damage(file: Path, kind: str, chance: random.Random) -> None:
    content = bytearray(file.read_bytes())
    used = min(len(content), 60_000)
    match kind:
        case "flip":
            content[chance.randrange(used)] ^= 1 << chance.randrange(8)
        case "field":
            at = chance.choice(FIELDS)
            content[at : at + 4] = chance.choice(WORDS)
        case "garbage":
            at = chance.randrange(used - 500)
            content[at : at + 500] = chance.randbytes(500)
        case "shorter":
            del content[chance.randrange(len(content)) :]
        case "longer":
            content += bytes(chance.choice((1, 32, 65_536)))
        case "empty":
            content.clear()
        case "unexpected":
            file = file.parent / chance.choice((".DS_Store", "0" * 17 + "999", "x.tmp", "\u0660" * 20))
            content = bytearray(b"x" * 10)
        case "name":
            file = file.rename(file.parent / f"{int(file.name) + chance.choice((1, 100)):020d}")
        case "missing" | "directory":
            file.unlink()
            if kind == "directory":
                file.mkdir()
            return
    file.write_bytes(content)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("sources")
    extract(MIXED, "n0/dledger-n0/data", directory)
    extract(MIXED, "n0/dledger-n0/c", directory)
    extract(MIXED, "n0/commitlog", directory)
    found = {"mixed": directory / MIXED / "n0", "classic": directory / MIXED / "n0" / "commitlog"}
    for name, version in (("java-a", "0.3.1.2"), ("java-b", "0.4.0")):
        found[name] = store_of(unpacked(f"dledger-{version}-rejoined", directory), "")[0]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["mixed", "classic", "java-a", "java-b"])
def test_damaged_directory_is_one_line_and_unchanged(
    sources: dict[str, Path], tmp_path: Path, name: str, kind: str
) -> None:
    chance = random.Random(f"{name} {kind}")
    for number in range(2):
        source = tmp_path / str(number)
        shutil.copytree(sources[name], source)
        logs = [path for path in sorted(source.rglob("*")) if len(path.name) == 20 and path.parent.name != "index"]
        damage(chance.choice(logs), kind, chance)
        before = snapshot(source)
        with only_reading(source):
            for command in (
                ("dump", source),
                ("dump", source, "--decode", "message", "--format", "json"),
                ("dump", source, "--from", "-3", "--format", "raw"),
                ("dump", source, "--from", "@70000", "--count", 3),
                ("convert", source, tmp_path / "new", *CONVERT),
                ("convert", source, tmp_path / "new", *CONVERT, "--profile", "A", "--cut-tail"),
            ):
                result = CliRunner().invoke(main, [str(word) for word in command])
                errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
                assert result.exit_code in (0, 3, 4), (command, result.output)
                assert len(errors) == (result.exit_code != 0), (command, result.output)
                assert all(ErrorLine(line).code for line in errors), (command, result.output)
        assert snapshot(source) == before
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("command", ["dump", "verify"])
@pytest.mark.parametrize("made", [None, "data/notes.txt"], ids=["empty", "other files"])
def test_directory_that_is_not_a_store_is_rejected(tmp_path: Path, command: str, made: str | None) -> None:
    if made:
        (tmp_path / made).parent.mkdir()
        (tmp_path / made).write_text("x")
    before = sorted(tmp_path.rglob("*"))
    result = run(command, tmp_path, code=3)
    assert result.stdout == ""
    assert last_error(result.stderr).code == "STORE_MISMATCH"
    assert sorted(tmp_path.rglob("*")) == before


def test_verify_continues_after_unreadable_store(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        CommitLog.open(tmp_path / name, group="g", node_id="n0").close()
    (tmp_path / "b" / "meta" / "log.json").write_text("{")
    result = run("verify", *(tmp_path / name for name in "abc"), "--format", "json", code=3)
    assert [Path(row["store"]).name for row in json.loads(result.stdout)] == ["a", "c"]
    assert str(tmp_path / "b" / "meta" / "log.json") in result.stderr.splitlines()[-1]


def test_verify_checks_every_log_of_a_directory(tmp_path: Path) -> None:
    for within in ("n0/commitlog", "n0/dledger-n0"):
        extract(MIXED, within, tmp_path)
    broker = tmp_path / MIXED / "n0"
    stores = json.loads(run("verify", broker, "--format", "json").stdout)
    assert [Path(each["store"]).name for each in stores] == ["commitlog", "dledger-n0"]
    file = min((broker / "commitlog").iterdir())
    flip(file, 90)
    stores = json.loads(run("verify", broker, "--format", "json", code=1).stdout)
    assert [(f["kind"], f["position"]) for f in stores[0]["findings"]] == [("CORRUPT", 0)]
    assert stores[1]["findings"] == []
    node = unpacked("dledger-0.4.0-three", tmp_path)
    assert len(json.loads(run("verify", node, "--format", "json").stdout)) == 3
    run("verify", tmp_path / "nothing", code=3)
