"""Three nodes with security: certificates, tokens, permissions, as clients and strangers see them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from dledger_core.certificates import CertificateFiles, digest_of, write_certificates
from dledger_core.client.backup import NodeLog
from dledger_core.client.routing.channel import ConnectionLostError
from dledger_core.config import ListenAddress
from dledger_core.connect import AsyncClient
from dledger_core.control import TransactionId
from dledger_core.digest import rows_digest
from dledger_core.errors import (
    ConfigError,
    DLedgerError,
    ForbiddenError,
    OtherLogError,
    UnauthenticatedError,
    UnknownGroupError,
    UnreachableError,
)
from dledger_core.net.credentials import Credentials
from dledger_core.net.dialing import connect
from dledger_core.net.hello import Hello
from dledger_core.net.protocol import Type
from dledger_core.net.tls import TlsOptions
from tests.server.security.secure_group import SecureGroup, Silent, security
from tests.support.server_group import ServerGroup, run

pytest.importorskip("cryptography")
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

NODES = ("n0", "n1", "n2")
PRINCIPALS = f"""
[dev]
token-sha256 = ["{digest_of("all")}"]
read = ["*"]
append = ["*"]
admin = ["*"]
[reader]
token-sha256 = ["{digest_of("read")}"]
read = ["default"]
[writer]
token-sha256 = ["{digest_of("append")}"]
append = ["default"]
[elsewhere]
token-sha256 = ["{digest_of("elsewhere")}"]
read = ["orders"]
append = ["orders"]
admin = ["orders"]
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> CertificateFiles:
    files = write_certificates(tmp_path_factory.mktemp("tls"), [(node, ["127.0.0.1"]) for node in NODES])
    files.tokens.write_text(PRINCIPALS)
    return files


def test_three_nodes_elect_a_leader_and_serve_a_client_over_tls(tmp_path, made) -> None:
    async def test() -> None:
        async with SecureGroup(tmp_path, made, 3) as group, group.open("all") as client:
            appended = await client.append([b"a", b"b"])
            rows = await client.read(appended.first_index, appended.last_index + 1)
            assert rows["body"].to_pylist() == [b"a", b"b"]
            await client.transfer_leadership((await group.followers())[0])

    run(test())


def test_client_certificate_names_its_principal(tmp_path, made) -> None:
    async def test() -> None:
        async with SecureGroup(tmp_path, made) as group, group.open(cert="dev") as client:
            assert (await client.append([b"a"])).term > 0

    run(test())


@pytest.mark.parametrize("token", [None, "wrong"], ids=["without_token", "wrong_token"])
def test_stranger_is_unauthenticated_at_once(tmp_path, made, token) -> None:
    async def test() -> None:
        async with SecureGroup(tmp_path, made) as group:
            await group.leader()
            async with group.open(token) as client:
                with pytest.raises(UnauthenticatedError) as raised:
                    await client.append([b"a"])
                assert "wrong" not in str(raised.value)
                with pytest.raises(UnauthenticatedError):
                    await client.read(0, 1)
                with pytest.raises(UnauthenticatedError):
                    await client.metadata()

    run(test())


@pytest.mark.parametrize(
    ("token", "allowed"), [("read", {"read"}), ("append", {"append"}), ("elsewhere", set())], ids=str
)
def test_permissions_are_denied_by_default(tmp_path, made, token, allowed) -> None:
    async def test() -> None:
        async with SecureGroup(tmp_path, made, 2) as group, group.open("all") as owner, group.open(token) as client:
            first = (await owner.append([b"a"])).first_index
            calls = {
                "append": lambda: client.append([b"b"]),
                "read": lambda: client.read(first, first + 1),
                "admin": lambda: client.transfer_leadership("n1"),
            }
            for permission, call in calls.items():
                if permission in allowed:
                    await call()
                else:
                    with pytest.raises(ForbiddenError):
                        await call()

    run(test())


def test_backup_needs_admin_although_its_records_are_readable(tmp_path, made) -> None:
    async def test() -> None:
        async with SecureGroup(tmp_path, made) as group, group.open("all") as owner:
            first = (await owner.append([b"a"])).first_index
            for token in ("all", "read", "append"):
                backup = NodeLog(group.peers, "n0", "default", 20.0, Credentials(group.tls, token))
                if token == "all":
                    fields, _ = await backup.start(first)
                    assert fields["last_index"] >= first
                else:
                    with pytest.raises(ForbiddenError):
                        await backup.start(first)
                await backup.end()

    run(test())


