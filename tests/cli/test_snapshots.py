"""Help pages, errors of wrong usage and outputs, as users see them. ``make snapshots`` accepts changes."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from dledger_core.cli import main
from dledger_core.config import StorageConfig
from dledger_core.control import pack
from dledger_core.storage import CommitLog
from dledger_core.storage.files.file_system import OsFiles
from dledger_core.storage.files.layout import Layout, load_log_meta, save_log_meta
from tests.cli.command import run
from tests.cli.test_dump import own_log
from tests.rocketmq.golden import MIXED, THREE
from tests.support.damage import flip, place_of
from tests.support.logs import append, found_store
from tests.support.snapshots import check_snapshot

SNAPSHOTS = Path(__file__).parent / "snapshots"
PEERS = "n0-127.0.0.1:1;n1-127.0.0.1:2"
NODE = f"serve --peers {PEERS} --self-id n0"
WRONG = f"""
--nonsense
statu
tial
recover
recover --peers 127.0.0.1:1
member add n3 --address 127.0.0.1:3
serve --peers 127.0.0.1:1,127.0.0.1:2 --self-id n0
tail --protocol dledger-java
status --peers {PEERS} --pears x
status --peers n0:127.0.0.1:1
status --peers=
status --peers n0-h:1;n0-h:2
status --peers {PEERS} --group ../x
status --peers {PEERS} --timeout 0
status --peers {PEERS} --timeout nan
status --peers {PEERS} --timeout inf
status --peers {PEERS} --format xml
status --client-config /nowhere.toml
get --peers {PEERS} five
get --peers {PEERS} 99999999999999999999999
get 1 --peers {PEERS} --protocol java
tail --peers {PEERS} --from 99999999999999999999999
tail --peers {PEERS} --from yesterday
tail --peers {PEERS} --protocol dledger-java --safety-lag -1
append --peers {PEERS} --file f body
append --peers {PEERS} --key a x
append --peers {PEERS} --tag a x
append --peers {PEERS} --queue 1 x
member remove n3
init
perf append --peers {PEERS} --seconds 0.2
serve --peers n0-10.1.1.1:1;n1-10.1.1.2:1 --self-id n0 --check
append --peers {PEERS} --file /nowhere/f
append x --peers {PEERS} --protocol dledger-java --producer-id p
transfer --peers {PEERS}
transfer --peers {PEERS} n9
dump /nowhere
dump / --from 9 --to 3
dump / --from @9 --to @3
dump / --from 2025-01-02T00:00 --to 2025-01-01T00:00
dump / --format %y
dump / --format xml
dump / --queue -1
dump / --count 0
verify
convert a b
backup
backup / --to /nowhere/backup --peers {PEERS}
backup --to /nowhere/backup --peers {PEERS} --group ../x
restore / --dir /nowhere/new --self-id ../n0
restore
convert / b --self-id n0 --peers {PEERS}
convert / b --self-id n0 --peers {PEERS} --group g --data-segment-bytes big
repair --dir /
repair
completion csh
serve
serve --peers {PEERS}
serve --peers {PEERS} --self-id n7
{NODE} --profile C
{NODE} --tick-ms soon
{NODE} --election-ms 20
{NODE} --index-segment-bytes 33
{NODE} --data-segment-bytes 4GiB
{NODE} --data-segment-bytes 10
{NODE} --data-segment-bytes -5
{NODE} --inflight-bytes 0
{NODE} --group a,a
{NODE} --group=
{NODE} --dir=
{NODE} --host=
{NODE} --preferred-leaders n1,n9
{NODE} --preferred-leaders other=n1
{NODE} --on-role-change=
{NODE} --on-role-change /nowhere/command
{NODE} --file-reserved-hours 0
{NODE} --delete-when 24
{NODE} --disk-full-bytes 63MiB
{NODE} --enable-disk-force-clean perhaps
{NODE} extra
serve --config /nowhere.toml
serve --config /
perf append --seconds inf
perf append --size 1 --request-bytes 1000000
perf append --peers {PEERS} --dir x
doctor --peers {PEERS} --self-id n9
dev --nodes 0
dev --group a/b
dev --memory --dir x
"""
SETTINGS = [
    "electoin-ms = 5",
    "self_id = 'n0'",
    "zzz = 1",
    "tick-ms = 'x'",
    "tick-ms = [",
    "[storage]\nx = 1",
    "group = 5",
]


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        assert found is not None
        yield (*path, name)
        if isinstance(found, click.Group):
            yield from commands(found, (*path, name))


def test_help_pages_are_those_of_snapshot() -> None:
    pages = [f"$ dledger {' '.join(path)}\n{run(*path, '--help').stdout}" for path in [(), *commands(main)]]
    check_snapshot(SNAPSHOTS / "help.txt", "\n".join(pages))


def test_errors_of_wrong_usage_are_those_of_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    calls = [line.split() for line in WRONG.strip().splitlines()]
    calls[1:1] = [["append", "--peers", PEERS, "--file", "/"]]
    for number, text in enumerate(SETTINGS):
        Path(f"{number}.toml").write_text(f"{text}\n")
        calls.append([*NODE.split(), "--config", f"{number}.toml"])
    lines = []
    for call in calls:
        result = CliRunner().invoke(main, call)
        assert (result.exit_code, result.stdout) == (3, ""), (call, result.output)
        lines.append(f"$ dledger {' '.join(call)}\n{result.stderr}")
    check_snapshot(SNAPSHOTS / "errors.txt", "\n".join(lines))
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{number}.toml" for number in range(len(SETTINGS))]


OUTPUTS = """
look mixed
look hidden
look large
look three
look brokers
dump mixed --last 2
dump mixed/commitlog --from 3
dump own
dump own --wide --last 2
dump own --from 1 --count 1 --format hex --decode message
dump own --from -1h
dump own --from 1970-01-01 --last 1
dump own --topic orders --from -1
dump own --topic topictest
dump own --topic orders --last 3
dump own --grep (
dump own --wide --format json
dump own --format %i
tail --format %i
get 1 --format %i
dump hidden
dump hidden --last 3 --format hex
export hidden to-commit-index
export hidden to-end --until end
export hidden to-end
export rejoined to-end
export other to-end
export own to-end --to csv
topics mixed
verify hidden
verify damaged
dump damaged --to 3
look damaged
"""


def make_stores(golden: Path) -> None:
    """Make the stores that OUTPUTS names, in the present directory, with the same content each time."""
    for name, source in (("mixed", golden / MIXED / "n0"), ("three", golden / THREE / "n0" / "dledger-n0")):
        shutil.copytree(source, name)
    for node in ("n0", "n1"):
        shutil.copytree(Path("mixed/commitlog"), Path("brokers", node, "commitlog"))
    own_log(Path("own"))

    def written(name: str, tail: list[bytes], committed: int, *, term: int = 1, count: int = 4) -> None:
        found_store(Path(name), config=StorageConfig(data_segment_bytes=8 << 20, preallocate_bytes=0))
        log = CommitLog.open(Path(name), group="g", node_id="n0")
        for batch, outcome in enumerate(("abort", None)):
            entry = {"k": "attempt", "q": "q", "b": batch, "r": "r", "a": "uuid", "n": 2, "c": 7}
            append(log, [b"kept"] * count, now_ms=1_000_000)
            append(log, [b"attempt"] * 2, control=pack(entry), now_ms=1_001_000)
            if outcome is not None:
                append(log, [], control=pack({"k": outcome, "q": "q", "b": batch, "r": "r"}), now_ms=1_002_000)
        append(log, tail, term, now_ms=1_003_000)
        log.close(committed)

    written("hidden", [b"ghost"] * 3, 14)
    written("rejoined", [b"acknowledged"] * 3, 17, term=2)
    written("damaged", [b"end"], 15)
    written("large", [b"end"], 100_009, count=50_000)
    file, offset = place_of(Path("damaged"), 1)
    flip(file, offset + 50)
    meta = replace(load_log_meta(OsFiles(), Layout(Path("own")).log_meta), log_uuid="1" * 32)
    shutil.copytree("own", "other")
    save_log_meta(OsFiles(), Layout(Path("other")).log_meta, meta)


def test_outputs_are_those_of_snapshot(golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    make_stores(golden)
    lines = []
    for call in OUTPUTS.strip().splitlines():
        result = CliRunner().invoke(main, call.split())
        shown = f"{result.stdout}{result.stderr}".replace(str(tmp_path), "").splitlines()
        shown = [re.sub(r"(bytes on disk +).*", r"\1N", line) for line in shown]  # the file system allocates them later
        lines += [f"$ dledger {call}", *map(str.rstrip, shown), f"exit code {result.exit_code}", ""]
    check_snapshot(SNAPSHOTS / "outputs.txt", "\n".join(lines))


def test_each_command_lists_examples_and_its_environment_variables() -> None:
    for path in commands(main):
        page = run(*path, "--help").stdout
        if "Commands:" not in page:
            assert "Examples:\n    dledger " in page or "Examples:\n    eval " in page, path
            assert "DLEDGER_DEBUG" in page, path
            # A measurement fills a group with random entries: it reads no variable.
            assert ("--peers" in page and path[0] != "perf") <= ("DLEDGER_PEERS" in page), path


def test_guide_lists_each_command() -> None:
    guide = (Path(__file__).parents[2] / "dledger_core/cli/README.md").read_text()
    assert [path[0] for path in commands(main) if f"`{path[0]}" not in guide] == []
