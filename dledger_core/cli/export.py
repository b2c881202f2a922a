"""``dledger export``: the entries of a directory as files for other tools, in parts that survive an interruption."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, Protocol, cast

import click
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv, ipc, parquet

from dledger_core.archive import FROM_LOG, ArchivedRows, ArchiveTable
from dledger_core.cli.dataset import Dataset, Part, Section, check_of_message, end_of_part
from dledger_core.cli.entries import Filters, SeekTarget, SeekType, condition_options
from dledger_core.cli.formats import body_text, json_lines
from dledger_core.cli.help import command, examples, option
from dledger_core.cli.options import (
    EXISTING_DIRECTORY,
    Archive,
    SizeType,
    archive_options,
    format_option,
    opaque_option,
)
from dledger_core.cli.output import Format, Progress, say, show_result
from dledger_core.errors import BadRequestError, ConfigError, CorruptRecordError, IndexOutOfRangeError
from dledger_core.ids import Index
from dledger_core.record import READ_SCHEMA, Isolation
from dledger_core.rocketmq import Damaged, Deleted, LogDirectory, Span, open_log_directory
from dledger_core.rocketmq.message.bodies import MESSAGES
from dledger_core.rocketmq.message.decode import Selected
from dledger_core.storage import StoreReader, Until, Visibility

_PART_BYTES: Final = 256 << 20
_TEMPORARY: Final = ".part"
_PREFIXES: Final[dict[Section, str]] = {"log": "", "commitlog": "commitlog-"}
_EMPTY: Final = Visibility(Index(0))


class _Writer(Protocol):
    def write_batch(self, batch: pa.RecordBatch) -> None: ...
    def close(self) -> None: ...


class _JsonLines:
    """Objects as ``dump --format json`` prints them, one per line."""

    def __init__(self, path: Path, _schema: pa.Schema) -> None:
        self._file = path.open("w", encoding="utf-8")

    def write_batch(self, batch: pa.RecordBatch) -> None:
        self._file.writelines(json_lines(batch))

    def close(self) -> None:
        self._file.close()


class _Csv:
    """Rows; maps are JSON, and a body that is not UTF-8 is in ``body_base64``."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        names = [name for name in schema.names if name != "body"]
        fields = [
            pa.field(n, pa.string() if pa.types.is_map(schema.field(n).type) else schema.field(n).type) for n in names
        ]
        self._schema = pa.schema([*fields, ("body", pa.string()), ("body_base64", pa.string())])
        self._writer = csv.CSVWriter(str(path), self._schema)

    def write_batch(self, batch: pa.RecordBatch) -> None:
        rows = []
        for row in batch.to_pylist():
            maps = {n: json.dumps(dict(v), ensure_ascii=False) for n, v in row.items() if isinstance(v, list)}
            rows.append(row | maps | {"body": None, "body_base64": None} | body_text(row["body"]))
        self._writer.write_batch(pa.RecordBatch.from_pylist(rows, self._schema))

    def close(self) -> None:
        self._writer.close()


_WRITERS: Final[dict[str, Callable[[Path, pa.Schema], _Writer]]] = {
    "parquet": lambda path, schema: parquet.ParquetWriter(path, schema, compression="zstd"),
    "arrow": lambda path, schema: ipc.new_file(str(path), schema),
    "csv": _Csv,
    "jsonl": _JsonLines,
}


class _StartType(SeekType):
    """Parse the start of an export: an index, a position of a CommitLog, or a time."""

    kinds: tuple[str, ...] = ("index", "position", "time", "first")

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See ``click.ParamType``."""
        found = super().convert(value, param, ctx)
        if found.kind not in self.kinds:
            self.fail(f"{value!r} is not one of: {', '.join(self.kinds)}", param, ctx)
        return found


class _UntilType(_StartType):
    """Parse the end of an export: an index, a time, ``end``, or ``committed``, for which it returns None."""

    kinds = ("index", "time", "end", "committed")

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See ``click.ParamType``."""
        return None if value == "committed" else super().convert(value, param, ctx)


