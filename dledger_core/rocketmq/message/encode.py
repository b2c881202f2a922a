"""Arrow columns to message records, whole batches at a time."""

from __future__ import annotations

import time
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dledger_core import checksum
from dledger_core.errors import BadRequestError
from dledger_core.rocketmq.message import layout
from dledger_core.rocketmq.message.columns import IntArray, binary_column, constant_column, pack_host, rows_of
from dledger_core.rocketmq.message.properties import build_properties

_TOPIC_BYTES_MAX: Final = 32767
_RECORDS_BYTES_MAX: Final = (1 << 31) - 1
_IPV6_HOST_BYTES: Final = 20
_DEFAULT_HOST: Final = "127.0.0.1:0"


def encode_messages(
    topic: Any,
    queue_id: Any,
    body: Any,
    tags: Any = None,
    keys: Any = None,
    properties: Any = None,
    *,
    flag: Any = 0,
    sys_flag: Any = 0,
    queue_offset: Any = 0,
    physical_offset: Any = 0,
    born_timestamp: Any = None,
    born_host: Any = _DEFAULT_HOST,
    store_timestamp: Any = None,
    store_host: Any = _DEFAULT_HOST,
    reconsume_times: Any = 0,
    prepared_transaction_offset: Any = 0,
) -> pa.BinaryArray:
    """Encode message records: V1, or V2 where the topic has more than 127 bytes.

    Every argument but ``body`` is one value for all rows, or an Arrow column (or sequence) of as many rows as ``body``.

    Args:
        topic: string.
        queue_id: int32.
        body: Arrow binary or string column, or a sequence of bytes; null = empty. Stored as given: with the
            compression bits of ``sys_flag`` set it must be compressed already.
        tags: string or null; stored as property TAGS.
        keys: string or null, separated by spaces; stored as property KEYS.
        properties: map<string, string> column (or sequence of dicts); ``tags`` and ``keys`` replace its pairs, and
            ``__CRC32#``, the CRC of the record that it was read from, is left out.
        flag: int32, for the user.
        sys_flag: int32, bits of 0x7FF; the IPv6 bits are set according to the hosts.
        queue_offset: int64. A native log leaves it 0: its consume queues assign it.
        physical_offset: int64.
        born_timestamp: ms since the epoch or an Arrow timestamp; None = now.
        born_host: ``address:port``.
        store_timestamp: as ``born_timestamp``.
        store_host: ``address:port``.
        reconsume_times: int32.
        prepared_transaction_offset: int64.

    Raises:
        BadRequestError: a value does not fit its field, or readers would not read it back.
    """
    bodies = _body_rows(body)
    n = len(bodies)
    topics = _texts(topic, n, "topic")
    topic_bytes = _topic_bytes(topics)
    text = build_properties(n, _optional(tags, n, "tags"), _optional(keys, n, "keys"), _map(properties, n))
    blob = rows_of(bodies)
    now = time.time_ns() // 1_000_000
    hosts = _hosts(born_host, n), _hosts(store_host, n)
    header = np.zeros(n, layout.BEFORE_HOSTS)
    header["magic"] = np.where(topic_bytes > layout.V1_TOPIC_BYTES_MAX, layout.MAGIC_V2, layout.MAGIC_V1)
    header["body_crc"] = checksum.crc32_column(blob.data.data, blob.lengths) & np.uint32(layout.BODY_CRC_MASK)
    header["queue_id"] = _integers(queue_id, n, "queue_id", pa.int32())
    header["flag"] = _integers(flag, n, "flag", pa.int32())
    header["queue_offset"] = _integers(queue_offset, n, "queue_offset", pa.int64())
    header["physical_offset"] = _integers(physical_offset, n, "physical_offset", pa.int64())
    header["sys_flag"] = _flags(sys_flag, hosts)
    header["born_timestamp"] = _millis(born_timestamp, n, "born_timestamp", now)
    tail = np.zeros(n, layout.BEFORE_BODY)
    tail["reconsume_times"] = _integers(reconsume_times, n, "reconsume_times", pa.int32())
    prepared = _integers(prepared_transaction_offset, n, "prepared_transaction_offset", pa.int64())
    tail["prepared_transaction_offset"] = prepared
    tail["body_bytes"] = blob.lengths
    stored = _millis(store_timestamp, n, "store_timestamp", now).astype(">i8")
    texts = [_topic_lengths(topic_bytes), topics.cast(pa.binary()), _text_lengths(text), text.cast(pa.binary())]
    return _join(header, [hosts[0], _fixed(stored), hosts[1], _fixed(tail), bodies, *texts])


def _join(header: Any, parts: list[pa.BinaryArray]) -> pa.BinaryArray:
    """Set the sizes and the offsets of the contiguous parts of each record."""
    sizes = np.full(len(header), layout.BEFORE_HOSTS.itemsize, np.int64)
    for part in parts:
        sizes += rows_of(part).lengths
    if int(sizes.sum()) > _RECORDS_BYTES_MAX:
        raise BadRequestError("records of more than 2 GiB", "messages", "encode fewer at a time")
    header["size"] = sizes
    return pc.binary_join_element_wise(_fixed(header), *parts, b"")


