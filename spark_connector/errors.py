"""Errors that a Spark user sees, each beginning with a stable code.

Spark keeps only the text of a Python error, so the code leads the message, as Spark's own conditions do::

    DLEDGER_OPTION                       an option is unknown or has a wrong value
    DLEDGER_SCHEMA                       columns that cannot be read or written
    DLEDGER_SPARK_VERSION                this Spark version is not supported
    DLEDGER_CHECKPOINT                   an offset that this version cannot read
    DLEDGER_DECODE                       a body is not a message, and onDecodeError=fail
    DLEDGER_PIN                          a node refuses to keep planned entries, and onPinFailure=fail
    DLEDGER_TABLE                        a Delta table and the Spark checkpoint of its query do not belong together
    DLEDGER_ARCHIVE_TABLE                a Delta table cannot be read, or is not an archive
    DLEDGER_ARCHIVE_DAMAGED              a range of the archive is not the one that was proven equal to the log
    DLEDGER_DATA_LOSS.RETENTION          entries were deleted before the query read them
    DLEDGER_DATA_LOSS.LOG_RECREATED      the log identity differs from the one in the checkpoint
    DLEDGER_DATA_LOSS.TERM_MISMATCH      the last entry that the query consumed was replaced
    DLEDGER_DATA_LOSS.OFFSET_BEYOND_END  the log ends below the next index of the query
    DLEDGER_DATA_LOSS.GROUP_GONE         the checkpoint contains a group that the query does not read
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from dledger_core import ArchiveDamagedError, ArchiveTableError, ConfigError, DLedgerError
from dledger_core.client import EntryCheck, Loss, LossKind
from dledger_core.environment import SPARK_VERSION, SPARK_VERSIONS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = [
    "ArchiveDamagedError",
    "ArchiveTableError",
    "CheckpointError",
    "DataLossError",
    "DecodeError",
    "GroupGoneError",
    "LogRecreatedError",
    "LossPolicy",
    "OffsetBeyondEndError",
    "OptionError",
    "PinError",
    "RetentionError",
    "SchemaError",
    "SparkVersionError",
    "TableMismatchError",
    "TermMismatchError",
    "brief",
    "brief_rows",
    "check_spark",
    "loss_error",
]

_log = logging.getLogger("spark_connector")
_P = ParamSpec("_P")
_T = TypeVar("_T")


def brief(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """Let a method raise each DLedgerError without the frames and causes below it, of which Spark prints all."""

    @functools.wraps(method)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return method(*args, **kwargs)
        except DLedgerError as error:
            raise _listed(error).with_traceback(None) from None

    return called


def brief_rows(rows: Iterable[_T]) -> Iterator[_T]:
    """Yield rows; an error of theirs is raised as by ``brief``."""
    try:
        yield from rows
    except DLedgerError as error:
        raise _listed(error).with_traceback(None) from None


def _listed(error: DLedgerError) -> DLedgerError:
    """Return the error as one of the classes in ``dledger_core.errors`` or here.

    Spark prints the name of the class, by which the guide's function finds our sentence
    (test_function_of_guide_finds_sentence_about_wrong_peers).
    """
    listed = next(each for each in type(error).__mro__ if each.__module__ in (DLedgerError.__module__, __name__))
    return error if listed is type(error) else listed(*error.args)


class OptionError(ConfigError):
    """An option is unknown or has a wrong value; ``what`` names it."""

    name = "DLEDGER_OPTION"


class SchemaError(ConfigError):
    """The columns cannot be read or written."""

    name = "DLEDGER_SCHEMA"


class SparkVersionError(ConfigError):
    """The PySpark in use is not the one this connector supports."""

    name = "DLEDGER_SPARK_VERSION"


def check_spark(spark: SparkSession) -> None:
    """Check the versions of the installed PySpark and of the Spark that runs the session.

    Raises:
        SparkVersionError: this connector does not support one of them.
    """
    import pyspark

    if not _is_supported(pyspark.__version__):
        what = f"PySpark {pyspark.__version__} is installed, {_needed(pyspark.__version__)}"
        raise SparkVersionError(what, "", f"pip install 'pyspark~={SPARK_VERSION}.0'")
    if not _is_supported(spark.version):  # a Spark Connect server has a version of its own
        what = f"the session runs on Spark {spark.version}, {_needed(spark.version)}"
        raise SparkVersionError(what, "", f"start the server with Spark {SPARK_VERSION}")


def _is_supported(version: str) -> bool:
    return _minor(version) in SPARK_VERSIONS


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _needed(version: str) -> str:
    needed = f"this connector needs {' or '.join(SPARK_VERSIONS)}"
    # Spark 4.0 passes the rows of a stream one by one, as Python objects: it has no DataSourceStreamArrowWriter, and no
    # classes of filters. A sink for it would be a second route.
    return f"{needed}: Spark 4.0 cannot pass a stream's rows to a sink as Arrow" if _minor(version) == "4.0" else needed


class CheckpointError(DLedgerError):
    """The checkpoint's offset cannot be used."""

    code = 700
    name = "DLEDGER_CHECKPOINT"