def test_lies_of_an_archive_job_record_nothing(tmp_path, made) -> None:
    async def test() -> None:
        async with SecureGroup(tmp_path, made) as group, group.open("all") as client:
            await client.append([b"a", b"b", b"c"])
            end = (await client.bounds()).end
            entries = pa.Table.from_batches([await client.read(0, end)])

            def claim(start: int, end: int, digest: bytes | None = None, **fields: Any) -> dict[str, Any]:
                inside = pc.and_(pc.greater_equal(entries["index"], start), pc.less(entries["index"], end))
                rows = rows_digest(entries.filter(inside))
                found = {"start": start, "end": end, "rows": rows.rows, "digest": digest or rows.digest}
                return found | {"table": "file:///archive"} | fields

            async def prove(token: str, claimed: dict[str, Any]) -> object:
                try:
                    return (await (await group.raw(token)).ask(Type.PROVE, **claimed)).header["equal"]
                except DLedgerError as error:
                    return getattr(error, "reason", type(error))

            lies: list[tuple[str, str, dict[str, Any], object]] = [
                ("another digest", "all", claim(0, 2, b"d" * 32), False),
                ("rows of another range", "all", claim(0, 2) | {"end": 3}, False),
                ("number of rows", "all", claim(0, 2, rows=7), False),
                ("gap at the start", "all", claim(1, 3), "not-next"),
                ("beyond what is visible", "all", claim(0, end + 1), "not-visible"),
                ("another log", "all", claim(0, 2, lu="f" * 32), OtherLogError),
                ("another group", "all", claim(0, 2, g="orders"), UnknownGroupError),
                ("a producer", "append", claim(0, 2), ForbiddenError),
                ("a reader", "read", claim(0, 2), ForbiddenError),
            ]
            for name, token, claimed, refusal in lies:
                assert await prove(token, claimed) == refusal, name
            assert (await client.bounds()).end == end, "nothing was appended"
            assert await prove("all", claim(0, 2)) is True
            later = [
                ("gap", claim(3, end), "not-next"),
                ("overlap", claim(1, 3), "not-next"),
                ("the same range, longer", claim(0, 3), "not-next"),
                ("the same range, other rows", claim(0, 2, b"d" * 32), False),
            ]
            for name, claimed, refusal in later:
                assert await prove("all", claimed) == refusal, name
            recorded = await client.archived_ranges()
            assert [(found.start, found.end) for found in recorded.ranges] == [(0, 2)]

    run(test())


def test_writer_ends_its_own_transactions_and_only_an_admin_lists_and_ends_any(tmp_path, made) -> None:
    async def test() -> None:
        async with SecureGroup(tmp_path, made) as group, group.open("all") as admin, group.open("append") as writer:
            for batch_id in (0, 1):
                own = TransactionId("query", batch_id, "run")
                await writer.append_attempt([b"a"], transaction=own, attempt="x")
            assert (await writer.transaction(own)).state == "open"
            with pytest.raises(ForbiddenError):
                await writer.abort_transaction(own._replace(run_id=""))
            for table in ("transactions", "producers"):
                with pytest.raises(ForbiddenError):
                    await writer.describe(table)
            assert (await writer.abort_transaction(own)).state == "aborted"
            assert (await admin.describe("transactions"))["batch_id"].to_pylist() == [0]
            await admin.abort_transaction(TransactionId("query", 0))
            assert (await admin.describe("transactions")).num_rows == 0

    run(test())


def test_removed_token_ends_an_open_connection(tmp_path, made) -> None:
    own = CertificateFiles(tmp_path)

    async def test() -> None:
        own.tokens.write_text(PRINCIPALS)
        group = SecureGroup(tmp_path / "group", made, files={"tokens": own.tokens})
        async with group, group.open("read") as client:
            await group.leader()
            await client.read(0, 1)
            own.tokens.write_text(PRINCIPALS.replace(digest_of("read"), digest_of("other")))

            async def ends() -> None:
                while True:
                    await client.read(0, 1)
                    await asyncio.sleep(0.02)

            with pytest.raises(UnauthenticatedError):
                await asyncio.wait_for(ends(), 30)

    run(test())


