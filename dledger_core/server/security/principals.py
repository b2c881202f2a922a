"""Principals: the names behind tokens and clients' certificates, and their permissions on groups.

The file is TOML with a table per principal::

    [ingest]
    token-sha256 = ["9f86d0..."]    # none = it authenticates with a certificate of this identity
    read = ["orders"]               # names of groups, or "*" for all
    append = ["orders"]
    admin = []

No permission includes another one. The file has digests only, so a copy of it opens nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, get_args

from dledger_core.config import check_group_name
from dledger_core.errors import ConfigError, UnauthenticatedError
from dledger_core.net.reloading import Reloaded
from dledger_core.toml_file import read_toml

Permission = Literal["read", "append", "admin"]
PERMISSIONS: Final[tuple[Permission, ...]] = get_args(Permission)
ALL_GROUPS: Final = "*"
_TOKENS: Final = "token-sha256"
_NAME: Final = re.compile(r"[\w.@:/+-]{1,128}", re.ASCII)
_DIGEST: Final = re.compile(r"[0-9a-fA-F]{64}", re.ASCII)
_BEARER: Final = "bearer "


@dataclass(frozen=True, slots=True)
class Principal:
    """A client or a node that has authenticated itself.

    Attributes:
        name: name in the file; ``node:ID`` for a node.
        groups: names of groups, or ``*``, by permission.
        digests: SHA-256 of each of its tokens.
    """

    name: str
    groups: Mapping[Permission, frozenset[str]]
    digests: tuple[bytes, ...] = field(default=(), repr=False)

    @classmethod
    def of_node(cls, node_id: str) -> Principal:
        """Return the principal of a node, which has all permissions: it has a copy of the log."""
        return cls(f"node:{node_id}", dict.fromkeys(PERMISSIONS, frozenset({ALL_GROUPS})))

    def may(self, permission: Permission, group: str) -> bool:
        """Whether the principal has a permission on a group."""
        groups = self.groups[permission]
        return group in groups or ALL_GROUPS in groups

    def may_any(self, group: str) -> bool:
        """Whether the principal has some permission on a group."""
        return any(self.may(permission, group) for permission in PERMISSIONS)


def token_digest(token: str) -> bytes:
    """Return the SHA-256 of a token. A token is random, so that a slow hash would add nothing."""
    return hashlib.sha256(token.encode()).digest()


class Principals:
    """The principals of a file, which takes effect again when it changes.

    Args:
        path: the file.

    Raises:
        ConfigError: the file cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self._file = Reloaded([path], lambda: _read(path))

    def refresh(self) -> None:
        """Read the file if it has changed."""
        self._file.get()

    @property
    def generation(self) -> int:
        """A number that changes whenever the principals do."""
        return self._file.generation

    def named(self, name: str) -> Principal | None:
        """Return the principal of this name."""
        return self._file.get().get(name)

    def of_token(self, token: str) -> Principal | None:
        """Return the principal with this token. The time does not depend on how much of a token is right."""
        digest, found = token_digest(token), None
        for principal in self._file.get().values():
            for known in principal.digests:
                if hmac.compare_digest(known, digest):
                    found = principal
        return found

    def of_authorization(self, header: str) -> Principal:
        """Return the principal of an HTTP request's Authorization header; raise UnauthenticatedError."""
        token = header[len(_BEARER) :].strip() if header[: len(_BEARER)].lower() == _BEARER else ""
        principal = self.of_token(token) if token else None
        if principal is None:
            raise UnauthenticatedError("no valid token", "", "send 'Authorization: Bearer TOKEN'")
        return principal


def _read(path: Path) -> dict[str, Principal]:
    tables = read_toml(path, "file of principals", "--tokens")
    found = {name: _principal(name, table, str(path)) for name, table in tables.items()}
    digests = [digest for principal in found.values() for digest in principal.digests]
    if len(set(digests)) != len(digests):
        raise ConfigError("two principals have the same token", str(path), "give each principal a token of its own")
    return found


def _principal(name: str, table: Any, where: str) -> Principal:
    def wrong(what: str) -> ConfigError:
        remedy = f'write ["{name}"] with {_TOKENS}, {", ".join(PERMISSIONS)}, each a list of strings'
        return ConfigError(f"principal {name!r}: {what}", where, remedy)

    if not _NAME.fullmatch(name) or name.startswith("node:"):
        raise ConfigError(
            f"{name!r} is not a name of a principal", where, "use 1 to 128 letters, digits, _ . @ : / + -, not node:"
        )
    if not isinstance(table, dict):
        raise wrong("it is not a table")
    for key, values in table.items():
        if key not in (_TOKENS, *PERMISSIONS):
            raise wrong(f"unknown key {key!r}")
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise wrong(f"{key} is not a list of strings")
    groups = {permission: frozenset(table.get(permission, ())) for permission in PERMISSIONS}
    for group in frozenset().union(*groups.values()) - {ALL_GROUPS}:
        check_group_name(group)
    tokens = table.get(_TOKENS, [])
    if not all(map(_DIGEST.fullmatch, tokens)):
        raise wrong(f"{_TOKENS} is not a SHA-256 in hexadecimal")
    return Principal(name, groups, tuple(map(bytes.fromhex, tokens)))