class DecodeError(DLedgerError):
    """A body is not a message, or cannot be decompressed."""

    code = 702
    name = "DLEDGER_DECODE"


class PinError(DLedgerError):
    """Planned entries could not be pinned against retention."""

    code = 703
    name = "DLEDGER_PIN"

    @classmethod
    def of(cls, group: str, error: DLedgerError) -> PinError:
        """Make the error for a pin that failed with ``error``."""
        return cls(
            f"planned entries could not be pinned against retention: {error}",
            f"group {group!r}",
            "set onPinFailure=wait to wait until they can be, or pinFor=0 to read without pins",
        )


class TableMismatchError(DLedgerError):
    """A table lacks rows that its query has committed, or the query would write rows of it again."""

    code = 704
    name = "DLEDGER_TABLE"


class DataLossError(DLedgerError):
    """Entries that the query should have read are deleted or were replaced.

    Args:
        group: the log.
        start: first affected index.
        end: end of the affected indexes (exclusive).
        finding: one sentence without code and range.
        cause: the likely reason.
        resume: start index for a new checkpoint.
    """

    code = 701
    name = "DLEDGER_DATA_LOSS"

    def __init__(self, group: str, start: int, end: int, finding: str, cause: str, resume: int) -> None:
        super().__init__(finding, f"group {group!r}", "", {"start": start, "end": end})
        # Pickle calls the class with args, so they must be the parameters of __init__.
        self.args = (group, start, end, finding, cause, resume)

    @property
    def what(self) -> str:
        """The finding."""
        return str(self.args[3])

    @property
    def where(self) -> str:
        """The group and the range of indexes."""
        return f"group {self.args[0]!r} [{self.start}, {self.end})"

    @property
    def remedy(self) -> str:
        """Options that continue the query or start a new one."""
        return (
            "To continue and accept the loss, set failOnDataLoss=false; to start over, use a new checkpoint with "
            f'startingOffsets={{"{self.args[0]}": {self.args[5]}}}.'
        )

    @property
    def values(self) -> dict[str, Any]:
        """The range."""
        return {"start": self.start, "end": self.end}

    @property
    def start(self) -> int:
        """First affected index."""
        return int(self.args[1])

    @property
    def end(self) -> int:
        """End of the affected indexes (exclusive)."""
        return int(self.args[2])

    def __str__(self) -> str:
        group, _, _, finding, cause, _ = self.args
        return f"[{self.name}] group '{group}': {finding}.\nCause: {cause}.\n{self.remedy}"


class RetentionError(DataLossError):
    """Entries below the log's first index were deleted before they were read."""

    name = "DLEDGER_DATA_LOSS.RETENTION"

    @classmethod
    def of(
        cls, group: str, start: int, first_index: int, end: int | None = None, *, by_position: bool = False
    ) -> RetentionError:
        """Make the error for a reader at ``start`` of a log that starts at ``first_index`` (reading up to ``end``).

        ``by_position``: it is a CommitLog, whose broker deletes complete files.
        """
        stop = first_index if end is None else min(first_index, end)
        return cls(
            group,
            start,
            stop,
            f"{_range_of(start, stop, by_position)} are no longer stored; "
            f"the first available {'position' if by_position else 'index'} is {first_index}",
            f"{'the broker' if by_position else 'retention'} deleted them before this query read them",
            first_index,
        )


class LogRecreatedError(DataLossError):
    """The log's uuid differs from the one in the offset."""

    name = "DLEDGER_DATA_LOSS.LOG_RECREATED"

    @classmethod
    def of(cls, group: str, loss: Loss, known_end: int | None = None) -> LogRecreatedError:
        """Make the error for a position in a log that the servers no longer have.

        Its range are the entries of that log which were not read: those up to ``known_end``, the end that this reader
        has seen. Without it their number is unknown, and the range is empty.
        """
        position, view = loss.position, loss.view
        at, resume = position.next_index, max(loss.resume_index, view.first_index)
        stop = max(at, known_end or 0)
        rest = (
            f"its entries [{at}, {stop}) ({stop - at} entries)" if stop > at else f"its entries from {at} on, if any,"
        )
        return cls(
            group,
            at,
            stop,
            f"the checkpoint belongs to log {position.log_uuid} up to index {at}, but the servers store log "
            f"{view.log_uuid} with indexes [{view.first_index}, {view.end}); {rest} are lost, and the first unread "
            f"index of the present log is {resume}",
            "the log was deleted and re-created, or the peers or the checkpoint belong to another cluster",
            resume,
        )


