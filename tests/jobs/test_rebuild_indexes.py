"""Index files that a rebuild writes and compares, without Spark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jobs._rebuild.indexes import write_indexes
from jobs._rebuild.plan import RebuildOptions, plan_for
from jobs._rebuild.report import problems_of
from tests.jobs.broker_store import STORED_MS, messages, write_commitlog
from tests.rocketmq import golden

CONF = "maxHashSlotNum=1000\nmaxIndexNum=4000\n"


def written(tmp_path: Path, **given: Any) -> dict[str, Any]:
    conf = tmp_path / "broker.conf"
    conf.write_text(CONF)
    named = {"table": tmp_path / "t", "indexes": tmp_path / "out", "broker_conf": conf} | given
    return write_indexes(plan_for(RebuildOptions.parse({name: str(value) for name, value in named.items()})))


def test_index_files_of_mixed_log_equal_those_of_broker(tmp_path: Path) -> None:
    broker = golden.extract(golden.MIXED, "n0", tmp_path)
    found = written(tmp_path, store=broker / "dledger-n0", commitlog=broker / "commitlog", compared=broker)
    [own], [new] = ((root / "index").iterdir() for root in (broker, tmp_path / "out"))
    assert new.read_bytes() == own.read_bytes()
    assert (found["indexes"]["keys"], found["compare_indexes"]["differences"]) == (1322, {})


def test_index_files_of_commitlog_end_at_its_last_message(tmp_path: Path) -> None:
    properties = [{"KEYS": f"a{at} b{at}", "UNIQ_KEY": f"u{at}"} for at in range(40)]
    bodies = messages(range(40), properties=properties, store_timestamp=STORED_MS)
    write_commitlog(tmp_path / "broker" / "commitlog", bodies)
    found = written(tmp_path, commitlog=tmp_path / "broker" / "commitlog", compared=tmp_path / "broker")
    assert found["indexes"]["keys"] == 120
    assert found["compare_indexes"]["differences"] == {"INDEX_MISSING": 120}
    empty = {"skipped": {"impossible_queue_offsets": 0, "not_messages": 0}, "dense": True, "duplicate_slots": 0}
    empty |= {"damaged_files": [], "damaged_messages": 0}
    plan = plan_for(
        RebuildOptions.parse({"table": str(tmp_path / "t"), "commitlog": str(tmp_path / "broker/commitlog")})
    )
    assert (len(problems_of(plan, empty)), len(problems_of(plan, empty | found))) == (0, 1)
