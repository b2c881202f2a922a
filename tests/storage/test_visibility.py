"""The rule of ``read_committed`` and its ends, for stores; servers and ``convert`` call the same code."""

from __future__ import annotations

from pathlib import Path

import pytest

from dledger_core import (
    HEADER_BYTES,
    CorruptRecordError,
    Fetch,
    IndexOutOfRangeError,
    StoreReader,
    TransactionId,
    Visibility,
    open_store,
)
from dledger_core.storage.files.file_system import OsFiles
from dledger_core.storage.files.layout import Layout
from dledger_core.storage.files.meta_files import Checkpoint, save_checkpoint
from dledger_core.storage.read.visibility import SKIPPED_MIN
from tests.spark_connector.store_writer import StoreWriter


def shown(view: StoreReader, start: int = 0) -> list[int]:
    return list(map(int, view.read_visible(start, 1 << 40)["index"].to_pylist()))


def indexes(fetch: Fetch) -> list[int]:
    return list(map(int, fetch.batch["index"].to_pylist()))


def with_commit_index(view: StoreReader, commit_index: int) -> StoreReader:
    """The same store as one that records less as committed."""
    checkpoint = Checkpoint(view.last_index, commit_index, view.position_end)
    save_checkpoint(OsFiles(), Layout(view.path).checkpoint, checkpoint)
    return open_store(view.path)


def test_visible_end_is_the_oldest_open_transaction(tmp_path: Path) -> None:
    with StoreWriter(tmp_path) as store:
        store.append_numbers(10)
        store.append_attempt(5, batch=3, run="r2")
        store.append_numbers(2)
        view = open_store(store.path)
    assert (view.visible_end, view.committed_end(), view.commit_index) == (10, 18, 17)
    assert view.visibility().open_transaction == TransactionId("q", 3, "r2")
    assert shown(view) == list(range(10))
    everything = view.fetch(0, 100, max_bytes=1 << 20, isolation="read_uncommitted")
    assert indexes(everything) == [*range(10), *range(11, 18)]
    assert everything.next_index == 18


@pytest.mark.parametrize("rows", [3, SKIPPED_MIN + 1])
def test_orphaned_attempts_are_left_out(tmp_path: Path, rows: int) -> None:
    with StoreWriter(tmp_path) as store:
        store.append_numbers(2)
        lost = store.append_attempt(rows, batch=0)
        won = store.append_attempt(2, batch=0)
        store.commit(won, batch=0)
        view = open_store(store.path)
    assert view.visibility().open_transaction is None
    assert view.visibility().orphaned(0, view.last_index) == [(lost.first, lost.last + 1)]
    assert shown(view) == [0, 1, won.first, won.last]
    assert shown(view, lost.first) == [won.first, won.last]
    assert view.fetch(lost.first, lost.last, max_bytes=1).next_index == lost.last


def test_outcomes_after_the_committed_end_decide_nothing(tmp_path: Path) -> None:
    with StoreWriter(tmp_path) as store:
        store.append_numbers(10)
        opened = store.append_attempt(5, batch=0)
        committed = store.end
        store.commit(opened, batch=0)
        store.append_numbers(1)
        end = store.end
    view = with_commit_index(open_store(store.path), committed - 1)
    assert (view.committed_end(), view.visible_end) == (committed, 10)
    assert (view.committed_end("end"), view.visibility("end").end) == (end, end), "taken for committed"
    assert indexes(view.fetch(0, end, max_bytes=1 << 20)) == list(range(10))
    assert indexes(view.fetch(0, end, max_bytes=1 << 20, until="end")) == [*range(10), *range(11, 16), 17]


def test_fetch_returns_its_start_where_the_view_ends(tmp_path: Path) -> None:
    with StoreWriter(tmp_path) as store:
        store.append_numbers(5)
        view = open_store(store.path)
        store.append_numbers(5)
        found = view.fetch(5, 10, max_bytes=1 << 20)
        assert (found.next_index, found.batch.num_rows, found.visible_end, found.commit_index) == (5, 0, 5, 4)
        again = open_store(store.path, since=view).fetch(5, 10, max_bytes=1)
        assert (again.next_index, indexes(again)) == (6, [5])
        with pytest.raises(IndexOutOfRangeError):
            view.fetch(-1, 3, max_bytes=1)


def test_refreshed_view_applies_only_new_control_entries(tmp_path: Path) -> None:
    with StoreWriter(tmp_path) as store:
        lost = store.append_attempt(5, batch=0)
        won = store.append_attempt(5, batch=0)
        store.commit(won, batch=0)
        view = open_store(store.path)
        assert shown(view) == list(range(won.first, won.last + 1))
        with (store.path / "data" / f"{0:020d}").open("r+b") as file:
            file.seek(HEADER_BYTES)
            file.write(b"damaged")
        opened = store.append_attempt(3, batch=1)
        with pytest.raises(CorruptRecordError):
            open_store(store.path).visibility()
        newer = open_store(store.path, since=view)
        assert newer.visible_end == opened.first - 1
        assert newer.visibility().orphaned(0, store.end) == [(lost.first, lost.last + 1)]


def test_outcomes_are_found_without_index_rows(tmp_path: Path) -> None:
    with StoreWriter(tmp_path, segment_bytes=1 << 24) as store:
        store.append_attempt(2_000, batch=0)
        won = store.append_attempt(5, batch=0)
        store.commit(won, batch=0)
    for path in (store.path / "index").iterdir():
        path.write_bytes(bytes(path.stat().st_size))
    assert shown(open_store(store.path)) == list(range(won.first, won.last + 1))


def test_span_ends_before_a_long_orphaned_range_and_after_the_given_number() -> None:
    visibility = Visibility(10_000, None, [(5, 6), (7, 8), (9, 10), (100, 2000), (9_990, 20_000)])
    assert visibility.span(0, 50) == (0, 50, [(5, 6), (7, 8), (9, 10)])
    assert visibility.span(5, 50, ranges_max=1) == (6, 9, [(7, 8)])
    assert visibility.span(0, 5000) == (0, 100, [(5, 6), (7, 8), (9, 10)])
    assert visibility.span(300, 5000) == (2000, 5000, [])
    assert visibility.span(9_995, 50_000) == (10_000, 10_000, [])
    assert visibility.span(20_000, 30_000) == (20_000, 20_000, [])
