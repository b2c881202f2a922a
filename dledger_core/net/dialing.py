"""Dialing: opens a connection to a node, and finds out why it cannot be opened."""

from __future__ import annotations

import asyncio
import socket
import ssl
from dataclasses import replace
from typing import Any, Final

from dledger_core.errors import ConfigError, DLedgerError, UnauthenticatedError, UnreachableError
from dledger_core.net.connection import ClosedEarlyError, Connection, Handler
from dledger_core.net.credentials import PLAINTEXT, Credentials
from dledger_core.net.frame import Frame
from dledger_core.net.hello import Hello
from dledger_core.net.session import Session
from dledger_core.net.tls import handshake_error, speaks_tls

_TRIAL_S: Final = 1.0
"""Time to find out whether a port that closes connections speaks TLS."""


class WrongNodeError(ConfigError):
    """The node at an address of a peers string has another id than the string says."""

    @classmethod
    def of(cls, found: str, expected: str, address: str) -> WrongNodeError:
        """Return the error that names both ids."""
        return cls(f"the node at this address is {found}, not {expected}", address, "correct the peers string")


async def connect(
    host: str,
    port: int,
    hello: Hello,
    handler: Handler,
    *,
    timeout_s: float,
    credentials: Credentials = PLAINTEXT,
    identity: str | None = "",
) -> Connection:
    """Open a connection and exchange hello. All connections to native nodes start here.

    Args:
        host: name or address.
        port: TCP port.
        hello: this side's introduction.
        handler: gets the frames.
        timeout_s: limit on the time for all of it, hello included.
        credentials: TLS and token.
        identity: the other side's node id, with TLS also in its certificate; None = any node's.

    Returns:
        A connection whose hello was accepted; ``peer_hello`` is the response.

    Raises:
        UnreachableError: no connection, or no response in time.
        UnauthenticatedError: one side does not accept the certificate or the token of the other one.
        WrongNodeError: the other side is another node.
        DLedgerError: the other side's response to hello.
    """
    try:
        return await _open(host, port, hello, handler, timeout_s=timeout_s, credentials=credentials, identity=identity)
    except ClosedEarlyError as error:
        if (reason := await _mismatch(host, port, hello, credentials)) is not None:
            raise UnauthenticatedError(reason[0], f"{host}:{port}", reason[1]) from None
        raise UnreachableError(*error.args) from None


async def _mismatch(host: str, port: int, hello: Hello, credentials: Credentials) -> tuple[str, str] | None:
    """Return the problem and its remedy if one side of a closed connection speaks TLS and the other one does not.

    Neither trial sends a token, because the other side may be anything
    (``test_connection_with_tls_on_one_side_names_the_remedy``).
    """
    is_node = hello.role == "peer"
    if credentials.context() is None:
        if not await speaks_tls(host, port, _TRIAL_S):
            return None
        node = "give this node --tls-cert, --tls-key, --peer-ca and --tokens"
        client = "give --tls-ca, and --token-file or --tls-cert"
        return "the port speaks TLS, this side does not", node if is_node else client
    try:
        trial = await _open(host, port, Hello(), _Deaf(), timeout_s=_TRIAL_S, credentials=PLAINTEXT, identity=None)
    except DLedgerError:
        return None
    trial.close()
    node = "start it with --tls-cert, --tls-key, --peer-ca and --tokens"
    remedy = node if is_node else f"{node}; on a network that you trust, leave out --tls-ca and the token"
    return "the port does not speak TLS, this side does", remedy


class Dialed:
    """The side that opens a connection.

    Args:
        hello: its introduction.
        handler: gets the frames.
        identity: the other side's node id, see ``connect``.
    """

    def __init__(self, hello: Hello, handler: Handler, identity: str | None = "") -> None:
        self._hello = hello
        self._handler = handler
        self._identity = identity

    def session(self) -> Session:
        """See ``Side``."""
        return Session(self._hello)

    def on_made(self, connection: Connection) -> None:
        """See ``Side``. The other side gets nothing, above all no token, unless it is the node that was dialed."""
        # Its authority proves that it is some node, or some client; only the identity, that it is this one
        # (``test_client_sends_nothing_to_another_node_than_it_dialed``).
        if not connection.has_tls:
            return
        certificate = connection.certificate
        found = "" if certificate is None else certificate.identity
        # Any node will do: a certificate that other programs may have too, with a common name alone, is not enough.
        is_any = self._identity is None and certificate is not None and certificate.is_ours
        if found and (found == self._identity or is_any):
            return
        if found and self._identity and certificate is not None and certificate.is_ours:
            connection.abort(WrongNodeError.of(found, self._identity, connection.peer_address))
            return
        connection.abort(
            UnauthenticatedError(
                f"the certificate at this address is of {found or 'no node'}, not of {self._identity or 'a node'}",
                connection.peer_address,
                "correct the peers string, or the node's certificate",
            )
        )

    def on_hello(self, connection: Connection, hello: Hello) -> None:
        """See ``Side``. The requests for a node must not reach another one."""
        if self._identity and hello.node_id != self._identity:
            connection.abort(WrongNodeError.of(str(hello.node_id), self._identity, connection.peer_address))
            return
        connection.accept(self._handler, hello)

    def on_other_protocol(self, connection: Connection) -> None:
        """See ``Side``. Its session takes no other protocol."""

    def on_request_refused(self, connection: Connection, header: dict[str, Any], error: DLedgerError) -> None:
        """See ``Side``. Only a listening side limits payloads."""


class _Deaf:
    """The handler of a connection that is closed at once."""

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        """Ignore a frame."""

    def on_close(self, connection: Connection, error: Exception | None) -> None:
        """Ignore the end."""


async def _open(
    host: str,
    port: int,
    hello: Hello,
    handler: Handler,
    *,
    timeout_s: float,
    credentials: Credentials,
    identity: str | None,
) -> Connection:
    loop = asyncio.get_running_loop()
    address = f"{host}:{port}"
    connection: Connection | None = None
    delivered = False
    try:
        context, token = credentials.context(), credentials.token()
        introduction = replace(hello, token=token) if token else hello
        async with asyncio.timeout(timeout_s):
            _, connection = await loop.create_connection(
                lambda: Connection(Dialed(introduction, handler, identity)),
                host,
                port,
                ssl=context,
            )
            await asyncio.shield(connection.accepted)
        delivered = True
    except DLedgerError as error:
        where = f"{error.where}, {address}" if error.where and address not in error.where else error.where or address
        raise type(error)(error.what, where, error.remedy, error.values) from None
    except ssl.SSLError as error:
        if not isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
            raise handshake_error(error, address) from None
        raise ClosedEarlyError("cannot connect: the node closed the connection", address, "retry") from None
    except (OSError, TimeoutError, UnicodeError) as error:  # a UnicodeError: not a host name
        reason = "no response in time" if isinstance(error, TimeoutError) else str(error)
        remedy = "check that the node runs and that the address is right"
        is_closed = isinstance(error, ConnectionResetError | ConnectionAbortedError)
        kind = ClosedEarlyError if is_closed else UnreachableError
        values = {"unknown_host": host} if isinstance(error, socket.gaierror) else {}
        raise kind(f"cannot connect: {reason}", address, remedy, values) from None
    finally:
        # Also if the caller was cancelled after hello was accepted: no other code has the connection.
        if connection is not None and not delivered:
            connection.abort()
    return connection
