"""Checks of the certificates, keys and tokens that a node or a client is given."""

from __future__ import annotations

import importlib.util
import shlex
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from dledger_core.certificates import expiry_of
from dledger_core.cli.check import Check
from dledger_core.cli.options import Access
from dledger_core.environment import install_command
from dledger_core.errors import ConfigError
from dledger_core.net.tls import handshake_error, load_certificate, shown_certificate
from dledger_core.private_file import readers_of
from dledger_core.server.security.authentication import Authentication, SecurityFiles

__all__ = ["client_certificates", "node_certificates"]

_SOON: Final = timedelta(days=14)
"""As in the alert ``DLedgerCertificateExpires``."""
_NEW: Final = "make a new one with 'dledger tls dev DIR --peers PEERS' or your authority; no restart is needed"


def node_certificates(node_id: str, files: SecurityFiles) -> Iterator[Check]:
    """Check the files of a node with security."""
    dates = [_dates("certificate", files.cert, _NEW), _authority(files.peer_ca)]
    if files.client_ca is not None:
        dates.append(_authority(files.client_ca))
    yield from dates
    yield _permissions(files.key)
    pair = _pair(files.cert, files.key)
    yield pair
    if pair.result == "ok" and all(each.result != "wrong" for each in dates):
        yield _identity(node_id, files)


def client_certificates(access: Access) -> Iterator[Check]:
    """Check the files of a client."""
    tls = access.tls
    if tls is None:
        return
    if importlib.util.find_spec("cryptography") is None:
        yield Check("certificates", "note", "the package cryptography is missing", install_command("tls"))
    else:
        yield _authority(Path(tls.ca))
        if tls.cert is not None:
            yield _dates("certificate", Path(tls.cert), _NEW)
    if tls.cert is not None:
        key = Path(tls.key or tls.cert)
        yield _permissions(key)
        yield _pair(Path(tls.cert), key)
    if access.token is not None:
        yield _permissions(access.token)


def _authority(path: Path) -> Check:
    remedy = f"add the new authority to {path}, then replace the certificates that the old one issued, then remove it"
    return _dates("authority", path, remedy)


def _dates(kind: str, path: Path, remedy: str) -> Check:
    what = f"{kind} {path}"
    try:
        expiry = expiry_of(path)
    except ConfigError as error:
        return _wrong(what, error)
    left = expiry - datetime.now(UTC)
    if left <= timedelta(0):
        return Check(what, "wrong", f"expired on {expiry:%Y-%m-%d}", remedy)
    found = f"expires on {expiry:%Y-%m-%d}, in {left.days} days"
    return Check(what, "note", found, remedy) if left < _SOON else Check(what, "ok", found)


def _permissions(path: Path) -> Check:
    what = f"permissions of {path}"
    try:
        readers = readers_of(path)
    except OSError as error:
        return Check(what, "wrong", f"the file cannot be read: {error.strerror}", "check its name and its directory")
    if readers:
        return Check(what, "wrong", f"{readers} can read it", f"chmod 600 {shlex.quote(str(path))}")
    return Check(what, "ok", "others cannot read it")


def _pair(cert: Path, key: Path) -> Check:
    what = f"key of {cert}"
    try:
        load_certificate(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), cert, key)
    except ConfigError as error:
        return _wrong(what, error)
    return Check(what, "ok", f"{key} belongs to it")


def _identity(node_id: str, files: SecurityFiles) -> Check:
    """Let the node connect to itself: it sees of its certificate what its peers see, as client and as server."""
    what, cert = f"identity of {node_id}", shlex.quote(str(files.cert))
    try:
        node = Authentication(files)
        client = node.credentials.context()
        assert client is not None
        shown = shown_certificate(node.context(), client)
    except ConfigError as error:
        return _wrong(what, error)
    except ssl.SSLError as error:
        remedy = f"name the authority that 'openssl x509 -noout -issuer -in {cert}' shows with --peer-ca, or {_NEW}"
        return Check(what, "wrong", handshake_error(error, "").what, remedy)
    if shown is None or not node.is_of_node(shown):
        remedy = f"issue the certificate with an authority of {files.peer_ca} itself: {_NEW}"
        return Check(what, "wrong", f"an authority between {files.peer_ca} and {files.cert} issued it", remedy)
    if shown.identity != node_id:
        named = shown.identity or "no node"
        remedy = f"name the certificate of {node_id} with --tls-cert, or {_NEW}"
        return Check(what, "wrong", f"{files.cert} names {named}", remedy)
    return Check(what, "ok", f"{files.cert} names it, and {files.peer_ca} verifies that")


def _wrong(what: str, error: ConfigError) -> Check:
    return Check(what, "wrong", f"{error.what} at {error.where}" if error.where else error.what, error.remedy)
