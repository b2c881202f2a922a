"""What a streaming query's checkpoint says, read before a JVM starts.

So a checkpoint of another log, or of another source, is one clear line and not the stack trace of a failed query, and
nothing has been written. The same is checked again when the query starts; a checkpoint that is no local directory is
checked only then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jobs._directories import check_checkpoint

if TYPE_CHECKING:
    from spark_connector.reading.tracking import Tracker

__all__ = ["check_resume"]


def check_resume(checkpoint: str, tracker: Tracker) -> None:
    """Checks that a query of these logs can go on from the checkpoint; an absent one is fine.

    Raises:
        ConfigError: the directory cannot be written or is no checkpoint.
        CheckpointError: it is of another source, or damaged.
        DataLossError: it does not fit the logs, and the options say to fail on that.
    """
    from spark_connector import planned_offset

    check_checkpoint(checkpoint)
    offset = planned_offset(checkpoint)
    if offset is not None:
        tracker.adopt(offset, tracker.bounds())
