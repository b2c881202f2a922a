"""Public names of each release: this version still has them, and its callers need to pass nothing new."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final

import pytest

from tests.compatibility.make import VERSIONS
from tests.compatibility.public_names import public_names, required_parameters

UPGRADING: Final = Path(__file__).parents[2] / "UPGRADING.md"
NOT_IN_NAMES: Final = "use "
"""Start of a withdrawn line about a value or an argument: its option or parameter stays, and raises an error."""
RELEASES = pytest.mark.parametrize("release", VERSIONS, ids=lambda path: path.name)


@cache
def current() -> tuple[str, ...]:
    return tuple(public_names())


def names_of(release: Path) -> list[str]:
    return (release / "names.txt").read_text().splitlines()


def withdrawn_from(release: Path) -> dict[str, str]:
    """Return the withdrawn lines of a release, each with its replacement."""
    file = release / "withdrawn.txt"
    pairs = (line.partition(" -> ") for line in file.read_text().splitlines()) if file.exists() else ()
    return {line: replacement for line, _, replacement in pairs}


@RELEASES
def test_no_public_name_of_release_disappears_or_changes(release: Path) -> None:
    now = set(current())
    # A parameter or an option may stop to be required.
    lost = {line for line in names_of(release) if not now & {line, *_relaxed(line)}}
    withdrawn = {line for line in withdrawn_from(release) if not line.startswith(NOT_IN_NAMES)}
    assert sorted(lost ^ withdrawn) == []


@RELEASES
def test_withdrawn_names_have_replacements_that_upgrading_lists(release: Path) -> None:
    rows = [line.split("|")[1:3] for line in UPGRADING.read_text().splitlines() if line.startswith("| `")]
    listed = {by.replace("`", "").strip(): tuple(names.replace("`", "").strip().split(", ")) for names, by in rows}
    for line, replacement in withdrawn_from(release).items():
        assert line.partition(" ")[2].startswith(listed[replacement]), line


def _relaxed(line: str) -> tuple[str, ...]:
    return (line.replace(" required", " optional"), line.removesuffix(" required"))


@RELEASES
def test_callables_and_commands_of_release_require_nothing_new(release: Path) -> None:
    before, now = names_of(release), required_parameters(list(current()))
    withdrawn = {line.split()[1] for line in withdrawn_from(release)}
    for name, parameters in required_parameters(before).items():
        assert name in withdrawn or now[name] <= parameters, name
    commands = {line for line in before if line.startswith("command ")}
    known = set(before)
    for line in current():
        kind, _, rest = line.partition(" ")
        if kind == "option" and line.endswith(" required") and line not in known:
            assert not any(f"command {rest.rpartition(' --')[0]}" == command for command in commands), line


def test_snapshot_notices_lost_name_and_new_required_parameter() -> None:
    names = list(current())
    assert "parameter dledger_core.Client peers required position 0" in names
    assert "error NOT_LEADER 404 exit 2 retriable NotLeaderError" in names
    assert "option dledger backup --to value required" in names
    assert "peers" in required_parameters(names)["dledger_core.Client"]
    assert "timeout_ms" not in required_parameters(names)["dledger_core.Client"]
