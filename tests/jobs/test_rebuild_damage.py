"""Each kind of damage is noticed by a rebuild, of a store and of a classic CommitLog."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contracts.small_file_stores import STORES
from tests.contracts.test_damage_table import UNKNOWABLE
from tests.jobs.conftest import Rebuild
from tests.support.damage import KINDS, DataFiles

ALWAYS = {
    ("classic", "zeros"),
    ("mixed", "old_copy"),
}
"""Two kinds of stores and of damage, because a cell is a run of Spark; ``make soak`` has all cells."""
CELLS = [
    pytest.param(store, kind, marks=[] if (store, kind) in ALWAYS else [pytest.mark.soak])
    for store in STORES
    for kind in KINDS
]


@pytest.mark.spark
@pytest.mark.parametrize(("store", "kind"), CELLS)
def test_damage_is_noticed_by_rebuild(
    tmp_path: Path, run_rebuild: Rebuild, spark: object, store: str, kind: str
) -> None:
    path, data = STORES[store](tmp_path)
    KINDS[kind](DataFiles(data))
    source = "commitlog" if path == data else "store"
    code, summary = run_rebuild(**{source: path}, table=tmp_path / "t")
    assert (code in (1, 3, 4)) == ((store, kind) not in UNKNOWABLE), summary
