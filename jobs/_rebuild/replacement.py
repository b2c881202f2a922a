"""All rows of a table replaced, in one Delta transaction, by files that tasks wrote.

Delta has no public call for this, so its transaction is used through the JVM, with actions as its protocol writes them.
Delta itself checks for others' commits, writes the log and its checkpoints.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from jobs._rebuild.table import PROPERTIES

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["Replacement", "rows_in"]

_DELTA: Final = "org.apache.spark.sql.delta"
_OPTIONAL: Final = 8
"""How many optional facts ``DeltaOperations.Write`` takes."""
_KILLED_S: Final = 10.0
"""A killed task's Python worker gets 2 s to end by itself; a session may also have tasks of others."""
_LOOK_S: Final = 0.05


class Replacement:
    """One transaction, begun when it is made: what others change in the table from then on makes ``commit`` fail.

    Attributes:
        stem: how the paths of all its files begin.
    """

    def __init__(self, spark: SparkSession, transaction: Any, directory: str) -> None:
        self._spark = spark
        self._transaction = transaction
        self._offered = False
        self.stem = f"{directory}/part-{uuid.uuid4()}"

    @classmethod
    def begin(cls, spark: SparkSession, table: str) -> Replacement | None:
        """Begins one; None where only Spark itself may write.

        That is where the table is not in a file system that is mounted, or has properties that are not ours and may
        ask more of a writer.
        """
        jvm: Any = spark._jvm
        log = getattr(jvm, f"{_DELTA}.DeltaLog").forTable(spark._jsparkSession, table)
        transaction = log.startTransaction()
        place = log.dataPath().toUri()
        properties = transaction.metadata().configuration().keySet().mkString("\n").split("\n")
        if place.getScheme() != "file" or set(properties) != set(PROPERTIES):
            return None
        return cls(spark, transaction, place.getPath())

    def commit(self, files: Sequence[str]) -> None:
        """Puts ``files`` in the place of all that the table had.

        Args:
            files: ``add`` actions of Delta's protocol.
        """
        jvm: Any = self._spark._jvm
        from_json = getattr(jvm, f"{_DELTA}.actions.Action").fromJson
        self._transaction.readWholeTable()  # so a commit of others in between is a conflict
        actions = [file.remove() for file in self._before()]
        actions += [from_json(file) for file in files]
        nothing = jvm.scala.Option.empty()
        mode = jvm.org.apache.spark.sql.SaveMode.Overwrite
        operation = getattr(jvm, f"{_DELTA}.DeltaOperations$Write")(mode, *[nothing] * _OPTIONAL)
        self._offered = True  # from here on they may be in the table, even where Delta reports a failure
        self._transaction.commit(jvm.PythonUtils.toSeq(actions), operation)

    def _before(self) -> list[Any]:
        """What the table has. To find that out takes Delta a second, so a table that its checksum calls empty is."""
        snapshot = self._transaction.snapshot()
        checksum = snapshot.checksumOpt()
        if checksum.isDefined() and checksum.get().numFiles() == 0:
            return []
        return list(snapshot.allFiles().collectAsList())

    def discard(self) -> None:
        """Deletes all files unless ``commit`` was called; what cannot be deleted is left to ``VACUUM``.

        Where one task failed Spark kills the others, but does not wait for them: they may still make a file.
        """
        from py4j.protocol import Py4JError  # type: ignore[import-untyped]

        if self._offered:
            return
        with contextlib.suppress(Py4JError, OSError):  # where Spark is gone, so are its tasks
            self._wait_for_tasks()
        stem = Path(self.stem)
        for path in stem.parent.glob(f"{stem.name}-*"):
            with contextlib.suppress(OSError):
                path.unlink()

    def _wait_for_tasks(self) -> None:
        sc: Any = self._spark.sparkContext._jsc.sc()
        deadline = time.monotonic() + _KILLED_S
        while any(executor.numRunningTasks() for executor in sc.statusTracker().getExecutorInfos()):
            if time.monotonic() > deadline:
                return
            time.sleep(_LOOK_S)


def rows_in(files: Sequence[str]) -> int:
    """Returns the number of rows in the files of ``add`` actions."""
    return sum(json.loads(json.loads(file)["add"]["stats"])["numRecords"] for file in files)
