"""Values on one line of a terminal: escaped, shortened in the middle, other bytes than text as hex."""

from __future__ import annotations

import codecs
import re
from typing import Final

from rich.cells import cell_len

_TEXT_CHARACTERS: Final = 160
_HEX_WITH_SIZE: Final = 32
"""A narrower preview of bytes leaves out their number."""
_BINARY: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f]")
"""Characters that no text contains: control characters without tab, line ends and escape."""
_ESCAPES: Final = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}


def visible(text: str) -> str:
    """Return ``text`` with escapes for all characters that are not printable, such as line ends and text directions."""
    return text if text.isprintable() else "".join(c if c.isprintable() else _escape(c) for c in text)


def _escape(character: str) -> str:
    code = ord(character)
    return _ESCAPES.get(character) or (f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}")


def printable(body: bytes) -> str:
    """Return the first characters of ``body``, printable."""
    text = visible(body[: 4 * _TEXT_CHARACTERS].decode(errors="backslashreplace"))
    return text if len(text) <= _TEXT_CHARACTERS else f"{text[:_TEXT_CHARACTERS]}... ({len(body)} bytes)"


def preview(body: bytes, width: int | None = 48) -> str:
    """Return a body in at most ``width`` cells of a terminal: text shortened in its middle, other bytes as ``0x`` hex.

    Only both ends of a large body are read. None = the complete body.
    """
    if not body:
        return "(empty)" if width is None or width >= len("(empty)") else ""
    ends = 4 * (len(body) if width is None else width)
    try:
        if len(body) <= 2 * ends:
            text, rest = body.decode(), None
        else:
            text = codecs.getincrementaldecoder("utf-8")().decode(body[:ends])
            rest = _without_partial_character(body[-ends:]).decode()
    except UnicodeDecodeError:
        return _hex(body, width)
    if _BINARY.search(text) or _BINARY.search(rest or ""):
        return _hex(body, width)
    text = visible(text)
    if width is None or (rest is None and cell_len(text) <= width):
        return text
    return _joined(text, text if rest is None else visible(rest), width)


def _without_partial_character(data: bytes) -> bytes:
    at = next((at for at in range(min(3, len(data))) if data[at] & 0xC0 != 0x80), 3)
    return data[at:]


def _hex(body: bytes, width: int | None) -> str:
    if width is None or 3 * len(body) + 1 <= width:
        return f"0x{body.hex(' ')}"
    size = f" … ({len(body)} bytes)" if width >= _HEX_WITH_SIZE else " …"
    count = max(0, (width - 1 - len(size)) // 3)
    return f"0x{body[:count].hex(' ')}{size}"[:width]


def shortened(text: str, width: int) -> str:
    """Return a text of at most ``width`` cells of a terminal, shortened in its middle."""
    if len(text) <= width and text.isascii():
        return text
    return text if cell_len(text) <= width else _joined(text, text, width)


def _joined(start: str, end: str, width: int) -> str:
    """Return the first characters of ``start`` and the last ones of ``end``, with an ellipsis between them."""
    left = max(0, width - 1) // 2
    head = _first_cells(start, left)
    tail = _first_cells(end[::-1], width - 1 - left)[::-1]
    return f"{head}…{tail}" if width > 0 else ""


def _first_cells(text: str, width: int) -> str:
    used = 0
    for at, character in enumerate(text):
        used += cell_len(character)
        if used > width:
            return text[:at]
    return text


def padded(text: str, width: int, *, right: bool = False) -> str:
    """Return a text with spaces up to ``width`` cells of a terminal, before it if ``right``."""
    spaces = " " * (width - (len(text) if text.isascii() else cell_len(text)))
    return spaces + text if right else text + spaces
