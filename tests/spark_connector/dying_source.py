"""The data source ``dying``: the connector's own, with places where the driver dies, chosen by the test.

Spark calls the source and the sink and waits for their answers, so a process that kills the driver within such a call
kills it at exactly that step of a micro-batch. Several queries of one driver meet first: each waits at its own step
until all have arrived. DLEDGER_CRASH names a folder with ``plan.json``, which the driver script writes.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import InputPartition, WriterCommitMessage
from pyspark.sql.streaming.datasource import ReadLimit
from pyspark.sql.types import StructType
from pyspark.taskcontext import TaskContext

from spark_connector.options import DLedgerOptions
from spark_connector.reading.readers import DLedgerStreamReader
from spark_connector.source import DLedgerDataSource
from spark_connector.writing.transactions import AttemptMessage
from spark_connector.writing.writers import DLedgerStreamWriter

FOLDER = "DLEDGER_CRASH"
_WAIT_S = 500.0


def plan() -> dict[str, Any]:
    return dict(json.loads((Path(os.environ[FOLDER]) / "plan.json").read_text()))


def newest(checkpoint: str, log: str) -> int:
    """The newest micro-batch in a log of the checkpoint, -1 if there is none."""
    files = Path(checkpoint, log).glob("*")
    return max((int(file.name) for file in files if file.name.isdigit() and file.is_file()), default=-1)


def reach(pipeline: str, point: str, batch_id: int | None = None) -> None:
    """Stall at the micro-batch and point that the test has chosen."""
    mine = plan()["pipelines"].get(pipeline)
    if mine is None or mine["point"] != point:
        return
    if batch_id is None:
        batch_id = newest(mine["checkpoint"], "offsets") + (point == "before the offset log")
    if batch_id != mine["batch"]:
        return
    if point == "offset log written" and newest(mine["checkpoint"], "commits") >= batch_id:
        return
    stand(pipeline)


def stand(pipeline: str) -> None:
    """Wait until all pipelines have stalled; then kill the driver, or continue on request of the test."""
    folder, whole = Path(os.environ[FOLDER]), plan()
    (folder / f"{pipeline}.arrived").touch()
    until = time.monotonic() + _WAIT_S
    while not all((folder / f"{name}.arrived").exists() for name in whole["pipelines"]):
        assert time.monotonic() < until, "another pipeline did not arrive"
        time.sleep(0.01)
    if whole["act"] == "kill":
        for pid in whole["pids"]:  # the JVM first: nothing may go on
            os.kill(pid, signal.SIGKILL)
        os._exit(1)
    while not (folder / "go").exists():
        assert time.monotonic() < until, "the test did not say go"
        time.sleep(0.01)


def _batch_of_task() -> int:
    context = TaskContext.get()
    assert context is not None
    return int(context.getLocalProperty("streaming.sql.batchId") or -1)


class DyingReader(DLedgerStreamReader):
    """The stream reader, and its steps."""

    def __init__(self, options: DLedgerOptions, pipeline: str) -> None:
        super().__init__(options)
        self._pipeline = pipeline

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"pipeline": self._pipeline}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        end = super().latestOffset(start, limit)
        if end != start or newest(plan()["pipelines"][self._pipeline]["checkpoint"], "offsets") < 0:
            reach(self._pipeline, "before the offset log")
        return end

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        reach(self._pipeline, "offset log written")
        mine = plan()["pipelines"][self._pipeline]
        if mine["point"] == "commit log refused" and newest(mine["checkpoint"], "offsets") == mine["batch"]:
            # The sink is Delta's, whose commit no Python sees: a folder in the way of the commit log's entry.
            Path(mine["checkpoint"], "commits", str(mine["batch"])).mkdir(parents=True)
        return super().partitions(start, end)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        yield from _passing(self._pipeline, super().read(partition))
        reach(self._pipeline, "tasks done", _batch_of_task())


class DyingWriter(DLedgerStreamWriter):
    """The stream writer, and its steps."""

    def __init__(self, options: DLedgerOptions, schema: StructType, label: str, checkpoint: str, pipeline: str) -> None:
        super().__init__(options, schema, False, label, checkpoint)
        self._pipeline = pipeline
        if not pipeline.startswith("log"):  # a query over our source meets this step in ``partitions``
            reach(pipeline, "offset log written")

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return super().write(_passing(self._pipeline, iterator))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        reach(self._pipeline, "tasks done", batchId)
        first = min((group for message in messages if message is not None for group in message.parts), default="")
        if plan()["pipelines"][self._pipeline]["point"] == "sink committed in part":
            super().commit([_only(first, message) for message in messages], batchId)
            reach(self._pipeline, "sink committed in part", batchId)
        super().commit(messages, batchId)
        reach(self._pipeline, "sink committed", batchId)


def _passing(pipeline: str, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield batch
        reach(pipeline, "tasks running", _batch_of_task())


def _only(group: str, message: Any) -> AttemptMessage:
    parts = {name: ranges for name, ranges in message.parts.items() if name == group}
    return AttemptMessage(message.transaction, parts, message.committed)


class DyingSource(DLedgerDataSource):
    """``format("dying")``; the option ``pipeline`` says whose plan counts."""

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        self.pipeline = self.options.pop("pipeline")

    @classmethod
    def name(cls) -> str:
        return "dying"

    def streamReader(self, schema: StructType) -> DyingReader:
        return DyingReader(DLedgerOptions.for_reading(self.options), self.pipeline)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DyingWriter:
        options = DLedgerOptions.for_writing(self.options)
        return DyingWriter(options, schema, self.label(), self.options["checkpointlocation"], self.pipeline)
