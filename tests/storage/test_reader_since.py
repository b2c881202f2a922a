"""A store that is opened again while it grows: what was seen before is not walked again, and the result is the same."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from dledger_core.storage import StoreReader, open_store
from dledger_core.storage.files.file_system import OsFiles
from tests.storage.conftest import GOLDEN
from tests.support.growing_store import GrowingStore, everything

SINGLE = [name for name in GOLDEN if name.endswith("single")]


class CountingFiles(OsFiles):
    """Counts the bytes that are read from data files."""

    def __init__(self) -> None:
        self.nbytes = 0

    def open(self, path: Path, *, write: bool = False, **options: Any) -> Any:
        file = super().open(path, write=write, **options)
        if path.parent.name != "data":
            return file
        read = file.pread

        class Counting:
            def __getattr__(self, name: str) -> Any:
                return getattr(file, name)

            def pread(_, length: int, offset: int) -> bytes:  # noqa: N805
                data = read(length, offset)
                self.nbytes += len(data)
                return data

        return Counting()


@pytest.mark.parametrize("with_index", [True, False])
@pytest.mark.parametrize("name", SINGLE)
def test_each_step_shows_what_a_first_look_would_show(
    golden: Path, tmp_path: Path, name: str, with_index: bool
) -> None:
    source = next((golden / name).glob("dledger-*"))
    store = GrowingStore(source, tmp_path / source.name, with_index=with_index)
    total = len(store.rows)
    view: StoreReader | None = None
    for count in (1, 2, total // 3, total // 3, total // 2, total - 1, total):
        store.hold(count)
        view = open_store(store.path, since=view)
        assert view.last_index + 1 - view.first_index == count
        assert everything(view) == store.rows[:count]
    assert view is not None
    assert view.term_ranges() == open_store(store.path).term_ranges()


@pytest.mark.parametrize("name", SINGLE)
def test_little_is_read_where_nothing_is_new(golden: Path, tmp_path: Path, name: str) -> None:
    source = next((golden / name).glob("dledger-*"))
    path = Path(shutil.copytree(source, tmp_path / source.name))
    first, again = CountingFiles(), CountingFiles()
    view = open_store(path, files=first)
    open_store(path, files=again, since=view)
    assert again.nbytes < first.nbytes / 2


@pytest.mark.parametrize("name", SINGLE)
def test_a_log_that_lost_its_end_is_looked_at_anew(golden: Path, tmp_path: Path, name: str) -> None:
    source = next((golden / name).glob("dledger-*"))
    store = GrowingStore(source, tmp_path / source.name, with_index=True)
    view = open_store(store.path)
    store.hold(len(store.rows) // 2)
    shorter = open_store(store.path, since=view)
    assert everything(shorter) == store.rows[: len(store.rows) // 2]