class TermMismatchError(DataLossError):
    """The record before the offset is not the one that the query consumed."""

    name = "DLEDGER_DATA_LOSS.TERM_MISMATCH"

    @classmethod
    def of(
        cls, group: str, next_index: int, known: object, found: object, first_index: int, *, by_position: bool = False
    ) -> TermMismatchError:
        """Make the error for an offset whose last consumed record had the check ``known`` and has ``found`` now."""
        at = next_index - 1
        record = f"the message before position {next_index}" if by_position else f"entry {at}"
        return cls(
            group,
            at,
            next_index,
            f"{record} is not the one this query consumed (then {known}, now {found})",
            "the log's history was rewritten: a store was restored from a backup, or it is another log",
            first_index,
        )


class OffsetBeyondEndError(DataLossError):
    """The offset is after the end of the log."""

    name = "DLEDGER_DATA_LOSS.OFFSET_BEYOND_END"

    @classmethod
    def of(cls, group: str, next_index: int, end: int, *, by_position: bool = False) -> OffsetBeyondEndError:
        """Make the error for an offset at ``next_index`` in a log that ends at ``end``."""
        return cls(
            group,
            end,
            next_index,
            f"the query is at {'position' if by_position else 'index'} {next_index} but the log ends at {end}: "
            f"{_range_of(end, next_index, by_position)} are missing",
            "the log lost its tail or was re-created, or the offset belongs to another log",
            end,
        )


class StoreEndLostError(DataLossError):
    """A store has evidence of entries after the last one that its files contain."""

    name = "DLEDGER_DATA_LOSS.STORE_END_LOST"

    @classmethod
    def of(cls, group: str, start: int, end: int) -> StoreEndLostError:
        """Make the error for a store whose entries [start, end) are missing."""
        return cls(
            group,
            start,
            end,
            f"the store ends at {start}, and its checkpoint or index names entries [{start}, {end})",
            "a data file is missing or shorter; read a replica, or the rest with an explicit endingOffsets",
            start,
        )


class GroupGoneError(DataLossError):
    """A group of the checkpoint is not among the groups of the query."""

    name = "DLEDGER_DATA_LOSS.GROUP_GONE"

    @classmethod
    def of(cls, group: str, next_index: int, reads: list[str]) -> GroupGoneError:
        """Make the error for a checkpoint with ``group`` of a query that reads the groups ``reads``."""
        return cls(
            group,
            next_index,
            next_index,
            f"the checkpoint contains this group up to index {next_index}, but the query reads {', '.join(reads)}",
            "'groups' or 'groupsPattern' changed, no node hosts the group, or this is the checkpoint of another query",
            next_index,
        )


def _range_of(start: int, end: int, by_position: bool) -> str:
    """Return a lost range in words: of a CommitLog it has positions and bytes."""
    if by_position:
        return f"positions [{start}, {end}) ({end - start} bytes)"
    return f"entries [{start}, {end}) ({end - start} entries)"


def loss_error(group: str, loss: Loss, known_end: int | None = None, *, by_position: bool = False) -> DataLossError:
    """Return the error for a loss that ``find_loss`` found in a group.

    Args:
        group: the log.
        loss: the loss.
        known_end: the end of the position's log that this reader has seen, None if it has seen none.
        by_position: the log is a CommitLog, whose positions take the place of indexes.
    """
    position, view = loss.position, loss.view
    match loss.kind:
        case LossKind.LOG_RECREATED:
            return LogRecreatedError.of(group, loss, known_end)
        case LossKind.OFFSET_BEYOND_END:
            return OffsetBeyondEndError.of(group, position.next_index, view.end, by_position=by_position)
        case LossKind.RETENTION:
            return RetentionError.of(group, position.next_index, view.first_index, by_position=by_position)
        case LossKind.TERM_MISMATCH:
            known_check = None if position.check is None else EntryCheck(position.term, position.check)
            return TermMismatchError.of(
                group, position.next_index, known_check, loss.found, view.first_index, by_position=by_position
            )


@dataclass(slots=True)
class LossPolicy:
    """The option ``failOnDataLoss``: raise on a loss, or log and count it.

    Attributes:
        fail: raise on every loss.
        events: accepted losses.
        entries: entries known to be lost with them; of a CommitLog their bytes.
    """

    fail: bool
    events: int = 0
    entries: int = 0
    _reported: set[tuple[str, str, int]] = field(default_factory=set)

    def report(self, error: DataLossError, at: int | None = None) -> None:
        """Raise ``error``, or log and count it, once for each index ``at`` of a reader (default: its start)."""
        if self.fail:
            raise error
        key = (error.name, str(error.args[0]), error.start if at is None else at)
        if key in self._reported:
            return
        self._reported.add(key)
        self.events += 1
        self.entries += max(0, error.end - error.start)
        _log.warning("data loss accepted (failOnDataLoss=false): losses=%d error=%s", self.events, error)
