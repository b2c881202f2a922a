"""What a streaming query's checkpoint says, read before a JVM starts.

So a checkpoint of another log, or of another source, is one clear line and not the stack trace of a failed query, and
nothing has been written. The same is checked again when the query starts; a checkpoint that is no local directory is
checked only then.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from jobs._directories import check_checkpoint, local_path

if TYPE_CHECKING:
    from spark_connector.reading.tracking import Tracker

__all__ = ["check_resume"]

_VERSION = "v1"


def check_resume(checkpoint: str, tracker: Tracker) -> None:
    """Checks that a query of these logs can go on from the checkpoint; an absent one is fine.

    Raises:
        ConfigError: the directory cannot be written or is no checkpoint.
        CheckpointError: it is of another source.
        DataLossError: it does not fit the logs, and the options say to fail on that.
    """
    from spark_connector.offsets import StreamOffset

    check_checkpoint(checkpoint)
    offset = _newest_offset(checkpoint)
    if offset is not None:
        tracker.adopt(StreamOffset.from_json(offset), tracker.bounds())


def _newest_offset(checkpoint: str) -> Any:
    """Returns where the newest planned micro-batch ends; None if there is none, or it cannot be understood here."""
    path = local_path(checkpoint)
    if path is None or not (path / "offsets").is_dir():
        return None
    numbers = [int(file.name) for file in (path / "offsets").iterdir() if file.name.isdigit()]
    if not numbers:
        return None
    lines = (path / "offsets" / str(max(numbers))).read_text(encoding="utf-8").splitlines()
    if len(lines) != 3 or lines[0] != _VERSION:
        return None  # another version of Spark's format, or several sources: Spark itself will say
    try:
        return json.loads(lines[2])
    except ValueError:
        return None
