"""Hosts of messages: 4 or 16 address bytes and a 4-byte port, as ``127.0.0.1:10911`` or ``[::1]:10911``."""

from __future__ import annotations

import socket
import struct
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dledger_core.errors import BadRequestError
from dledger_core.rocketmq.message.columns import BoolArray, Bytes, IntArray, chunks_at, field

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
        return packed + struct.pack(">i", int(port))
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
