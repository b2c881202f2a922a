"""The command ``dledger convert``."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dledger_core.cli import convert as command
from dledger_core.cli import main
from dledger_core.rocketmq.convert import ConvertRequest, Report, Step
from dledger_core.storage import open_store
from tests.rocketmq.convert.stores import PEERS


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["convert", *map(str, arguments)])


@pytest.fixture
def source(three: Path) -> Path:
    return three.with_name("dledger-n1")


OPTIONS = {"--group": "orders", "--self-id": "n1", "--peers": PEERS}


def words(options: dict[str, str]) -> list[str]:
    return [word for pair in options.items() for word in pair]


def test_convert_prints_json_report(tmp_path: Path, source: Path) -> None:
    options = words(OPTIONS | {"--format": "json"})
    planned = run(source, tmp_path / "dir", *options, "--dry-run")
    assert (planned.exit_code, planned.stderr) == (0, "")
    assert not (tmp_path / "dir").exists()
    done = run(source, tmp_path / "dir", *options)
    assert (done.exit_code, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report["destination"] == str(tmp_path / "dir/orders/dledger-n1")
    assert (report["entries"], report["kind"], report["profile"]) == (267, "java-a", "B")
    assert json.loads(planned.stdout)["entries"] == 267
    with open_store(tmp_path / "dir/orders/dledger-n1") as reader:
        assert (reader.group, reader.node_id, reader.log_uuid) == ("orders", "n1", report["log_uuid"])


def test_convert_prints_table_and_index_map(tmp_path: Path, source: Path) -> None:
    options = words(OPTIONS | {"--profile": "A", "--data-segment-bytes": "32KiB"})
    done = run(source, tmp_path / "x" / "dledger-n1", *options)
    assert done.exit_code == 0, done.output
    assert "converted and verified" in done.stdout
    meta = json.loads((tmp_path / "x/dledger-n1/meta/log.json").read_text())
    assert (meta["data_segment_bytes"], meta["profile"]) == (32768, "A")
    index_map = tmp_path / "x/dledger-n1/meta/index-map.json"
    assert str(index_map) in done.stderr
    (run_,) = json.loads(index_map.read_text())["ranges"]
    assert (run_["part"], run_["start"], run_["end"], run_["new_start"]) == ("log", 0, 267, 0)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"--self-id": "n7"}, "n7"),
        ({"--group": "../x"}, "../x"),
        ({"--peers": "n1"}, "n1"),
        ({"--profile": "C"}, "--profile"),
        ({"--data-segment-bytes": "many"}, "--data-segment-bytes"),
        ({"--data-segment-bytes": "1KiB"}, "--data-segment-bytes"),
        ({"--data-segment-bytes": "12"}, "data_segment_bytes"),
        ({"--index-segment-bytes": "33"}, "index_segment_bytes"),
        ({"--commitlog": "/nowhere"}, "--commitlog"),
        ({"--log-uuid": "short"}, "--log-uuid"),
    ],
)
def test_convert_rejects_wrong_options_in_one_line(
    tmp_path: Path, source: Path, changes: dict[str, str], name: str
) -> None:
    done = run(source, tmp_path / "dir", *words(OPTIONS | changes))
    assert (done.exit_code, done.stdout) == (3, ""), done.output
    assert name in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_convert_stops_between_steps_on_signal_and_continues(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: Path, number: signal.Signals
) -> None:
    real = command.run_conversion

    def signalled(request: ConvertRequest, on_step: Callable[[Step], None]) -> Report:
        def step(found: Step) -> None:
            on_step(found)
            if found.phase == "copy":
                os.kill(os.getpid(), number)

        return real(request, step)

    options = words(OPTIONS | {"--format": "json"})
    with monkeypatch.context() as patch:
        patch.setattr(command, "run_conversion", signalled)
        stopped = run(source, tmp_path / "dir", *options)
    assert (stopped.exit_code, stopped.stdout) == (130, "")
    done = run(source, tmp_path / "dir", *options)
    assert (done.exit_code, json.loads(done.stdout)["resumed"]) == (0, True)
