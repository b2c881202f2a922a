"""The second port of nodes with security: TLS with the node's certificate, tokens, and a page that sees all nodes."""

from __future__ import annotations

import base64
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from dledger_core import LocalCluster
from tests.support.http import fetch
from tests.support.soon import soon

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(3, http=True, tls=True) as nodes:
        yield nodes


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


def test_plaintext_gets_no_answer(cluster: LocalCluster) -> None:
    port = int(cluster.page("n0").rsplit(":", 1)[1].strip("/"))
    with pytest.raises(OSError):  # noqa: PT011 - a reset or an end
        fetch(port, "/livez")