@command(
    epilog=examples(
        "dledger export /var/lib/broker/store messages --to parquet",
        "dledger export dledger-data/default/dledger-n0 out --to jsonl --from 1000 --until 2000",
        "dledger export dledger-data/default/dledger-n0 history --archive true",
        "dledger export /var/lib/broker/store paid --topic orders --tag paid --from 2026-01-31",
    )
)
@click.argument("source", type=EXISTING_DIRECTORY)
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@option(
    "--to", "kind", type=click.Choice(list(_WRITERS)), default="parquet", show_default=True, help="Format of the files."
)
@option(
    "--from",
    "start",
    type=_StartType(),
    metavar="INDEX|@POSITION|TIME",
    section="Selection",
    help="Start: an index, @POSITION of a CommitLog, a time like 2025-01-31T12:00 (UTC), or -1h [default: first].",
)
@option(
    "--until",
    "end",
    type=_UntilType(),
    default="committed",
    show_default=True,
    metavar="INDEX|TIME|committed|end",
    section="Selection",
    help="End (exclusive); only with 'end' entries above the recorded commit index, which may not be committed.",
)
@condition_options
@option(
    "--isolation",
    type=click.Choice(["read-committed", "read-uncommitted"]),
    default="read-committed",
    show_default=True,
    section="Selection",
    help="With read-uncommitted entries of open transactions, aborted ones and losing attempts too.",
)
@option(
    "--part-bytes",
    type=SizeType(),
    default=_PART_BYTES,
    metavar="BYTES",
    help="Size of the bodies in a file, about [default: 256MiB].",
)
@opaque_option
@archive_options
@format_option
def export(
    source: Path,
    directory: Path,
    kind: str,
    start: SeekTarget | None,
    end: SeekTarget | None,
    filters: Filters,
    isolation: str,
    part_bytes: int,
    opaque: bool,
    archive: Archive | None,
    output: Format,
) -> None:
    """Write the entries of a store as files in DIRECTORY.

    The entries are those that a read_committed reader receives. Columns are those of the entries and of the RocketMQ
    messages in them; with --opaque those of the entries alone. A file is named after its range, FIRST-END.parquet, and
    complete once it has its name. The same command continues the dataset: after an interruption, and with new entries.
    It is refused if the log, its history or an option is another one. Messages of a classic CommitLog have no index:
    their files are named commitlog-FIRST-END after their positions, and an index as --from or --until leaves them out.
    Pandas, Polars and DuckDB read the files. Exit 4 at damage; the files before it are complete. Where a file
    of the log is missing, the entries after it are exported too.
    """
    if archive is not None and isolation != "read-committed":
        what = "--archive: an archive has what read-committed shows"
        raise ConfigError(what, str(source), "leave --isolation or --archive out")
    filters = replace(filters, since=start.time if start else None, until=end.time if end else None)
    settings = {"to": kind, "isolation": isolation, "opaque": opaque, "filters": _recorded(filters)}
    with (
        open_log_directory(source, opaque=opaque) as opened,
        Dataset.open(directory, settings) as dataset,
        Progress("exporting") as progress,
    ):
        if archive is not None:
            _use_archive(opened, archive)
        asked = cast("Isolation", isolation.replace("-", "_"))
        until: Until = "end" if end is not None and end.kind == "end" else "committed"
        limit = end.number if end is not None and end.kind == "index" else None
        shown = _EMPTY if opened.log is None else opened.log.shown(asked, until)
        target = _Target(opened, dataset, kind, part_bytes, filters, shown, opaque, progress)
        first, continued = target.run(start, limit)
        if limit is None and (warning := opened.check_end()) is not None:
            say(f"warning: {warning}")
    at = max(target.end, first)
    summary = {"directory": str(directory), "first_index": first, "end_index": at, "files": target.files}
    summary |= {"rows": target.rows, "continued_from": continued, "isolation": isolation}
    show_result(summary | _not_exported(opened.log, shown, until, limit, at), output)
    if filters.of_messages and not target.rows and continued is None:
        say(f"note: no entry matches; 'dledger look {source}' lists topics and keys; upper and lower case differ")
    for gap in opened.gaps:
        if target.concerns(gap, first if start is None else first + 1):
            raise gap.error


def _use_archive(opened: LogDirectory, archive: Archive) -> None:
    """Read entries that the store has deleted from its log's archive.

    Raises:
        ConfigError: the log cannot have an archive, or has none.
        ArchiveTableError: the table cannot be read, or is not an archive.
    """
    where, remedy = str(opened.path), "leave --archive out"
    if opened.log is None or opened.log.meta is None:
        kind = "a classic CommitLog" if opened.log is None else "a log that Java wrote"
        raise ConfigError(f"--archive: {kind} has no archive", where, remedy)
    if opened.classic:
        what = "--archive: a CommitLog precedes the store, whose deleted entries would lie between the two"
        raise ConfigError(what, where, f"export {opened.log.path} alone")
    if (found := opened.recorded_archive()) is None:
        raise ConfigError("--archive: the log of this store has no archive", where, remedy)
    table = ArchiveTable(found.table if archive.location == FROM_LOG else archive.location, archive.storage)
    table.check()
    opened.use_archive(found, ArchivedRows(str(opened.log.group), table))


