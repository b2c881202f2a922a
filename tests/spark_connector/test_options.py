from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from spark_connector.errors import OptionError
from spark_connector.options import DLedgerOptions

PEERS = {"peers": "n0-127.0.0.1:1;n1-127.0.0.1:2"}
JAVA = {**PEERS, "protocol": "dledger-java"}


def test_defaults_ignore_options_of_spark() -> None:
    options = DLedgerOptions.for_reading({**PEERS, "checkpointlocation": "/c", "queryname": "q"})
    assert (options.groups, options.decode, options.isolation) == (("default",), "none", "read_committed")
    assert options.fail_on_data_loss
    assert options.starting_offsets is None
    assert pickle.loads(pickle.dumps(options)) == options


STORED = '{"groups":{"default":{"check":null,"log":null,"next":7,"term":-1}},"v":1}'


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("groups", " a, b", ("a", "b")),
        ("STARTINGOFFSETS", "Earliest", "earliest"),
        ("startingOffsets", '{"default": 12}', {"default": 12}),
        ("startingOffsets", '{"default": "latest"}', {"default": -1}),
        ("startingOffsets", STORED, {"default": 7}),
        ("endingOffsets", '{"default": -1}', {"default": -1}),
        ("maxOffsetsPerTrigger", "500", 500),
        ("maxBytesPerTrigger", "500", 500),
        ("minOffsetsPerTrigger", "500", 500),
        ("maxTriggerDelay", "10 seconds", 10_000),
        ("maxTriggerDelay", "0.5 seconds", 500),
        ("discoveryInterval", "1m30s", 90_000),
        ("startingTimestamp", "0", 0),
        ("startingTimestamp", " 1700000000123 ", 1_700_000_000_123),
        ("startingTimestamp", "2023-11-14T22:13:20.123Z", 1_700_000_000_123),
        ("startingTimestamp", "2023-11-14T23:13:20.123+01:00", 1_700_000_000_123),
        ("startingTimestamp", "2023-11-14 22:13:20", 1_700_000_000_000),
        ("startingTimestamp", "2023-11-14", 1_699_920_000_000),
        ("startingTimestamp", '{"default": "1970-01-02"}', {"default": 86_400_000}),
        ("endingTimestamp", "1970-01-01T00:00:01Z", 1000),
        ("startingOffsetsByTimestampStrategy", "LATEST", "latest"),
        ("minPartitions", "4", 4),
        ("failOnDataLoss", "FALSE", False),
        ("readFrom", "Leader", "leader"),
        ("readFrom", "node:n1", "node:n1"),
        ("decode", "message", "message"),
        ("isolation", "read_uncommitted", "read_uncommitted"),
        ("filterPushdown", "ONE_QUERY", "one_query"),
        ("fetchMaxBytes", "1000", 1000),
        ("groupsPattern", "orders-.*", "orders-.*"),
        ("maxRecordsPerPartition", "5000", 5000),
        ("table", "Groups", "groups"),
        *(("safetyLag", text, lag) for text, lag in (("0", 0), ("0s", 0), ("500ms", 500), ("2m", 120_000))),
    ],
)
def test_reading_option_is_parsed(name: str, value: str, expected: object) -> None:
    options = DLedgerOptions.for_reading({**(JAVA if name == "safetyLag" else PEERS), name: value})
    known = {str(info.validation_alias).lower(): field for field, info in DLedgerOptions.model_fields.items()}
    assert getattr(options, known[name.lower()]) == expected


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ["peers", "path"]),
        ({**PEERS, "path": "/store"}, ["peers", "path"]),
        ({"peers": "n0=127.0.0.1"}, ["peers"]),
        ({**PEERS, "maxOffsetPerTriger": "5"}, ["maxOffsetPerTriger", "maxOffsetsPerTrigger"]),
        ({**PEERS, "xyz": "5"}, ["xyz", "commitProbe, decode"]),
        ({**PEERS, "group": "a"}, ["'group'", "'groups'"]),
        ({**PEERS, "groups": ","}, ["groups"]),
        ({**PEERS, "groups": "a,b,a"}, ["groups", "twice"]),
        ({**PEERS, "groups": "a/b"}, ["groups", "'a/b'"]),
        ({**PEERS, "maxOffsetsPerTrigger": "-1"}, ["maxOffsetsPerTrigger", "'-1'"]),
        ({**PEERS, "maxOffsetsPerTrigger": "1e3"}, ["maxOffsetsPerTrigger", "integer"]),
        ({**PEERS, "failOnDataLoss": "maybe"}, ["failOnDataLoss", "boolean"]),
        ({**PEERS, "startingOffsets": "newest"}, ["startingOffsets", "earliest, latest"]),
        ({**PEERS, "startingOffsets": "[1]"}, ["startingOffsets", "JSON"]),
        ({**PEERS, "startingOffsets": '{"default": -3}'}, ["startingOffsets", "'default'"]),
        ({**PEERS, "startingOffsets": '{"default": true}'}, ["startingOffsets", "'default'"]),
        ({**PEERS, "startingOffsets": '{"other": 3}'}, ["startingOffsets", "'other'"]),
        ({**PEERS, "startingOffsets": "@/no/such/file"}, ["startingOffsets", "/no/such/file"]),
        *(
            ({**PEERS, "startingTimestamp": text}, ["startingTimestamp"])
            for text in ("yesterday", "now", "-5", "1.5", "12:00", "1969-12-31", "9" * 16)
        ),
        ({**PEERS, "startingTimestamp": '{"other": 3}'}, ["startingTimestamp", "'other'"]),
        ({**PEERS, "startingTimestamp": "{}"}, ["startingTimestamp", "JSON"]),
        ({**PEERS, "maxTriggerDelay": "15"}, ["maxTriggerDelay", "'15'"]),
        ({**PEERS, "minOffsetsPerTrigger": "5", "maxOffsetsPerTrigger": "4"}, ["minOffsetsPerTrigger 5", "4"]),
        ({**PEERS, "readFrom": "nearest"}, ["readFrom", "any, leader, follower or node:ID"]),
        ({**PEERS, "readFrom": "node:n7"}, ["readFrom", "'node:n7'", "node:n0, node:n1"]),
        ({**PEERS, "decode": "json"}, ["decode", "'none' or 'message'"]),
        ({**PEERS, "token": "x"}, ["'token'"]),
        ({**PEERS, "columns": "body"}, ["'columns'"]),
        ({"path": "/store", "groups": "a,b"}, ["groups"]),
        ({"path": "/store", "groupsPattern": "a.*"}, ["groupsPattern"]),
        ({**PEERS, "groups": "a", "groupsPattern": "a.*"}, ["groups", "groupsPattern"]),
        ({**PEERS, "groupsPattern": "a("}, ["groupsPattern", "regular expression"]),
        ({**PEERS, "subscribePattern": "a.*"}, ["'groupsPattern'"]),
        ({"kafka.bootstrap.servers": "a:1"}, ["'peers'"]),
        ({**PEERS, "topic": "orders"}, ["'topics'"]),
        ({**PEERS, "maxRecordsPerPartition": "0"}, ["maxRecordsPerPartition", "greater than 0"]),
        ({**PEERS, "minPartitions": "1000000"}, ["minPartitions", "100000"]),
        ({**PEERS, "fetchMaxBytes": str(1 << 30)}, ["fetchMaxBytes", "16777216"]),
        (
            {**PEERS, "table": "tables"},
            ["table", "'groups', 'nodes', 'terms', 'segments', 'producers' or 'transactions'"],
        ),
        ({**PEERS, "table": "groups", "decode": "message"}, ["decode", "table=groups"]),
        ({**PEERS, "topics": "a"}, ["topics", "decode=message"]),
        ({**PEERS, "tags": "a"}, ["tags", "decode=message"]),
        ({**PEERS, "onDecodeError": "fail"}, ["onDecodeError", "decode=message"]),
        ({**PEERS, "decode": "message", "topics": " , "}, ["topics"]),
        ({**PEERS, "decode": "message", "tags": '[""]'}, ["tags", "JSON"]),
        ({**PEERS, "decode": "message", "onDecodeError": "skip"}, ["onDecodeError", "'column' or 'fail'"]),
        ({**PEERS, "safetyLag": "5s"}, ["safetyLag", "protocol=dledger"]),
        ({**PEERS, "commitProbe": "true"}, ["commitProbe", "protocol=dledger"]),
        ({**JAVA, "groupsPattern": "a.*"}, ["groupsPattern", "protocol=dledger-java"]),
        ({**JAVA, "startingTimestamp": "2026-03-01"}, ["startingTimestamp", "protocol=dledger-java"]),
        ({**JAVA, "endingTimestamp": "2026-03-01"}, ["endingTimestamp", "protocol=dledger-java"]),
        ({**JAVA, "table": "groups"}, ["table", "protocol=dledger-java"]),
        ({**JAVA, "readFrom": "follower"}, ["readFrom"]),
        ({**JAVA, "safetyLag": "soon"}, ["safetyLag", "'soon'"]),
    ],
)
def test_wrong_reading_option_is_named_in_one_line(options: dict[str, str], names: list[str]) -> None:
    with pytest.raises(OptionError) as caught:
        DLedgerOptions.for_reading(options)
    text = str(caught.value)
    assert text.startswith("[DLEDGER_OPTION] ")
    assert "\n" not in text
    assert [name for name in names if name not in text] == []


