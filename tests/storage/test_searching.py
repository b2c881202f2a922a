"""Searching a store by append time and by position: one function each, for files and for a node's log."""

from __future__ import annotations

from pathlib import Path

import pytest

from dledger_core import BadRequestError, open_store
from tests.spark_connector.store_writer import StoreWriter
from tests.storage.conftest import GOLDEN


@pytest.mark.parametrize("with_index", [True, False])
def test_index_at_time_returns_the_first_entry_at_or_after_it(tmp_path: Path, with_index: bool) -> None:
    with StoreWriter(tmp_path) as store:
        for _ in range(4):
            store.append_numbers(3)
    if not with_index:
        for path in (store.path / "index").iterdir():
            path.write_bytes(bytes(path.stat().st_size))
    view = open_store(store.path)
    times = [int(time.timestamp() * 1000) for time in view.read(0, 12)["timestamp"].to_pylist()]
    assert [view.index_at_time(time) for time in times[::3]] == [0, 3, 6, 9]
    assert [view.index_at_time(time + 1) for time in times[::3]] == [3, 6, 9, 12]
    assert view.index_at_time(0) == 0


@pytest.mark.parametrize("name", [name for name in GOLDEN if name.endswith("single")])
def test_index_at_time_is_refused_for_a_java_store(golden: Path, name: str) -> None:
    with pytest.raises(BadRequestError):
        open_store(next((golden / name).glob("dledger-*"))).index_at_time(0)


def test_index_at_position_returns_the_entry_that_contains_it(tmp_path: Path) -> None:
    with StoreWriter(tmp_path, segment_bytes=1 << 12) as store:
        store.append([bytes(1000)] * 8)  # each segment ends with a BLANK
    view = open_store(store.path)
    positions = view.read(0, 8)["position"].to_pylist()
    assert [view.index_at_position(position) for position in positions] == list(range(8))
    assert [view.index_at_position(position + 1047) for position in positions] == list(range(8))
    assert [view.index_at_position(position + 1048) for position in positions] == list(range(1, 9))
    assert view.index_at_position((1 << 12) - 1) == 3, "a BLANK belongs to no entry"
