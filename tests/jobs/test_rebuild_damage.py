"""Each kind of damage is noticed by a rebuild, of a store and of a classic CommitLog."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contracts.test_damage_table import DAMAGE, STORES, UNKNOWABLE
from tests.jobs.conftest import Rebuild

ALWAYS = ("generation_b", "classic")
"""Stores of one reader each; the others have their readers in common with them."""
CELLS = [
    pytest.param(store, kind, marks=[] if store in ALWAYS or kind in ("bit", "lost_end") else [pytest.mark.soak])
    for store in STORES
    for kind in DAMAGE
]


@pytest.mark.spark
@pytest.mark.parametrize(("store", "kind"), CELLS)
def test_damage_is_noticed_by_rebuild(
    tmp_path: Path, run_rebuild: Rebuild, spark: object, store: str, kind: str
) -> None:
    path, data = STORES[store](tmp_path)
    DAMAGE[kind](sorted(data.iterdir()))
    source = "commitlog" if path == data else "store"
    code, summary = run_rebuild(**{source: path}, table=tmp_path / "t")
    assert (code in (1, 3, 4)) == ((store, kind) not in UNKNOWABLE), summary
