"""A driver that proves or reads an archive, and places where the test, or the driver itself, ends processes.

Usage::

    python -m tests.spark_connector.archive_driver RUN.json

``RUN.json`` has the fields of Run.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from dledger_core import RowsDigest
from jobs import archive
from jobs._cli import run_job
from jobs._session import spark_session
from spark_connector.options import DLedgerOptions
from spark_connector.reading.readers import DLedgerStreamReader
from spark_connector.source import DLedgerDataSource
from tests.spark_connector.spark_processes import while_stages_run
from tests.support.spark_jvm import jvm_pid

_WAIT_S = 500.0


@dataclass(frozen=True)
class Run:
    """The task of a driver.

    Attributes:
        peers: of the log.
        directory: of archive, copy, checkpoint.
        folder: of this run; its files show the progress.
        step: the step in which it is ended; ``write`` and ``prove`` are steps of the job, ``trim`` and ``read`` of a
            stream.
        until: end of the job.
    """

    peers: str
    directory: str
    folder: str
    step: str
    until: int = 0

    @property
    def arguments(self) -> list[str]:
        """The command line of the job."""
        table = str(Path(self.directory, "archive"))
        return ["--peers", self.peers, "--table", table, "--until", str(self.until), "--write"]

    def save(self) -> Path:
        path = Path(self.folder, "run.json")
        path.write_text(json.dumps(asdict(self)))
        return path


# --- the job -------------------------------------------------------------------------------------------------------


@contextmanager
def at_step(step: str, act: Callable[[int], None]) -> Iterator[None]:
    """Call ``act`` while the job writes rows (``write``), or while it computes their digests (``prove``)."""
    make_writer, make_digests, written = archive.table_writer, archive.table_digests, threading.Event()

    def writer(spark: Any, *given: Any) -> archive.Write:
        write = make_writer(spark, *given)

        def watched(start: int, end: int) -> None:
            with while_stages_run(spark, act) if step == "write" and start < end else nullcontext():
                write(start, end)
            if start < end:
                written.set()

        return watched

    def digests(spark: Any, *given: Any) -> archive.Digests:
        compute = make_digests(spark, *given)

        def watched(ranges: Sequence[tuple[int, int]]) -> Sequence[RowsDigest]:
            with while_stages_run(spark, act) if step == "prove" and written.is_set() else nullcontext():
                return compute(ranges)

        return watched

    archive.table_writer, archive.table_digests = writer, digests
    try:
        yield
    finally:
        archive.table_writer, archive.table_digests = make_writer, make_digests


# --- the stream ----------------------------------------------------------------------------------------------------


class HoldingReader(DLedgerStreamReader):
    """The stream reader, whose tasks wait for the test: before their first row, or with ``read`` after some rows."""

    def __init__(self, options: DLedgerOptions, folder: str, step: str) -> None:
        super().__init__(options)
        self._folder, self._step = folder, step

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"folder": self._folder, "step": self._step}

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        rows = super().read(partition)
        if self._step == "read" and (first := next(rows, None)) is not None:
            yield first
        folder, until = Path(self._folder), time.monotonic() + _WAIT_S
        (folder / f"task {uuid4()}").touch()
        while not (folder / "go").exists():
            assert time.monotonic() < until, "the test did not say go"
            time.sleep(0.01)
        yield from rows


class HoldingSource(DLedgerDataSource):
    """``format("holding")``, with the options ``folder`` and ``step``."""

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        self._folder, self._step = self.options.pop("folder"), self.options.pop("step")

    @classmethod
    def name(cls) -> str:
        return "holding"

    def streamReader(self, schema: StructType) -> HoldingReader:
        return HoldingReader(DLedgerOptions.for_reading(self.options), self._folder, self._step)


def start_stream(spark: Any, run: Run) -> Any:
    """Start the query that copies archive and log to another table, in one micro-batch for each of its runs."""
    spark.dataSource.register(HoldingSource)
    given = {"peers": run.peers, "archive": "true", "startingOffsets": "earliest", "fetchMaxBytes": "50000"}
    rows = spark.readStream.format("holding").options(**given, folder=run.folder, step=run.step, minPartitions="2")
    writer = rows.load().select("index", "body").writeStream.format("delta").option("path", f"{run.directory}/copy")
    return writer.option("checkpointLocation", f"{run.directory}/checkpoint").trigger(availableNow=True).start()


# --- the process ---------------------------------------------------------------------------------------------------


def main() -> None:
    run = Run(**json.loads(Path(sys.argv[1]).read_text()))
    with spark_session("archive-driver", settings={"spark.databricks.delta.snapshotPartitions": "1"}) as spark:
        pids = [jvm_pid(spark), os.getpid()]  # the JVM first: nothing may go on

        def die(_: int) -> None:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)

        if run.step in ("write", "prove"):
            with at_step(run.step, die):
                run_job(archive.command, run.arguments)
        else:
            Path(run.folder, "pids").write_text(json.dumps(pids))
            start_stream(spark, run).awaitTermination()


if __name__ == "__main__":
    main()