def names_for_reading() -> list[str]:
    """The known options, as an unknown one lists them."""
    with pytest.raises(OptionError) as caught:
        DLedgerOptions.for_reading({"xyz": ""})
    return caught.value.remedy.removeprefix("known options: ").split(", ")


@pytest.mark.parametrize("name", names_for_reading())
def test_empty_value_names_option_and_valid_example(name: str) -> None:
    with pytest.raises(OptionError) as caught:
        DLedgerOptions.for_reading({**PEERS, "decode": "message", name: ""})
    text = str(caught.value)
    assert name in caught.value.what
    assert "\n" not in text
    remedy = caught.value.remedy
    assert remedy
    example = remedy.removeprefix("for example ")
    if example != remedy and "@" not in example and name not in ("path", "table", "client.config"):
        java = {"protocol": "dledger-java"} if name in ("safetyLag", "commitProbe") else {}
        decode = {"decode": "message"} if name != "decode" else {}
        tls = {"tls.ca": "/ca.pem", "tls.cert": "/c.pem"} if name in ("tls.cert", "tls.key", "token.file") else {}
        DLedgerOptions.for_reading({**PEERS, **java, **decode, **tls, name: example})


@pytest.mark.parametrize(
    "text",
    [
        '{"default": 7}',
        'v1\n{"batchWatermarkMs":0}\n{"groups":{"default":{"check":null,"log":null,"next":7,"term":-1}},"v":1}',
        'v1\n{}\n17\n{"groups":{"default":{"check":1,"log":"l","next":7,"term":2}},"v":1}\n-',
    ],
)
def test_starting_offsets_are_read_from_file_or_checkpoint(tmp_path: Path, text: str) -> None:
    (tmp_path / "offsets").write_text(text + "\n")
    options = DLedgerOptions.for_reading({**PEERS, "startingOffsets": f"@{tmp_path / 'offsets'}"})
    assert options.starting_offsets == {"default": 7}


