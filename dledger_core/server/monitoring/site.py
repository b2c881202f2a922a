"""The second port of a node: its paths, and who may see them.

Health is open to all, so that probes need no credentials. Everything else needs a principal once credentials are
checked: metrics one that may read some group, the rest one that may read the group. Without credentials a port on
loopback serves only requests that name a loopback host: a page of another site, in a browser on this machine, cannot
reach it under a name of its own.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
import re
import ssl
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dledger_core.config import ListenAddress, is_loopback
from dledger_core.errors import BadRequestError, DLedgerError
from dledger_core.server.monitoring.access import Principal, PrincipalOf, bearer_of
from dledger_core.server.monitoring.cluster_probe import ClusterProbe, OpenChannel, open_channel
from dledger_core.server.monitoring.events import RecentEvents
from dledger_core.server.monitoring.history import History
from dledger_core.server.monitoring.http_port import HttpPort, HttpRequest, HttpResponse, text_response
from dledger_core.server.monitoring.loop_delays import LoopDelays
from dledger_core.server.monitoring.message_browser import MessageBrowser, Messages, Search
from dledger_core.server.monitoring.metrics import Metrics
from dledger_core.server.monitoring.observed import ObservedNode
from dledger_core.server.monitoring.status_report import StatusReport

_PAGE = Path(__file__).with_name("page.html")


def _version() -> str:
    try:
        return importlib.metadata.version("dledger")
    except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
        return "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteOptions:
    """The parts of the second port that a composition root chooses.

    Attributes:
        principal_of: checks the credentials of a request; None = all requests that reach the port may read.
        open_metrics: whether metrics need no principal.
        open_channel: connects to another node, as a client that may read.
        messages: recognizes messages in bodies; None = bodies are bytes.
        tls: returns the TLS context of each new connection; None = plain HTTP.
    """

    principal_of: PrincipalOf | None = None
    open_metrics: bool = False
    open_channel: OpenChannel = open_channel
    messages: Messages | None = None
    tls: Callable[[], ssl.SSLContext] | None = None


class Open:
    """The principal of every request while no credentials are checked."""

    def may(self, action: str, group: str) -> bool:
        """Return True for reads, the only action of this port."""
        del group
        return action == "read"


class Site:
    """The second port of one node; lives on its event loop.

    Args:
        node: the node.
        options: see ``SiteOptions``.
    """

    def __init__(self, node: ObservedNode, options: SiteOptions) -> None:
        self._node = node
        self._options = options
        self._executor = ThreadPoolExecutor(1, "monitoring")
        self._delays = LoopDelays()
        version = _version()
        self._metrics = Metrics(node, self._delays.durations, self._executor, version)
        self._history = History(node)
        node.service.node.commit_history = self._history.commits
        self._events = RecentEvents()
        self._cluster = ClusterProbe(node, options.open_channel)
        self._report = StatusReport(node, self._cluster, self._history, self._events, version)
        self._browser = MessageBrowser(options.messages, self._executor)
        self._page = _page_response(_PAGE.read_text())
        self._http = HttpPort(self._answer)
        self._host = ""
        self._paths: dict[str, Callable[[HttpRequest, Principal], Awaitable[HttpResponse]]] = {
            "/": self._show_page,
            "/metrics": self._show_metrics,
            "/api/status": self._show_status,
            "/api/messages": self._show_messages,
        }

    @property
    def port(self) -> int:
        """The port it listens on."""
        return self._http.port

    async def start(self, address: ListenAddress) -> None:
        """Start to listen; raise ConfigError if the port is not available."""
        self._host = address.host
        await self._http.start(address.host, address.port, self._options.tls)
        self._delays.start()
        self._history.start()
        self._events.start()

    async def close(self) -> None:
        """Stop listening, and end requests in progress."""
        self._delays.close()
        self._history.close()
        self._events.stop()
        await self._http.close()
        await self._cluster.close()
        self._executor.shutdown(wait=False)

    async def _answer(self, request: HttpRequest) -> HttpResponse:
        if request.path == "/livez":
            return text_response(HTTPStatus.OK, "ok")
        if request.path == "/readyz":
            reasons = list(self._node.not_ready())
            status = HTTPStatus.SERVICE_UNAVAILABLE if reasons else HTTPStatus.OK
            return text_response(status, "\n".join(reasons) or "ok")
        if not self._is_named(request):
            return text_response(HTTPStatus.MISDIRECTED_REQUEST, "this port is for this machine: use its loopback name")
        principal = self._principal(request)
        if principal is None:
            return text_response(
                HTTPStatus.UNAUTHORIZED, "credentials are required", **{"WWW-Authenticate": 'Basic realm="dledger"'}
            )
        show = self._paths.get(request.path)
        if show is None:
            return text_response(HTTPStatus.NOT_FOUND, f"no such page; there are {', '.join(self._paths)}")
        return await show(request, principal)

    def _is_named(self, request: HttpRequest) -> bool:
        if self._options.principal_of is not None or not is_loopback(self._host):
            return True
        try:
            host = urlsplit(f"//{request.headers.get('host', '')}").hostname
        except ValueError:
            return False
        return host is not None and is_loopback(host)

    def _principal(self, request: HttpRequest) -> Principal | None:
        check = self._options.principal_of
        if check is None or (self._options.open_metrics and request.path == "/metrics"):
            return Open()
        return check(bearer_of(request.headers.get("authorization")))

    async def _show_metrics(self, request: HttpRequest, principal: Principal) -> HttpResponse:
        del request
        if not self._readable(principal):
            return text_response(HTTPStatus.FORBIDDEN, "no permission to read a group")
        return await self._metrics.response()

    def _readable(self, principal: Principal) -> list[str]:
        return [name for name in self._node.groups if principal.may("read", name)]

    async def _show_page(self, request: HttpRequest, principal: Principal) -> HttpResponse:
        del request
        return self._page if self._readable(principal) else text_response(HTTPStatus.FORBIDDEN, "no permission")

    async def _show_status(self, request: HttpRequest, principal: Principal) -> HttpResponse:
        del request
        groups = self._readable(principal)
        if not groups:
            return text_response(HTTPStatus.FORBIDDEN, "no permission to read a group")
        return _json(await self._report.report(groups))

    async def _show_messages(self, request: HttpRequest, principal: Principal) -> HttpResponse:
        name = request.query.get("group", "")
        # A group without permission looks like one that does not exist.
        if name not in self._readable(principal):
            return _json({"error": f"no group {name[:80]!r} that you may read"}, HTTPStatus.NOT_FOUND)
        try:
            search = Search.of(dict(request.query))
            return _json(await self._browser.find(self._node.groups[name].services(), search))
        except BadRequestError as error:
            return _json({"error": error.what}, HTTPStatus.BAD_REQUEST)
        except DLedgerError as error:
            return _json({"error": str(error)}, HTTPStatus.SERVICE_UNAVAILABLE)


def _json(content: dict[str, Any], status: HTTPStatus = HTTPStatus.OK) -> HttpResponse:
    return HttpResponse(json.dumps(content).encode(), "application/json", status)


def _page_response(page: str) -> HttpResponse:
    """Return the page; its policy lets a browser run only the script and styles in it, and ask only this port."""
    sources = {
        kind: " ".join(_hash(found) for found in re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL))
        for kind, tag in (("script-src", "script"), ("style-src", "style"))
    }
    policy = {
        "default-src": "'none'",
        **sources,
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    shown = "; ".join(f"{name} {value}" for name, value in policy.items())
    return HttpResponse(page.encode(), "text/html; charset=utf-8", headers={"Content-Security-Policy": shown})


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
