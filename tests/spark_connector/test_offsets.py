from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger_core import EntryCheck
from spark_connector.errors import CheckpointError
from spark_connector.offsets import GroupOffset, StreamOffset

group_offsets = st.builds(
    GroupOffset,
    st.integers(0, 2**62),
    st.none() | st.uuids().map(str),
    st.integers(-1, 2**40),
    st.none() | st.integers(0, 2**32 - 1),
)
offsets = st.dictionaries(st.text("abcz", min_size=1), group_offsets).map(StreamOffset)


@given(offsets)
def test_round_trip_gives_same_text_whatever_order(offset: StreamOffset) -> None:
    text = json.dumps(offset.to_json())
    again = StreamOffset.from_json(json.loads(text))
    reversed_order = StreamOffset(dict(reversed(list(offset.groups.items()))))
    assert again == offset
    assert json.dumps(again.to_json()) == json.dumps(reversed_order.to_json()) == text
    assert text == json.dumps(json.loads(text), sort_keys=True)


def test_text_that_checkpoints_hold() -> None:
    offset = StreamOffset({"default": GroupOffset.at(1200, "abc", EntryCheck(7, 305419896))})
    assert json.dumps(offset.to_json()) == (
        '{"groups": {"default": {"check": 305419896, "log": "abc", "next": 1200, "term": 7}}, "v": 1}'
    )
    assert GroupOffset.at(0, None, None) == GroupOffset(0, None, -1, None)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"v": 2, "groups": {}}, "has version 2, this connector reads up to 1"),
        ({}, "not an offset of this source"),
        ({"v": 1, "groups": []}, "not an offset of this source"),
        ({"topicA": {"0": 23}}, "not an offset of this source"),
        ({"v": 1, "groups": {"a": {"next": 1}}}, "not an offset of this source"),
        ({"v": 1, "groups": {"a": {"next": "1", "log": None, "term": 1, "check": None}}}, "not an offset"),
        ({"v": 1, "groups": {"a": {"next": True, "log": None, "term": 1, "check": None}}}, "not an offset"),
        ({"v": 1, "groups": {"a": {"next": 1, "log": 5, "term": 1, "check": None}}}, "not an offset"),
    ],
)
def test_foreign_and_newer_offsets_are_refused(data: dict[str, object], said: str) -> None:
    with pytest.raises(CheckpointError, match=said) as caught:
        StreamOffset.from_json(data)
    assert str(caught.value).startswith("[DLEDGER_CHECKPOINT] ")