def test_writing_options_are_parsed_and_checked() -> None:
    options = DLedgerOptions.for_writing({**PEERS, "group": "orders", "path": "", "appendMaxBytes": "1000"})
    assert (options.group, options.append_max_bytes) == ("orders", 1000)
    for wrong in ({}, {**PEERS, "groups": "a"}, {**PEERS, "appendMaxBytes": str(8 << 20)}, {**PEERS, "decode": "none"}):
        with pytest.raises(OptionError):
            DLedgerOptions.for_writing(wrong)


@pytest.mark.parametrize("stream", [True, False])
def test_writing_by_path_names_group(stream: bool) -> None:
    """save("b") and start("b") would write to the default group without a word."""
    with pytest.raises(OptionError, match="'b'"):
        DLedgerOptions.for_writing({**PEERS, "Path": "b"}, stream=stream)


def test_version_of_application_is_given_completely_and_not_to_a_stream() -> None:
    both = {**PEERS, "txnAppId": "app", "txnversion": "0"}
    options = DLedgerOptions.for_writing(both)
    assert (options.txn_app_id, options.txn_version) == ("app", 0)
    halves: tuple[dict[str, str], ...] = ({"txnAppId": "app"}, {"txnVersion": "0"})
    wrong = [both | {"txnVersion": "-1"}, both | {"txnAppId": ""}, *({**PEERS, **half} for half in halves)]
    for given in wrong:
        with pytest.raises(OptionError, match="txn"):
            DLedgerOptions.for_writing(given)
    with pytest.raises(OptionError, match="txnAppId"):
        DLedgerOptions.for_writing(both, stream=True)


def test_writing_to_java_group_names_client_append() -> None:
    with pytest.raises(OptionError, match="dledger-java"):
        DLedgerOptions.for_writing({**PEERS, "protocol": "dledger-java"})


