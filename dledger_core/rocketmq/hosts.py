"""Hosts of messages: 4 or 16 address bytes and a 4-byte port, as ``127.0.0.1:10911`` or ``[::1]:10911``."""

from __future__ import annotations

import socket
import struct
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from dledger_core.errors import BadRequestError
from dledger_core.rocketmq.columns import BoolArray, Bytes, IntArray, field

__all__ = ["message_ids", "pack_host", "read_hosts"]

_HEX = np.frombuffer(b"".join(b"%02X" % byte for byte in range(256)), np.uint16)


def read_hosts(data: Bytes, at: IntArray, ipv6: BoolArray) -> pa.StringArray:
    """Returns the host at each of the byte offsets ``at``, of 20 bytes where ``ipv6``, else of 8."""
    if ipv6.any():
        wide = np.flatnonzero(ipv6)
        rows = [_host_text(data[start : start + 20].tobytes()) for start in at[wide].tolist()]
        narrow = np.flatnonzero(~ipv6)
        both = pa.concat_arrays([read_hosts(data, at[narrow], ipv6[narrow]), pa.array(rows, pa.string())])
        order = np.empty(len(at), np.int64)
        order[narrow], order[wide] = np.arange(len(narrow)), np.arange(len(narrow), len(at))
        return both.take(pa.array(order))
    encoded = pa.array(field(data, ">i8", at)).dictionary_encode()
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
    """Returns the bytes of ``address:port`` or ``[IPv6 address]:port``; names are not looked up.

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


def message_ids(data: Bytes, store_host: IntArray, ipv6: BoolArray, starts: IntArray) -> pa.StringArray:
    """Returns RocketMQ's offset message ids: upper-case hex of store host and physical offset."""
    n = len(starts)
    host_bytes = 20 if ipv6.any() else 8
    text: Any = np.empty((n, host_bytes + 8), np.uint16)
    narrow = ~ipv6
    text[narrow, :8] = _HEX[_take(data, store_host[narrow], 8)]
    text[narrow, 8:16] = _HEX[_take(data, starts[narrow] + 28, 8)]
    if host_bytes == 8:
        lengths = np.full(n, 32, np.int32)
        blob = text
    else:
        text[ipv6, :20] = _HEX[_take(data, store_host[ipv6], 20)]
        text[ipv6, 20:] = _HEX[_take(data, starts[ipv6] + 28, 8)]
        lengths = np.where(ipv6, 56, 32).astype(np.int32)
        blob = text[np.arange(28) < (lengths // 2)[:, None]]
    offsets = np.zeros(n + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(blob))]
    return pa.Array.from_buffers(pa.string(), n, buffers)


def _take(data: Bytes, at: IntArray, width: int) -> Any:
    pieces = field(data, f"V{width}", at)
    return pieces.view(np.uint8).reshape(len(at), width)
