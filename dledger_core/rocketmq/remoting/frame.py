"""Frames of RocketMQ's remoting protocol as bytes, without I/O.

::

    int32  length = 4 + header bytes + body bytes           big-endian, does not count itself
    int32  serialize type << 24 | header bytes              type 0 = JSON, 1 = binary
    bytes  header
    bytes  body

    binary header:  int16 code | int8 language | int16 version | int32 opaque | int32 flag
                    int32 bytes, remark | int32 bytes, fields: (int16 bytes, name | int32 bytes, value)*

DLedger's request codes (50000 and above) do not fit a binary header's signed 16 bits: a JVM that was started with
``rocketmq.serialize.type=ROCKETMQ`` sends them cut, and here they are read as unsigned.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from dledger_core.errors import ProtocolError

JSON: Final = 0
BINARY: Final = 1
FRAME_BYTES_MAX: Final = 16 << 20
"""Java's limit (``com.rocketmq.remoting.frameMaxLength``): it closes the connection above it."""
HEADER_BYTES_MAX: Final = 64 << 10
FIELDS_MAX: Final = 1024
_REPLY_FLAG: Final = 1
_ONEWAY_FLAG: Final = 2
_PREFIX = struct.Struct(">iI")
_BINARY = struct.Struct(">hbhii")
_SHORT = struct.Struct(">h")
_INT = struct.Struct(">i")
_INT_MIN, _INT_MAX = -(1 << 31), (1 << 31) - 1
_LANGUAGES: Final = (
    "JAVA", "CPP", "DOTNET", "PYTHON", "DELPHI", "ERLANG", "RUBY", "OTHER", "HTTP", "GO", "PHP", "OMS",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotingFrame:
    """One request or response.

    Attributes:
        code: kind of the request; 200 in the response to a handled request.
        opaque: number of the request, repeated in its response.
        flag: bit 0 = response, bit 1 = no response expected.
        body: DLedger's JSON.
        remark: the error, in a response without a usable body.
        fields: name and value of extension fields.
        language: of the sender.
        version: of the sender.
        serialize_type: JSON or BINARY header.
    """

    code: int
    opaque: int
    flag: int = 0
    body: bytes = b""
    remark: str | None = None
    fields: Mapping[str, str] = field(default_factory=dict)
    language: str = "PYTHON"
    version: int = 0
    serialize_type: int = JSON

    @property
    def is_response(self) -> bool:
        """Whether it is a response."""
        return bool(self.flag & _REPLY_FLAG)

    @property
    def is_oneway(self) -> bool:
        """Whether the client expects no response."""
        return bool(self.flag & _ONEWAY_FLAG)

    def response(self, code: int, body: bytes = b"", remark: str | None = None) -> RemotingFrame:
        """Return the response to this request, with a header of the same type."""
        return RemotingFrame(
            code=code,
            opaque=self.opaque,
            flag=_REPLY_FLAG,
            body=body,
            remark=remark,
            serialize_type=self.serialize_type,
        )


def encode_frame(frame: RemotingFrame) -> bytes:
    """Return the frame's bytes.

    Raises:
        ProtocolError: it exceeds a limit.
    """
    header = _json_header(frame) if frame.serialize_type == JSON else _binary_header(frame)
    length = 4 + len(header) + len(frame.body)
    if len(header) > HEADER_BYTES_MAX or length > FRAME_BYTES_MAX:
        values = {"header_bytes": len(header), "bytes": length, "limit": FRAME_BYTES_MAX}
        raise ProtocolError("a frame to send is too large", "", "send less at once", values)
    return b"".join((_PREFIX.pack(length, frame.serialize_type << 24 | len(header)), header, frame.body))


def _json_header(frame: RemotingFrame) -> bytes:
    header: dict[str, Any] = {"code": frame.code}
    if frame.fields:
        header["extFields"] = dict(frame.fields)
    header |= {"flag": frame.flag, "language": frame.language, "opaque": frame.opaque}
    if frame.remark is not None:
        header["remark"] = frame.remark
    header |= {"serializeTypeCurrentRPC": "JSON", "version": frame.version}
    return json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def _binary_header(frame: RemotingFrame) -> bytes:
    language = _LANGUAGES.index(frame.language) if frame.language in _LANGUAGES else _LANGUAGES.index("OTHER")
    remark = (frame.remark or "").encode("utf-8", "replace")
    fields = b"".join(_binary_field(name, value) for name, value in frame.fields.items())
    code = (frame.code + 0x8000) % 0x10000 - 0x8000
    try:
        fixed = _BINARY.pack(code, language, frame.version, frame.opaque, frame.flag)
    except struct.error as error:
        raise ProtocolError(f"a frame to send has a number out of range: {error}", "header") from None
    return b"".join((fixed, _INT.pack(len(remark)), remark, _INT.pack(len(fields)), fields))


def _binary_field(name: str, value: str) -> bytes:
    key, content = name.encode("utf-8", "replace"), value.encode("utf-8", "replace")
    if len(key) > 0x7FFF:
        raise ProtocolError("a field's name is too long", "header", "", {"bytes": len(key)})
    return b"".join((_SHORT.pack(len(key)), key, _INT.pack(len(content)), content))


class FrameDecoder:
    """Splits received bytes into frames; buffers at most one frame within its limit.

    Discard it after a ProtocolError.

    Args:
        max_bytes: limit of a frame's length field.
    """

    def __init__(self, max_bytes: int = FRAME_BYTES_MAX) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()
        self._at = 0

    @property
    def buffered_bytes(self) -> int:
        """Received bytes that are not part of a returned frame."""
        return len(self._buffer) - self._at

    def receive_data(self, data: bytes | bytearray | memoryview) -> None:
        """Add received bytes."""
        if self._at:
            del self._buffer[: self._at]
            self._at = 0
        self._buffer += data

    def next_frame(self) -> RemotingFrame | None:
        """Return the next complete frame, None if there is none yet.

        Raises:
            ProtocolError: the input is malformed or exceeds a limit.
        """
        if self.buffered_bytes < 4:
            return None
        (length,) = _INT.unpack_from(self._buffer, self._at)
        if not 4 <= length <= self._max_bytes:
            raise ProtocolError("a frame's length is out of range", "frame", "", {"length": length})
        if self.buffered_bytes >= _PREFIX.size:
            self._check_header_length(length)
        if self.buffered_bytes < 4 + length:
            return None
        _, packed = _PREFIX.unpack_from(self._buffer, self._at)
        header_at = self._at + _PREFIX.size
        body_at, end = header_at + (packed & 0xFFFFFF), self._at + 4 + length
        header, body = bytes(self._buffer[header_at:body_at]), bytes(memoryview(self._buffer)[body_at:end])
        self._at = end
        return _decode_json(header, body) if packed >> 24 == JSON else _decode_binary(header, body)

    def _check_header_length(self, length: int) -> None:
        """Reject a header as soon as its length is known, before the frame is complete."""
        _, packed = _PREFIX.unpack_from(self._buffer, self._at)
        kind, header_bytes = packed >> 24, packed & 0xFFFFFF
        if kind not in (JSON, BINARY):
            raise ProtocolError("a header's type is unknown", "frame", "", {"type": kind})
        if header_bytes > min(HEADER_BYTES_MAX, length - 4):
            values = {"header_bytes": header_bytes, "length": length, "limit": HEADER_BYTES_MAX}
            raise ProtocolError("a header's length is out of range", "frame", "", values)


def _decode_json(header: bytes, body: bytes) -> RemotingFrame:
    try:
        found = json.loads(header)
    except (ValueError, RecursionError):
        raise ProtocolError("a header is not JSON", "frame") from None
    if not isinstance(found, dict):
        raise ProtocolError("a header is not a JSON object", "frame")
    fields, remark = found.get("extFields") or {}, found.get("remark")
    if not isinstance(fields, dict) or len(fields) > FIELDS_MAX:
        raise ProtocolError("field 'extFields' is malformed", "header")
    return RemotingFrame(
        code=_number(found, "code", None),
        opaque=_number(found, "opaque", 0),
        flag=_number(found, "flag", 0),
        body=body,
        remark=remark if remark is None else str(remark),
        fields={str(name): str(value) for name, value in fields.items() if value is not None},
        language=str(found.get("language") or "OTHER"),
        version=_number(found, "version", 0),
    )


def _number(header: dict[str, Any], name: str, default: int | None) -> int:
    value = header.get(name, default)
    if type(value) is not int or not _INT_MIN <= value <= _INT_MAX:
        raise ProtocolError(f"field {name!r} is not a 32-bit number", "header")
    return value


def _decode_binary(header: bytes, body: bytes) -> RemotingFrame:
    try:
        code, language, version, opaque, flag = _BINARY.unpack_from(header)
        remark, at = _sized(header, _BINARY.size, _INT)
        packed, _ = _sized(header, at, _INT)
        fields = _binary_fields(packed)
        text = remark.decode() if remark else None
    except (struct.error, ValueError) as error:
        raise ProtocolError(f"a binary header is malformed: {error}", "frame") from None
    return RemotingFrame(
        code=code & 0xFFFF,
        opaque=opaque,
        flag=flag,
        body=body,
        remark=text,
        fields=fields,
        language=_LANGUAGES[language] if 0 <= language < len(_LANGUAGES) else "OTHER",
        version=version,
        serialize_type=BINARY,
    )


def _sized(data: bytes, at: int, length: struct.Struct) -> tuple[bytes, int]:
    """Return the bytes behind a length at ``at``, and where they end."""
    (size,) = length.unpack_from(data, at)
    start = at + length.size
    if not 0 <= size <= len(data) - start:
        raise ValueError(f"length {size} at {at}")
    return data[start : start + size], start + size


def _binary_fields(packed: bytes) -> dict[str, str]:
    found: dict[str, str] = {}
    at = 0
    while at < len(packed):
        if len(found) >= FIELDS_MAX:
            raise ValueError("too many fields")
        name, at = _sized(packed, at, _SHORT)
        value, at = _sized(packed, at, _INT)
        found[name.decode()] = value.decode()
    return found
