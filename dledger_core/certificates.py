"""Read certificates, and make those for a trial of TLS, with a token and a file of principals.

Nodes and clients get an authority each, because the role of a node comes from the authority that
issued a certificate.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dledger_core.environment import install_command
from dledger_core.errors import ConfigError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.x509 import Certificate, CertificateBuilder, GeneralName

DAYS: Final = 365
_AUTHORITY_DAYS: Final = 3650
_CLOCK_SKEW: Final = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """The files in a directory that ``write_certificates`` has filled.

    Attributes:
        directory: the directory.
    """

    directory: Path

    @property
    def nodes_ca(self) -> Path:
        """The authority of the nodes: ``--peer-ca`` of a node, ``--tls-ca`` of a client."""
        return self.directory / "nodes-ca.pem"

    @property
    def clients_ca(self) -> Path:
        """The authority of the clients: ``--tls-ca`` of a node."""
        return self.directory / "clients-ca.pem"

    @property
    def tokens(self) -> Path:
        """The principals: ``--tokens`` of a node."""
        return self.directory / "principals.toml"

    @property
    def token(self) -> Path:
        """The token of the first principal: ``--token-file`` of a client."""
        return self.directory / "token"

    def cert(self, name: str) -> Path:
        """Return the certificate of a node or principal."""
        return self.directory / f"{name}.pem"

    def key(self, name: str) -> Path:
        """Return the key of a node or principal."""
        return self.directory / f"{name}.key"


def write_certificates(
    directory: Path, nodes: Iterable[tuple[str, Sequence[str]]], principal: str = "dev", days: int = DAYS
) -> CertificateFiles:
    """Make the missing files in a directory, and new certificates of the nodes and of the principal in any case.

    Authorities, token and principals of an earlier call stay, so that running nodes take the new certificates.

    Args:
        directory: is created; only its owner can read it.
        nodes: (node id, host names and addresses) of each node.
        principal: name of the client with all permissions on all groups.
        days: time until the certificates expire.

    Raises:
        ConfigError: the package cryptography is missing, or a file cannot be written.
    """
    files = CertificateFiles(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        nodes_ca = _Authority.open(files, "nodes-ca", "dledger nodes")
        for node, hosts in nodes:
            nodes_ca.issue(files, node, hosts, days)
        _Authority.open(files, "clients-ca", "dledger clients").issue(files, principal, (), days)
        if not files.token.exists():
            token = new_token()
            write_private(files.token, f"{token}\n".encode())
            write_private(files.tokens, principal_entry(principal, token, admin=True).encode())
    except OSError as error:
        what = f"the certificates cannot be written: {error.strerror}"
        raise ConfigError(what, str(directory), "name another directory") from None
    return files


def read_certificates(path: Path) -> list[Certificate]:
    """Return the certificates in a file; raise ConfigError."""
    try:
        from cryptography import x509
    except ImportError:
        raise ConfigError("the package cryptography is missing", "", install_command("tls")) from None
    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except OSError as error:
        what = f"the certificates cannot be read: {error.strerror}"
        raise ConfigError(what, str(path), "check the file and its permissions") from None
    except ValueError as error:
        raise ConfigError(f"not a file with certificates: {error}", str(path), "use a PEM file") from None


def expiry_of(path: Path) -> datetime:
    """Return the time when the first certificate in a file expires; raise ConfigError."""
    return min(each.not_valid_after_utc for each in read_certificates(path))


def new_token() -> str:
    """Return a random token."""
    return secrets.token_urlsafe(32)


def digest_of(token: str) -> str:
    """Return the SHA-256 of a token in hexadecimal, as the file of principals has it."""
    return hashlib.sha256(token.encode()).hexdigest()


def principal_entry(name: str, token: str, *, admin: bool = False) -> str:
    """Return the entry of a principal with all groups, for a file of principals."""
    granted = '["*"]' if admin else "[]"
    return f'["{name}"]\ntoken-sha256 = ["{digest_of(token)}"]\nread = ["*"]\nappend = {granted}\nadmin = {granted}\n'


class _Authority:
    """An authority and its key."""

    def __init__(self, certificate: Certificate, key: EllipticCurvePrivateKey) -> None:
        self._certificate = certificate
        self._key = key

    @classmethod
    def open(cls, files: CertificateFiles, name: str, title: str) -> _Authority:
        """Read an authority, or make it."""
        try:
            from cryptography import x509
            from cryptography.hazmat.primitives import serialization
            from cryptography.hazmat.primitives.asymmetric import ec
        except ImportError:
            raise ConfigError("the package cryptography is missing", "", install_command("tls")) from None
        if files.cert(name).exists() and files.key(name).exists():
            key = serialization.load_pem_private_key(files.key(name).read_bytes(), None)
            assert isinstance(key, ec.EllipticCurvePrivateKey)
            return cls(x509.load_pem_x509_certificate(files.cert(name).read_bytes()), key)
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, title)])
        usage = x509.KeyUsage(
            digital_signature=False,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            key_cert_sign=True,
            crl_sign=True,
            encipher_only=False,
            decipher_only=False,
        )
        builder = _dated(x509.CertificateBuilder(), _AUTHORITY_DAYS).subject_name(subject).issuer_name(subject)
        certificate = (
            builder.public_key(key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, _sha256())
        )
        _write_pair(files, name, certificate, key)
        return cls(certificate, key)

    def issue(self, files: CertificateFiles, identity: str, hosts: Sequence[str], days: int) -> None:
        """Issue a certificate and write it with its key."""
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID

        key = ec.generate_private_key(ec.SECP256R1())
        uses = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if hosts else [])]
        names = [x509.UniformResourceIdentifier(f"dledger:{identity}"), *map(_general_name, hosts)]
        builder = _dated(x509.CertificateBuilder(), days).issuer_name(self._certificate.subject)
        certificate = (
            builder.subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, identity)]))
            .public_key(key.public_key())
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, _sha256())
        )
        _write_pair(files, identity, certificate, key)


def _sha256() -> SHA256:
    from cryptography.hazmat.primitives.hashes import SHA256

    return SHA256()


def _dated(builder: CertificateBuilder, days: int) -> CertificateBuilder:
    from cryptography import x509

    now = datetime.now(UTC)
    return (
        builder.serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + timedelta(days=days))
    )


def _general_name(host: str) -> GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write_pair(files: CertificateFiles, name: str, certificate: Certificate, key: EllipticCurvePrivateKey) -> None:
    from cryptography.hazmat.primitives import serialization

    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    write_private(files.key(name), private)
    _write(files.cert(name), certificate.public_bytes(serialization.Encoding.PEM), mode=0o644)


def write_private(path: Path, content: bytes) -> None:
    """Replace a file that only its owner can read; raise OSError."""
    _write(path, content, mode=0o600)


def _write(path: Path, content: bytes, *, mode: int) -> None:
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
    temporary.replace(path)
