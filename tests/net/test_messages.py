"""The field tables of all messages: round trips, wrong values, documentation."""

from __future__ import annotations

import dataclasses

import pytest

from dledger_core.errors import BadRequestError, DLedgerError, ProtocolError
from dledger_core.net.codec import PEER_TABLES
from dledger_core.net.fields import REQUIRED
from dledger_core.net.frame import FrameDecoder, encode_frame
from dledger_core.net.messages import TABLES, GroupsRequest
from dledger_core.net.protocol import FRAME_BYTES_MAX, Type
from tests.support.field_values import MISSING, good_value, header_of, wrong_values

ALL = [pytest.param(table, id=table.number.name) for table in (*TABLES, *PEER_TABLES)]


@pytest.mark.parametrize("table", [pytest.param(table, id=table.number.name) for table in TABLES])
def test_message_survives_encoding_with_all_fields_and_with_required_ones(table):
    for header in (
        header_of(table),
        {"t": table.number} | {f.key: good_value(f) for f in table.fields if f.default is REQUIRED},
    ):
        message = table.decode(header)
        decoder = FrameDecoder(FRAME_BYTES_MAX)
        decoder.receive_data(b"".join(encode_frame(table.encode(message, r=3))))
        received = decoder.next_frame().header
        assert received["t"] == table.number
        assert received["r"] == 3
        assert table.decode(received) == message


@pytest.mark.parametrize("table", ALL)
def test_every_wrong_value_of_every_field_is_rejected_by_tables_error(table):
    table.read(header_of(table))
    for field in table.fields:
        assert wrong_values(field) or field.kind == "any"
        for value in wrong_values(field):
            header = header_of(table) | {field.key: value}
            if value is MISSING:
                del header[field.key]
            with pytest.raises(table.error) as caught:
                table.read(header)
            assert field.key in caught.value.what


def test_requests_get_response_and_other_messages_close_connection():
    requests = {table.number for table in TABLES if table.error is BadRequestError}
    assert requests == {table.number for table in TABLES if not table.number.name.endswith("_OK")}
    assert {table.error for table in (*TABLES, *PEER_TABLES)} == {BadRequestError, ProtocolError}
    assert issubclass(BadRequestError, DLedgerError)


def test_every_message_number_has_one_documented_table():
    numbers = [table.number for table in (*TABLES, *PEER_TABLES)]
    assert sorted(numbers) == sorted(set(Type) - {Type.HELLO, Type.HELLO_OK, Type.FAILURE})
    for table in (*TABLES, *PEER_TABLES):
        text = str(table)
        assert all(f"    {field.key} (" in text and field.meaning for field in table.fields)
        assert table.message.__doc__


def test_keys_of_message_are_distinct_and_none_is_reserved():
    for table in (*TABLES, *PEER_TABLES):
        keys = [field.key for field in table.fields]
        assert len(set(keys)) == len(keys)
        assert not {"t", "r", "g"} & set(keys)


def test_message_without_fields_decodes_from_any_header():
    [table] = [table for table in TABLES if table.message is GroupsRequest]
    assert dataclasses.asdict(table.decode({"t": 1, "unknown": 5})) == {}
