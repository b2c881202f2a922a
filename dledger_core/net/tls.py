"""TLS of a connection: files, contexts of both sides, and the identity in a certificate.

A certificate names one identity: the part after ``dledger:`` of a URI in its subject alternative names, or its common
name where it has no such URI. For a node it is the node id, so that a node may move to another address; for a client it
is the name of a principal.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dledger_core.errors import ConfigError, UnauthenticatedError

URI_PREFIX: Final = "dledger:"
_EXPIRED: Final = 10
"""OpenSSL's X509_V_ERR_CERT_HAS_EXPIRED."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsOptions:
    """Files, in PEM format, of a side that connects with TLS.

    Attributes:
        ca: certificates of the authorities that issue the nodes' certificates.
        cert: this side's certificate; None = it authenticates with a token.
        key: the key of ``cert``; None = it is in the same file.
    """

    ca: Path | str
    cert: Path | str | None = None
    key: Path | str | None = None

    def __post_init__(self) -> None:
        if self.key is not None and self.cert is None:
            raise ConfigError("tls: a key without a certificate", str(self.key), "name the certificate too")

    @property
    def paths(self) -> list[Path]:
        """The files."""
        return [Path(path) for path in (self.ca, self.cert, self.key) if path is not None]

    def context(self) -> ssl.SSLContext:
        """Return the context of a connection to a node; raise ConfigError if a file cannot be used."""
        context = _context(ssl.PROTOCOL_TLS_CLIENT)
        # The identity is the node id, which ``Connection`` checks before it sends anything, and not the host name.
        context.check_hostname = False
        load_authorities(context, Path(self.ca))
        if self.cert is not None:
            load_certificate(context, Path(self.cert), None if self.key is None else Path(self.key))
        return context


def listening_context(cert: Path, key: Path, authorities: list[Path]) -> ssl.SSLContext:
    """Return the context of a port, on which the other side may show a certificate of one of the authorities."""
    context = _context(ssl.PROTOCOL_TLS_SERVER)
    load_certificate(context, cert, key)
    for path in authorities:
        load_authorities(context, path)
    context.verify_mode = ssl.CERT_OPTIONAL
    # A resumed session is not verified again, so a certificate would outlive its authority's removal.
    context.num_tickets = 0
    context.options |= ssl.OP_NO_TICKET
    # In TLS 1.2 a client could ask for one handshake after the other on one connection.
    context.options |= ssl.OP_NO_RENEGOTIATION
    return context


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def load_certificate(context: ssl.SSLContext, cert: Path, key: Path | None) -> None:
    """Load this side's certificate and its key; raise ConfigError."""
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except ssl.SSLError as error:
        what = f"the certificate and the key cannot be used: {error.reason or error}"
        remedy = "use PEM files without a password that belong together"
        raise ConfigError(what, f"{cert}, {key or cert}", remedy) from None
    except OSError as error:
        what = f"the certificate or the key cannot be read: {error.strerror}"
        raise ConfigError(what, f"{cert}, {key or cert}", "check the files and their permissions") from None


def _no_password() -> str:
    return ""  # otherwise OpenSSL asks for one on the terminal


def load_authorities(context: ssl.SSLContext, path: Path) -> None:
    """Trust the authorities of a file; raise ConfigError."""
    try:
        context.load_verify_locations(cafile=path)
    except ssl.SSLError as error:
        what = f"not a file with certificates of authorities: {error.reason or error}"
        raise ConfigError(what, str(path), "use a PEM file") from None
    except OSError as error:
        what = f"the authorities' certificates cannot be read: {error.strerror}"
        raise ConfigError(what, str(path), "check the file and its permissions") from None


@dataclass(frozen=True, slots=True)
class PeerCertificate:
    """The verified certificate of the other side.

    Attributes:
        identity: node id or name of a principal, empty if it names none or several.
        der: its encoding.
        is_ours: whether a URI ``dledger:NAME`` has the identity; other programs have common names too.
    """

    identity: str
    der: bytes
    is_ours: bool = False

    @classmethod
    def of(cls, connection: ssl.SSLObject | ssl.SSLSocket) -> PeerCertificate | None:
        """Return the certificate that the other side has shown, None if it has shown none."""
        der = connection.getpeercert(binary_form=True)
        if not der:
            return None
        fields = connection.getpeercert() or {}
        return cls(_identity(fields), der, bool(_named_by_uri(fields)))


def shown_certificate(server: ssl.SSLContext, client: ssl.SSLContext) -> PeerCertificate | None:
    """Return the server's certificate as the client sees it, by a handshake in memory.

    Raises:
        ssl.SSLError: one side does not accept the other one.
    """
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    connection = client.wrap_bio(to_client, to_server)
    pending = [connection, server.wrap_bio(to_server, to_client, server_side=True)]
    while pending:
        side = pending.pop(0)
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            pending.append(side)
    return PeerCertificate.of(connection)


def _named_by_uri(fields: Mapping[str, Any]) -> list[str]:
    uris = [value for kind, value in fields.get("subjectAltName", ()) if kind == "URI"]
    return [uri.removeprefix(URI_PREFIX) for uri in uris if uri.startswith(URI_PREFIX)]


def _identity(fields: Mapping[str, Any]) -> str:
    named = _named_by_uri(fields)
    if not named:
        named = [value for part in fields.get("subject", ()) for name, value in part if name == "commonName"]
    return str(named[0]) if len(named) == 1 else ""


async def speaks_tls(host: str, port: int, timeout_s: float) -> bool:
    """Whether a port completes a TLS handshake; nothing is sent on the connection."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # no data follows, so it does not matter whose certificate it is
    try:
        async with asyncio.timeout(timeout_s):
            transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, host, port, ssl=context)
    except (OSError, TimeoutError):
        return False
    transport.abort()
    return True


def handshake_error(error: ssl.SSLError, address: str) -> UnauthenticatedError:
    """Return the error of a failed handshake. It is not retriable: a file has to change."""
    if isinstance(error, ssl.SSLCertVerificationError) and error.verify_code == _EXPIRED:
        return UnauthenticatedError(
            "the node's certificate, or its authority's, has expired",
            address,
            "give the node a new certificate in the file of --tls-cert; it is used without a restart",
        )
    if isinstance(error, ssl.SSLCertVerificationError):
        return UnauthenticatedError(
            f"the node's certificate is not trusted: {error.verify_message}",
            address,
            "name the authority of the nodes' certificates with --tls-ca",
        )
    return UnauthenticatedError(
        f"the TLS handshake failed: {error.reason or error}",
        address,
        "check that the port speaks TLS, and the certificates of both sides",
    )