def _recorded(filters: Filters) -> dict[str, Any]:
    """Return the conditions, as the manifest of a dataset has them."""
    given = {each.name: getattr(filters, each.name) for each in fields(filters)}
    times = {name: value.isoformat() for name, value in given.items() if name in ("since", "until") and value}
    lists = {name: sorted(value) for name, value in given.items() if isinstance(value, tuple) and value}
    return times | lists | ({"grep": filters.grep} if filters.grep is not None else {})


def _not_exported(
    log: StoreReader | None, shown: Visibility, until: Until, limit: int | None, at: int
) -> dict[str, Any]:
    """Return the commit index, the number of entries above it, and a note about the end of the export."""
    if log is None:
        return {"commit_index": None, "above_commit_index": 0, "note": None}
    commit, above = log.commit_index, log.last_index + 1 - log.committed_end()
    exported = max(0, at - log.committed_end())
    notes = []
    if commit is None:
        notes.append("the store records no commit index: it was read to its end, which may not be committed")
    if exported:
        notes.append(
            f"{exported:,} entries above the recorded commit index {commit} are exported: they may be uncommitted"
        )
    if above > exported and until == "committed" and (limit is None or limit > at):
        left = f"{above - exported:,} entries above the recorded commit index {commit} are left out"
        notes.append(f"{left}; --until end exports them")
    if (opened := shown.open_transaction) is not None and at >= shown.end:
        name = f"of query {opened.query_id}, micro-batch {opened.batch_id},"
        notes.append(f"the transaction {name} is open: entries from index {shown.end} on are left out")
    return {"commit_index": commit, "above_commit_index": above, "note": "; ".join(notes) or None}


