"""Arrow columns of bytes as numpy arrays, and slices of a buffer as Arrow columns: bytes, texts, hosts, message ids.

The building blocks of the codec: read a field of every record at once, and make a column of slices of a buffer.
Callers check that slices and fields are inside the buffer.
"""

from __future__ import annotations

import re
import socket
import struct
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dledger_core.errors import BadRequestError
from dledger_core.record import slices_of

Bytes = npt.NDArray[np.uint8]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

_COLUMN_BYTES_MAX: Final = (1 << 31) - 1
_SHORT_CHUNK: Final = 20
_ENCODED_SURROGATE: Final = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]?")
_REPLACEMENT: Final = "\ufffd".encode()


@dataclass(frozen=True)
class Rows:
    """A binary column: row i is ``data[starts[i]:starts[i] + lengths[i]]``.

    Attributes:
        data: uint8, the column's bytes.
        starts: int64, shape (n,).
        lengths: int64, shape (n,).
        present: bool, shape (n,); None if no row is null.
    """

    data: Bytes
    starts: IntArray
    lengths: IntArray
    present: BoolArray | None

    def without_head(self, count: int) -> Rows:
        """Return the rows without their first ``count`` bytes; a shorter row gets a length below 0."""
        return replace(self, starts=self.starts + count, lengths=self.lengths - count) if count else self


def rows_of(array: Any, name: str = "bodies") -> Rows:
    """Return an Arrow binary or string column as rows, without a copy of its bytes.

    Raises:
        BadRequestError: another type, or more than 2 GiB.
    """
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    try:
        array = array.cast(pa.large_binary())
    except (AttributeError, pa.ArrowNotImplementedError, pa.ArrowInvalid):
        found = getattr(array, "type", type(array).__name__)
        raise BadRequestError(
            f"a column of type {found} does not contain bytes", name, "use an Arrow binary column"
        ) from None
    if not len(array):
        empty = np.zeros(0, np.int64)
        return Rows(np.zeros(0, np.uint8), empty, empty, None)
    _, offset_buffer, data_buffer = array.buffers()
    offsets = np.frombuffer(offset_buffer, np.int64, len(array) + 1, array.offset * 8)
    first, last = int(offsets[0]), int(offsets[-1])
    if last - first > _COLUMN_BYTES_MAX:
        raise BadRequestError("a column of more than 2 GiB", name, "split it", {"bytes": last - first})
    data = np.frombuffer(data_buffer, np.uint8)[first:last] if data_buffer else np.zeros(0, np.uint8)
    present = np.asarray(array.is_valid()) if array.null_count else None
    return Rows(data, offsets[:-1] - first, np.diff(offsets), present)


def field(data: Bytes, dtype: str, at: IntArray) -> npt.NDArray[Any]:
    """Return the numbers of ``dtype`` at the byte offsets ``at``, in native byte order."""
    kind = np.dtype(dtype)
    return _everywhere(data, kind)[at].astype(kind.newbyteorder("="), copy=False)


def chunks_at(data: Bytes, width: int, at: IntArray) -> Bytes:
    """Return ``width`` bytes at each of the byte offsets ``at``, shape (n, width); a copy."""
    return field(data, f"V{width}", at).view(np.uint8).reshape(len(at), width)


