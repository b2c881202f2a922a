"""The command ``dledger convert``."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from dledger_core.cli import convert as command
from dledger_core.rocketmq.convert import ConvertRequest, Report, Step
from dledger_core.storage import open_store
from tests.cli.command import error_of, result_of, run
from tests.rocketmq.convert.stores import PEERS

GIVEN = ("--group", "orders", "--self-id", "n1", "--peers", PEERS)


@pytest.fixture
def source(three: Path) -> Path:
    return three.with_name("dledger-n1")


def test_convert_prints_json_report(tmp_path: Path, source: Path) -> None:
    planned = result_of("convert", source, tmp_path / "dir", *GIVEN, "--dry-run")
    assert not (tmp_path / "dir").exists()
    report = result_of("convert", source, tmp_path / "dir", *GIVEN)
    assert report["destination"] == str(tmp_path / "dir/orders/dledger-n1")
    assert (report["entries"], report["kind"], report["profile"]) == (planned["entries"], "java-a", "B")
    with open_store(tmp_path / "dir/orders/dledger-n1") as reader:
        assert (reader.group, reader.node_id, reader.log_uuid) == ("orders", "n1", report["log_uuid"])


def test_convert_prints_table_and_index_map(tmp_path: Path, source: Path) -> None:
    store = tmp_path / "x" / "dledger-n1"
    done = run("convert", source, store, *GIVEN, "--profile", "A", "--data-segment-bytes", "32KiB")
    assert str(store) in done.stdout
    meta, index_map = store / "meta/log.json", store / "meta/index-map.json"
    assert str(index_map) in done.stderr
    fields = json.loads(meta.read_text())
    assert (fields["data_segment_bytes"], fields["profile"]) == (32768, "A")
    (ranges,) = json.loads(index_map.read_text())["ranges"]
    assert (ranges["part"], ranges["start"], ranges["end"], ranges["new_start"]) == ("log", 0, 267, 0)


@pytest.mark.parametrize(
    ("option", "value", "name"),
    [
        ("--self-id", "n7", "n7"),
        ("--group", "../x", "../x"),
        ("--peers", "n1", "n1"),
        ("--profile", "C", "--profile"),
        ("--data-segment-bytes", "many", "--data-segment-bytes"),
        ("--data-segment-bytes", "1KiB", "--data-segment-bytes"),
        ("--data-segment-bytes", "12", "data_segment_bytes"),
        ("--index-segment-bytes", "33", "index_segment_bytes"),
        ("--commitlog", "/nowhere", "--commitlog"),
        ("--log-uuid", "short", "--log-uuid"),
    ],
)
def test_convert_rejects_wrong_options(tmp_path: Path, source: Path, option: str, value: str, name: str) -> None:
    assert name in error_of("convert", source, tmp_path / "dir", *GIVEN, option, value)


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

    with monkeypatch.context() as patch:
        patch.setattr(command, "run_conversion", signalled)
        assert run("convert", source, tmp_path / "dir", *GIVEN, "--format", "json", code=130).stdout == ""
    assert result_of("convert", source, tmp_path / "dir", *GIVEN)["resumed"] is True
