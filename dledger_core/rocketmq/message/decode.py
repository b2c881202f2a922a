"""Message records to Arrow columns, whole batches at a time.

A body that is not a message record never raises: its row is null except for the column ``error``. A damaged message
(``integrity``) has the reason in ``error``; its columns are kept, except for a body that does not match its CRC or
cannot be decompressed. Where ``error`` is not wanted, only CRCs of bodies are checked, and only for ``body``.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dledger_core.errors import BadRequestError
from dledger_core.record import slices_of
from dledger_core.rocketmq.message import layout
from dledger_core.rocketmq.message.columns import (
    BoolArray,
    IntArray,
    binary_column,
    join_chunks,
    message_ids,
    read_hosts,
    rows_of,
    text_column,
)
from dledger_core.rocketmq.message.inner import Unwrapped, unwrap
from dledger_core.rocketmq.message.integrity import BODY_CRC, Faults, fault_text, faults
from dledger_core.rocketmq.message.layout import CONSUME_QUEUE_SCHEMA, MESSAGE_SCHEMA, QUEUE_FIELDS_SCHEMA
from dledger_core.rocketmq.message.properties import Pairs, delivery_times, java_hash, parse_properties
from dledger_core.rocketmq.message.records import Located, locate, wrong_bodies

BODY_BYTES_MAX: Final = 64 << 20
"""Larger bodies are not decompressed: a few compressed bytes can claim gigabytes."""

_ZLIB: Final = (0, 3)
_ROW: Final = "\0row"
_FRAMED: Final = {1: "lz4", 2: "zstd"}


class TooManyBytesError(BadRequestError):
    """The bodies together are larger than the caller allows: decode fewer at a time."""


class CompressionError(ValueError):
    """The body cannot be decompressed."""


def decompress(body: memoryview, kind: int, limit: int = BODY_BYTES_MAX) -> bytes:
    """Return the decompressed body.

    Args:
        body: the stored bytes.
        kind: RocketMQ's compression type: 0 and 3 zlib, 1 LZ4 frames, 2 zstd.
        limit: most bytes to return.

    Raises:
        CompressionError: unknown type, damaged, incomplete or too large.
    """
    if kind in _ZLIB:
        return _inflate(body, limit)
    codec = _FRAMED.get(kind)
    if codec is None:
        raise CompressionError(f"unknown compression type {kind}")
    try:
        with pa.CompressedInputStream(pa.BufferReader(body), codec) as stream:
            out: bytes = stream.read(limit + 1)
    except (OSError, pa.ArrowException, ValueError) as error:
        raise CompressionError(f"{codec}: {error}") from None
    if len(out) > limit:
        raise CompressionError(f"{codec}: more than {limit} bytes")
    return out


def _inflate(body: memoryview, limit: int) -> bytes:
    inflater = zlib.decompressobj()
    try:
        out = inflater.decompress(body, limit + 1)
    except zlib.error as error:
        raise CompressionError(f"zlib: {error}") from None
    if len(out) > limit:
        raise CompressionError(f"zlib: more than {limit} bytes")
    if not inflater.eof:
        raise CompressionError("zlib: it is incomplete")
    return out


_BATCH_BYTES_MAX: Final = 1 << 30
_YEAR_10000_MS: Final = 253_402_300_800_000
_TIMESTAMP: Final = pa.timestamp("us", tz="UTC")


def decode_messages(
    bodies: Any,
    columns: Sequence[str] | None = None,
    *,
    delay_levels_ms: Sequence[int] = layout.DELAY_LEVELS_MS,
    opened_bytes_max: int | None = None,
) -> pa.RecordBatch:
    """Decode message records, V1 and V2.

    Args:
        bodies: Arrow binary or large_binary column; each row one message record as a broker stores it.
        columns: which columns of MESSAGE_SCHEMA, in any order; None = all. Fewer are faster.
        delay_levels_ms: the broker's ``messageDelayLevel``, for ``tags_code`` of delayed messages.
        opened_bytes_max: limit on the decompressed size of several bodies together; None = 1 GiB, and a body beyond
            it is an ``error``.

    Returns:
        One row per body, also of an inner batch; ``expanded_messages`` returns its messages. ``body`` is decompressed,
        ``body_crc`` is of the stored body, timestamps outside the years 0 to 9999 are null, bytes that are not UTF-8
        become U+FFFD.

    Raises:
        BadRequestError: no binary column, an unknown column name, or columns above 2 GiB.
        TooManyBytesError: decompressed bodies are above ``opened_bytes_max``.
    """
    return _decode(bodies, MESSAGE_SCHEMA, columns, delay_levels_ms, opened_bytes_max)[0]


def expanded_messages(
    bodies: Any,
    columns: Sequence[str] | None = None,
    *,
    delay_levels_ms: Sequence[int] = layout.DELAY_LEVELS_MS,
    opened_bytes_max: int | None = None,
) -> tuple[pa.RecordBatch, IntArray | None]:
    """Decode message records, and the messages of an inner batch as rows of their own.

    A malformed inner batch is one row with an ``error``.

    Args:
        bodies: as in ``decode_messages``.
        columns: as in ``decode_messages``.
        delay_levels_ms: as in ``decode_messages``.
        opened_bytes_max: as in ``decode_messages``; messages of inner batches count too.

    Returns:
        The messages, and the row of ``bodies`` of each, int64; None if they are the same rows.

    Raises:
        BadRequestError: as ``decode_messages``.
        TooManyBytesError: as ``decode_messages``.
    """
    return _decode(bodies, MESSAGE_SCHEMA, columns, delay_levels_ms, opened_bytes_max, expand=True)


def consume_queue_columns(
    bodies: Any,
    columns: Sequence[str] | None = None,
    *,
    delay_levels_ms: Sequence[int] = layout.DELAY_LEVELS_MS,
    skip_bytes: int = 0,
    positions: Any = None,
) -> pa.RecordBatch:
    """Return only the fields of a consume queue, several times faster than ``decode_messages``.

    Args:
        bodies: as in ``decode_messages``.
        columns: which columns of QUEUE_FIELDS_SCHEMA; None = those of CONSUME_QUEUE_SCHEMA.
        delay_levels_ms: the broker's ``messageDelayLevel``.
        skip_bytes: offset of the message in each row, so that complete entries can be passed.
        positions: int64 column: the physical offset that each message must have; another one is an ``error``.
    """
    names = CONSUME_QUEUE_SCHEMA.names if columns is None else columns
    return _decode(bodies, QUEUE_FIELDS_SCHEMA, names, delay_levels_ms, skip_bytes=skip_bytes, positions=positions)[0]


def expanded_queue_columns(
    bodies: Any,
    columns: Sequence[str] | None = None,
    *,
    delay_levels_ms: Sequence[int] = layout.DELAY_LEVELS_MS,
    positions: Any = None,
) -> tuple[pa.RecordBatch, IntArray | None]:
    """Return the fields of a consume queue with those of inner batches; see ``expanded_messages``.

    Arguments as in ``consume_queue_columns``.
    """
    names = CONSUME_QUEUE_SCHEMA.names if columns is None else columns
    return _decode(bodies, QUEUE_FIELDS_SCHEMA, names, delay_levels_ms, positions=positions, expand=True)


def _decode(
    bodies: Any,
    schema: pa.Schema,
    columns: Sequence[str] | None,
    delay_levels_ms: Sequence[int],
    opened_bytes_max: int | None = None,
    skip_bytes: int = 0,
    positions: Any = None,
    *,
    expand: bool = False,
) -> tuple[pa.RecordBatch, IntArray | None]:
    names = schema.names if columns is None else list(columns)
    unknown = sorted(set(names) - set(schema.names))
    if unknown:
        raise BadRequestError(f"no such column: {', '.join(unknown)}", "columns", f"use {', '.join(schema.names)}")
    located = locate(rows_of(bodies).without_head(skip_bytes))
    expected = None if positions is None else np.asarray(positions, np.int64)[located.rows]
    unwrapped = unwrap(located) if expand else None
    if unwrapped is not None and opened_bytes_max is not None and len(located.reasons) > 1:
        opened_bytes_max -= unwrapped.repeated_bytes
        if opened_bytes_max < 0:
            raise TooManyBytesError("the messages are too large together", "messages", "decode fewer")
    decoder = _Decoder(located, delay_levels_ms, opened_bytes_max, expected, unwrapped)
    arrays = [decoder.column(name) for name in names if name != "error"]
    if not decoder.located.complete:
        arrays = _with_null_rows(arrays, decoder.located)
    if "error" in names:
        arrays.insert(names.index("error"), decoder.error())
    found = pa.RecordBatch.from_arrays(arrays, schema=pa.schema([schema.field(name) for name in names]))
    return found, None if unwrapped is None else unwrapped.origin


def _with_null_rows(arrays: list[pa.Array], located: Located) -> list[pa.Array]:
    """Return the rows of the messages at their places among all rows; the others are null."""
    source = np.zeros(len(located.reasons), np.int64)
    source[located.rows] = np.arange(located.count)
    rows = pa.array(source, mask=located.reasons != 0)
    return [array.take(rows) for array in arrays]


class _Decoder:
    """Columns of the located records, each computed on demand."""

    def __init__(
        self,
        located: Located,
        delay_levels_ms: Sequence[int],
        opened_bytes_max: int | None,
        positions: IntArray | None,
        unwrapped: Unwrapped | None,
    ) -> None:
        self.located = located if unwrapped is None else unwrapped.located
        self._records = located
        self._unwrapped = unwrapped
        self._positions = positions
        self._opened_bytes_max = opened_bytes_max
        self._delay_levels_ms = delay_levels_ms
        self._broken: dict[int, str] = {}

    def column(self, name: str) -> pa.Array:
        if name in _NUMBERS:
            return pa.array(self.located.number("size" if name == "store_size" else name))
        make: Callable[[], pa.Array] = getattr(self, "_" + name)
        return make()

    def error(self) -> pa.StringArray:
        """Return the fault of each row. Call it last: ``body`` adds faults."""
        found = self._faults
        for row in np.flatnonzero(found).tolist():
            if found[row] == BODY_CRC or row not in self._broken:
                self._broken[row] = fault_text(int(found[row]))
        if self._unwrapped is not None:
            for row in self._unwrapped.malformed.tolist():
                self._broken.setdefault(row, "its inner batch is malformed")
        if self.located.complete and not self._broken:
            return pa.nulls(self.located.count, pa.string())
        texts = self.located.reason_texts()
        for row, text in self._broken.items():
            texts[int(self.located.rows[row])] = text
        return pa.array(texts, pa.string())

    @cached_property
    def _stored(self) -> Any:
        """The bodies as they are stored, joined."""
        return join_chunks(self.located.data, self.located.body, self.located.body_bytes)

    @cached_property
    def _faults(self) -> Faults:
        if self._unwrapped is None:
            return faults(self.located, self._positions, self._wrong)
        return faults(self._records, self._positions)[self._unwrapped.of]

    @cached_property
    def _wrong(self) -> BoolArray:
        """Bodies that do not match their CRC."""
        if self._unwrapped is None:
            return wrong_bodies(self.located, self._stored)
        return np.asarray(self._faults == BODY_CRC)

    @cached_property
    def _pairs(self) -> Pairs:
        return parse_properties(self.located.data, self.located.properties, self.located.properties_bytes)

    @cached_property
    def _topics(self) -> pa.StringArray:
        return text_column(self.located.data, self.located.topic, self.located.topic_bytes)

    @cached_property
    def _tag_texts(self) -> pa.StringArray:
        return self._pairs.values_of("TAGS")

    def _topic(self) -> pa.Array:
        return self._topics

    def _tags(self) -> pa.Array:
        return self._tag_texts

    def _keys(self) -> pa.Array:
        return self._pairs.values_of("KEYS")

    def _dispatch_queues(self) -> pa.Array:
        return self._of_dispatch(layout.MULTI_DISPATCH)

    def _dispatch_offsets(self) -> pa.Array:
        return self._of_dispatch(layout.MULTI_QUEUE_OFFSET)

    def _of_dispatch(self, name: str) -> pa.Array:
        return self._pairs.values_of(name) if self._may_dispatch else pa.nulls(self.located.count, pa.string())

    @cached_property
    def _may_dispatch(self) -> bool:
        """Whether any message may name further queues: few do, and a text search is cheaper than parsing all."""
        if "_pairs" in vars(self):
            return True
        texts = join_chunks(self.located.data, self.located.properties, self.located.properties_bytes)
        return layout.MULTI_DISPATCH.encode() in bytes(texts)

    def _batch_index(self) -> pa.Array:
        if self._unwrapped is None:
            return pa.nulls(self.located.count, pa.int32())
        numbers = self._unwrapped.batch_index
        return pa.array(numbers.astype(np.int32), mask=numbers < 0)

    def _properties(self) -> pa.Array:
        return self._pairs.to_map()

    def _sys_flag(self) -> pa.Array:
        return pa.array(self.located.sys_flags)

    def _born_timestamp(self) -> pa.Array:
        return _timestamps(self.located.number("born_timestamp"))

    def _store_timestamp(self) -> pa.Array:
        return _timestamps(self.located.number("store_timestamp"))

    def _born_host(self) -> pa.Array:
        return self._host(self.located.born_host, layout.BORN_IPV6)

    def _store_host(self) -> pa.Array:
        return self._host(self.located.store_host, layout.STORE_IPV6)

    def _host(self, at: IntArray, ipv6_bit: int) -> pa.Array:
        return read_hosts(self.located.data, at, (self.located.sys_flags & ipv6_bit) != 0)

    def _msg_id(self) -> pa.Array:
        located = self.located
        ipv6 = (located.sys_flags & layout.STORE_IPV6) != 0
        offsets = np.ascontiguousarray(located.headers["physical_offset"]).view(np.uint8).reshape(-1, 8)
        return message_ids(located.data, located.store_host, ipv6, offsets)

    def _tags_code(self) -> pa.Array:
        codes = java_hash(self._tag_texts)
        scheduled = self.located.topic_bytes == len(layout.SCHEDULE_TOPIC)
        if scheduled.any():
            scheduled = np.asarray(pc.equal(self._topics, layout.SCHEDULE_TOPIC))
        if scheduled.any():
            levels = self._pairs.values_of("DELAY", scheduled)
            stored = self.located.number("store_timestamp")
            times, delayed = delivery_times(levels, stored, self._delay_levels_ms)
            codes = np.where(delayed, times, codes)
        return pa.array(codes)

    def _body(self) -> pa.Array:
        located, wrong = self.located, self._wrong
        packed = np.flatnonzero(((located.sys_flags & layout.COMPRESSED) != 0) & ~wrong)
        if not len(packed) and not wrong.any():
            return binary_column(self._stored, located.body_bytes)
        opened = self._decompress(packed)
        lengths, starts = located.body_bytes.copy(), located.body.copy()
        which = np.zeros(located.count, np.int32)
        which[packed] = 1
        lengths[packed] = [len(body) for body in opened]
        starts[packed] = np.cumsum(lengths[packed]) - lengths[packed]
        lengths[wrong] = 0
        present = ~wrong
        present[list(self._broken)] = False
        return binary_column(slices_of([located.data, b"".join(opened)], lengths, which, starts), lengths, present)

    def _decompress(self, packed: IntArray) -> list[bytes]:
        """Return the decompressed bodies of the records ``packed``; record failures in ``_broken``."""
        located, opened = self.located, []
        left = _BATCH_BYTES_MAX - int(located.body_bytes.sum())
        view, most = located.data.data, self._opened_bytes_max if len(packed) > 1 else None
        kinds = (located.sys_flags[packed] & layout.COMPRESSION_MASK) >> layout.COMPRESSION_SHIFT
        starts, ends = located.body[packed], located.body[packed] + located.body_bytes[packed]
        bodies = zip(packed.tolist(), starts.tolist(), ends.tolist(), kinds.tolist(), strict=True)
        for row, start, end, kind in bodies:
            try:
                body = decompress(view[start:end], kind, max(0, min(BODY_BYTES_MAX, left)))
            except CompressionError as error:
                self._broken[row] = f"its body cannot be decompressed: {error}"
                body = b""
            left -= len(body)
            opened.append(body)
            if most is not None and (most := most - len(body)) < 0:
                raise TooManyBytesError("the decompressed bodies are too large together", "messages", "decode fewer")
        return opened


_NUMBERS: Final = frozenset(
    {
        "store_size",
        "size",
        "body_crc",
        "queue_id",
        "flag",
        "queue_offset",
        "physical_offset",
        "reconsume_times",
        "prepared_transaction_offset",
    }
)
"""Columns that are plain numbers of the header."""


def _timestamps(millis: IntArray) -> pa.Array:
    sane = (millis > -_YEAR_10000_MS) & (millis < _YEAR_10000_MS)
    if sane.all():
        return pa.array(millis * 1000).view(_TIMESTAMP)
    return pa.array(np.where(sane, millis, 0) * 1000, mask=~sane).view(_TIMESTAMP)


def decode_chunks(
    batch: pa.RecordBatch, columns: Sequence[str], *, opened_bytes_max: int
) -> Iterator[tuple[pa.RecordBatch, pa.RecordBatch]]:
    """Decode the column ``body`` of a batch, in chunks whose decompressed bodies stay below a limit.

    The messages of an inner batch are rows of their own; see ``expanded_messages``.

    Args:
        batch: rows with a column ``body``, each a message record as a broker stores it.
        columns: as in ``decode_messages``.
        opened_bytes_max: largest size of the decompressed bodies of a chunk; a single body may be larger.

    Yields:
        Rows of the batch, as ``rows_of_messages`` returns them, and as many rows of messages.

    Raises:
        BadRequestError: as ``decode_messages``.
    """
    rest = [batch]
    while rest:
        chunk = rest.pop()
        try:
            found, origin = expanded_messages(chunk.column("body"), columns, opened_bytes_max=opened_bytes_max)
        except TooManyBytesError:
            half = chunk.num_rows // 2
            rest += [chunk.slice(half), chunk.slice(0, half)]
            continue
        yield rows_of_messages(chunk, origin), found


def rows_of_messages(batch: pa.RecordBatch, origin: IntArray | None) -> pa.RecordBatch:
    """Return the row of each message, once for each message of an inner batch.

    Binary columns, such as the record with all messages, are null from the second message of a batch on: repeated, a
    few bytes would become gigabytes.

    Args:
        batch: rows.
        origin: int64: the row of each message, ascending; None = each row is one message.
    """
    if origin is None:
        return batch
    again = np.zeros(len(origin), np.bool_)
    again[1:] = origin[1:] == origin[:-1]
    rows, firsts = pa.array(origin), pa.array(origin, mask=again)
    arrays = [column.take(firsts if pa.types.is_binary(column.type) else rows) for column in batch.columns]
    return pa.RecordBatch.from_arrays(arrays, schema=batch.schema)


@dataclass(frozen=True)
class Selected:
    """Entries with a message that passes a filter.

    Attributes:
        entries: the entries.
        passing: bool: which of their messages pass, inner batches expanded; None if each entry has one message.
    """

    entries: pa.RecordBatch
    passing: BoolArray | None = None

    def only(self, chunks: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the rows that pass.

        Args:
            chunks: the expanded messages of the first entries, in order, with any columns.
        """
        at = 0
        for chunk in chunks:
            if self.passing is None:
                yield chunk
                continue
            yield chunk.filter(pa.array(self.passing[at : at + chunk.num_rows]))
            at += chunk.num_rows


