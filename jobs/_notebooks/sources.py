"""Logs that a notebook reads: a directory, a group of nodes, or three nodes with flights as a demo."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Final, Literal

import numpy as np
import pandas as pd
import pyarrow as pa

from dledger_core import Client, ClientConfig, ConfigError, LocalCluster, LogRange, NodeStatus
from dledger_core.config import parse_peers
from dledger_core.rocketmq import (
    Damaged,
    Deleted,
    LogDirectory,
    Span,
    encode_messages,
    end_problems,
    open_log_directory,
    sample_positions,
)

from .._cli import environment_access
from .._demo.flights import flight_messages
from .samples import sample_broker

__all__ = ["Source", "append_messages", "nodes_table", "open_source"]

_BATCH: Final = 500
_DEMO_SEGMENT_BYTES: Final = 64 << 20
_DEMO_EVENTS: Final = "20000"


@dataclass(frozen=True)
class Source:
    """An open log.

    Attributes:
        name: the directory, or the group.
        kind: in words.
        first_index: of the log; 0 of a CommitLog.
        end: end (exclusive) of its indexes; 0 of a CommitLog.
        nbytes: size of its files.
        read: yields the entries of an index range that ``read_committed`` shows, and the damage between them.
        nodes: of a group, a row per node.
        directory: the opened directory; None for a group.
    """

    name: str
    kind: str
    first_index: int
    end: int
    nbytes: int
    read: Callable[[int, int], Iterator[pa.RecordBatch | Damaged | Deleted]]
    nodes: pd.DataFrame = field(default_factory=pd.DataFrame)
    directory: LogDirectory | None = None

    @property
    def positions(self) -> list[tuple[int, int]]:
        """Positions of the classic CommitLog to read for a sample; empty without one."""
        return sample_positions(self.directory) if self.directory is not None and self.directory.classic else []

    @property
    def by_position(self) -> bool:
        """Whether it is a classic CommitLog alone, which has no indexes."""
        return self.directory is not None and self.directory.log is None and bool(self.directory.classic)

    def positions_between(self, start: int | None, end: int | None) -> list[tuple[int, int]]:
        """Return the positions in [start, end) that the files of the CommitLog have; empty if there are none."""
        files = self.directory.classic if self.directory is not None else ()
        if not files:
            return []
        low = max(files[0].position, files[0].position if start is None else start)
        high = min(files[-1].end, files[-1].end if end is None else end)
        return [(low, high)] if low < high else []

    def read_positions(self, start: int, end: int) -> Iterator[pa.RecordBatch | Damaged | Deleted]:
        """Yield the messages of the classic CommitLog in [start, end), and the damage between them."""
        if self.directory is not None:
            yield from self.directory.batches(Span((start, end), (0, 0)))

    def everything(self) -> Iterator[pa.RecordBatch | Damaged | Deleted]:
        """Yield all entries that ``read_committed`` shows, and the damage between them."""
        if self.directory is not None:
            yield from self.directory.batches(shown=self.directory.shown)
        else:
            yield from self.read(self.first_index, self.end)

    def problems(self) -> list[str]:
        """Return a sentence for each problem that needs no reading of entries."""
        if self.directory is None:
            return [f"node {node} does not answer" for node in self.nodes.query("~reachable")["node_id"]]
        log = self.directory.log
        damaged = [f"indexes {a} to {b - 1} are damaged" for a, b in log.damaged] if log is not None else []
        return [*damaged, *map(str, self.directory.gaps), *end_problems(self.directory)]


@contextmanager
def open_source(
    source: str | Path | None = None, group: str | None = None, demo: Literal["flights", "broker"] = "flights"
) -> Iterator[Source]:
    """Open a log for reading.

    Args:
        source: a directory with a log, or the peers of a group. None = ``DLEDGER_SOURCE``, ``DLEDGER_PEERS`` or the
            peers of ``DLEDGER_CLIENT_CONFIG``.
        group: the group of peers. None = ``DLEDGER_GROUP``, that of ``DLEDGER_CLIENT_CONFIG``, or ``default``.
        demo: read without any of them: three nodes with flights, or the store of a real broker, from the tests. Both
            are removed at the end.

    Raises:
        ConfigError: ``source`` is neither.
        DLedgerError: the log cannot be read.
    """
    settings = ClientConfig.in_effect()
    source = source or os.environ.get("DLEDGER_SOURCE") or settings.peers
    group = group or settings.group or "default"
    if source is None and demo == "broker":
        with _temporary() as unpacked, open_log_directory(sample_broker(unpacked)) as directory:
            yield _directory(directory)
    elif source is None:
        with _demo(group) as peers, _group(peers, group) as opened:
            yield opened
    elif Path(source).is_dir():
        with open_log_directory(Path(source)) as directory:
            yield _directory(directory)
    elif ":" in str(source):
        with _group(str(source), group) as opened:
            yield opened
    else:
        what = f"{str(source)!r} is neither a directory nor a list of nodes"
        raise ConfigError(what, "", "name a directory or PEERS, or unset DLEDGER_SOURCE")


def _directory(opened: LogDirectory) -> Source:
    first, end = opened.indexes
    size = sum(file.size for file in opened.classic)
    if opened.log is not None:
        size += opened.log.position_end
    return Source(
        str(opened.path),
        opened.kind,
        first,
        end,
        size,
        lambda start, stop: opened.batches(Span((0, 0), (start, stop)), shown=opened.shown),
        directory=opened,
    )


@contextmanager
def _group(peers: str, group: str) -> Iterator[Source]:
    parse_peers(peers, needs_ids=False)
    with Client(peers, group, **environment_access().of_client) as client:
        bounds: LogRange = client.bounds()
        nodes = nodes_table(client)
        nbytes = int(nodes["data_bytes"].max()) if nodes["data_bytes"].notna().any() else 0
        yield Source(f"group {group}", "running group", bounds.first_index, bounds.end, nbytes, client.tail, nodes)


def nodes_table(client: Client) -> pd.DataFrame:
    """Return a row per node, as it describes itself; a number that it did not report is missing."""
    names = [each.name for each in fields(NodeStatus)]
    nodes = client.metadata(space=True).nodes
    table = pd.DataFrame([{name: getattr(node, name) for name in names} for node in nodes], columns=names)
    numbers = table.select_dtypes(np.integer).columns
    return table.astype(dict.fromkeys(numbers, "Int64")).replace(dict.fromkeys(numbers, -1), pd.NA)


@contextmanager
def _demo(group: str) -> Iterator[str]:
    """Start three nodes, append flights, and yield the peers; leave neither processes nor files."""
    events = int(os.environ.get("DLEDGER_NOTEBOOK_EVENTS", _DEMO_EVENTS))
    messages = flight_messages().slice(0, events)
    print(f"starting three nodes, and appending {events:,} flights out of New York in 2013")
    with _temporary() as directory:
        nodes = LocalCluster(3, directory, groups=(group,), data_segment_bytes=_DEMO_SEGMENT_BYTES)
        with nodes, Client(nodes.peers, group) as client:
            append_messages(client, messages)
            yield nodes.peers


@contextmanager
def _temporary() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="dledger-notebook-", ignore_cleanup_errors=True) as directory:
        yield Path(directory)


def append_messages(client: Client, messages: pa.Table) -> None:
    """Append rows of messages, in requests of 500.

    Args:
        client: of the group.
        messages: columns as ``encode_messages`` takes them.
    """
    for batch in messages.combine_chunks().to_batches(_BATCH):
        client.append(encode_messages(**{name: batch[name] for name in batch.schema.names}))
