"""The Spark session and the streaming queries of a job: versions, checkpoints, triggers."""

from __future__ import annotations

import json
import subprocess
import sys
import traceback
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pyspark
import pytest
from py4j.protocol import Py4JError  # type: ignore[import-untyped]

from dledger_core import ConfigError, environment
from dledger_core.environment import DELTA_VERSION
from jobs import _delta_jars, _session
from jobs._session import check_resume, parse_trigger
from spark_connector.errors import CheckpointError, GroupGoneError, LogRecreatedError, OffsetBeyondEndError
from spark_connector.options import DLedgerOptions
from spark_connector.reading.tracking import Tracker
from tests.spark_connector.store_writer import StoreWriter


@pytest.mark.parametrize("version", ["3.5.1", "4.0.2", "4.20.0", "5.0.0"])
def test_check_versions_rejects_another_pyspark(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pyspark, "__version__", version)
    with pytest.raises(ConfigError) as caught:
        _session.check_versions()
    assert caught.value.values == {"found": version}


@pytest.mark.parametrize("version", ["3.3.2", "4.0.0", "4.3.1", "4.4.1", None])
def test_check_versions_rejects_another_delta(version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def installed(name: str) -> str:
        assert name == "delta-spark"
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", installed)
    with pytest.raises(ConfigError) as caught:
        _session.check_versions()
    assert caught.value.values == ({} if version is None else {"found": version})
    assert f"'delta-spark=={DELTA_VERSION}'" in caught.value.remedy
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")  # spark-submit, whose user names the jar
    _session.check_versions()


def test_check_versions_rejects_spark_home_of_another_spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")  # no search for Java
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    _session.check_versions()  # nothing is known of it
    (tmp_path / "jars").mkdir()
    jar = tmp_path / "jars" / "spark-core_2.13-4.1.4.jar"
    jar.touch()
    with pytest.raises(ConfigError, match=r"Spark 4\.1\.4, and PySpark is of 4\.2") as caught:
        _session.check_versions()
    assert caught.value.remedy == "unset SPARK_HOME"
    jar.rename(jar.with_name(f"spark-core_2.13-{pyspark.__version__}.jar"))
    _session.check_versions()


def test_check_versions_rejects_another_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "SYSTEM_JAVA", tmp_path)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError) as caught:
        _session.check_versions()
    assert caught.value.remedy


def test_long_error_in_micro_batch_has_one_line() -> None:
    def fail(_rows: Any, number: int) -> None:
        raise (Py4JError("o1.save failed\n" + "\tat Some.method\n" * 1000), ConfigError("wrong"), ValueError("a\nb"))[
            number
        ]

    write = _session.with_short_errors(fail)
    rows: Any = None
    with pytest.raises(RuntimeError) as caught:
        write(rows, 0)
    assert "o1.save failed" in str(caught.value)
    assert "\n" not in "".join(traceback.format_exception_only(caught.value)).strip()
    for number, error in ((1, ConfigError), (2, ValueError)):
        with pytest.raises(error):
            write(rows, number)


@pytest.fixture
def jars(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / name for name in ("io.delta_delta-spark.jar", "storage.jar")]
    for path in paths:
        with zipfile.ZipFile(path, "w") as jar:
            jar.writestr("content", "x" * 1000)
    return paths


def recorded(tmp_path: Path, jars: list[Path]) -> tuple[Path, str]:
    text = ",".join(f"file://{jar}" for jar in jars)
    record = tmp_path / "record"
    record.write_text(f"{text}\n")
    return record, text


def test_recorded_jars_are_used_while_all_of_them_exist(tmp_path: Path, jars: list[Path]) -> None:
    assert not _delta_jars.recorded_jars(None)
    assert not _delta_jars.recorded_jars(tmp_path / "record")
    record, text = recorded(tmp_path, jars)
    assert _delta_jars.recorded_jars(record) == text
    jars[1].unlink()
    assert not _delta_jars.recorded_jars(record)


