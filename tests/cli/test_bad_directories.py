"""Directories with damaged, missing and wrong files: dump and convert end in a line and a code, and change nothing."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from dledger_core.cli import main
from tests.rocketmq.convert.stores import PEERS, snapshot, store_of, unpacked
from tests.rocketmq.golden import MIXED, extract
from tests.support.only_reading import only_reading

WORDS = (b"\xff" * 4, b"\x7f\xff\xff\xff", b"\0" * 4, b"\x80\0\0\0", b"\xda\xa3\x20\xa7")
FIELDS = (0, 4, 8, 16, 24, 32, 44, 48, 52, 76, 124, 131)
"""Offsets of the numbers in the first record, and of its message's."""
CONVERT = ("--group", "g", "--self-id", "n0", "--peers", PEERS, "--dry-run")
KINDS = ("flip", "field", "cut", "longer", "empty", "gone", "stray", "folder", "garbage", "name")


def damage(file: Path, kind: str, chance: random.Random) -> None:
    size = file.stat().st_size
    content = bytearray(file.read_bytes()) if kind in ("flip", "field", "garbage") else bytearray()
    match kind:
        case "flip":
            content[chance.randrange(min(size, 60_000))] ^= 1 << chance.randrange(8)
        case "field":
            at = chance.choice(FIELDS)
            content[at : at + 4] = chance.choice(WORDS)
        case "garbage":
            at = chance.randrange(min(size, 60_000) - 500)
            content[at : at + 500] = chance.randbytes(500)
        case "cut" | "longer" | "empty":
            lengths = {"cut": chance.randrange(size), "longer": size + chance.choice((1, 32, 65_536)), "empty": 0}
            os.truncate(file, lengths[kind])
        case "gone":
            file.unlink()
        case "folder":
            file.unlink()
            file.mkdir()
        case "stray":
            (file.parent / chance.choice((".DS_Store", "0" * 17 + "999", "x.tmp", "\u0660" * 20))).write_bytes(
                b"x" * 10
            )
        case "name":
            file.rename(file.parent / f"{int(file.name) + chance.choice((1, 100)):020d}")
    if content:
        file.write_bytes(content)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    extract(MIXED, "n0/dledger-n0/data", folder)
    extract(MIXED, "n0/dledger-n0/c", folder)
    extract(MIXED, "n0/commitlog", folder)
    found = {"mixed": folder / MIXED / "n0", "classic": folder / MIXED / "n0" / "commitlog"}
    for name, version in (("java-a", "0.3.1.2"), ("java-b", "0.4.0")):
        found[name] = store_of(unpacked(f"dledger-{version}-rejoined", folder), "")[0]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["mixed", "classic", "java-a", "java-b"])
def test_every_damage_ends_in_a_line_and_a_code(sources: dict[str, Path], tmp_path: Path, name: str, kind: str) -> None:
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
                ("dump", source, "--from", "-3", "--format", r"%i %P\n"),
                ("dump", source, "--from", "@70000", "--count", 3),
                ("convert", source, tmp_path / "new", *CONVERT),
                ("convert", source, tmp_path / "new", *CONVERT, "--profile", "A", "--cut-tail"),
            ):
                result = CliRunner().invoke(main, [str(word) for word in command])
                errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
                assert result.exit_code in (0, 3, 4), (command, result.output)
                assert len(errors) == (result.exit_code != 0), (command, result.output)
                assert "unexpected" not in result.stderr, (command, result.output)
        assert snapshot(source) == before
    assert not (tmp_path / "new").exists()
