"""The options of the ingest job, and the columns of its tables; all of it without a JVM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from dledger_core import ConfigError
from jobs import ingest
from jobs._delta_log import StoredColumns, stored_columns
from jobs._ingest.columns import TargetTable
from jobs._ingest.dead_letters import DEAD_LETTERS
from jobs._ingest.source_options import PASSED_ON
from spark_connector import ddl_of
from spark_connector.columns import schema_for
from spark_connector.options import DLedgerOptions
from spark_connector.reading import admission
from tests.contracts.small_file_stores import classic
from tests.rocketmq.golden import MIXED, extract
from tests.support.run_job import run_in_process

NAMES = {"bigint": "long", "int": "integer"}
OWN = {"startingOffsets", "maxOffsetsPerTrigger", "maxBytesPerTrigger", "failOnDataLoss", "fetchRetryMs", "safetyLag"}
OWN |= {"peers", "groups", "decode", "protocol", "commitProbe", "tls.ca", "tls.cert", "tls.key", "token.file"}
OWN |= {"client.config"}
OWN |= {"path"}
NOT_OF_STREAMS = {"table", "filterPushdown"}
OF_ARCHIVES = {"archive"}
"""The table that is written may be the archive itself."""


def test_every_option_of_source_is_option_of_job() -> None:
    fields = [field for field in DLedgerOptions.model_fields.values() if field.examples]
    names = {str(field.validation_alias) for field in fields}
    with_all = dict.fromkeys(names, "x")
    written = {"group", "appendMaxBytes", "firstBatchId", "onReplayMismatch", "txnAppId", "txnVersion"}
    assert with_all.keys() - written == OWN | NOT_OF_STREAMS | OF_ARCHIVES | set(PASSED_ON)
    options = {name for parameter in ingest.command.params for name in parameter.opts}
    assert {"--groups-pattern", "--starting-timestamp", "--min-partitions", "--topics"} <= options


def field(name: str, kind: Any = "string", *, nullable: bool = True) -> dict[str, Any]:
    return {"name": name, "type": kind, "nullable": nullable, "metadata": {}}


def fields_of(schema: pa.Schema) -> list[dict[str, Any]]:
    """Return an Arrow schema as Delta stores it."""
    found = []
    for each in schema:
        kind = ddl_of(pa.schema([pa.field("x", each.type)])).removeprefix("`x` ")
        of_map = {"type": "map", "keyType": "string", "valueType": "string", "valueContainsNull": True}
        found.append(field(each.name, of_map if kind.startswith("map") else NAMES.get(kind, kind)))
    return found


def write_log(table: Path, fields: list[dict[str, Any]], *, version: int = 0, partitions: tuple[str, ...] = ()) -> None:
    """Write a commit that sets the columns of a table."""
    (table / "_delta_log").mkdir(parents=True, exist_ok=True)
    schema = json.dumps({"type": "struct", "fields": fields})
    metadata = {"metaData": {"id": "x", "schemaString": schema, "partitionColumns": list(partitions)}}
    lines = [{"commitInfo": {"note": '"metaData"'}}, metadata, {"add": {"path": "part"}}]
    text = "\n".join(map(json.dumps, lines))
    (table / "_delta_log" / f"{version:020}.json").write_text(text)


def test_schema_is_that_of_newest_commit_or_checkpoint(tmp_path: Path) -> None:
    log = tmp_path / "_delta_log"
    assert stored_columns(tmp_path) is None
    write_log(tmp_path, [field("old")])
    write_log(tmp_path, [field("new")], version=3)
    (log / f"{4:020}.json").write_text(json.dumps({"add": {"path": "part"}}))
    assert stored_columns(tmp_path) == StoredColumns({"type": "struct", "fields": [field("new")]})
    text = json.dumps({"type": "struct", "fields": [field("kept")]})
    rows = [{"metaData": None, "add": {"path": "a"}}, {"metaData": {"id": "x", "schemaString": text}, "add": None}]
    parquet.write_table(pa.Table.from_pylist(rows), log / f"{4:020}.checkpoint.parquet")
    assert stored_columns(tmp_path) == StoredColumns({"type": "struct", "fields": [field("kept")]})
    rows[0]["metaData"] = {"id": "x", "schemaString": text, "partitionColumns": ["kept"]}
    parquet.write_table(pa.Table.from_pylist(rows[:1]), log / f"{4:020}.checkpoint.parquet")
    assert stored_columns(tmp_path) == StoredColumns({"type": "struct", "fields": [field("kept")]}, ("kept",))
    write_log(tmp_path, [field("newest")], version=5, partitions=("newest",))
    assert stored_columns(tmp_path) == StoredColumns({"type": "struct", "fields": [field("newest")]}, ("newest",))


ENTRIES, MESSAGES = fields_of(schema_for("none")), fields_of(schema_for("message"))


@pytest.mark.parametrize(
    ("fields", "decode", "names"),
    [
        ([], "none", schema_for("none").names),
        (ENTRIES, "none", schema_for("none").names),
        (ENTRIES[::-1], "none", schema_for("none").names),
        ([*ENTRIES, field("more"), field("topic")], "none", schema_for("none").names),
        ([field("BODY", "binary"), *ENTRIES[:-1]], "none", schema_for("none").names),
        (MESSAGES[:-1], "message", schema_for("message").names[:-1]),
    ],
    ids=["no column", "same", "another order", "more columns", "another case", "earlier release"],
)
def test_table_with_more_columns_is_accepted(
    fields: list[dict[str, Any]], decode: str, names: list[str], tmp_path: Path
) -> None:
    write_log(tmp_path, fields)
    assert TargetTable("--table", str(tmp_path), schema_for(decode)).columns() == names


GENERATED = field("day", "date", nullable=False) | {
    "metadata": {"delta.generationExpression": "CAST(timestamp AS DATE)"}
}


def test_table_with_partitions_that_rows_lack_is_rejected_without_jvm(tmp_path: Path) -> None:
    """Delta's sink would refuse the first micro-batch; it computes a column that is generated."""
    target = TargetTable("--table", str(tmp_path), schema_for("none"))
    for number, partition in enumerate(("GROUP", "day")):
        write_log(tmp_path, [*ENTRIES, GENERATED], version=number, partitions=(partition,))
        assert target.columns() == schema_for("none").names
    write_log(tmp_path, [*ENTRIES, field("Region")], version=2, partitions=("group", "Region"))
    with pytest.raises(ConfigError, match=r"partitioned by Region,.*GENERATED ALWAYS"):
        target.columns()