def test_new_certificates_are_used_without_restart(tmp_path) -> None:
    made = write_certificates(tmp_path / "tls", [("n0", ["127.0.0.1"])])
    made.tokens.write_text(PRINCIPALS)

    async def test() -> None:
        async with SecureGroup(tmp_path / "group", made) as group, group.open("all") as client:
            await client.append([b"a"])
            credentials = Credentials(TlsOptions(ca=made.nodes_ca), "all")
            before = (await group.dial(Hello(), credentials)).certificate
            write_certificates(made.directory, [("n0", ["127.0.0.1"])])
            after = (await group.dial(Hello(), credentials)).certificate
            assert before is not None
            assert after is not None
            assert before.der != after.der
            await client.append([b"b"])  # an open connection stays

    run(test())


def shown_certificate(port: int, made: CertificateFiles) -> bytes:
    """Return the certificate of a node's second port, verified."""
    context = ssl.create_default_context(cafile=str(made.nodes_ca))
    with (
        socket.create_connection(("127.0.0.1", port), timeout=20) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
    ):
        found = connection.getpeercert(binary_form=True)
    assert found is not None
    return found


def test_second_port_uses_new_certificates_without_restart(tmp_path) -> None:
    made = write_certificates(tmp_path / "tls", [("n0", ["127.0.0.1"])])
    made.tokens.write_text(PRINCIPALS)

    async def test() -> None:
        async with SecureGroup(tmp_path / "group", made, http=ListenAddress("127.0.0.1", 0)) as group:
            port = group.nodes["n0"].http_port
            before = await asyncio.to_thread(shown_certificate, port, made)
            assert before == await asyncio.to_thread(shown_certificate, port, made)
            write_certificates(made.directory, [("n0", ["127.0.0.1"])])
            assert before != await asyncio.to_thread(shown_certificate, port, made)
            made.cert("n0").write_text("not a certificate")
            await asyncio.to_thread(shown_certificate, port, made)

    run(test())


def test_second_port_closes_connections_without_handshake(tmp_path, made) -> None:
    async def test() -> None:
        async with SecureGroup(tmp_path, made, http=ListenAddress("127.0.0.1", 0)) as group:
            port = group.nodes["n0"].http_port
            opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
            await asyncio.to_thread(shown_certificate, port, made)
            for reader, writer in opened:
                assert await asyncio.wait_for(reader.read(), 30) == b""
                writer.close()

    run(test())


def test_half_replaced_certificate_keeps_the_earlier_one(tmp_path) -> None:
    made = write_certificates(tmp_path / "tls", [("n0", ["127.0.0.1"])])
    made.tokens.write_text(PRINCIPALS)

    async def test() -> None:
        async with SecureGroup(tmp_path / "group", made) as group:
            made.cert("n0").write_text("not a certificate")
            async with group.open("all") as client:
                await client.append([b"a"])

    run(test())


@pytest.mark.parametrize("credentials", ["client", "other_node", "token", "none"])
def test_peer_role_needs_the_certificate_of_that_node(tmp_path, made, credentials) -> None:
    tls = {
        "client": TlsOptions(ca=made.nodes_ca, cert=made.cert("dev"), key=made.key("dev")),
        "other_node": TlsOptions(ca=made.nodes_ca, cert=made.cert("n2"), key=made.key("n2")),
        "token": TlsOptions(ca=made.nodes_ca),
        "none": TlsOptions(ca=made.nodes_ca),
    }[credentials]
    token = "all" if credentials == "token" else None

    async def test() -> None:
        async with SecureGroup(tmp_path, made, 2) as group:
            hello = Hello("peer", "n1", "00", (1, 2), "127.0.0.1:1")
            with pytest.raises(UnauthenticatedError):
                await group.dial(hello, Credentials(tls, token))

    run(test())


def test_node_certificate_of_clients_authority_grants_no_peer_role(tmp_path, made) -> None:
    """The clients' authority issues a certificate with the name of a node and of the nodes' authority."""
    forged = write_certificates(tmp_path / "forged", [("n1", ["127.0.0.1"])])

    # An authority with the same name as the nodes', and another key.
    async def test() -> None:
        group = SecureGroup(tmp_path / "group", made, files={"client_ca": forged.nodes_ca})
        async with group:
            tls = TlsOptions(ca=made.nodes_ca, cert=forged.cert("n1"), key=forged.key("n1"))
            with pytest.raises(UnauthenticatedError):
                await group.dial(Hello("peer", "n1", "00", (1, 2), "127.0.0.1:1"), Credentials(tls))

    run(test())


