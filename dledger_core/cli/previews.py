"""Values on one line of a terminal: escaped, shortened in the middle, other bytes than text as hex."""

from __future__ import annotations

import codecs
import re
from typing import Final

from rich.cells import cell_len, set_cell_size

_HEX_WITH_SIZE: Final = 32
"""A narrower preview of bytes leaves out their number."""
_BINARY: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f]")
"""Characters that no text contains: control characters without tab, line ends and escape."""


def visible(text: str) -> str:
    """Return ``text`` with escapes for all characters that are not printable, such as line ends and text directions."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


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
            rest = body[-ends:].lstrip(bytes(range(0x80, 0xC0))).decode()  # without a partial character
    except UnicodeDecodeError:
        return _hex(body, width)
    if _BINARY.search(text) or _BINARY.search(rest or ""):
        return _hex(body, width)
    if rest is not None and width is not None:
        return _joined(visible(text), visible(rest), width)
    return visible(text) if width is None else shortened(visible(text), width)


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
    if width <= 0:
        return ""
    left = (width - 1) // 2
    # Half of a wide character becomes a space.
    head, tail = set_cell_size(start, left).rstrip(), set_cell_size(end[::-1], width - 1 - left).rstrip()
    return f"{head}…{tail[::-1]}"