def _flags(value: Any, hosts: tuple[pa.BinaryArray, pa.BinaryArray]) -> IntArray:
    """Return the system flags, with the IPv6 bits of the hosts' lengths."""
    flags = _integers(value, len(hosts[0]), "sys_flag", pa.int32())
    if (flags & ~layout.SYS_FLAGS).any():
        raise BadRequestError("a system flag has unknown bits", "sys_flag", f"use bits of {layout.SYS_FLAGS:#x}")
    for bit, column in zip((layout.BORN_IPV6, layout.STORE_IPV6), hosts, strict=True):
        flags = np.where(rows_of(column).lengths == _IPV6_HOST_BYTES, flags | bit, flags & ~bit)
    return flags


def _body_rows(body: Any) -> pa.Array:
    if isinstance(body, pa.ChunkedArray):
        body = body.combine_chunks()
    if not isinstance(body, pa.Array):
        try:
            body = pa.array(body, pa.binary())
        except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError) as error:
            raise BadRequestError(f"a body is not bytes: {error}", "body", "pass bytes") from None
    try:
        column = body.cast(pa.binary())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise BadRequestError(f"bodies of Arrow type {body.type} cannot be encoded", "body", "use binary") from None
    return pc.fill_null(column, b"") if column.null_count else column


def _column(value: Any, n: int, name: str, kind: pa.DataType) -> pa.Array:
    """Return ``value`` as a column of ``kind`` with n rows; a single value is repeated."""
    if isinstance(value, pa.Scalar):
        value = value.as_py()
    if isinstance(value, pa.ChunkedArray):
        value = value.combine_chunks()
    try:
        if isinstance(value, (str, bytes, int)) or value is None:
            return constant_column(value, n, kind)
        column = value.cast(kind) if isinstance(value, pa.Array) else pa.array(value, kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError, TypeError) as error:
        raise BadRequestError(f"{name} does not fit {kind}: {error}", name, "") from None
    if len(column) != n:
        raise BadRequestError(f"{name} has another number of rows", name, "", {"rows": len(column), "bodies": n})
    return column


def _required(value: Any, n: int, name: str, kind: pa.DataType) -> pa.Array:
    column = _column(value, n, name, kind)
    if column.null_count:
        raise BadRequestError(f"{name} is null", name, "every message needs one")
    return column


def _texts(value: Any, n: int, name: str) -> pa.StringArray:
    return _required(value, n, name, pa.string())


def _optional(value: Any, n: int, name: str) -> pa.StringArray | None:
    return None if value is None else _column(value, n, name, pa.string())


def _map(value: Any, n: int) -> pa.MapArray | None:
    kind = pa.map_(pa.string(), pa.string())
    if value is None:
        return None
    if not isinstance(value, (pa.Array, pa.ChunkedArray)):
        one_for_all = isinstance(value, dict)
        value = [list(row.items()) if isinstance(row, dict) else row for row in ([value] * n if one_for_all else value)]
    return _column(value, n, "properties", kind)


def _integers(value: Any, n: int, name: str, kind: pa.DataType) -> IntArray:
    return np.asarray(_required(value, n, name, kind))


def _millis(value: Any, n: int, name: str, now: int) -> IntArray:
    if isinstance(value, (pa.Array, pa.ChunkedArray)) and pa.types.is_timestamp(value.type):
        value = pc.cast(value, pa.timestamp("ms", value.type.tz), safe=False).cast(pa.int64())
    return _integers(now if value is None else value, n, name, pa.int64())


def _hosts(value: Any, n: int) -> pa.BinaryArray:
    if isinstance(value, str):
        return constant_column(pack_host(value), n, pa.binary())
    encoded = _texts(value, n, "host").dictionary_encode()
    return pa.array([pack_host(text) for text in encoded.dictionary.to_pylist()], pa.binary()).take(encoded.indices)


def _topic_bytes(topics: pa.StringArray) -> IntArray:
    lengths = np.asarray(pc.binary_length(topics), np.int64)
    if len(lengths) and (int(lengths.min()) == 0 or int(lengths.max()) > _TOPIC_BYTES_MAX):
        values = {"shortest": int(lengths.min()), "longest": int(lengths.max())}
        raise BadRequestError("a topic has 1 to 32767 bytes", "topic", "", values)
    if pc.any(pc.match_substring(topics, "\0")).as_py():
        raise BadRequestError("a topic holds 0x00", "topic", "readers would take it for damage")
    return lengths


def _topic_lengths(topic_bytes: IntArray) -> pa.BinaryArray:
    """Return one byte, or two for a V2 record."""
    wide = topic_bytes > layout.V1_TOPIC_BYTES_MAX
    if not wide.any():
        return _fixed(topic_bytes.astype(np.uint8))
    pairs = topic_bytes.astype(">u2").view(np.uint8).reshape(-1, 2)
    keep = np.column_stack([wide, np.ones(len(wide), np.bool_)])
    return binary_column(pairs[keep], np.where(wide, 2, 1))


def _text_lengths(text: pa.StringArray) -> pa.BinaryArray:
    return _fixed(np.asarray(pc.binary_length(text)).astype(">u2"))


def _fixed(values: Any) -> pa.BinaryArray:
    """Return the bytes of each element of a numpy array; shares the array's memory."""
    n, width = len(values), values.dtype.itemsize
    offsets = pa.py_buffer(np.arange(0, (n + 1) * width, width, dtype=np.int32) if n else np.zeros(1, np.int32))
    return pa.Array.from_buffers(pa.binary(), n, [None, offsets, pa.py_buffer(values)])