def test_client_sends_nothing_to_another_node_than_it_dialed(tmp_path, made) -> None:
    async def test() -> None:
        async with SecureGroup(tmp_path, made) as group:
            with pytest.raises(ConfigError):
                await group.dial(Hello(), Credentials(TlsOptions(ca=made.nodes_ca), "all"), identity="n1")

    run(test())


@pytest.mark.parametrize("with_ids", [True, False])
def test_client_refuses_node_of_another_authority(tmp_path, made, with_ids) -> None:
    other = write_certificates(tmp_path / "other", [("n0", ["127.0.0.1"])])

    def peers_of(group: SecureGroup) -> Any:
        return group.peers if with_ids else ",".join(peer.address for peer in group.peers)

    async def test() -> None:
        async with (
            SecureGroup(tmp_path / "group", made) as group,
            AsyncClient(peers_of(group), tls=TlsOptions(ca=other.nodes_ca), token="all") as client,
            AsyncClient(peers_of(group), tls=TlsOptions(ca=made.nodes_ca), token="all") as accepted,
        ):
            with pytest.raises(UnauthenticatedError):
                await client.append([b"a"])
            assert (await accepted.append([b"a"])).first_index > 0

    run(test())


def write_web_certificate(files: CertificateFiles) -> None:
    """Write web.pem and web.key: a certificate of the nodes' authority with a common name alone."""
    now = datetime.now(UTC)
    authority = x509.load_pem_x509_certificate(files.nodes_ca.read_bytes())
    signer = serialization.load_pem_private_key(files.key("nodes-ca").read_bytes(), None)
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        x509.CertificateBuilder(authority.subject, serial_number=x509.random_serial_number())
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "web")]))
        .public_key(key.public_key())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .sign(signer, hashes.SHA256())
    )
    files.cert("web").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    encoding = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    files.key("web").write_bytes(key.private_bytes(*encoding))


def test_client_without_node_id_sends_nothing_to_a_server_that_is_no_node(tmp_path) -> None:
    files = write_certificates(tmp_path, [("n0", ["127.0.0.1"])])
    write_web_certificate(files)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.cert("web"), files.key("web"))
    received: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(await reader.read(1000))
        writer.close()

    async def test() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
        port = server.sockets[0].getsockname()[1]
        credentials = Credentials(TlsOptions(ca=files.nodes_ca), "secret")
        for identity, sends in ((None, False), ("web", True)):
            received.clear()
            with pytest.raises((UnauthenticatedError, UnreachableError)):
                await connect(
                    "127.0.0.1", port, Hello(), Silent(), timeout_s=20, credentials=credentials, identity=identity
                )
            await asyncio.sleep(0)
            assert any(b"secret" in each for each in received) is sends
        server.close()

    run(test())


def test_expired_certificate_of_node_is_named_with_its_remedy(tmp_path) -> None:
    nodes = [("n0", ["127.0.0.1"])]
    files = write_certificates(tmp_path / "tls", nodes)

    async def test() -> None:
        async with SecureGroup(tmp_path / "group", files) as group, group.open("all") as client:
            write_certificates(files.directory, nodes, days=0)
            with pytest.raises(UnauthenticatedError):
                await client.append([b"a"])

    run(test())


def test_node_with_wrong_certificate_does_not_fail_reads(tmp_path, made) -> None:
    other = write_certificates(tmp_path / "other", [("n2", ["127.0.0.1"])])
    wrong = replace(security(made, "n2"), cert=other.cert("n2"), key=other.key("n2"))

    async def test() -> None:
        async with SecureGroup(tmp_path / "group", made, 3) as group, group.open("all") as writer:
            first = (await writer.append([b"a"])).first_index
            await group.stop("n2")
            await group.start("n2", security=wrong)
            for number in range(3):  # each of them starts at another replica
                async with group.open("all") as client:
                    rows = await client.fetch(first, first + 1, min_commit=first, spread=number)
                    assert rows.batch["body"].to_pylist() == [b"a"]

    run(test())


def test_plaintext_client_is_disconnected_by_tls_port(tmp_path, made) -> None:
    async def test() -> None:
        async with SecureGroup(tmp_path, made) as group:
            peer = group.peers[0]
            with pytest.raises(UnauthenticatedError):
                await connect(peer.host, peer.port, Hello(), Silent(), timeout_s=20)

    run(test())


