"""Contract of the stores that ``open_store`` reads: all kinds of ``stores.py`` behave the same."""

from __future__ import annotations

import contextlib
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest

from dledger_core.errors import BadRequestError, CorruptRecordError, IndexOutOfRangeError
from dledger_core.record import MAGIC_DATA, READ_SCHEMA, RECORD_SCHEMA
from dledger_core.storage import StoreReader, open_store
from tests.contracts import stores
from tests.contracts.stores import Made, Stored, copy_of, sha256
from tests.support.damage import flip, place_of
from tests.support.growing_store import everything
from tests.support.logs import rows_of
from tests.support.only_reading import only_reading

HUGE = 1 << 62


def stored(batch: Any) -> list[Stored]:
    """Return read entries as the makers of stores describe them."""
    return [Stored(row["index"], row["term"], row["magic"], sha256(row["body"])) for row in batch.to_pylist()]


def all_of(view: StoreReader, max_bytes: int = 1 << 30) -> list[Stored]:
    found, at = [], int(view.first_index)
    while at <= view.last_index:
        batch = view.read(at, HUGE, max_bytes=max_bytes)
        assert batch.num_rows > 0
        found += stored(batch)
        at += batch.num_rows
    return found


class StoreContract:
    kind: ClassVar[type[stores.Store]]

    @pytest.fixture
    def made(self, tmp_path: Path) -> Made:
        return copy_of(self.kind, tmp_path)

    @pytest.fixture
    def view(self, made: Made) -> Any:
        with open_store(made.path) as view:
            yield view

    # --- entries ------------------------------------------------------------------------------------------------------

    def test_entries_are_those_written_in_order(self, made: Made, view: StoreReader) -> None:
        assert (view.first_index, view.last_index) == (made.entries[0].index, made.entries[-1].index)
        assert view.read(0, 1).schema == RECORD_SCHEMA
        for max_bytes in (1 << 30, 3000, 1):
            assert all_of(view, max_bytes) == made.entries
        assert view.damaged == view.gaps == ()
        assert view.missing is None
        assert view.verify().findings == ()

    def test_positions_are_contiguous_in_data_files(self, view: StoreReader) -> None:
        rows = everything(view)
        for before, after in pairwise(rows):
            end = before["position"] + 48 + len(before["body"])
            assert after["position"] == end or after["position"] % view.segment_bytes[0] == 0
        assert view.position_end == rows[-1]["position"] + 48 + len(rows[-1]["body"])

    def test_raw_records_are_those_of_read(self, made: Made, view: StoreReader) -> None:
        found = rows_of(view.raw(10, 30))
        assert [Stored(row.index, row.term, row.magic, sha256(row.body)) for row in found] == made.entries[10:30]

    def test_read_ends_at_limit_of_bytes(self, made: Made, view: StoreReader) -> None:
        sizes = view.raw(0, 20, 1 << 20).sizes.tolist()
        for count in (1, 2, 7):
            limit = sum(sizes[:count])
            assert view.raw(0, 20, limit).count == count
            assert view.raw(0, 20, limit - 1).count == max(count - 1, 1)
        assert view.raw(0, HUGE, 0).count == 1

    def test_term_ranges_are_those_of_entries(self, made: Made, view: StoreReader) -> None:
        terms = [(term, next(group).index) for term, group in groupby(made.entries, key=lambda entry: entry.term)]
        assert [(found.term, found.first_index) for found in view.term_ranges()] == terms
        assert view.describe("terms").column("term").to_pylist() == [term for term, _ in terms]
        with pytest.raises(BadRequestError):
            view.describe("none")

    # --- bounds -------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("place", ["negative", "empty", "reversed", "after the end", "huge"])
    def test_range_outside_log_is_rejected_by_read(self, view: StoreReader, place: str) -> None:
        end = view.last_index + 1
        ranges = {"negative": (-1, 3), "empty": (5, 5), "reversed": (5, 3), "after the end": (end, end + 1)}
        start, stop = ranges.get(place, (HUGE, HUGE + 1))
        for read in (view.read, view.raw):
            with pytest.raises(IndexOutOfRangeError) as caught:
                read(start, stop)
            assert caught.value.values == {"first_index": view.first_index, "last_index": view.last_index}

    def test_read_across_end_returns_entries_before_it(self, made: Made, view: StoreReader) -> None:
        assert stored(view.read(view.last_index, HUGE)) == made.entries[-1:]

    def test_fetch_outside_log_is_empty_after_it_and_rejected_before(self, view: StoreReader) -> None:
        for start, stop in ((5, 5), (5, 3), (view.last_index + 1, HUGE), (HUGE, HUGE + 1)):
            found = view.fetch(start, stop)
            assert (found.next_index, found.batch.num_rows, found.batch.schema) == (start, 0, READ_SCHEMA)
        with pytest.raises(IndexOutOfRangeError):
            view.fetch(-1, 3)

    def test_empty_store_has_no_entries(self, tmp_path: Path) -> None:
        with open_store(str(self.kind().make_empty(tmp_path))) as view:
            assert (view.first_index, view.last_index) == (0, -1)
            assert view.commit_index in (None, -1)
            assert (view.term_ranges(), view.verify().findings) == ([], ())
            assert (view.fetch(0, 10).next_index, view.shown().end) == (0, 0)
            with pytest.raises(IndexOutOfRangeError):
                view.read(0, 1)

    # --- committed entries --------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("max_bytes", [1 << 20, 3000])
    def test_fetch_returns_committed_data_entries(self, made: Made, view: StoreReader, max_bytes: int) -> None:
        for until, end in (("committed", made.committed), ("end", len(made.entries))):
            indexes, at = [], 0
            while (found := view.fetch(at, HUGE, max_bytes=max_bytes, until=until)).next_index > at:
                at = found.next_index
                indexes += found.batch.column("index").to_pylist()
            assert indexes == [entry.index for entry in made.entries[:end] if entry.magic == MAGIC_DATA]
            assert (at, found.visible_end, found.first_index) == (end, end, 0)
            assert view.shown(until=until).end == view.committed_end(until) == end
        assert view.commit_index in (None, made.committed - 1)

    # --- search -------------------------------------------------------------------------------------------------------

    def test_position_leads_to_entry_that_contains_it_or_the_next(self, view: StoreReader) -> None:
        rows = everything(view)[:200]
        for row, after in pairwise(rows):
            start, end = row["position"], row["position"] + 48 + len(row["body"])
            assert view.index_at_position(start) == view.index_at_position(end - 1) == row["index"]
            assert view.index_at_position(end) == after["index"]
            assert view.index_at_position(after["position"] - 1) in (row["index"], after["index"])
        assert view.index_at_position(-1) == 0
        assert view.index_at_position(HUGE) == view.last_index + 1

    def test_time_leads_to_first_entry_or_is_rejected(self, view: StoreReader) -> None:
        if view.meta is None:
            with pytest.raises(BadRequestError):
                view.index_at_time(0)
            return
        assert view.index_at_time(0) == 0
        assert view.index_at_time(HUGE) == view.last_index + 1
        if self.kind.has_times:
            rows = everything(view)
            for row in rows[::20]:
                at = round(row["timestamp"].timestamp() * 1000)
                first = next(each["index"] for each in rows if each["timestamp"] == row["timestamp"])
                assert view.index_at_time(at) == first
                assert view.index_at_time(at - 1) <= first < view.index_at_time(at + 1)

    # --- damage -------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("field", ["magic", "size", "body"])
    def test_damaged_record_is_never_returned(self, made: Made, field: str) -> None:
        at, offset = 20, {"magic": 0, "size": 4, "body": 48}[field]
        file, place = place_of(made.path, at)
        flip(file, place + offset)
        if field == "body" and not self.kind.checks_bodies:
            return
        with open_store(made.path) as view:
            assert stored(view.read(0, at)) == made.entries[:at]
            for read in (view.read, view.raw, partial(view.fetch, until="end")):
                for start in (at, at - 5):
                    with pytest.raises(CorruptRecordError) as caught:
                        read(start, at + 5, max_bytes=1 << 20)
                    assert (caught.value.where, caught.value.values["index"]) == (str(file), at)
            assert view.damage_end(caught.value) == at + 1
            assert stored(view.read(at + 1, HUGE, max_bytes=1 << 30))[:50] == made.entries[at + 1 : at + 51]
            found = [(each.start, each.end, each.path) for each in view.verify().findings if each.kind == "CORRUPT"]
            assert found == [(at, at + 1, str(file))]

    @pytest.mark.parametrize("lost", ["directory", "files", "first file", "rows", "last rows"])
    def test_store_is_read_without_its_index(self, made: Made, lost: str) -> None:
        directory = made.path / "index"
        files = sorted(directory.iterdir())
        if lost == "directory":
            shutil.rmtree(directory)
        elif lost.endswith("rows"):
            for file in files[-1:] if lost == "last rows" else files:
                file.write_bytes(bytes(file.stat().st_size))
        else:
            for file in files[: 1 if lost == "first file" else None]:
                file.unlink()
        with open_store(made.path) as view:
            assert all_of(view, 20_000) == made.entries
            assert {finding.kind for finding in view.verify().findings} == {"INDEX_MISMATCH"}
            if lost in ("directory", "files"):
                last = range(view.last_index - 5, view.last_index + 1)
                assert view.index_mismatches(view.raw(last.start, last.stop)) == list(last)
            if self.kind.has_times:
                time = view.time_of(200)
                assert time is not None
                assert view.time_of(view.index_at_time(round(time.timestamp() * 1000))) == time

    # --- deleted entries ----------------------------------------------------------------------------------------------

    def test_deleted_entries_are_out_of_range(self, made: Made) -> None:
        with open_store(made.path) as before:
            self.kind().delete_first(made.path)
            with open_store(made.path) as view:
                first = int(view.first_index)
                assert 0 < first < view.last_index
                assert all_of(view) == made.entries[first:]
                assert view.verify().findings == ()
                for read in (view.read, view.raw, view.fetch):
                    with pytest.raises(IndexOutOfRangeError) as caught:
                        read(first - 1, first + 5)
                    assert caught.value.values == {"first_index": first, "last_index": view.last_index}
            assert before.first_index_now == first
            assert before.verify().deleted in ((0, first), None)
            # An open descriptor still has the deleted entries; without one their range is named, and no damage.
            with contextlib.suppress(IndexOutOfRangeError):
                assert stored(before.read(first - 1, first)) == made.entries[first - 1 : first]

    # --- the life of a view -------------------------------------------------------------------------------------------

    def test_view_continued_from_earlier_one_equals_new_one(self, tmp_path: Path) -> None:
        view: StoreReader | None = None
        for path in self.kind().growing(tmp_path):
            view = open_store(path, since=view)
            with open_store(path) as fresh:
                assert (view.last_index, everything(view)) == (fresh.last_index, everything(fresh))
                assert view.term_ranges() == fresh.term_ranges()
                assert view.shown().end == fresh.shown().end

    def test_reads_change_no_file(self, made: Made) -> None:
        with only_reading(made.path), open_store(made.path) as view:
            all_of(view)
            view.verify()
            view.fetch(0, HUGE)

    def test_threads_read_the_same_entries(self, made: Made, view: StoreReader) -> None:
        def read(seed: int) -> bool:
            chosen = random.Random(seed)
            starts = [chosen.randrange(len(made.entries)) for _ in range(20)]
            return all(stored(view.read(at, at + 9)) == made.entries[at : at + 9] for at in starts)

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(read, range(8)))

    def test_view_is_closed_twice_and_opens_its_files_again_for_late_read(self, made: Made, view: StoreReader) -> None:
        view.close()
        view.close()
        assert stored(view.read(0, 5)) == made.entries[:5]


class TestNative(StoreContract):
    kind = stores.Native


class TestProfileA(StoreContract):
    kind = stores.ProfileA


class TestOldLeader(StoreContract):
    kind = stores.OldLeader


class TestRestored(StoreContract):
    kind = stores.Restored


class TestConverted(StoreContract):
    kind = stores.Converted


class TestJavaA(StoreContract):
    kind = stores.JavaA


class TestJavaB(StoreContract):
    kind = stores.JavaB


class TestBroker(StoreContract):
    kind = stores.Broker
