"""All bodies that a client reads of a log."""

from __future__ import annotations

from dledger_core import Client


def bodies_of(client: Client) -> list[bytes]:
    """Return the bodies of the log's readable entries, in order."""
    bodies: list[bytes] = []
    start, end = 0, client.bounds().end
    while start < end and len(found := client.read(start, end)):
        bodies += found["body"].to_pylist()
        start = found["index"][-1].as_py() + 1
    return bodies
