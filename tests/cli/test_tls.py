"""``dledger tls``, the security options of ``serve`` and of clients, and a secure cluster of real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dledger_core import LocalCluster
from dledger_core.certificates import CertificateFiles
from dledger_core.errors import ForbiddenError, UnauthenticatedError
from tests.cli.command import error_of, result_of, run

pytest.importorskip("cryptography")

LOCAL = "n0-127.0.0.1:1;n1-127.0.0.1:2"
OPEN = "n0-10.0.0.1:1;n1-10.0.0.2:2"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> CertificateFiles:
    directory = tmp_path_factory.mktemp("tls") / "certificates"
    run("tls", "dev", directory, "--peers", OPEN)
    return CertificateFiles(directory)


def secure(made: CertificateFiles, node: str = "n0") -> list[object]:
    files = {"cert": made.cert(node), "key": made.key(node)}
    return [
        *(word for name, path in files.items() for word in (f"--tls-{name}", path)),
        *("--peer-ca", made.nodes_ca, "--tls-ca", made.clients_ca, "--tokens", made.tokens),
    ]


def test_secrets_are_readable_by_their_owner_only(made) -> None:
    assert made.directory.stat().st_mode & 0o777 == 0o700
    private = [path for path in made.directory.iterdir() if path.suffix == ".key"] + [made.token, made.tokens]
    assert len(private) == 7
    assert {path.stat().st_mode & 0o777 for path in private} == {0o600}


def test_second_call_keeps_authorities_and_token(made) -> None:
    kept = {path: path.read_bytes() for path in (made.nodes_ca, made.clients_ca, made.token, made.tokens)}
    before = made.cert("n0").read_bytes()
    run("tls", "dev", made.directory, "--peers", OPEN)
    assert {path: path.read_bytes() for path in kept} == kept
    assert made.cert("n0").read_bytes() != before


def test_token_is_written_to_its_file_and_never_printed(tmp_path: Path) -> None:
    done = run("tls", "token", "ingest", "--file", tmp_path / "token")
    token = (tmp_path / "token").read_text().strip()
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    assert token not in done.output
    assert "ingest" in done.stdout


def test_plaintext_off_loopback_needs_insecure() -> None:
    assert error_of("serve", "--peers", OPEN, "--self-id", "n0", "--check").code == "CONFIG"
    done = run("serve", "--peers", OPEN, "--self-id", "n0", "--check", "--insecure")
    assert done.stderr, "a warning"


def test_plaintext_on_loopback_needs_no_option() -> None:
    assert run("serve", "--peers", LOCAL, "--self-id", "n0", "--check").stderr == ""


def test_secure_node_off_loopback_is_accepted(made) -> None:
    done = run("serve", "--peers", OPEN, "--self-id", "n0", "--check", *secure(made))
    assert done.stderr == ""


@pytest.mark.parametrize("missing", ["--tls-cert", "--tls-key", "--peer-ca", "--tokens"])
def test_security_with_missing_file_option_is_refused(made, missing) -> None:
    words = secure(made)
    at = words.index(missing)
    error_of("serve", "--peers", OPEN, "--self-id", "n0", "--check", *words[:at], *words[at + 2 :])


def test_check_reads_the_files(made, tmp_path: Path) -> None:
    words = secure(made)
    words[words.index("--tls-key") + 1] = made.key("n1")
    error_of("serve", "--peers", OPEN, "--self-id", "n0", "--check", *words)


def test_client_options_without_authority_are_refused(made) -> None:
    error_of("status", "--peers", LOCAL, "--token-file", made.token)
    error_of("status", "--peers", LOCAL, "--tls-cert", made.cert("dev"))


@pytest.mark.integration
@pytest.mark.slow
def test_commands_use_secure_cluster_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalCluster(3, tls=True) as cluster:
        assert cluster.tls is not None
        for name, value in (
            ("PEERS", cluster.peers),
            ("TLS_CA", str(cluster.tls.ca)),
            ("TOKEN_FILE", str(cluster.token)),
        ):
            monkeypatch.setenv(f"DLEDGER_{name}", value)
        run("append", "hello")
        assert result_of("get", "1")["body"] == "hello"
        assert len(result_of("status")["nodes"]) == 3
        run("member", "list")
        run("transfer", result_of("status")["nodes"][0]["node_id"])
        assert run("doctor", code=None).exit_code in (0, 1)
        secret = cluster.token.read_text().strip() if cluster.token is not None else ""
        for node in cluster.node_ids:
            assert secret not in cluster.log_path(node).read_text()
            assert secret not in Path(f"/proc/{cluster.pid(node)}/cmdline").read_text()
        assert secret not in run("status").output
        assert secret not in (cluster.directory / "admin.log").read_text()
        monkeypatch.delenv("DLEDGER_TOKEN_FILE")
        assert UnauthenticatedError.name in error_of("append", "hello")
        lines = [json.loads(line) for line in (cluster.directory / "admin.log").read_text().splitlines()]
        assert any(line["who"].startswith("dev@") for line in lines)


def test_errors_have_stable_codes() -> None:
    assert (UnauthenticatedError.code, ForbiddenError.code) == (670, 671)
    assert (UnauthenticatedError.retriable, ForbiddenError.retriable) == (False, False)
