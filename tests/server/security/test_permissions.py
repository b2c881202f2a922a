"""Each request has one permission, and nothing else has one."""

from __future__ import annotations

import pytest

from dledger_core.net.protocol import Type
from dledger_core.server.services.requests.table import REQUESTS, permission_of

_BETWEEN_NODES = {"HELLO", "VOTE", "APPEND_ENTRIES", "HEARTBEATS", "INSTALL_SNAPSHOT"}


def requests() -> set[Type]:
    """Types that have a response, except those between nodes and one that is always refused."""
    names = {kind.name for kind in Type}
    return (
        {kind for kind in Type if f"{kind.name}_OK" in names} - {Type[name] for name in _BETWEEN_NODES} - {Type.RECOVER}
    )


def test_each_request_has_a_permission() -> None:
    assert set(REQUESTS) == requests()


def test_type_without_rule_needs_admin() -> None:
    assert permission_of({"t": 999}) == "admin"


@pytest.mark.parametrize(
    ("header", "permission"),
    [
        ({"t": Type.METADATA}, None),
        ({"t": Type.METADATA, "pin": ["name", 1000]}, "read"),
        ({"t": Type.METADATA, "pin": []}, "read"),
        ({"t": Type.DIGEST}, "read"),
        ({"t": Type.READ, "pin": ["name", 1000]}, "read"),
        ({"t": Type.PRODUCER}, "append"),
        ({"t": Type.PRODUCER, "op": "state"}, "append"),
        ({"t": Type.PRODUCER, "op": "expire"}, "admin"),
        ({"t": Type.PRODUCER, "op": ["state"]}, "admin"),
        ({"t": Type.DESCRIBE, "table": "segments"}, "read"),
        ({"t": Type.DESCRIBE, "table": "producers"}, "admin"),
        ({"t": Type.DESCRIBE, "table": "transactions"}, "admin"),
        ({"t": Type.DESCRIBE, "table": ["segments"]}, "admin"),
        ({"t": Type.TRANSACTION, "op": "state", "x": {"q": "q", "b": 0, "r": ""}}, "append"),
        ({"t": Type.TRANSACTION, "op": "commit", "x": {"q": "q", "b": 0, "r": ""}}, "append"),
        ({"t": Type.TRANSACTION, "op": "abort", "x": {"q": "q", "b": 0, "r": "run"}}, "append"),
        ({"t": Type.TRANSACTION, "op": "abort", "x": {"q": "q", "b": 0, "r": ""}}, "admin"),
        ({"t": Type.TRANSACTION, "op": "abort", "x": "r"}, "admin"),
        ({"t": Type.MEMBER, "op": "list"}, "read"),
        ({"t": Type.MEMBER, "op": "remove"}, "admin"),
        ({"t": Type.TRANSFER}, "admin"),
        ({"t": Type.RECOVER}, "admin"),
        ({"t": Type.BACKUP, "op": "start"}, "admin"),
        ({"t": Type.RANGES}, "read"),
        ({"t": Type.ARCHIVE_RANGES}, "read"),
        ({"t": Type.PROVE}, "admin"),
        ({"t": Type.ARCHIVE_END}, "admin"),
    ],
)
def test_permission_depends_on_the_operation(header, permission) -> None:
    assert permission_of(header) == permission
