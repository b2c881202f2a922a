"""A request to a node's second port, from a test on the node's event loop or without one."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any
from urllib.parse import quote, urlencode


@dataclass(frozen=True)
class Fetched:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def fetch(port: int, path: str, *, method: str = "GET", headers: dict[str, str] | None = None, **query: Any) -> Fetched:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        target = quote(path) + (f"?{urlencode(query)}" if query else "")
        connection.request(method, target, headers=headers or {})
        response = connection.getresponse()
        found = {name.lower(): value for name, value in response.getheaders()}
        return Fetched(response.status, found, response.read())
    finally:
        connection.close()


async def afetch(port: int | None, path: str, **options: Any) -> Fetched:
    assert port is not None
    return await asyncio.to_thread(lambda: fetch(port, path, **options))