def test_tls_client_is_disconnected_by_plaintext_port(tmp_path, made) -> None:
    async def test() -> None:
        async with ServerGroup(tmp_path, 1) as group:
            peer = group.peers[0]
            with pytest.raises(UnauthenticatedError):
                await connect(
                    peer.host,
                    peer.port,
                    Hello(),
                    Silent(),
                    timeout_s=20,
                    credentials=Credentials(TlsOptions(ca=made.nodes_ca)),
                    identity="n0",
                )

    run(test())


def test_handshake_has_a_deadline_and_other_clients_are_served(tmp_path, made) -> None:
    async def test() -> None:
        async with SecureGroup(tmp_path, made) as group:
            peer = group.peers[0]
            opened = [await asyncio.open_connection(peer.host, peer.port) for _ in range(20)]
            async with group.open("all") as client:
                await client.append([b"a"])
            for reader, writer in opened:
                assert await asyncio.wait_for(reader.read(), 30) == b""
                writer.close()

    run(test())


def test_tls_1_1_is_refused(tmp_path, made) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.maximum_version = ssl.TLSVersion.TLSv1_1

    async def test() -> None:
        async with SecureGroup(tmp_path, made) as group:
            with pytest.raises((ssl.SSLError, ConnectionError)):  # the alert may be lost with the connection
                await asyncio.open_connection(group.peers[0].host, group.peers[0].port, ssl=context)

    run(test())


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_tls_1_2_and_1_3_are_spoken(tmp_path, made, version) -> None:
    context = ssl.create_default_context(cafile=str(made.nodes_ca))
    context.minimum_version = context.maximum_version = version

    async def test() -> None:
        async with SecureGroup(tmp_path, made) as group:
            peer = group.peers[0]
            _, writer = await asyncio.open_connection(peer.host, peer.port, ssl=context)
            assert writer.get_extra_info("ssl_object").version() == version.name.replace("_", ".")
            writer.close()

    run(test())


def test_remoting_protocol_is_not_served_with_security(tmp_path, made) -> None:
    served = []

    class Foreign(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            served.append(transport)

    context = ssl.create_default_context(cafile=str(made.nodes_ca))

    async def test() -> None:
        async with SecureGroup(tmp_path, made, foreign_port=lambda node: Foreign) as group:
            peer = group.peers[0]
            for tls in (None, context):
                reader, writer = await asyncio.open_connection(peer.host, peer.port, ssl=tls)
                writer.write((8).to_bytes(4, "big") + bytes(8))
                with contextlib.suppress(ConnectionError):
                    assert await asyncio.wait_for(reader.read(), 30) == b""
                writer.close()
        assert served == []

    run(test())


def test_admin_requests_are_in_the_audit_log(tmp_path, made) -> None:
    async def test() -> None:
        async with SecureGroup(tmp_path, made, 2) as group, group.open("all") as client:
            await group.leader()
            await client.append([b"a"])
            leader = await group.leader()
            await client.transfer_leadership("n1" if leader == "n0" else "n0")
            for kind in (9001, 9002):  # they count together, so that further ones are no way around the limit
                with pytest.raises(ConnectionLostError):
                    await (await group.raw("all")).ask(kind)
        lines = [json.loads(line) for line in (tmp_path / "admin.log").read_text().splitlines()]
        assert [line["command"].split()[0] for line in lines] == ["transfer", "unknown", "unknown"]
        assert lines[0]["who"].startswith("dev@")

    run(test())


def test_authority_of_both_nodes_and_clients_is_refused(tmp_path, made) -> None:
    async def test() -> None:
        group = SecureGroup(tmp_path, made, files={"client_ca": made.nodes_ca})
        with pytest.raises(ConfigError):
            await group.start("n0")

    run(test())


def test_token_without_tls_is_refused() -> None:
    with pytest.raises(ConfigError):
        Credentials(None, "all")


def test_files_of_a_node_are_readable_by_their_owner_only(tmp_path) -> None:
    directory = tmp_path / "node"

    async def test() -> None:
        async with ServerGroup(directory, 1) as group, AsyncClient(group.peers) as client:
            await client.append([b"a"])

    run(test())
    found = list(directory.rglob("*"))
    open_ones = [path for path in found if path.is_dir() and path.stat().st_mode & 0o077]
    assert open_ones == []
    assert [path for path in (directory / "default").rglob("[0-9]*") if path.stat().st_mode & 0o077] == []