@pytest.mark.parametrize("length", [0, 1, 100, -1])
def test_jar_that_is_not_whole_is_named_until_its_remedy_is_typed(
    tmp_path: Path, jars: list[Path], length: int
) -> None:
    record, _ = recorded(tmp_path, jars)
    jars[1].write_bytes(jars[1].read_bytes()[:length])
    with pytest.raises(ConfigError) as caught:
        _delta_jars.recorded_jars(record)
    assert caught.value.where == str(jars[1])
    subprocess.run(caught.value.remedy.partition(";")[0], shell=True, check=True)
    assert not _delta_jars.recorded_jars(record), "Spark fetches it"


@pytest.mark.parametrize("record", [b"", b"\xff\xfe\x00", b"\0", b",", b"s3a://bucket/delta-spark.jar", b"x" * 5000])
def test_damaged_record_of_jars_is_none(tmp_path: Path, record: bytes) -> None:
    path = tmp_path / "record"
    path.write_bytes(record)
    assert not _delta_jars.recorded_jars(path)


def test_record_that_cannot_be_opened_or_lacks_delta_is_none(tmp_path: Path, jars: list[Path]) -> None:
    assert not _delta_jars.recorded_jars(tmp_path)
    assert not _delta_jars.recorded_jars(tmp_path / ("x" * 300))
    record, _ = recorded(tmp_path, jars[1:])
    assert not _delta_jars.recorded_jars(record)


