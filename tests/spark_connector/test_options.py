from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest

from spark_connector.errors import OptionError
from spark_connector.options import DLedgerOptions

PEERS = {"peers": "n0-127.0.0.1:1;n1-127.0.0.1:2"}


def test_defaults_and_sparks_own_options() -> None:
    options = DLedgerOptions.for_reading({**PEERS, "checkpointlocation": "/c", "queryname": "q"})
    assert (options.groups, options.decode, options.isolation) == (("default",), "none", "read_committed")
    assert options.fail_on_data_loss
    assert options.starting_offsets is None
    assert pickle.loads(pickle.dumps(options)) == options


@pytest.mark.parametrize(
    ("name", "value", "attribute", "expected"),
    [
        ("groups", " a, b", "groups", ("a", "b")),
        ("STARTINGOFFSETS", "Earliest", "starting_offsets", "earliest"),
        ("startingOffsets", '{"default": 12}', "starting_offsets", {"default": 12}),
        ("startingOffsets", '{"default": "latest"}', "starting_offsets", {"default": -1}),
        (
            "startingOffsets",
            '{"groups":{"default":{"check":null,"log":null,"next":7,"term":-1}},"v":1}',
            "starting_offsets",
            {"default": 7},
        ),
        ("endingOffsets", '{"default": -1}', "ending_offsets", {"default": -1}),
        ("maxOffsetsPerTrigger", "500", "max_offsets_per_trigger", 500),
        ("maxBytesPerTrigger", "500", "max_bytes_per_trigger", 500),
        ("minOffsetsPerTrigger", "500", "min_offsets_per_trigger", 500),
        ("maxTriggerDelay", "10 seconds", "max_trigger_delay", 10_000),
        ("maxTriggerDelay", "0.5 seconds", "max_trigger_delay", 500),
        ("discoveryInterval", "1m30s", "discovery_ms", 90_000),
        ("startingTimestamp", "1700000000000", "starting_timestamp", 1_700_000_000_000),
        ("endingTimestamp", "1970-01-01T00:00:01Z", "ending_timestamp", 1000),
        ("startingTimestamp", '{"default": "1970-01-02"}', "starting_timestamp", {"default": 86_400_000}),
        ("startingOffsetsByTimestampStrategy", "LATEST", "starting_strategy", "latest"),
        ("minPartitions", "4", "min_partitions", 4),
        ("failOnDataLoss", "FALSE", "fail_on_data_loss", False),
        ("readFrom", "Leader", "read_from", "leader"),
        ("readFrom", "node:n1", "read_from", "node:n1"),
        ("decode", "message", "decode", "message"),
        ("isolation", "read_uncommitted", "isolation", "read_uncommitted"),
        ("fetchMaxBytes", "1000", "fetch_max_bytes", 1000),
        ("groupsPattern", "orders-.*", "groups_pattern", "orders-.*"),
        ("discoveryInterval", "30s", "discovery_ms", 30_000),
        ("maxRecordsPerPartition", "5000", "max_records_per_partition", 5000),
        ("table", "Groups", "table", "groups"),
    ],
)
def test_reading(name: str, value: str, attribute: str, expected: object) -> None:
    assert getattr(DLedgerOptions.for_reading({**PEERS, name: value}), attribute) == expected


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "exactly one of the options peers and path"),
        ({**PEERS, "path": "/store"}, "exactly one of the options peers and path"),
        ({"peers": "n0=127.0.0.1"}, "malformed peer"),
        ({**PEERS, "maxOffsetPerTriger": "5"}, "did you mean 'maxOffsetsPerTrigger'?"),
        ({**PEERS, "xyz": "5"}, "known options: commitProbe, decode"),
        ({**PEERS, "group": "a"}, "not for reading at group; did you mean 'groups'?"),
        ({**PEERS, "groups": ","}, "no group in ',' at groups"),
        ({**PEERS, "groups": "a,b,a"}, "group a occurs twice"),
        ({**PEERS, "groups": "a/b"}, "cannot name a group"),
        ({**PEERS, "maxOffsetsPerTrigger": "-1"}, "wrong value '-1': it should be greater than 0 at"),
        ({**PEERS, "maxOffsetsPerTrigger": "1e3"}, "it should be a valid integer"),
        ({**PEERS, "failOnDataLoss": "maybe"}, "valid boolean"),
        ({**PEERS, "startingOffsets": "newest"}, "earliest, latest or JSON"),
        ({**PEERS, "startingOffsets": "[1]"}, "JSON like"),
        ({**PEERS, "startingOffsets": '{"default": -3}'}, "must have an index"),
        ({**PEERS, "startingOffsets": '{"default": true}'}, "must have an index"),
        ({**PEERS, "startingOffsets": '{"other": 3}'}, "not among the groups default"),
        ({**PEERS, "startingOffsets": "@/no/such/file"}, "cannot read the file"),
        ({**PEERS, "startingTimestamp": "yesterday"}, "milliseconds since the epoch, or a time like"),
        ({**PEERS, "startingTimestamp": '{"other": 3}'}, "not among the groups default"),
        ({**PEERS, "startingTimestamp": "{}"}, "per group it must be JSON"),
        ({**PEERS, "maxTriggerDelay": "15"}, "malformed duration '15' at maxTriggerDelay"),
        ({**PEERS, "minOffsetsPerTrigger": "5", "maxOffsetsPerTrigger": "4"}, "5 is more than maxOffsetsPerTrigger"),
        ({**PEERS, "readFrom": "nearest"}, "any, leader, follower or node:ID"),
        ({**PEERS, "decode": "json"}, "wrong value 'json': it should be 'none' or 'message' at decode"),
        ({**PEERS, "token": "x"}, "unknown option 'token' at token; "),
        ({**PEERS, "columns": "body"}, "unknown option 'columns'"),
        ({"path": "/store", "groups": "a,b"}, "a store holds one group at groups"),
        ({"path": "/store", "groupsPattern": "a.*"}, "a store holds one group at groupsPattern"),
        ({**PEERS, "groups": "a", "groupsPattern": "a.*"}, "only one of the options groups and groupsPattern"),
        ({**PEERS, "groupsPattern": "a("}, "must be a regular expression"),
        ({**PEERS, "subscribePattern": "a.*"}, "what Kafka calls so is 'groupsPattern' here"),
        ({"kafka.bootstrap.servers": "a:1"}, "what Kafka calls so is 'peers' here"),
        ({**PEERS, "topic": "orders"}, "did you mean 'topics'?"),
        ({**PEERS, "maxRecordsPerPartition": "0"}, "greater than 0 at maxRecordsPerPartition"),
        ({**PEERS, "minPartitions": "1000000"}, "less than or equal to 100000 at minPartitions"),
        ({**PEERS, "fetchMaxBytes": str(1 << 30)}, "less than or equal to 16777216 at fetchMaxBytes"),
        ({**PEERS, "readFrom": "node:n7"}, "'node:n7': peers names no such node at readFrom; use one of node:n0"),
        ({**PEERS, "table": "tables"}, "it should be 'groups', 'nodes', 'terms', 'segments' or 'producers'"),
        ({**PEERS, "table": "groups", "decode": "message"}, "with table=groups it does nothing at decode"),
    ],
)
def test_wrong_reading_options_say_what_and_what_to_do(options: dict[str, str], said: str) -> None:
    with pytest.raises(OptionError) as caught:
        DLedgerOptions.for_reading(options)
    assert str(caught.value).startswith("[DLEDGER_OPTION] ")
    assert said in str(caught.value)


