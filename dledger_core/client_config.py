"""Settings of clients from a TOML file and from variables: which nodes and group, and how a client introduces itself.

The keys are the names of the options, and a variable is ``DLEDGER_`` with the same name::

    peers = "10.0.0.1:40911,10.0.0.2:40911,10.0.0.3:40911"  # or DLedger's n0-10.0.0.1:40911;n1-...
    group = "orders"
    tls-ca = "nodes-ca.pem"         # names of files are relative to the directory of this file
    token-file = "orders.token"     # or tls-cert and tls-key

An option or argument overrides the variable, the variable the file, the file the default. Commands and jobs have
``--client-config`` and ``DLEDGER_CLIENT_CONFIG``, programs ``Client.from_config``, Spark the option ``client.config``,
which reads no variables. The file has no secret: it names the files that have one, so it may be copied and shown.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, Self

from dledger_core.config import check_group_name, parse_peers
from dledger_core.errors import ConfigError
from dledger_core.net.tls import TlsOptions
from dledger_core.private_file import check_private
from dledger_core.toml_file import check_keys, read_toml

__all__ = ["CLIENT_CONFIG", "LOCAL_PEERS", "LOCAL_PORTS", "ClientConfig", "variable_of"]

CLIENT_CONFIG: Final = "client-config"
"""The option that names the file."""
LOCAL_PORTS: Final = (40911, 40912, 40913)
"""Ports that ``dledger dev`` takes if they are free."""
LOCAL_PEERS: Final = ",".join(f"127.0.0.1:{port}" for port in LOCAL_PORTS)
"""Peers of commands and jobs where option, variable and file name none; one of these nodes may be down."""


def variable_of(option: str) -> str:
    """Return the environment variable of an option."""
    return f"DLEDGER_{option.replace('-', '_').upper()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """Settings of a client; None = not given.

    Attributes:
        peers: the nodes, ``id-host:port`` or ``host:port``; some of them are enough.
        group: the group.
        tls_ca: file with the authority of the nodes' certificates; turns TLS on.
        tls_cert: file with this client's certificate.
        tls_key: file with its key; None = in the same file.
        token_file: file with this client's token, instead of a certificate.
    """

    peers: str | None = None
    group: str | None = None
    tls_ca: Path | str | None = None
    tls_cert: Path | str | None = None
    tls_key: Path | str | None = None
    token_file: Path | str | None = None

    @classmethod
    def read(cls, path: Path | str) -> Self:
        """Return the settings of a file.

        Raises:
            ConfigError: the file cannot be read, a key is unknown, a value is wrong, or others can read the file with
                the token or the key.
        """
        path = Path(path)
        names = {field.name.replace("_", "-"): field.name for field in fields(cls)}
        values = read_toml(path, "settings of the client", f"--{CLIENT_CONFIG}")
        check_keys(values, list(names), path)
        for key, value in values.items():
            if not isinstance(value, str) or not value:
                raise ConfigError(f"{key} must be a string that is not empty", str(path), f'write {key} = "..."')
        try:
            if "peers" in values:
                parse_peers(values["peers"], needs_ids=False)
            if "group" in values:
                check_group_name(values["group"])
        except ConfigError as error:
            raise ConfigError(error.what, str(path), error.remedy) from None
        files = {key: path.parent / value for key, value in values.items() if key not in ("peers", "group")}
        for key in ("token-file", "tls-key" if "tls-key" in files else "tls-cert"):
            if key in files:
                check_private(files[key])
        return cls(**{names[key]: value for key, value in (values | files).items()})

    @classmethod
    def in_effect(cls, path: Path | str | None = None) -> Self:
        """Return the settings of a file, overridden by the variables.

        Args:
            path: the file; None = the one of DLEDGER_CLIENT_CONFIG, if it is set.

        Raises:
            ConfigError: see ``read``.
        """
        path = path or os.environ.get(variable_of(CLIENT_CONFIG))
        variables = {field.name: os.environ.get(variable_of(field.name)) for field in fields(cls)}
        return replace(cls.read(path) if path else cls(), **{name: value for name, value in variables.items() if value})

    @property
    def given(self) -> dict[str, Any]:
        """The values that are given, by attribute."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def tls(self) -> TlsOptions | None:
        """The TLS files, None for plaintext; raises ConfigError if one is given without the authority."""
        if self.tls_ca is not None:
            return TlsOptions(ca=self.tls_ca, cert=self.tls_cert, key=self.tls_key)
        others = {"tls-cert": self.tls_cert, "tls-key": self.tls_key, "token-file": self.token_file}
        for name, value in others.items():
            if value is not None:
                remedy = f"name the authority of the nodes' certificates, or set {variable_of('tls-ca')}"
                raise ConfigError(f"--{name} needs --tls-ca", "", remedy)
        return None

    @property
    def token(self) -> Path | None:
        """The file with the token, None without one."""
        return None if self.token_file is None else Path(self.token_file)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of ``Client`` that are given."""
        values = {"peers": self.peers, "group": self.group, "tls": self.tls, "token": self.token}
        return {name: value for name, value in values.items() if value is not None}
