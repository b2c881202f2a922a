"""How this process introduces itself to nodes: its TLS files and its token."""

from __future__ import annotations

import ssl
from functools import partial
from pathlib import Path
from typing import Final

from dledger_core.errors import ConfigError
from dledger_core.net.reloading import Reloaded
from dledger_core.net.tls import TlsOptions

TOKEN_CHARACTERS_MAX: Final = 1024
"""Hello, with the token, has at most 4 KiB."""


class Credentials:
    """TLS files and token of this side, read again when they change; ``Credentials()`` is plaintext without a token.

    Args:
        tls: the TLS files; None = plaintext.
        token: the token, or the path of the file that contains it.

    Raises:
        ConfigError: a file cannot be used, or a token without TLS.
    """

    def __init__(self, tls: TlsOptions | None = None, token: str | Path | None = None) -> None:
        if token is not None and tls is None:
            what = "a token needs TLS, because plaintext would show it to others"
            raise ConfigError(what, "", "name the authority of the nodes' certificates with --tls-ca")
        self._context = None if tls is None else Reloaded(tls.paths, tls.context)
        self._token = Reloaded([token], partial(_read_token, token)) if isinstance(token, Path) else None
        self._fixed = _checked(token, "") if isinstance(token, str) else ""

    def __repr__(self) -> str:
        return f"<Credentials tls={self._context is not None}>"  # without the token: it may reach a log

    def context(self) -> ssl.SSLContext | None:
        """Return the context of a new connection, None for plaintext."""
        return None if self._context is None else self._context.get()

    def token(self) -> str:
        """Return the token of a new connection, empty = none."""
        return self._fixed if self._token is None else self._token.get()


PLAINTEXT: Final = Credentials()


def _read_token(path: Path) -> str:
    try:
        return _checked(path.read_text(encoding="ascii").strip(), str(path))
    except OSError as error:
        what = f"the token cannot be read: {error.strerror}"
        raise ConfigError(what, str(path), "check --token-file") from None
    except UnicodeDecodeError:
        raise ConfigError("the file contains no token", str(path), "write the token alone into it") from None


def _checked(token: str, where: str) -> str:
    if not (0 < len(token) <= TOKEN_CHARACTERS_MAX and token.isascii() and token.isprintable() and " " not in token):
        what = f"a token must have 1 to {TOKEN_CHARACTERS_MAX} printable characters without spaces"
        raise ConfigError(what, where, "make one with 'dledger tls token NAME'")
    return token