def _everywhere(data: Bytes, kind: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return ``data`` read as ``kind`` at every byte offset, without a copy."""
    count = max(0, len(data) - kind.itemsize + 1)
    return np.ndarray((count,), kind, buffer=data if count else bytes(8), strides=(1,))


def join_chunks(data: Bytes, starts: IntArray, lengths: IntArray) -> Any:
    """Return the concatenation of ``data[starts[i]:starts[i] + lengths[i]]`` as a buffer."""
    total = int(lengths.sum())
    if total > _COLUMN_BYTES_MAX:
        raise BadRequestError("a column would exceed 2 GiB", "messages", "decode fewer at a time", {"bytes": total})
    if not total:
        return b""
    if bool((lengths == lengths[0]).all()):  # often so for names, tags, hosts and ids: read as numbers of that size
        return _everywhere(data, np.dtype(f"V{lengths[0]}"))[starts].view(np.uint8)
    if total <= _SHORT_CHUNK * len(lengths):  # cheaper per byte than per slice
        ends = np.cumsum(lengths)
        return data[np.arange(total) + np.repeat(starts - (ends - lengths), lengths)]
    return slices_of([data], lengths, 0, starts)


def bitmap(present: BoolArray | None) -> pa.Buffer | None:
    """Return Arrow's validity bitmap."""
    return None if present is None else pa.py_buffer(np.packbits(present, bitorder="little"))


def binary_column(blob: Any, lengths: npt.NDArray[np.integer[Any]], present: BoolArray | None = None) -> pa.BinaryArray:
    """Return the binary column whose rows are contiguous in ``blob``."""
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    buffers = [bitmap(present), pa.py_buffer(offsets), pa.py_buffer(blob)]
    return pa.Array.from_buffers(pa.binary(), len(lengths), buffers)


def text_column(data: Bytes, starts: IntArray, lengths: IntArray, present: BoolArray | None = None) -> pa.StringArray:
    """Return a string column of slices; bytes that are not UTF-8 become U+FFFD as in ``java_text``."""
    if present is not None:
        lengths = np.where(present, lengths, 0)
    column = binary_column(join_chunks(data, starts, lengths), lengths, present)
    try:
        return column.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array((None if row is None else java_text(row) for row in column.to_pylist()), pa.string())


def java_text(data: bytes) -> str:
    """Return ``data`` as Java's ``new String(data, UTF_8)`` does.

    Java and Python differ only in surrogates that are encoded on their own (CESU-8): Java reads the bytes of one as a
    single malformed sequence, Python each byte.
    """
    return _ENCODED_SURROGATE.sub(_REPLACEMENT, data).decode("utf-8", "replace")


def constant_column(value: Any, n: int, kind: pa.DataType) -> pa.Array:
    """Return ``value`` n times."""
    return pa.repeat(pa.scalar(value, kind), n)


_HEX = np.frombuffer(b"".join(b"%02X" % byte for byte in range(256)), np.uint16)


def read_hosts(data: Bytes, at: IntArray, ipv6: BoolArray) -> pa.StringArray:
    """Return the host at each of the byte offsets ``at``, 20 bytes each where ``ipv6`` is set, otherwise 8."""
    if ipv6.any():
        wide = np.flatnonzero(ipv6)
        rows = [_host_text(data[start : start + 20].tobytes()) for start in at[wide].tolist()]
        narrow = np.flatnonzero(~ipv6)
        both = pa.concat_arrays([read_hosts(data, at[narrow], ipv6[narrow]), pa.array(rows, pa.string())])
        order = np.empty(len(at), np.int64)
        order[narrow], order[wide] = np.arange(len(narrow)), np.arange(len(narrow), len(at))
        return both.take(pa.array(order))
    hosts = field(data, ">i8", at)
    if len(hosts) and bool((hosts == hosts[0]).all()):  # all of one broker or producer
        return pa.repeat(_host_text(struct.pack(">q", hosts[0])), len(hosts))
    encoded = pa.array(hosts).dictionary_encode()
    texts = [_host_text(struct.pack(">q", host)) for host in encoded.dictionary.to_pylist()]
    return pa.array(texts, pa.string()).take(encoded.indices)


@lru_cache(maxsize=4096)
def _host_text(host: bytes) -> str:
    (port,) = struct.unpack(">i", host[-4:])
    if len(host) == 8:
        return f"{socket.inet_ntop(socket.AF_INET, host[:4])}:{port}"
    return f"[{socket.inet_ntop(socket.AF_INET6, host[:16])}]:{port}"


@lru_cache(maxsize=4096)
def pack_host(text: str) -> bytes:
    """Return the bytes of ``address:port`` or ``[IPv6 address]:port``; names are not looked up.

    Raises:
        BadRequestError: malformed.
    """
    address, colon, port = text.rpartition(":")
    family = socket.AF_INET6 if address.startswith("[") else socket.AF_INET
    try:
        packed = socket.inet_pton(family, address.removeprefix("[").removesuffix("]"))
        return packed + struct.pack(">HH", 0, int(port))
    except (OSError, ValueError, struct.error):
        problem = f"malformed host {text!r}" if colon else f"host {text!r} has no port"
        raise BadRequestError(problem, "host", "write 127.0.0.1:10911 or [::1]:10911") from None


def message_ids(data: Bytes, store_host: IntArray, ipv6: BoolArray, physical_offset: Bytes) -> pa.StringArray:
    """Return RocketMQ's offset message ids: upper-case hex of store host and physical offset.

    Args:
        data: bytes that contain the hosts.
        store_host: offset of each host.
        ipv6: which hosts have 20 bytes instead of 8.
        physical_offset: its bytes as stored, shape (n, 8).
    """
    if not ipv6.any():
        digits = np.empty((len(store_host), 16), np.uint16)
        hosts = field(data, "<u8", store_host)
        same = len(hosts) and bool((hosts == hosts[0]).all())
        digits[:, :8] = _HEX.take(hosts[:1].view(np.uint8) if same else hosts.view(np.uint8).reshape(-1, 8))
        digits[:, 8:] = _HEX.take(physical_offset)
        return _texts(digits, np.full(len(digits), 32, np.int32))
    ids = np.empty((len(store_host), 28), np.uint8)
    narrow = ~ipv6
    ids[narrow, :16] = np.hstack([chunks_at(data, 8, store_host[narrow]), physical_offset[narrow]])
    ids[ipv6] = np.hstack([chunks_at(data, 20, store_host[ipv6]), physical_offset[ipv6]])
    bytes_of = np.where(ipv6, 28, 16)
    return _texts(_HEX.take(ids[np.arange(28) < bytes_of[:, None]]), (2 * bytes_of).astype(np.int32))


def _texts(digits: npt.NDArray[np.uint16], lengths: npt.NDArray[np.int32]) -> pa.StringArray:
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(digits)]
    return pa.Array.from_buffers(pa.string(), len(lengths), buffers)
