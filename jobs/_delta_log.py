"""The log of a Delta table by Delta's published protocol: its newest checkpoint, the commits after it, the columns.

The columns of a local table need no JVM, so a job can check them before it starts one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pyarrow import parquet

__all__ = ["StoredColumns", "newest_files", "stored_columns"]

_CHECKPOINT: Final = re.compile(r"(\d{20})\.checkpoint.*\.(parquet|json)")
_COMMIT: Final = re.compile(r"(\d{20})\.json")


def newest_files(names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the files of the newest checkpoint, and of the commits after it, oldest first.

    Args:
        names: the files in the directory ``_delta_log``.
    """
    ordered = sorted(names)
    newest = max((found[1] for name in ordered if (found := _CHECKPOINT.fullmatch(name))), default="")
    parts = [name for name in ordered if newest and name.startswith(newest) and _CHECKPOINT.fullmatch(name)]
    return parts, [name for name in ordered if (found := _COMMIT.fullmatch(name)) and found[1] > newest]


@dataclass(frozen=True, slots=True)
class StoredColumns:
    """The columns of a table.

    Attributes:
        schema: all of them, in Spark's JSON.
        partitions: those that the table is partitioned by.
    """

    schema: dict[str, Any]
    partitions: tuple[str, ...] = ()


def stored_columns(table: Path) -> StoredColumns | None:
    """Return the columns of a table in a local directory; None if there is no table."""
    log = table / "_delta_log"
    parts, later = newest_files(path.name for path in log.iterdir()) if log.is_dir() else ([], [])
    for name in (*reversed(later), *parts):
        for metadata in _metadata_in(log / name):
            return StoredColumns(json.loads(metadata["schemaString"]), tuple(metadata.get("partitionColumns") or ()))
    return None


def _metadata_in(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the table's metadata in a file of the log, if a commit has changed it there."""
    if path.suffix == ".parquet":
        wanted = ["metaData.schemaString", "metaData.partitionColumns"]
        rows = parquet.ParquetFile(path).read(wanted).column("metaData").to_pylist()
        yield from (row for row in rows if row is not None and row["schemaString"] is not None)
        return
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if '"metaData"' in line and "metaData" in (action := json.loads(line)):
                yield action["metaData"]
