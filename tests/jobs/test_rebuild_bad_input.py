"""Damaged or inconsistent stores: a classified finding or one line, and never a change to the store."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from dledger_core import open_store
from dledger_core.rocketmq import encode_messages
from jobs import rebuild_consume_queue
from tests.jobs.broker_store import write_broker_store
from tests.jobs.test_rebuild_slots import state
from tests.support.run_job import run_in_process

pytestmark = pytest.mark.spark

_COUNT = 200
_DATA_BYTES = 1 << 12
_BODY = 50


def overwrite(store: Path, position: int, data: bytes) -> None:
    base = position // _DATA_BYTES * _DATA_BYTES
    path = store / "data" / f"{base:020d}"
    content = bytearray(path.read_bytes())
    content[position - base : position - base + len(data)] = data
    path.write_bytes(content)


def write(store: Path) -> list[int]:
    offsets = [number // 3 for number in range(_COUNT)]
    ids = [number % 3 for number in range(_COUNT)]
    bodies = encode_messages("T", ids, [b"x" * _BODY] * _COUNT, "TagA", queue_offset=offsets).to_pylist()
    return write_broker_store(store, bodies, committed=_COUNT - 1, data_bytes=_DATA_BYTES)


def cut(store: Path, places: list[int]) -> None:
    last = sorted((store / "data").iterdir())[-1]
    last.write_bytes(last.read_bytes()[: places[-3] - int(last.name) + 40])


def test_messages_that_lie(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Magic, body length, properties length, queue offset: each message is named, all others are in the table."""
    store = tmp_path / "in" / "dledger-n0"
    places = write(store)
    lies = {
        30: (4, bytes(4)),
        60: (84, b"\x7f\xff\xff\xff"),
        90: (88 + _BODY + 2, b"\x7f\xff"),
        120: (20, b"\x7f" + b"\xff" * 7),
    }
    for number, (begin, value) in lies.items():
        overwrite(store, places[number] + begin, value)
    before = state(store)
    code, summary, _ = run_in_process(
        rebuild_consume_queue.command, capsys, "--store", str(store), "--table", str(tmp_path / "t")
    )
    assert (code, summary["rows"], summary["slots"], summary["dense"]) == (1, _COUNT - 4, _COUNT - 4, False)
    skipped = {"not_messages": 3, "impossible_queue_offsets": 1, "prepared_or_rolled_back": 0}
    assert summary["skipped"] == skipped
    assert summary["not_messages_at"] == [places[30], places[60], places[90]]
    assert summary["impossible_queue_offsets_at"] == [places[120]]
    assert state(store) == before


def test_store_that_ends_early(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Recovered entries are rebuilt; a checkpoint beyond them is a finding."""
    store = tmp_path / "in" / "dledger-n0"
    cut(store, write(store))
    code, summary, _ = run_in_process(
        rebuild_consume_queue.command, capsys, "--store", str(store), "--table", str(tmp_path / "t")
    )
    end = summary["end"]
    assert (code, end < _COUNT, summary["rows"] + summary["skipped"]["not_messages"]) == (1, True, end)
    assert summary["lost_end"] == [{"group": "in", "recorded_end": _COUNT}]


@pytest.mark.parametrize("how", ["cut", "emptied", "header"])
def test_end_that_is_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str) -> None:
    """Without a checkpoint, as in Java's generation B, the files themselves show the lost end."""
    store = tmp_path / "in" / "dledger-n0"
    places = write(store)
    for path in store.glob("checkpoint*"):
        path.unlink()
    last = max((store / "data").iterdir())
    if how == "header":
        overwrite(store, places[-3] - 48, bytes(4))
    else:
        os.truncate(last, 0 if how == "emptied" else places[-3] - int(last.name) + 40)
    with open_store(store) as reader:
        end = int(reader.last_index) + 1
    before = state(store)
    code, summary, _ = run_in_process(
        rebuild_consume_queue.command, capsys, "--store", str(store), "--table", str(tmp_path / "t")
    )
    assert (code, summary["end"], summary["rows"]) == (1, end, end)
    assert end < _COUNT
    assert summary["lost_end"] == [{"group": "in", "recorded_end": end + 1}]
    assert state(store) == before


def test_damage_before_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The entries after it cannot be trusted: one line names file and index, and the table stays empty."""
    store = tmp_path / "in" / "dledger-n0"
    overwrite(store, write(store)[100] - 48, struct.pack(">ii", 1, 1 << 30))
    before = state(store)
    code, summary, err = run_in_process(
        rebuild_consume_queue.command, capsys, "--store", str(store), "--table", str(tmp_path / "t")
    )
    assert (code, summary["error"]) == (4, "CORRUPT")
    assert "index=100" in summary["message"]
    assert "Traceback" not in err
    assert state(store) == before
    assert not list((tmp_path / "t").glob("*.parquet"))
