"""Public names of each release: this version still has them, and its callers need to pass nothing new."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.kept.make import VERSIONS
from tests.kept.public_names import public_names, required_parameters

RELEASES = pytest.mark.parametrize("release", VERSIONS, ids=lambda path: path.name)


@cache
def current() -> tuple[str, ...]:
    return tuple(public_names())


def names_of(release: Path) -> list[str]:
    return (release / "names.txt").read_text().splitlines()


@RELEASES
def test_no_public_name_of_release_disappears_or_changes(release: Path) -> None:
    now = set(current())
    # A parameter or an option may stop to be required.
    kept = {line for line in names_of(release) if now & {line, *_relaxed(line)}}
    assert sorted(set(names_of(release)) - kept) == []


def _relaxed(line: str) -> tuple[str, ...]:
    return (line.replace(" required", " optional"), line.removesuffix(" required"))


@RELEASES
def test_callables_and_commands_of_release_require_nothing_new(release: Path) -> None:
    before, now = names_of(release), required_parameters(list(current()))
    for name, parameters in required_parameters(before).items():
        assert now[name] <= parameters, name
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
    assert "option dledger convert --peers value required" in names
    assert "peers" in required_parameters(names)["dledger_core.Client"]
    assert "timeout_ms" not in required_parameters(names)["dledger_core.Client"]
