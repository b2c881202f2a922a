"""Permission to see the second port; the part that knows tokens and certificates passes the check in."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from typing import Literal, Protocol

Action = Literal["read", "append", "admin"]


class Principal(Protocol):
    """A known client."""

    def may(self, action: Action, group: str) -> bool:
        """Whether it may do this in a group."""


PrincipalOf = Callable[[str | None], Principal | None]
"""Gets the value of the header ``Authorization``, None without one; returns its principal, None if it is not known."""


def bearer_of(header: str | None) -> str | None:
    """Return a header ``Authorization`` as a bearer's; a browser sends a token as the password of any user name."""
    if header is None or not header.lower().startswith("basic "):
        return header
    try:
        _, colon, token = base64.b64decode(header[6:].strip(), validate=True).decode("ascii").partition(":")
    except (binascii.Error, UnicodeDecodeError):
        return header
    return f"Bearer {token}" if colon else header