ACCESS = {"tls.ca": "/ca.pem", "tls.cert": "/c.pem", "tls.key": "/c.key", "token.file": "/token"}


@pytest.mark.parametrize("parse", [DLedgerOptions.for_reading, DLedgerOptions.for_writing])
def test_tls_and_token_are_names_of_files(parse) -> None:
    options = parse({**PEERS, **ACCESS})
    assert options.tls is not None
    assert (options.tls.ca, options.tls.cert, options.tls.key) == ("/ca.pem", "/c.pem", "/c.key")
    assert options.token == Path("/token")
    assert pickle.loads(pickle.dumps(options)) == options
    assert parse(PEERS).tls is None


@pytest.mark.parametrize(
    "given",
    [
        {**PEERS, "token.file": "/token"},
        {**PEERS, "tls.cert": "/c.pem"},
        {**PEERS, "tls.ca": "/ca.pem", "tls.key": "/c.key"},
        {**JAVA, "tls.ca": "/ca.pem"},
        {"path": "/store", "tls.ca": "/ca.pem"},
    ],
)
def test_tls_options_without_effect_are_refused(given) -> None:
    with pytest.raises(OptionError):
        DLedgerOptions.for_reading(given)


@pytest.fixture
def client_config(tmp_path: Path) -> str:
    for name in ("token", "other-token"):
        (tmp_path / name).touch(0o600)
    path = tmp_path / "client.toml"
    path.write_text(
        'peers = "n0-127.0.0.1:9"\ngroup = "orders"\n'
        'tls-ca = "ca.pem"\ntls-cert = "c.pem"\ntls-key = "c.key"\ntoken-file = "token"\n'
    )
    return str(path)


@pytest.mark.parametrize("parse", [DLedgerOptions.for_reading, DLedgerOptions.for_writing])
def test_options_that_are_not_given_come_from_the_file(parse, client_config: str) -> None:
    options = parse({"client.config": client_config})
    directory = Path(client_config).parent
    assert (options.peers, options.token) == ("n0-127.0.0.1:9", directory / "token")
    assert options.tls is not None
    files = ["ca.pem", "c.pem", "c.key"]
    assert [options.tls.ca, options.tls.cert, options.tls.key] == [str(directory / name) for name in files]
    given = parse({"client.config": client_config, **PEERS, **ACCESS})
    assert (given.peers, given.token_file, given.tls_ca) == (PEERS["peers"], "/token", "/ca.pem")


@pytest.mark.parametrize(
    ("given", "groups"),
    [({}, ("orders",)), ({"groups": "a,b"}, ("a", "b")), ({"groupsPattern": "o.*"}, ("default",))],
)
def test_group_of_the_file_is_read_unless_groups_are_given(
    given: dict[str, str], groups: tuple[str, ...], client_config: str
) -> None:
    assert DLedgerOptions.for_reading({"client.config": client_config, **given}).groups == groups


def test_group_of_the_file_is_only_a_default_of_writes(client_config: str) -> None:
    options = DLedgerOptions.for_writing({"client.config": client_config})
    assert (options.group, options.default_group) == (None, "orders")
    assert DLedgerOptions.for_writing({"client.config": client_config, "group": "b"}).group == "b"


def test_wrong_file_of_client_config_is_an_error_of_the_option(tmp_path: Path, client_config: str) -> None:
    with pytest.raises(OptionError, match=r"client\.config") as caught:
        DLedgerOptions.for_reading({"client.config": str(tmp_path / "missing.toml")})
    assert caught.value.where == str(tmp_path / "missing.toml")
    with pytest.raises(OptionError, match=r"client\.config"):
        DLedgerOptions.for_reading({"client.config": client_config, "path": "/store"})
    (tmp_path / "token").chmod(0o644)
    with pytest.raises(OptionError) as caught:
        DLedgerOptions.for_reading({"client.config": client_config})
    assert caught.value.remedy.startswith("chmod 600 ")


@pytest.mark.parametrize("parse", [DLedgerOptions.for_reading, DLedgerOptions.for_writing])
@pytest.mark.parametrize("given", [{}, {"provider": "dledger", "option.peers": "h:1", "peers": "h:1", "owner": "o"}])
def test_table_of_a_catalog_is_refused_with_the_statement_of_a_view(parse: Any, given: dict[str, str]) -> None:
    with pytest.raises(OptionError) as raised:
        parse(given)
    assert "CREATE TEMPORARY VIEW" in raised.value.remedy