def names_for_reading() -> list[str]:
    """The known options, as an unknown one lists them."""
    with pytest.raises(OptionError) as caught:
        DLedgerOptions.for_reading({"xyz": ""})
    return caught.value.remedy.removeprefix("known options: ").split(", ")


@pytest.mark.parametrize("name", names_for_reading())
def test_wrong_values_name_option_and_remedy(name: str) -> None:
    with pytest.raises(OptionError) as caught:
        DLedgerOptions.for_reading({**PEERS, "decode": "message", name: ""})
    text = str(caught.value)
    assert f" at {name}; " in text
    assert "\n" not in text
    remedy = caught.value.remedy
    assert remedy
    example = remedy.removeprefix("for example ")
    if example != remedy and "@" not in example and name not in ("path", "table"):
        java = {"protocol": "dledger-java"} if name in ("safetyLag", "commitProbe") else {}
        decode = {"decode": "message"} if name != "decode" else {}
        DLedgerOptions.for_reading({**PEERS, **java, **decode, name: example})


@pytest.mark.parametrize(
    "text",
    [
        '{"default": 7}',
        'v1\n{"batchWatermarkMs":0}\n{"groups":{"default":{"check":null,"log":null,"next":7,"term":-1}},"v":1}',
        'v1\n{}\n17\n{"groups":{"default":{"check":1,"log":"l","next":7,"term":2}},"v":1}\n-',
    ],
)
def test_starting_offsets_of_a_file_or_of_a_checkpoint(tmp_path: Path, text: str) -> None:
    (tmp_path / "offsets").write_text(text + "\n")
    options = DLedgerOptions.for_reading({**PEERS, "startingOffsets": f"@{tmp_path / 'offsets'}"})
    assert options.starting_offsets == {"default": 7}