@pytest.mark.parametrize(
    ("fields", "decode", "name"),
    [
        (ENTRIES[1:], "none", "group"),
        ([*ENTRIES[:-1], field("body")], "none", "body"),
        ([*ENTRIES, field("more", nullable=False)], "none", "more"),
        (ENTRIES, "message", "topic"),
        (MESSAGES, "none", "decode"),
    ],
    ids=["missing", "another type", "not null", "not decoded", "decoded"],
)
def test_table_with_other_columns_is_rejected_without_jvm(
    fields: list[dict[str, Any]], decode: str, name: str, tmp_path: Path
) -> None:
    write_log(tmp_path, fields)
    with pytest.raises(ConfigError, match=name) as caught:
        TargetTable("--table", str(tmp_path), schema_for(decode)).columns()
    assert caught.value.remedy


def test_only_spark_reads_table_elsewhere() -> None:
    assert TargetTable("--dead-letters", "s3a://bucket/table", DEAD_LETTERS).columns() is None


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--dead-letters", "dead"], ["--dead-letters", "--decode message"]),
        (["--dead-letters", "dead", "--decode", "message", "--on-decode-error", "fail"], ["--on-decode-error"]),
        (["--dead-letters", "table", "--decode", "message"], ["--table", "--dead-letters"]),
        (["--optimize-every", "soon"], ["--optimize-every"]),
        (["--min-partitions", "0"], ["minPartitions"]),
        (["--topics", "a"], ["topics"]),
        (["--groups", "a", "--groups-pattern", "b.*"], ["groups", "groupsPattern"]),
        (["--trigger", "once"], ["--trigger", "available-now"]),
        (["--ending-offsets", "latest"], ["endingOffsets"]),
    ],
)
def test_wrong_option_is_named(
    arguments: list[str],
    names: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    given = ["--peers", "n0-127.0.0.1:1", "--table", "table", "--checkpoint", "checkpoint", *arguments]
    code, summary, err = run_in_process(ingest.command, capsys, *given)
    assert (code, summary["status"]) == (3, "error")
    assert [name for name in names if name not in err] == []
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "option", ["--max-offsets-per-trigger", "--max-bytes-per-trigger", "--min-offsets-per-trigger"]
)
def test_limit_that_would_end_run_of_spark_4_1_early_is_refused(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(admission, "PASSES_START", False)
    given = ["--peers", "n0-127.0.0.1:1", "--table", "table", "--checkpoint", "checkpoint", option, "5"]
    code, _, err = run_in_process(ingest.command, capsys, *given)
    assert (code, option in err, "4.2" in err) == (3, True, True)


@pytest.fixture
def commitlog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a broker with a classic CommitLog, next to the working directory."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return classic(tmp_path / "broker-a")[0].parent


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--peers", "n0-127.0.0.1:1"], "--peers"),
        (["--groups-pattern", "a.*"], "--groups-pattern"),
        (["--discovery-interval", "5s"], "--discovery-interval"),
        (["--groups", "a,b"], "groups"),
        (["--protocol", "dledger-java"], "--protocol"),
        (["--safety-lag", "5s"], "--safety-lag"),
        (["--commit-probe"], "--commit-probe"),
        (["--read-from", "leader"], "--read-from"),
        (["--pin-for", "5m"], "--pin-for"),
        (["--on-pin-failure", "wait"], "--on-pin-failure"),
        (["--fetch-timeout-ms", "10"], "--fetch-timeout-ms"),
        (["--tls-ca", "ca.pem"], "--tls-ca"),
        (["--token-file", "token"], "--token-file"),
        (["--trigger", "5 seconds", "--max-offsets-per-trigger", "5"], "maxOffsetsPerTrigger"),
        (["--trigger", "5 seconds", "--min-offsets-per-trigger", "5"], "minOffsetsPerTrigger"),
        (["--max-records-per-partition", "5"], "maxRecordsPerPartition"),
        (["--isolation", "read_uncommitted"], "isolation"),
        (["--table", "../broker-a/table"], "--path"),
        (["--path", "../absent"], "absent"),
    ],
)
def test_option_without_meaning_in_directory_is_refused_in_one_sentence(
    arguments: list[str], named: str, commitlog: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--path", str(commitlog), "--table", "table", "--checkpoint", "checkpoint", *arguments]
    code, summary, err = run_in_process(ingest.command, capsys, *given)
    assert (code, summary["status"]) == (3, "error")
    [line] = err.splitlines()
    assert named in line
    assert not list(Path().iterdir())
    assert sorted(path.name for path in commitlog.iterdir()) == ["commitlog"]


def test_directory_is_read_whatever_the_environment_says_of_servers(
    commitlog: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("PEERS", "GROUP", "TLS_CA", "TLS_CERT", "TLS_KEY", "TOKEN_FILE"):
        monkeypatch.setenv(f"DLEDGER_{name}", "n0-127.0.0.1:1" if name == "PEERS" else "other")
    store = extract(MIXED, "n0/dledger-n0", tmp_path)
    extract(MIXED, "n0/commitlog", tmp_path)
    last = int(max((commitlog / "commitlog").iterdir()).name)
    limited = ["--max-bytes-per-trigger", "5000", "--min-partitions", "2", "--topics", "a", "--retry-for", "5"]
    for path, arguments, groups in (
        (commitlog, limited, {"broker-a"}),
        (commitlog / "commitlog", ["--groups", "orders"], {"orders"}),
        (store, ["--isolation", "read_uncommitted"], {"n0"}),
        (store.parent, ["--starting-offsets", '{"n0.commitlog": 5}'], {"n0", "n0.commitlog"}),
    ):
        given = ["--path", str(path), "--decode", "message", "--table", "t", "--checkpoint", "c", "--dry-run"]
        code, summary, _ = run_in_process(ingest.command, capsys, *given, *arguments)
        assert (code, set(summary["available"])) == (0, groups)
        if "broker-a" in groups:
            assert summary["available"]["broker-a"]["start"] == 0
            assert summary["available"]["broker-a"]["end"] > last
    assert not list(Path().iterdir())