def select_entries(
    batch: pa.RecordBatch,
    columns: Sequence[str],
    passes: Callable[[pa.RecordBatch, pa.RecordBatch], Any],
    *,
    opened_bytes_max: int,
) -> Selected:
    """Return the entries with a message that passes a filter.

    Args:
        batch: entries with the column ``body``.
        columns: columns of messages that the filter reads.
        passes: returns which rows pass, a boolean column, from rows of the batch and as many messages.
        opened_bytes_max: as in ``decode_chunks``.
    """
    numbered = batch.append_column(_ROW, pa.array(np.arange(batch.num_rows)))
    rows, passing = [np.zeros(0, np.int64)], [np.zeros(0, np.bool_)]
    for chunk, found in decode_chunks(numbered, columns, opened_bytes_max=opened_bytes_max):
        rows.append(np.asarray(chunk.column(_ROW)))
        passing.append(np.asarray(pc.fill_null(passes(chunk, found), False)).astype(np.bool_))
    of, good = np.concatenate(rows), np.concatenate(passing)
    if len(of) == batch.num_rows:
        return Selected(batch if good.all() else batch.filter(pa.array(good)))
    kept = np.zeros(batch.num_rows, np.bool_)
    kept[of[good]] = True
    return Selected(batch.filter(pa.array(kept)), good[kept[of]])
