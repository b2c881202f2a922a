"""Delayed messages of a broker with its own messageDelayLevel: their units' tags code is the delivery time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dledger_core import ConfigError
from dledger_core.rocketmq import UNIT, encode_messages
from dledger_core.rocketmq.message.layout import DELAY_LEVELS_MS
from jobs import rebuild_consume_queue
from jobs._rebuild.plan import RebuildOptions, delay_levels_of, plan_for
from jobs._rebuild.units import EntryRules, ranges_and_units
from tests.jobs.broker_store import write_broker_store, write_commitlog
from tests.support.run_job import run_in_process

TOPIC = "SCHEDULE_TOPIC_XXXX"
STORED_MS = 1_700_000_000_000
LEVELS = "1s 2s 3s 7s"
DEFAULT = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"


def delayed(levels: list[int]) -> list[bytes]:
    """A message for each level, all in queue 0."""
    properties = pa.array([[("DELAY", str(level))] for level in levels], pa.map_(pa.string(), pa.string()))
    count = len(levels)
    bodies: list[bytes] = encode_messages(
        TOPIC, 0, [b"x"] * count, "TagA", properties=properties, store_timestamp=STORED_MS,
        queue_offset=list(range(count)),
    ).to_pylist()  # fmt: skip
    return bodies


def tags_codes(bodies: list[bytes], rules: EntryRules) -> list[int]:
    count = len(bodies)
    entries = {"group": ["g"] * count, "index": list(range(count)), "position": [i * 1000 for i in range(count)]}
    batch = pa.RecordBatch.from_pydict({**entries, "body": pa.array(bodies, pa.binary())})
    _, units = ranges_and_units(batch, rules)
    codes: list[int] = units.column("tags_code").to_pylist()
    return codes


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    return run_in_process(rebuild_consume_queue.command, capsys, *arguments)[:2]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (DEFAULT, DELAY_LEVELS_MS),
        (LEVELS, (1000, 2000, 3000, 7000)),
        (" 0s  2d ", (0, 2 * 86_400_000)),
        ("90m", (90 * 60_000,)),
    ],
)
def test_rocketmqs_notation(text: str, expected: tuple[int, ...]) -> None:
    assert delay_levels_of(text) == expected


def test_tags_codes_are_delivery_times_of_given_levels() -> None:
    """A level above the highest counts as the highest."""
    bodies = delayed([1, 2, 4, 9])
    given = EntryRules(delay_levels_ms=delay_levels_of(LEVELS))
    assert [code - STORED_MS for code in tags_codes(bodies, given)] == [1000, 2000, 7000, 7000]
    assert [code - STORED_MS for code in tags_codes(bodies, EntryRules())] == [1000, 5000, 30_000, 300_000]


def test_plan_has_given_levels_for_stores_and_commitlogs(tmp_path: Path) -> None:
    write_broker_store(tmp_path / "dledger-n0", delayed([1]))
    write_commitlog(tmp_path / "commitlog", delayed([1]))
    table = str(tmp_path / "t")
    for source in ({"store": str(tmp_path / "dledger-n0")}, {"commitlog": str(tmp_path / "commitlog")}):
        plain = plan_for(RebuildOptions.parse({"table": table, **source}))
        given = plan_for(RebuildOptions.parse({"table": table, "delay_levels": LEVELS, **source}))
        assert plain.rules.delay_levels_ms == DELAY_LEVELS_MS
        assert given.rules.delay_levels_ms == (1000, 2000, 3000, 7000)


@pytest.mark.parametrize(
    "text", ["", " ", "1s 5", "1s,5s", "s", "1S", "-1s", "1.5s", "1s 5w", "9999999999d", "\u0661s"]
)
def test_wrong_levels_are_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match="--delay-levels"):
        delay_levels_of(text)


@pytest.mark.spark
def test_comparison_says_whose_levels_it_needs(spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A DLedger store is rebuilt with RocketMQ's levels, a CommitLog with the broker's own."""
    bodies = delayed([1, 2, 3, 4])
    for begin, places in (
        ("--store", write_broker_store(tmp_path / "a" / "log", bodies)),
        ("--commitlog", write_commitlog(tmp_path / "b" / "log", bodies)),
    ):
        folder = tmp_path / ("a" if begin == "--store" else "b")
        units = np.zeros(10, UNIT)
        for slot, (place, body, seconds) in enumerate(zip(places, bodies, (1, 2, 3, 7), strict=True)):
            units[slot] = (place, len(body), STORED_MS + seconds * 1000)
        file = folder / "consumequeue" / TOPIC / "0" / f"{0:020d}"
        file.parent.mkdir(parents=True)
        file.write_bytes(units.tobytes())
        own = ("--delay-levels", LEVELS) if begin == "--commitlog" else ()
        code, summary = run(
            capsys, begin, str(folder / "log"), "--table", str(tmp_path / "t"), "--compare", str(folder), *own
        )
        compared = summary["compare"]
        if own:
            assert (code, compared["differences"]) == (0, {})
        else:
            assert (code, compared["differences"]) == (1, {"CQ_WRONG_TAG": 3})
            (finding,) = compared["findings"]
            assert "delivery time" in finding["cause"]
            assert "messageDelayLevel" in finding["next"]
            assert "--delay-levels" in finding["next"]
