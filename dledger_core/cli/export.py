"""``dledger export``: the entries of a directory as files for other tools, in parts that survive an interruption."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import click
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv, ipc, parquet

from dledger_core.cli.formats import body_text, json_objects
from dledger_core.cli.help import command, examples, option
from dledger_core.cli.options import EXISTING_DIRECTORY, SizeType, format_option, opaque_option
from dledger_core.cli.output import Format, Progress, say, show_result
from dledger_core.errors import IndexOutOfRangeError
from dledger_core.record import MAGIC_DATA, READ_SCHEMA
from dledger_core.rocketmq import Damaged, Deleted, LogDirectory, Span, open_log_directory
from dledger_core.rocketmq.message.decode import MESSAGES

_PART_BYTES: Final = 256 << 20
_TEMPORARY: Final = ".part"
_CLASSIC: Final = "commitlog-"


class _Writer(Protocol):
    def write_batch(self, batch: pa.RecordBatch) -> None: ...
    def close(self) -> None: ...


class _JsonLines:
    """Objects as ``dump --format json`` prints them, one per line."""

    def __init__(self, path: Path, _schema: pa.Schema) -> None:
        self._file = path.open("w", encoding="utf-8")

    def write_batch(self, batch: pa.RecordBatch) -> None:
        self._file.writelines(f"{line}\n" for line in json_objects(batch).to_pylist())

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


@command(
    epilog=examples(
        "dledger export /var/lib/broker/store messages --to parquet",
        "dledger export dledger-data/default/dledger-n0 out --to jsonl --from 1000 --until 2000",
    )
)
@click.argument("source", type=EXISTING_DIRECTORY)
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@option(
    "--to", "kind", type=click.Choice(list(_WRITERS)), default="parquet", show_default=True, help="Format of the files."
)
@option("--from", "start", type=click.IntRange(0), metavar="INDEX", help="First index [default: of the log].")
@option("--until", "end", type=click.IntRange(0), metavar="INDEX", help="End (exclusive) [default: of the log].")
@option(
    "--part-bytes",
    type=SizeType(),
    default=_PART_BYTES,
    metavar="BYTES",
    help="Size of the bodies in a file, about [default: 256MiB].",
)
@opaque_option
@format_option
def export(
    source: Path,
    directory: Path,
    kind: str,
    start: int | None,
    end: int | None,
    part_bytes: int,
    opaque: bool,
    output: Format,
) -> None:
    """Write the entries of a store as files in DIRECTORY.

    Columns are those of the entries and of the RocketMQ messages in them; with --opaque those of the entries alone. A
    file is named after its range, FIRST-END.parquet, and complete once it has its name: after an interruption the same
    command continues. Messages of a classic CommitLog have no index: their files are named commitlog-FIRST-END after
    their positions, and --from and --until leave them out. Pandas, Polars and DuckDB read the files. Exit 4 at damage;
    the files before it are complete.
    """
    with open_log_directory(source, opaque=opaque) as opened, Progress("exporting") as progress:
        low, high = opened.indexes
        if start is not None and not low <= start <= high:
            raise IndexOutOfRangeError("the start is not in the log", str(source), f"use {low} to {high}")
        directory.mkdir(parents=True, exist_ok=True)
        target = _Target(opened, directory, kind, part_bytes, opaque, progress)
        classic = target.write_commitlog() if start is None and end is None else 0
        first, stop = low if start is None else start, high if end is None else min(end, high)
        written = _finished(directory, kind, "", first)
        at, files = target.write("", written, stop)
        if stop == high and (warning := opened.check_end()) is not None:
            say(f"warning: {warning}")
    summary = {"directory": str(directory), "first_index": first, "end_index": max(at, first), "files": files + classic}
    show_result(summary | {"continued_from": written if written > first else None}, output)


def _finished(directory: Path, kind: str, prefix: str, first: int) -> int:
    """Return where earlier runs ended: the end of the files that continue each other from ``first``."""
    ends = {}
    for path in directory.glob(f"{prefix}*.{kind}"):
        begin, dash, end = path.stem.removeprefix(prefix).partition("-")
        if dash and begin.isdecimal() and end.isdecimal():
            ends[int(begin)] = int(end)
    at = first
    while at in ends and ends[at] > at:
        at = ends[at]
    return at


@dataclass(frozen=True)
class _Target:
    """The files of an export."""

    opened: LogDirectory
    directory: Path
    kind: str
    part_bytes: int
    opaque: bool
    progress: Progress

    def write_commitlog(self) -> int:
        """Write the messages of the classic CommitLog, and return the number of files."""
        if not self.opened.classic:
            return 0
        first, stop = self.opened.classic[0].position, self.opened.classic[-1].end
        _, files = self.write(_CLASSIC, _finished(self.directory, self.kind, _CLASSIC, first), stop)
        if (gap := self.opened.gap) is not None:
            raise gap.error
        return files

    def write(self, prefix: str, start: int, stop: int) -> tuple[int, int]:
        """Write [start, stop), indexes or, of a CommitLog, positions; return the end and the number of files."""
        at, files = start, 0
        while at < stop and (end := self._write_part(prefix, at, stop)) > at:
            at, files = end, files + 1
            self.progress.update(at - start, total=stop - start, detail=f"{files} files")
        return at, files

    def _write_part(self, prefix: str, start: int, stop: int) -> int:
        """Write one file that starts at ``start``, and return its end; none where a CommitLog has no more messages."""
        by_position = prefix == _CLASSIC
        span = Span((start, stop), (0, 0)) if by_position else Span((0, 0), (start, stop))
        schema = READ_SCHEMA if self.opaque else MESSAGES.schema
        at, nbytes = start, 0
        temporary = self.directory / f"{prefix}{start}{_TEMPORARY}"
        with _temporary(temporary, self.kind, schema) as writer:
            for found in self.opened.batches(span):
                if isinstance(found, Deleted):
                    raise IndexOutOfRangeError(str(found), str(self.opened.path), "run the command again")
                if isinstance(found, Damaged):
                    if at == start:
                        raise found.error
                    break  # this file ends before the damage, and the next one raises it
                lengths = pc.binary_length(found.column("body"))
                ends = nbytes + np.cumsum(lengths, dtype=np.int64)
                fitting = found.slice(0, int(np.searchsorted(ends, self.part_bytes)) + 1)
                last, nbytes = fitting.num_rows - 1, int(ends[fitting.num_rows - 1])
                place = int(fitting.column("position" if by_position else "index")[last].as_py())
                at = place + (lengths[last].as_py() if by_position else 1)
                for batch in _rows(fitting, opaque=self.opaque):
                    writer.write_batch(batch)
                if nbytes >= self.part_bytes:
                    break
            else:
                at = at if by_position else stop  # a CommitLog may grow after its last message
        if at == start:
            temporary.unlink()
            return at
        temporary.replace(self.directory / f"{prefix}{start:020d}-{at:020d}.{self.kind}")
        return at


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


def _rows(batch: pa.RecordBatch, *, opaque: bool) -> Iterator[pa.RecordBatch]:
    is_data = pc.fill_null(pc.equal(batch.column("magic"), MAGIC_DATA), True)  # a CommitLog has no other records
    data = batch.filter(is_data).select(READ_SCHEMA.names).cast(READ_SCHEMA)
    if opaque:
        yield data
    else:
        yield from MESSAGES.decode(data)