@dataclass
class _Target:
    """The files of an export.

    Attributes:
        opened: the source.
        dataset: the files of earlier runs.
        kind: format of the files.
        part_bytes: size of the bodies in a file.
        filters: conditions on the entries.
        shown: the entries that the isolation shows.
        opaque: do not decode bodies.
        progress: of this run.
        end: end of the exported indexes.
        files: files of this run.
        rows: rows in them.
    """

    opened: LogDirectory
    dataset: Dataset
    kind: str
    part_bytes: int
    filters: Filters
    shown: Visibility
    opaque: bool
    progress: Progress
    end: int = 0
    files: int = 0
    rows: int = 0

    def run(self, start: SeekTarget | None, limit: int | None) -> tuple[int, int | None]:
        """Write everything; return the first index of the dataset, and the index at which it was continued."""
        parts = self.dataset.parts["log"]
        known = parts[0].first if parts else None
        index, position = (start.number if start and start.kind == kind else None for kind in ("index", "position"))
        if position is not None and not self.opened.classic:
            raise BadRequestError("only a classic CommitLog has positions", str(self.opened.path), "use an index")
        self.end = at = self.dataset.start_in_log(self.opened, index if index is not None else self._at_time(start))
        if index is None and limit is None:
            self._write_commitlog(position)
        stop = self.shown.end if limit is None else min(self.shown.end, limit)
        self.end = self._write("log", at, stop, first=known is None and index is None)
        return (at, None) if known is None else (known, at)

    def concerns(self, gap: Damaged, first: int) -> bool:
        """Whether the dataset lacks these entries: they end at index ``first`` or later."""
        if "index" in gap.error.values:
            return gap.start < self.end and gap.end >= first
        parts = self.dataset.parts["commitlog"]
        return bool(parts) and gap.start < parts[-1].next and gap.end > parts[0].first

    def _at_time(self, start: SeekTarget | None) -> int | None:
        """Return the first entry at or after a time at which a new dataset starts; None if all must be compared."""
        log = self.opened.log
        if start is None or start.time is None or log is None or self.dataset.parts["log"]:
            return None
        try:
            return self.opened.index_at_time(int(start.time.timestamp() * 1000))
        except (BadRequestError, CorruptRecordError):  # no append times (Java), or one that cannot be read
            return None

    def _write_commitlog(self, asked: int | None) -> None:
        start = self.dataset.start_in_commitlog(self.opened, asked)
        if start is None:
            return
        self._write("commitlog", start, self.opened.classic[-1].end, first=asked is None)
        if (gap := self.opened.gap) is not None:
            raise gap.error

    def _write(self, section: Section, start: int, stop: int, *, first: bool) -> int:
        """Write [start, stop), indexes or, of a CommitLog, positions; return the end.

        Args:
            section: of the dataset.
            start: the first one.
            stop: end (exclusive).
            first: entries that retention deletes before the first file do not matter.
        """
        at = start
        while at < stop:
            try:
                end = self._write_part(section, at, stop)
            except _AbsentError as error:
                found = error.found
                if isinstance(found, Damaged):
                    say(f"--- {found} ---")
                elif not first or self.dataset.parts[section]:
                    sign = "@" if found.by_position else ""
                    remedy = f"--from {sign}{found.end} continues without them"
                    raise IndexOutOfRangeError(str(found), str(self.opened.path), remedy) from None
                end = min(found.end, stop)
            if end <= at:
                break
            at = end
            self.progress.update(at - start, total=stop - start, detail=f"{self.files} files")
        return at

    def _write_part(self, section: Section, start: int, stop: int) -> int:
        """Write one file that starts at ``start``, and return its end; none where a CommitLog has no more messages."""
        by_position = section == "commitlog"
        span = Span((start, stop), (0, 0)) if by_position else Span((0, 0), (start, stop))
        schema = READ_SCHEMA if self.opaque else MESSAGES.schema
        at, nbytes, rows, last = start, 0, 0, None
        temporary = self.dataset.directory / f"{_PREFIXES[section]}{start}{_TEMPORARY}"
        with _temporary(temporary, self.kind, schema) as writer:
            for found in self.opened.batches(span, shown=self.shown):
                if isinstance(found, Damaged | Deleted):
                    if found.start <= start:
                        raise _AbsentError(found) if isinstance(found, Deleted) or found.missing else found.error
                    at = found.start
                    break  # this file ends before it, and the next one raises it
                chosen, examined, nbytes = self._fitting(found, nbytes)
                for batch in _rows(chosen, opaque=self.opaque):
                    writer.write_batch(batch)
                    rows += batch.num_rows
                if examined.num_rows:
                    last = examined.slice(examined.num_rows - 1)
                    at = last.column("position" if by_position else "index")[0].as_py()
                    at += len(last.column("body")[0].as_buffer()) if by_position else 1
                if nbytes >= self.part_bytes:
                    break
            else:
                at = at if by_position else stop  # a CommitLog may grow after its last message
        if at > start:
            self._add(section, start, at, last, temporary if rows else None)
            self.rows += rows
        temporary.unlink(missing_ok=True)
        return at

    def _fitting(self, found: pa.RecordBatch, nbytes: int) -> tuple[Selected, pa.RecordBatch, int]:
        """Return the selected entries that fit into a file, the entries up to the last of them, and the new size."""
        selected = self.filters.select(found)
        chosen = selected.entries
        ends = nbytes + np.cumsum(pc.binary_length(chosen.column("body")), dtype=np.int64)
        count = int(np.searchsorted(ends, self.part_bytes)) + 1
        if count > chosen.num_rows:
            return selected, found, int(ends[-1]) if chosen.num_rows else nbytes
        fitting = chosen.slice(0, count)
        return Selected(fitting, selected.passing), fitting, int(ends[count - 1])

    def _add(self, section: Section, start: int, end: int, last: pa.RecordBatch | None, temporary: Path | None) -> None:
        name = None if temporary is None else f"{_PREFIXES[section]}{start:020d}-{end:020d}.{self.kind}"
        if section == "log" and self.opened.log is not None:
            part = end_of_part(self.opened, self.opened.log, start, end, name)
        elif last is not None:
            part = Part(start, end, check=check_of_message(last), last=last.column("position")[0].as_py(), file=name)
        else:
            part = Part(start, end, file=name)
        self.dataset.add(section, part, temporary)
        self.files += name is not None


class _AbsentError(Exception):
    """The first entries of a file are missing, or retention deleted them before they were read."""

    def __init__(self, found: Damaged | Deleted) -> None:
        super().__init__(str(found))
        self.found = found


@contextmanager
def _temporary(path: Path, kind: str, schema: pa.Schema) -> Iterator[_Writer]:
    writer = _WRITERS[kind](path, schema)
    try:
        yield writer
    except BaseException:
        writer.close()
        path.unlink(missing_ok=True)
        raise
    writer.close()
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _rows(selected: Selected, *, opaque: bool) -> Iterator[pa.RecordBatch]:
    data = selected.entries.select(READ_SCHEMA.names).cast(READ_SCHEMA)
    if opaque:
        yield data
    else:
        yield from selected.only(MESSAGES.decode(data))