@pytest.mark.parametrize(
    ("settings", "arguments", "defaults", "has_own", "packages"),
    [
        ({}, "", "", False, []),
        ({"spark.jars": "own.jar"}, "", "", True, []),
        ({"spark.jars.packages": "a:b:1,c:d:2"}, "", "spark.jars.packages x:y:3", True, ["a:b:1", "c:d:2"]),
        ({}, "--repositories https://host/maven2 pyspark-shell", "", False, []),
        ({}, "--conf spark.jars.repositories=https://host/maven2 pyspark-shell", "", False, []),
        ({}, "--packages a:b:1 pyspark-shell", "", True, []),
        ({}, "--conf spark.jars=own.jar pyspark-shell", "", True, []),
        ({}, "--properties-file own.conf pyspark-shell", "", True, []),
        ({}, "", "# mine\nspark.ui.enabled false\n", False, []),
        ({}, "", "spark.jars own.jar\n", True, []),
        ({}, "", "spark.ui.enabled false\nspark.jars.packages=a:b:1, c:d:2 \n", True, ["a:b:1", "c:d:2"]),
        ({}, "", "spark.jars.packages    a:b:1", True, ["a:b:1"]),
    ],
)
def test_jars_of_user_are_found(
    settings: dict[str, str],
    arguments: str,
    defaults: str,
    has_own: bool,
    packages: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", arguments)
    if defaults:
        (tmp_path / "spark-defaults.conf").write_text(defaults)
    assert (_delta_jars.has_own_jars(settings), _delta_jars.own_packages(settings)) == (has_own, packages)


SHOW_JARS = """
import sys
from jobs._session import spark_session
with spark_session("jars", settings=dict(pair.split("=", 1) for pair in sys.argv[2:])) as spark:
    spark.range(1).write.format("delta").mode("append").save(sys.argv[1])
    print(spark.conf.get("spark.jars"))
"""


def test_jars_of_the_caller_are_added_to_recorded_ones(tmp_path: Path) -> None:
    own = tmp_path / "own.jar"
    with zipfile.ZipFile(own, "w") as archive:
        archive.writestr("name", b"contents")
    command = [sys.executable, "-c", SHOW_JARS, str(tmp_path / "table"), f"spark.jars={own}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert str(own) in done.stdout


@pytest.fixture
def tracker(tmp_path: Path) -> Tracker:
    with StoreWriter(tmp_path / "store") as writer:
        writer.append_numbers(10)
    return Tracker(DLedgerOptions.for_reading({"path": str(writer.path)}))


def checkpoint(directory: Path, *offsets: Any, version: str = "v1") -> str:
    """A checkpoint as Spark writes it: one file per planned micro-batch, with version, metadata and the offset."""
    (directory / "offsets").mkdir(parents=True)
    for number, offset in enumerate(offsets):
        text = offset if isinstance(offset, str) else json.dumps(offset)
        (directory / "offsets" / str(number)).write_text(f"{version}\n{{}}\n{text}")
        (directory / "offsets" / f".{number}.crc").write_bytes(b"crc\0")
    return str(directory)


def offset(next_index: int = 4, *, group: str = "default", log: str = "log-1") -> dict[str, Any]:
    return {"groups": {group: {"check": None, "log": log, "next": next_index, "term": -1}}, "v": 1}


def test_new_or_matching_checkpoint_is_accepted(tracker: Tracker, tmp_path: Path) -> None:
    for place in (
        str(tmp_path / "absent"),
        "s3a://bucket/checkpoint",
        checkpoint(tmp_path / "empty"),
        checkpoint(tmp_path / "fits", offset(0), offset()),
    ):
        check_resume(place, tracker)
    assert not (tmp_path / "absent").exists()


@pytest.mark.parametrize(
    ("found", "error"),
    [
        (offset(log="log-2"), LogRecreatedError),
        (offset(group="orders"), GroupGoneError),
        ({"groups": {}, "v": 99}, CheckpointError),
        (17, CheckpointError),
        ({"topic": {"0": 5}}, CheckpointError),
    ],
    ids=str,
)
def test_other_checkpoint_is_rejected(tracker: Tracker, tmp_path: Path, found: Any, error: type[Exception]) -> None:
    before = checkpoint(tmp_path / "checkpoint", found)
    names = sorted(tmp_path.rglob("*"))
    with pytest.raises(error):
        check_resume(before, tracker)
    assert sorted(tmp_path.rglob("*")) == names


def test_checkpoint_beyond_end_of_log_is_rejected(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "store") as writer:
        writer.append_numbers(10)
    tracker = Tracker(DLedgerOptions.for_reading({"path": str(writer.path), "fetchRetryMs": "1"}))
    with pytest.raises(OffsetBeyondEndError):
        check_resume(checkpoint(tmp_path / "checkpoint", offset(50)), tracker)


def test_newest_micro_batch_is_checked(tracker: Tracker, tmp_path: Path) -> None:
    fits = [offset(index) for index in range(10)]
    with pytest.raises(LogRecreatedError):  # batch 10 comes after batch 9, not after batch 1
        check_resume(checkpoint(tmp_path / "checkpoint", *fits, offset(log="log-2")), tracker)


@pytest.mark.parametrize(
    "arguments",
    [{"version": "v7"}, {"extra": "\n{}"}, {"text": "{torn"}, {"text": ""}],
    ids=["a newer Spark", "two sources", "torn", "nothing"],
)
def test_unreadable_checkpoint_is_rejected(tracker: Tracker, tmp_path: Path, arguments: dict[str, str]) -> None:
    text = arguments.get("text", json.dumps(offset())) + arguments.get("extra", "")
    with pytest.raises(CheckpointError):
        check_resume(checkpoint(tmp_path / "checkpoint", text, version=arguments.get("version", "v1")), tracker)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("available-now", {"availableNow": True}),
        ("0.5 seconds", {"processingTime": "500 milliseconds"}),
        ("10 seconds", {"processingTime": "10000 milliseconds"}),
        ("1m", {"processingTime": "60000 milliseconds"}),
    ],
)
def test_parse_trigger_accepts_every_duration(text: str, arguments: dict[str, Any]) -> None:
    assert parse_trigger(text) == arguments


@pytest.mark.parametrize("text", ["", "now", "10", "-1 seconds", "0 seconds"])
def test_parse_trigger_rejects_other_texts(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_trigger(text)
