"""The second port of nodes with security: TLS with the node's certificate, tokens, and a page that sees all nodes."""

from __future__ import annotations

import base64
import json
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from cryptography import x509
from playwright.sync_api import Browser, Error, Page, expect

from dledger_core import LocalCluster
from dledger_core.certificates import CertificateFiles, digest_of
from tests.support.http import fetch
from tests.support.soon import soon

pytestmark = pytest.mark.integration

VIEWER = "token of a principal that may read one group"


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    nodes = LocalCluster(3, groups=("orders", "payments"), http=True, tls=True)
    with CertificateFiles(nodes.directory / "tls").tokens.open("a") as principals:
        principals.write(f'[viewer]\ntoken-sha256 = ["{digest_of(VIEWER)}"]\nread = ["orders"]\n')
    with nodes:
        for group in nodes.groups:
            with nodes.client(group) as client:
                client.append([f"a body of {group}".encode()])
        yield nodes


@contextmanager
def tab_with(browser: Browser, token: str | None) -> Iterator[Page]:
    """A tab of an operator who accepts the certificate, and gives the token as password if asked."""
    password = None if token is None else {"username": "any", "password": token}
    with browser.new_context(ignore_https_errors=True, http_credentials=password) as context:
        yield context.new_page()


def get(cluster: LocalCluster, path: str, authorization: str | None = None) -> tuple[int, bytes]:
    assert cluster.tls is not None
    request = urllib.request.Request(cluster.page("n0") + path)
    if authorization is not None:
        request.add_header("Authorization", authorization)
    context = ssl.create_default_context(cafile=str(cluster.tls.ca))
    try:
        with urllib.request.urlopen(request, context=context, timeout=60) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_token_opens_page_and_metrics_as_bearer_and_as_password(cluster: LocalCluster) -> None:
    assert cluster.token is not None
    token = cluster.token.read_text().strip()
    password = "Basic " + base64.b64encode(f"any:{token}".encode()).decode()
    for path in ("", "metrics", "api/status"):
        assert get(cluster, path)[0] == 401
        assert get(cluster, path, "Bearer wrong")[0] == get(cluster, path, "Basic !")[0] == 401
        assert get(cluster, path, f"Bearer {token}")[0] == get(cluster, path, password)[0] == 200
    assert [get(cluster, path)[0] for path in ("livez", "readyz")] == [200, 200]


def test_status_sees_the_other_nodes_over_tls(cluster: LocalCluster) -> None:
    assert cluster.token is not None
    token = cluster.token.read_text().strip()

    def level() -> str:
        return str(json.loads(get(cluster, "api/status", f"Bearer {token}")[1])["verdict"]["level"])

    soon(lambda: level() == "healthy")


def test_browser_shows_the_groups_that_its_token_may_read(browser: Browser, cluster: LocalCluster) -> None:
    with tab_with(browser, VIEWER) as tab:
        response = tab.goto(cluster.page("n0"))
        assert response is not None
        security = response.security_details()
        assert (response.status, (security or {}).get("protocol")) == (200, "TLS 1.3")
        expect(tab.get_by_role("heading", level=1)).to_have_text("Healthy", timeout=60_000)
        expect(tab.locator("details.group .name")).to_have_text(["orders"])
        expect(tab.locator("details.group tbody tr")).to_have_count(3)
        expect(tab.locator("#messages")).to_contain_text("a body of orders", timeout=60_000)
        assert "payments" not in tab.content()


def test_page_opens_with_user_and_token_in_its_address(browser: Browser, cluster: LocalCluster) -> None:
    with tab_with(browser, None) as tab:
        tab.goto(cluster.page("n0").replace("https://", f"https://any:{VIEWER.replace(' ', '%20')}@"))
        expect(tab.get_by_role("heading", level=1)).to_have_text("Healthy", timeout=60_000)
        expect(tab.locator("#messages .message").first).to_contain_text("a body of orders")


@pytest.mark.parametrize("token", [None, "wrong"])
def test_browser_shows_nothing_of_the_groups_without_a_token(
    token: str | None, browser: Browser, cluster: LocalCluster
) -> None:
    with tab_with(browser, token) as tab:
        statuses: list[int] = []
        tab.on("response", lambda response: statuses.append(response.status))
        with suppress(Error):  # Chromium shows its own page, as after a click on "Cancel"
            tab.goto(cluster.page("n0"))
        assert set(statuses) <= {401}
        expect(tab.locator("body")).not_to_contain_text(re.compile("orders|payments"))
        for path in ("", "api/status", "api/messages?group=orders"):
            asked = tab.request.get(cluster.page("n0") + path)
            assert asked.status == 401
            assert b"orders" not in asked.body()


def test_metrics_show_when_certificate_expires_and_results_of_handshakes(cluster: LocalCluster) -> None:
    assert cluster.tls is not None
    assert cluster.token is not None
    text = get(cluster, "metrics", f"Bearer {cluster.token.read_text().strip()}")[1].decode()
    [found] = re.findall(r"^dledger_certificate_expiry_timestamp_seconds (\S+)$", text, re.MULTILINE)
    made = Path(cluster.tls.ca).parent
    pems = [(made / name).read_bytes() for name in ("n0.pem", "nodes-ca.pem", "clients-ca.pem")]
    certificates = [each for pem in pems for each in x509.load_pem_x509_certificates(pem)]
    assert float(found) == min(each.not_valid_after_utc.timestamp() for each in certificates)
    assert re.search(r'^dledger_tls_handshakes_total\{result="completed"\} [1-9]', text, re.MULTILINE)


def test_plaintext_gets_no_answer(cluster: LocalCluster) -> None:
    port = int(cluster.page("n0").rsplit(":", 1)[1].strip("/"))
    with pytest.raises(OSError):  # noqa: PT011 - a reset or an end
        fetch(port, "/livez")
