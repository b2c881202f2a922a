"""Appends, micro-batches, crashes and restarts in any order: each entry is read once, in order, from the start on."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.streaming.datasource import ReadMaxRows

from tests.spark_connector.engine import ALL, Engine, make_reader, next_of
from tests.spark_connector.store_writer import StoreWriter

steps = st.lists(
    st.one_of(
        st.integers(1, 40),
        st.sampled_from(["micro-batch", "crash", "restart", "available now", "crash in available now"]),
    ),
    max_size=25,
)
limits = st.sampled_from([{}, {"maxOffsetsPerTrigger": 7}, {"maxBytesPerTrigger": 300}, {"minOffsetsPerTrigger": 5}])


class Run:
    """One query over one store."""

    def __init__(self, store: StoreWriter, options: dict[str, Any]) -> None:
        self.store, self.options = store, options
        self.engine = Engine(ReadMaxRows(1 << 60) if options else ALL)
        self.restart()

    def restart(self, *, available_now: bool = False) -> None:
        self.reader = make_reader(self.store, **self.options)
        if available_now:
            self.reader.prepareForTriggerAvailableNow()
        self.engine.limit = self.reader.getDefaultReadLimit()

    def drain(self, *, crash: bool = False) -> None:
        """Run until Spark would see that nothing is left."""
        self.restart(available_now=True)
        while True:
            before = (len(self.engine.offsets), self.engine.commits)
            self.engine.start(self.reader, crash_before_commit=crash)
            if crash or before == (len(self.engine.offsets), self.engine.commits):
                return

    def do(self, step: Any) -> None:
        if isinstance(step, int):
            self.store.append_numbers(step)
        elif step == "micro-batch":
            self.engine.start(self.reader)
        elif step == "crash":
            self.engine.start(self.reader, crash_before_commit=True)
            self.restart()
        elif step == "restart":
            self.restart()
        else:
            self.drain(crash=step.startswith("crash"))
            self.restart()


@pytest.mark.slow
@pytest.mark.parametrize("starting", ["earliest", "latest", '{"default": 5}'])
@settings(max_examples=25, deadline=None)
@given(steps, limits)
def test_every_entry_once_and_in_order(starting: str, todo: list[Any], limit: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as directory, StoreWriter(Path(directory)) as store:
        store.append_numbers(10)
        run = Run(store, {"startingOffsets": starting, **limit})
        for step in todo:
            run.do(step)
        store.append_numbers(3)
        run.drain()
        begin = next_of(json.loads(run.engine.offsets[0]))
        assert run.engine.read == list(range(begin, store.end))
        assert begin == {"earliest": 0, '{"default": 5}': 5}.get(starting, begin)
        assert begin >= 5 or starting == "earliest"
