"""Authentication of connections: certificates of two authorities, and tokens.

A node is a certificate that the nodes' authority has issued directly, with the node's id. OpenSSL has verified the
chain, but to any of the authorities that the port trusts; so the issuer is checked here, by its signature: the name of
an issuer alone can be forged with another authority.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dledger_core.certificates import expiry_of, read_certificates
from dledger_core.errors import ConfigError, UnauthenticatedError
from dledger_core.net.connection import Connection
from dledger_core.net.credentials import Credentials
from dledger_core.net.reloading import Reloaded
from dledger_core.net.tls import PeerCertificate, TlsOptions, listening_context
from dledger_core.server.security.principals import Principal, Principals, token_digest

if TYPE_CHECKING:
    from cryptography.x509 import Certificate


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityFiles:
    """The files of a node with security; all of them take effect again when they change.

    Attributes:
        cert: the node's certificate.
        key: its key.
        peer_ca: the authority that issues the nodes' certificates, and nothing else.
        tokens: the principals.
        client_ca: the authority that issues the clients' certificates; None = clients have tokens.
    """

    cert: Path
    key: Path
    peer_ca: Path
    tokens: Path
    client_ca: Path | None = None


@dataclass(frozen=True, slots=True)
class Grant:
    """The proof that a connection has shown: valid while the file of principals has it.

    Attributes:
        name: the principal.
        digest: SHA-256 of the token; None = a certificate.
        is_node: whether it is a node.
    """

    name: str
    digest: bytes | None = None
    is_node: bool = False

    @property
    def principal(self) -> str:
        """The name of the principal."""
        return f"node:{self.name}" if self.is_node else self.name


class Authentication:
    """Decides who is at the other end of a connection to this node.

    Args:
        files: the node's files.

    Attributes:
        principals: the principals.
        credentials: this node's own, for the connections that it opens.

    Raises:
        ConfigError: a file cannot be used, or both authorities are the same.
    """

    def __init__(self, files: SecurityFiles) -> None:
        authorities = [files.peer_ca, *([] if files.client_ca is None else [files.client_ca])]
        self._files = files
        self._issuers = Reloaded(authorities, self._read_issuers)
        self._context = Reloaded(
            [files.cert, files.key, *authorities], lambda: listening_context(files.cert, files.key, authorities)
        )
        self.principals = Principals(files.tokens)
        self.credentials = Credentials(TlsOptions(ca=files.peer_ca, cert=files.cert, key=files.key))

        self._expiry = Reloaded([files.cert, *authorities], lambda: min(map(expiry_of, [files.cert, *authorities])))

    def context(self) -> ssl.SSLContext:
        """Return the context of a new connection to this node."""
        return self._context.get()

    def expiry(self) -> float:
        """Return the time, in seconds since the epoch, when the first of the certificates in the files expires."""
        return self._expiry.get().timestamp()

    def _read_issuers(self) -> list[Certificate]:
        nodes = read_certificates(self._files.peer_ca)
        clients = [] if self._files.client_ca is None else read_certificates(self._files.client_ca)
        if any(client in nodes for client in clients):
            raise ConfigError(
                "nodes and clients have the same authority, so that each client could be a node",
                f"{self._files.peer_ca}, {self._files.client_ca}",
                "use two authorities",
            )
        return nodes

    def is_of_node(self, certificate: PeerCertificate) -> bool:
        """Whether the nodes' authority itself has issued a certificate."""
        from cryptography import x509
        from cryptography.exceptions import InvalidSignature

        found = x509.load_der_x509_certificate(certificate.der)
        for issuer in self._issuers.get():
            try:
                found.verify_directly_issued_by(issuer)
            except (ValueError, TypeError, InvalidSignature):
                continue
            return True
        return False

    def authenticate(self, connection: Connection) -> Grant:
        """Return the proof of a connection whose hello has arrived.

        Raises:
            UnauthenticatedError: it has no valid certificate or token, or claims to be a node that it is not.
        """
        hello, certificate = connection.peer_hello, connection.certificate
        if certificate is not None and certificate.identity and self.is_of_node(certificate):
            if hello.role == "peer" and hello.node_id != certificate.identity:
                what = f"the certificate is of node {certificate.identity}, and not of {hello.node_id}"
                raise _refused(what, connection, "start the node with its own certificate")
            return Grant(certificate.identity, is_node=True)
        if hello.role == "peer":
            what = f"{hello.node_id} has no certificate of the nodes' authority"
            raise _refused(what, connection, "start the node with --tls-cert, --tls-key and the same --peer-ca")
        if hello.token:
            principal = self.principals.of_token(hello.token)
            if principal is None:
                raise _refused(
                    "the token is not valid",
                    connection,
                    "check --token-file; 'dledger tls token' makes a token and the lines for the file of --tokens",
                )
            return Grant(principal.name, token_digest(hello.token))
        if certificate is not None:
            if self.principals.named(certificate.identity) is None:
                what = f"the principal {certificate.identity or 'of the certificate'} is not known"
                raise _refused(what, connection, "add it to the file of --tokens on the nodes")
            return Grant(certificate.identity)
        raise _refused("the client has neither a certificate nor a token", connection, "use --token-file or --tls-cert")

    def principal_of(self, grant: Grant) -> Principal:
        """Return the principal of a proof with its present permissions.

        Raises:
            UnauthenticatedError: the file has the principal, or its token, no longer.
        """
        if grant.is_node:
            return Principal.of_node(grant.name)
        principal = self.principals.named(grant.name)
        if principal is None or (grant.digest is not None and grant.digest not in principal.digests):
            raise UnauthenticatedError(
                f"the principal {grant.name} or its token was removed", "", "connect with a valid token"
            )
        return principal


def _refused(what: str, connection: Connection, remedy: str) -> UnauthenticatedError:
    return UnauthenticatedError(what, connection.peer_address, remedy)