def test_writing() -> None:
    options = DLedgerOptions.for_writing({**PEERS, "group": "orders", "path": "", "appendMaxBytes": "1000"})
    assert (options.group, options.append_max_bytes) == ("orders", 1000)
    for wrong in ({}, {**PEERS, "groups": "a"}, {**PEERS, "appendMaxBytes": str(8 << 20)}, {**PEERS, "decode": "none"}):
        with pytest.raises(OptionError):
            DLedgerOptions.for_writing(wrong)


def test_writing_to_java_groups_names_client_append() -> None:
    with pytest.raises(OptionError, match=r"does not write to Java groups.* at protocol; .*Client\(.*\.append"):
        DLedgerOptions.for_writing({**PEERS, "protocol": "dledger-java"})


@pytest.mark.parametrize(
    ("text", "millis"),
    [
        ("0", 0),
        (" 1700000000123 ", 1_700_000_000_123),
        ("2023-11-14T22:13:20.123Z", 1_700_000_000_123),
        ("2023-11-14T23:13:20.123+01:00", 1_700_000_000_123),
        ("2023-11-14 22:13:20", 1_700_000_000_000),
        ("2023-11-14", 1_699_920_000_000),
    ],
)
def test_times_are_milliseconds_or_iso_and_utc_without_zone(text: str, millis: int) -> None:
    assert DLedgerOptions.for_reading({**PEERS, "startingTimestamp": text}).starting_timestamp == millis


@pytest.mark.parametrize("text", ["", "now", "-5", "1.5", "12:00", "1969-12-31", "9" * 16])
def test_wrong_times_are_rejected(text: str) -> None:
    with pytest.raises(OptionError, match=r"milliseconds since the epoch|before 1970"):
        DLedgerOptions.for_reading({**PEERS, "startingTimestamp": text})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"safetyLag": "5s"}, "with protocol=dledger it does nothing at safetyLag"),
        ({"commitProbe": "true"}, "with protocol=dledger it does nothing at commitProbe"),
        ({"protocol": "dledger-java", "groupsPattern": "a.*"}, "it does nothing at groupsPattern"),
        ({"protocol": "dledger-java", "startingTimestamp": "2026-03-01"}, "it does nothing at startingTimestamp"),
        ({"protocol": "dledger-java", "endingTimestamp": "2026-03-01"}, "it does nothing at endingTimestamp"),
        ({"protocol": "dledger-java", "table": "groups"}, "it does nothing at table"),
        ({"protocol": "dledger-java", "readFrom": "follower"}, "a Java group is read at its leader at readFrom"),
        ({"protocol": "dledger-java", "safetyLag": "soon"}, "malformed duration 'soon' at safetyLag"),
    ],
)
def test_options_that_a_java_group_has_or_has_not(given: dict[str, str], said: str) -> None:
    with pytest.raises(OptionError, match=re.escape(said)):
        DLedgerOptions.for_reading({"peers": "n0-127.0.0.1:1", **given})


def test_the_safety_lag_may_be_none() -> None:
    def lag(value: str) -> int:
        options = {"peers": "n0-127.0.0.1:1", "protocol": "dledger-java", "safetyLag": value}
        return DLedgerOptions.for_reading(options).safety_lag_ms

    assert [lag("0"), lag("0s"), lag("500ms"), lag("2m")] == [0, 0, 500, 120_000]
