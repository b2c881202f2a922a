"""Options of the data source that the job passes on as they are, by their names: ``--min-partitions`` for one.

The source checks their values; the job does so before a JVM starts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import click

__all__ = ["PASSED_ON", "passed_on", "source_options"]

PASSED_ON: Final = {
    "groupsPattern": ("REGEX", "Read every log whose complete name matches, also new ones, instead of --groups."),
    "discoveryInterval": ("TIME", "Interval at which --groups-pattern looks for new logs.  [default: 10s]"),
    "startingTimestamp": ("TIME", "Start a new checkpoint at the first entry appended then; not --starting-offsets."),
    "startingOffsetsByTimestampStrategy": ("WORD", "Without an entry then: error or latest.  [default: error]"),
    "endingOffsets": ("INDEXES", "End before these indexes: JSON per group, or @FILE."),
    "endingTimestamp": ("TIME", "End before the first entry appended at this time or later."),
    "minOffsetsPerTrigger": ("COUNT", "Delay a micro-batch until this many indexes are available."),
    "maxTriggerDelay": ("TIME", "Limit of the delay by --min-offsets-per-trigger.  [default: 15m]"),
    "minPartitions": ("COUNT", "Number of Spark partitions to plan at least, if there are as many entries."),
    "maxRecordsPerPartition": ("COUNT", "Limit of the entries in a Spark partition."),
    "pinFor": ("TIME", "Time for which planned entries are kept from retention.  [default: 10m]"),
    "onPinFailure": ("WORD", "If entries cannot be pinned: fail or wait.  [default: fail]"),
    "readFrom": ("REPLICA", "Replica to read: any, leader, follower or node:ID.  [default: any]"),
    "topics": ("NAMES", "With --decode message, read only these topics, separated by commas."),
    "tags": ("NAMES", "With --decode message, read only messages with one of these tags."),
    "onDecodeError": ("WORD", "If a body cannot be decoded: column (a row with error) or fail.  [default: column]"),
    "isolation": ("WORD", "read_committed or read_uncommitted.  [default: read_committed]"),
    "fetchMaxBytes": ("BYTES", "Bytes of one read.  [default: 4194304]"),
    "fetchTimeoutMs": ("MS", "Timeout of one request in milliseconds.  [default: 10000]"),
    "pollMs": ("MS", "Time in milliseconds that an idle query waits at a server.  [default: 500]"),
}
"""Per name of the source the metavar and the help."""


def source_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options."""
    for name, (metavar, text) in reversed(PASSED_ON.items()):
        option = re.sub(r"([A-Z])", r"-\1", name).lower()
        command = click.option(f"--{option}", name, metavar=metavar, help=text)(command)
    return command


def passed_on(given: dict[str, Any]) -> dict[str, str]:
    """Take the options out of those of the command, and return the given ones by the source's names."""
    taken: Mapping[str, str | None] = {name: given.pop(name) for name in PASSED_ON}
    return {name: value for name, value in taken.items() if value is not None}
