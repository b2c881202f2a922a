"""Recorded sessions of each release: this version decodes every frame, and answers the recorded client."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgpack
import pytest

from dledger_core.client.status import metadata_of
from dledger_core.config import Peer
from dledger_core.errors import RecoveryRefusedError, error_from_wire
from dledger_core.ids import NodeId
from dledger_core.net import codec
from dledger_core.net.frame import Frame, encode_frame
from dledger_core.net.hello import HELLO, HELLO_OK, Hello, negotiate
from dledger_core.net.messages import METADATA_OK
from dledger_core.net.protocol import PREFACE, Type
from tests.compatibility.clusters import KeptCluster
from tests.compatibility.make import VERSIONS, address_of, extract, load
from tests.compatibility.sessions import OF_EACH, ROUTING, TABLES, Socket, frame_of, jsonable
from tests.support.frames import frames_of
from tests.support.logs import rows_of

WITHOUT_TABLE = {Type.FAILURE, Type.GOAWAY, Type.PIECE, Type.RECOVER, Type.RECOVER_OK}
LATER = {
    *(Type.BACKUP, Type.BACKUP_OK, Type.PRODUCE, Type.PRODUCE_OK, Type.SPLIT, Type.SPLIT_OK),
    *(Type.RANGES, Type.RANGES_OK, Type.PROVE, Type.PROVE_OK),
    *(Type.ARCHIVE_RANGES, Type.ARCHIVE_RANGES_OK, Type.ARCHIVE_END, Type.ARCHIVE_END_OK),
}
"""Messages that no release has yet."""
RELEASES = pytest.mark.parametrize("release", VERSIONS, ids=lambda path: path.name)
Row = dict[str, Any]


def rows_of_release(release: Path) -> list[Row]:
    found = load(release / "sessions.json.xz")
    return [*found["client"], *(row for link in found["links"] for row in link), *found["samples"]]


@RELEASES
def test_every_frame_decodes_to_the_recorded_header(release: Path) -> None:
    rows = rows_of_release(release)
    assert {Type(row["header"]["t"]) for row in rows} >= {*TABLES} - LATER
    for row in rows:
        frame = frame_of(row)
        assert Type(frame.header["t"]).name == row["type"]
        assert jsonable(frame.header) == row["header"]


@RELEASES
def test_every_message_has_its_values_and_is_sent_with_the_same_ones(release: Path) -> None:
    for row in rows_of_release(release):
        frame = frame_of(row)
        if frame.header["t"] in WITHOUT_TABLE or is_refused(row):
            continue
        table = TABLES[frame.header["t"]]
        values = table.read(frame.header)
        for field in table.fields:
            if field.key in frame.header:
                assert values[field.name or field.key] == frame.header[field.key]
        routing = {key: frame.header[key] for key in ROUTING[1:] if key in frame.header and key not in fields_of(table)}
        [sent] = frames_of(encode_frame(table.encode(None, values, **routing), frame.payload))
        # A node of the release reads these keys with msgpack and ignores unknown ones.
        got = msgpack.unpackb(msgpack.packb(sent.header))
        omitted = {f.key: f.default for f in table.fields if f.key not in got}
        assert row["header"].items() <= jsonable(omitted | got).items()
        assert bytes(sent.payload) == bytes(frame.payload)


def fields_of(table: Any) -> set[str]:
    return {field.key for field in table.fields}


def is_refused(row: Row) -> bool:
    """Whether the recorded client sent a malformed request on purpose."""
    return row["header"].get("start") == -5


@RELEASES
def test_metadata_of_release_without_disk_has_an_unknown_one(release: Path) -> None:
    for row in load(release / "sessions.json.xz")["client"]:
        if row["type"] == "METADATA_OK":
            response = METADATA_OK.decode(frame_of(row).header)
            [node] = metadata_of([Peer(NodeId("n0"), "h", 1)], {"n0": response}).nodes
            assert node.reachable
            assert (node.disk_free_bytes, node.disk_size_bytes) == tuple(response.disk or (-1, -1))
            return
    raise AssertionError("no METADATA_OK was recorded")


@RELEASES
def test_payloads_are_complete(release: Path) -> None:
    parsed = Counter[str]()
    for row in rows_of_release(release):
        frame = frame_of(row)
        if not frame.payload:
            continue
        parsed[row["type"]] += 1
        match frame.header["t"]:
            case Type.APPEND:
                columns = codec.parse_columns(frame.payload, frame.header["n"])
                columns.verify()
            case Type.READ_OK:
                rows = rows_of(codec.parse_records(frame.payload, frame.header["n"]))
                assert [each.index for each in rows] == sorted(each.index for each in rows)
            case Type.APPEND_ENTRIES:
                [(group, message)] = codec.frame_to_messages(frame, lambda _: codec.Ends("g", "n0", "n1"))
                assert group == "g"
                assert sum(batch.count for batch in message.batches) == frame.header["n"]
                [again] = frames_of(codec.message_to_frame(frame.header["a"], message))
                assert (jsonable(again.header), bytes(again.payload)) == (row["header"], bytes(frame.payload))
            case Type.TRANSACTION:
                assert len(codec.parse_parts(frame.payload, frame.header["n"])) == frame.header["n"]
            case Type.AWAIT:
                assert codec.parse_seen(frame.payload, frame.header["n"], 10)
            case Type.FOUND:
                record = codec.parse_record(frame.payload)
                assert record is not None
                assert codec.record_payload(record) == bytes(frame.payload)
            case Type.CONTINUE_OK:
                assert codec.parse_survivor(frame.payload) is not None
            case Type.PIECE:
                pass
            case _:
                raise AssertionError(f"a payload of {row['type']} is not checked")
    assert set(parsed) >= {"APPEND", "READ_OK", "APPEND_ENTRIES", "TRANSACTION", "AWAIT", "FOUND", "PIECE"}


@RELEASES
def test_pieces_of_the_link_become_the_large_frame(release: Path) -> None:
    for link in load(release / "sessions.json.xz")["links"]:
        pieces = [frame_of(row) for row in link if row["type"] == "PIECE"]
        if pieces:
            assert len(pieces) <= OF_EACH
            [large] = frames_of([bytes(piece.payload) for piece in pieces])
            assert len(large.payload) > 64 << 10
            [(_, message)] = codec.frame_to_messages(large, lambda _: codec.Ends("g", "n0", "n1"))
            assert message.batches
            return
    raise AssertionError("no frame in pieces was recorded")


@RELEASES
def test_hello_of_release_negotiates_a_version(release: Path) -> None:
    found = load(release / "sessions.json.xz")
    hellos = [row for link in (found["client"], *found["links"]) for row in link if row["type"].startswith("HELLO")]
    assert {row["type"] for row in hellos} == {"HELLO", "HELLO_OK"}
    for row in hellos:
        theirs = Hello.from_header(frame_of(row).header)
        version, features = negotiate(theirs, Hello(theirs.role, theirs.node_id))
        assert version in theirs.versions
        assert features <= theirs.features
        assert (HELLO if row["type"] == "HELLO" else HELLO_OK).read(theirs_header(theirs, row["type"]))


def theirs_header(theirs: Hello, kind: str) -> Row:
    return theirs.to_header() if kind == "HELLO" else theirs.to_response()


# --- the recorded client with a live node -----------------------------------------------------------------------------


@pytest.mark.integration
@RELEASES
def test_live_node_gives_recorded_client_compatible_answers(release: Path, tmp_path: Path) -> None:
    directory = extract(release / "session-store.tar.xz", tmp_path)
    rows = load(release / "sessions.json.xz")["client"]
    cluster = KeptCluster(lambda *_: None, nodes=1).start(directory)
    with cluster, Socket(address_of(cluster.peers)) as node:
        node.send(PREFACE)
        for sent, expected in zip(rows[::2], rows[1::2], strict=True):
            assert (sent["way"], expected["way"]) == (">", "<")
            node.send(bytes.fromhex(sent["bytes"]))
            [answer] = frames_of([node.receive()])
            if expected["type"] == "RECOVER_OK":  # votes are not given back any longer, and the command must know it
                assert isinstance(error_from_wire(answer.header["e"]), RecoveryRefusedError)
                continue
            assert Type(answer.header["t"]).name == expected["type"], answer.header
            assert expected["header"].keys() <= answer.header.keys()
            assert comparable(answer) == comparable(frame_of(expected)), sent


def comparable(frame: Frame) -> Any:
    """Return the values that a client relies on: without terms, addresses, times and sizes of files."""
    header, kind = frame.header, Type(frame.header["t"])
    match kind:
        case Type.FAILURE:
            error = error_from_wire(header["e"])
            return type(error), error.code, sorted(header["e"]["values"])
        case Type.HELLO_OK:
            return header["v"], header["node"], header["nu"]
        case Type.READ_OK:
            rows = [(row.index, row.magic, row.body if row.magic == 1 else None) for row in rows_of_frame(frame)]
            return rows, header["next"], header["commit"], header["visible"], header["first"], header["skip"]
        case Type.METADATA_OK:
            node_id, role, _, first, last, commit, visible, _ = header["self"]
            members = [(member[0], member[1], member[3]) for member in header["members"]]
            known = (header["leader"], header["log"], header["configuration"], header["groups"], header["preferred"])
            tables = {(name, rows) for name, rows, _ in header["tables"]}
            return node_id, role, first, last, commit, visible, members, known, tables, header["is_recovering"]
        case Type.DIGEST_OK:
            return [row[:3] for row in header["ranges"]], header["next"], header["commit"], header["damaged"]
        case Type.DESCRIBE_OK:
            return [(row[0], len(row)) for row in header["rows"]], header["more"]
        case Type.FOUND_OK:
            identity = header["answer"]["identity"]
            return header["uuid"], identity["store"], identity["record"], identity["is_complete"]
        case Type.MEMBER_OK:
            members = [(*row[:2], *row[3:7]) for row in header["members"]]
            return members, header["configuration"], header["pending"], header["before"]
        case Type.RECOVER_OK:
            return header["is_recovering"], header["index"], header["leader"], [row[0] for row in header["voters"]]
        case Type.CONTINUE_OK:
            answer = codec.parse_survivor(frame.payload)
            return answer is not None
        case Type.AT_OK | Type.APPEND_OK | Type.TIME_OK | Type.WATCH_OK | Type.TRANSACTION_OK | Type.PRODUCER_OK:
            return {key: value for key, value in header.items() if key not in {"hl", "term", "index"}}
    return {key: value for key, value in header.items() if key != "hl"}


def rows_of_frame(frame: Frame) -> Any:
    return rows_of(codec.parse_records(frame.payload, frame.header["n"]))
