"""The proof of an archive: what the table's rows are, what is recorded, and which rows are named. No JVM, no nodes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from dledger_core import rows_digest
from dledger_core.archive import ArchiveTable
from jobs._archive.differences import Kind, find_differences
from jobs._archive.proving import Proving, retried
from spark_connector.errors import ArchiveTableError
from tests.support.archived_log import GROUP, ArchivedGroup, append, delete, entry, new_table, overwrite, rows_of

Attack = Callable[[str, ArchivedGroup], Any]


def digests_of(path: str) -> Callable[[Any], Any]:
    return lambda ranges: [rows_digest(ArchiveTable(path).rows(GROUP, *one)) for one in ranges]


def proving(log: ArchivedGroup, path: str, digests: Callable[[Any], Any] | None = None, **options: Any) -> Proving:
    table = ArchiveTable(path)
    table.check()
    return Proving(log, table, digests or digests_of(path), **options)  # type: ignore[arg-type]


def changed(log: ArchivedGroup, at: int = 142, **values: Any) -> list[dict[str, Any]]:
    """All entries, with other values of one."""
    return [one | values if one["index"] == at else one for one in log.entries(0, log.size)]


def swapped(log: ArchivedGroup) -> list[dict[str, Any]]:
    bodies = {142: entry(143)["body"], 143: entry(142)["body"]}
    return [one | {"body": bodies.get(one["index"], one["body"])} for one in log.entries(0, log.size)]


def moved(path: str, _: ArchivedGroup) -> None:
    shutil.move(path, f"{path}.moved")
    shutil.copytree(f"{path}.moved", path)


AT = entry(142)
ATTACKS: dict[str, tuple[Attack, list[tuple[str, int, int]]]] = {
    "a row dropped": (lambda path, _: delete(path, '"index" = 142'), [("missing", 142, 143)]),
    "a row doubled": (lambda path, _: append(path, [entry(142)]), [("doubled", 142, 143)]),
    "two rows swapped": (lambda path, log: overwrite(path, swapped(log)), [("changed", 142, 144)]),
    "a bit of a body flipped": (
        lambda path, log: overwrite(path, changed(log, body=b"entry 000141"[:-1] + b"\x33")), [("changed", 142, 143)],
    ),
    "a body longer": (
        lambda path, log: overwrite(path, changed(log, body=AT["body"] + b"\0")), [("changed", 142, 143)],
    ),
    "a term changed": (lambda path, log: overwrite(path, changed(log, term=2)), [("changed", 142, 143)]),
    "a position changed": (
        lambda path, log: overwrite(path, changed(log, position=AT["position"] + 1)), [("changed", 142, 143)],
    ),
    "a time changed": (
        lambda path, log: overwrite(path, changed(log, timestamp=AT["timestamp"] + 1)), [("changed", 142, 143)],
    ),
    "a time removed": (lambda path, log: overwrite(path, changed(log, 143, timestamp=None)), [("changed", 143, 144)]),
    "a term removed": (lambda path, log: overwrite(path, changed(log, term=None)), [("changed", 142, 143)]),
    "a row of a control entry": (lambda path, _: append(path, [entry(100)]), [("foreign", 100, 101)]),
    "a row of another log next to it": (lambda path, _: append(path, [entry(142, term=2)]), [("foreign", 142, 143)]),
    "the same index, another body": (lambda path, _: append(path, [entry(142, body=b"x")]), [("foreign", 142, 143)]),
    "rows after the end of the log": (lambda path, _: append(path, [entry(400), entry(402)]), [("foreign", 300, 403)]),
    "the table of another log": (
        lambda path, _: overwrite(path, [entry(index, term=9) for index in range(50, 250)]),
        [("missing", 1, 50), ("changed", 50, 100)],
    ),
}  # fmt: skip
HARMLESS: dict[str, Attack] = {
    "nothing": lambda _, __: None,
    "OPTIMIZE": lambda path, _: DeltaTable(path).optimize.compact(),
    "ZORDER": lambda path, _: DeltaTable(path).optimize.z_order(["body"]),
    "VACUUM": lambda path, _: DeltaTable(path).vacuum(0, dry_run=False, enforce_retention_duration=False),
    "a copy elsewhere": moved,
    "another order of rows": lambda path, log: overwrite(path, log.entries(0, 300)[::-1]),
    "rows of another group": lambda path, _: append(path, [entry(142), entry(142), entry(900)], "another"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_wrong_rows_are_named_and_neither_they_nor_later_ranges_recorded(tmp_path: Path, name: str) -> None:
    attack, expected = ATTACKS[name]
    log = ArchivedGroup()
    path = new_table(tmp_path / "table", log)
    attack(path, log)
    done = proving(log, path).prove()
    assert [(one.kind, one.start, one.end) for one in done.findings] == expected
    first = min(start for _, start, _ in expected)
    recorded = 0 if first == 300 else first // 100
    assert [(one.start, one.end) for one in log.recorded] == [(at * 100, at * 100 + 100) for at in range(recorded)]


@pytest.mark.parametrize("name", HARMLESS)
def test_changes_that_keep_the_rows_are_proved(tmp_path: Path, name: str) -> None:
    log = ArchivedGroup()
    path = new_table(tmp_path / "table", log)
    HARMLESS[name](path, log)
    done = proving(log, path).prove()
    assert (done.findings, done.behind, done.ranges, done.end, done.rows) == ([], None, 3, 300, 296)
    HARMLESS[name](path, log)
    assert proving(log, path).prove().findings == []
    assert proving(log, path).verify().ranges == 3


def test_pin_ends_with_the_proof(tmp_path: Path) -> None:
    log = ArchivedGroup()
    path = new_table(tmp_path / "table", log)
    delete(path, '"index" = 142')
    job = proving(log, path)
    assert job.prove().end == 100
    assert (min(log.pins), log.pinned) == (0, False)
    append(path, [entry(142)])
    log.pins.clear()
    assert proving(log, path).prove().end == 300
    assert log.pins == []  # a job that was killed would hold back retention for an hour, which waits for the archive


@pytest.mark.parametrize("proved", [0, 1])
def test_pin_of_a_killed_job_ends_with_the_next_run(tmp_path: Path, proved: int) -> None:
    class DyingGroup(ArchivedGroup):
        dead = False

        def pin(self, name: str, start: int, seconds: float) -> None:
            if not self.dead:
                super().pin(name, start, seconds)

    def die(_: Any) -> Any:
        log.dead = True
        raise KeyboardInterrupt

    log = DyingGroup()
    path = new_table(tmp_path / "table", log)
    prove_archived = log.prove_archived
    if proved:  # it dies with the answer to its first proof
        log.prove_archived = lambda *given, **more: (prove_archived(*given, **more), die(given))  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        proving(log, path, None if proved else die).prove()
    assert (len(log.recorded), log.pinned) == (proved, True)
    log.dead, log.prove_archived = False, prove_archived  # type: ignore[method-assign]
    assert proving(log, path).prove().end == 300
    assert not log.pinned


LATER: dict[str, Attack] = {
    "RESTORE": lambda path, _: DeltaTable(path).restore(1),
    "DELETE": lambda path, _: delete(path, '"index" = 142'),
    "an overwrite": lambda path, log: overwrite(path, [one for one in log.entries(0, 300) if one["index"] != 142]),
    "DELETE and VACUUM": lambda path, _: (
        delete(path, '"index" = 142'),
        DeltaTable(path).vacuum(0, dry_run=False, enforce_retention_duration=False),
    ),
    "a row doubled": lambda path, _: append(path, [entry(142)]),
}


@pytest.mark.parametrize("name", LATER)
@pytest.mark.parametrize("trimmed", [False, True])
def test_rows_lost_after_the_proof_stop_the_next_one(tmp_path: Path, name: str, *, trimmed: bool) -> None:
    log = ArchivedGroup()
    path = new_table(tmp_path / "table", log)
    job = proving(log, path)
    assert job.prove().ranges == 3
    log.size = 400
    append(path, log.entries(300, 400))
    LATER[name](path, log)
    log.first_index = 250 if trimmed else 0
    for again in (job, proving(log, path)):
        done = again.prove()
        assert {one.kind for one in done.findings} <= ({"lost"} if trimmed else {"missing", "doubled"})
        assert any(one.start <= 142 < one.end for one in done.findings) or name == "RESTORE"
        assert done.findings
        assert log.archived_end == 300


def test_rows_lost_between_digest_and_proof_are_not_recorded(tmp_path: Path) -> None:
    log = ArchivedGroup()
    path = new_table(tmp_path / "table", log)
    calls: list[Any] = []

    def late(ranges: Any) -> Any:
        found = digests_of(path)(ranges)
        if not calls:
            delete(path, '"index" = 242')
        calls.append(ranges)
        return found

    done = proving(log, path, late).prove()
    assert [(one.kind, one.start) for one in done.findings] == [("missing", 242)]
    assert (log.archived_end, len(calls)) == (200, 2)


def test_statistics_that_count_other_rows_are_an_error_and_no_endless_loop(tmp_path: Path) -> None:
    log = ArchivedGroup()
    path = new_table(tmp_path / "table", log)
    [commit] = (tmp_path / "table" / "_delta_log").glob("*01.json")
    commit.write_text(commit.read_text().replace('\\"numRecords\\":98', '\\"numRecords\\":99'))
    with pytest.raises(ArchiveTableError, match="count 297 rows"):
        proving(log, path).prove()
    assert log.recorded == []


def test_verify_names_rows_whose_number_is_the_same(tmp_path: Path) -> None:
    log = ArchivedGroup()
    path = new_table(tmp_path / "table", log)
    assert proving(log, path).prove().ranges == 3
    overwrite(path, changed(log, term=2))
    assert proving(log, path).prove().findings == []
    done = proving(log, path).verify()
    assert [(one.kind, one.start, one.end) for one in done.findings] == [("changed", 142, 143)]
    assert done.ranges == 2
    log.first_index = 200
    done = proving(log, path).verify()
    assert [(one.kind, one.start, one.end) for one in done.findings] == [("lost", 100, 200)]


def test_table_that_has_only_the_beginning_is_behind_and_no_finding(tmp_path: Path) -> None:
    log = ArchivedGroup()
    path = new_table(tmp_path / "table", log)
    delete(path, '"group" = \'g\' AND "index" >= 142')
    done = proving(log, path).prove()
    assert (done.findings, done.behind, done.end) == ([], 142, 100)
    append(path, log.entries(142, 300))
    assert proving(log, path).prove().end == 300


def test_write_replaces_the_rows_from_the_log_once(tmp_path: Path) -> None:
    log = ArchivedGroup()
    path = new_table(tmp_path / "table", log)
    overwrite(path, changed(log, term=2)[:180])
    append(path, [entry(300)], "another")
    written = []

    def write(start: int, end: int) -> None:
        where = f'"group" = \'g\' AND "index" >= {start} AND "index" < {end}'
        write_deltalake(path, rows_of(log.entries(start, end)), mode="overwrite", predicate=where)
        written.append((start, end))

    done = proving(log, path, write=write).prove()
    assert (done.findings, done.end, done.ranges, written) == ([], 300, 3, [(100, 300)])
    assert (done.written, DeltaTable(path).to_pyarrow_table().num_rows) == (200, 297)


@pytest.mark.parametrize("name", ["ConcurrentAppendException", "DeltaConcurrentModificationException"])
def test_conflict_with_another_writer_is_retried_once_and_then_named(tmp_path: Path, name: str) -> None:
    from delta import exceptions

    table, failures = ArchiveTable(new_table(tmp_path / "table", ArchivedGroup())), [1, 1, 1]

    def write() -> None:
        if failures:
            failures.pop()
            raise getattr(exceptions, name)("another")

    with pytest.raises(ArchiveTableError, match=r"--write, and WRITE by delta-rs"):
        retried(write, table)
    assert len(failures) == 1
    retried(write, table)


def test_write_of_an_empty_table_takes_one_commit_for_ranges_that_are_missing(tmp_path: Path) -> None:
    log = ArchivedGroup()
    path = new_table(tmp_path / "table", log)
    delete(path, "\"group\" = 'g'")
    written = []

    def write(start: int, end: int) -> None:
        append(path, log.entries(start, end))
        written.append((start, end))

    assert proving(log, path, write=write).prove().end == 300
    assert written == [(0, 300)]


def test_write_that_does_not_help_is_a_finding(tmp_path: Path) -> None:
    log = ArchivedGroup()
    path = new_table(tmp_path / "table", log)
    append(path, [entry(142)])
    done = proving(log, path, write=lambda *_: None).prove()
    assert ([one.kind for one in done.findings], done.end) == (["doubled"], 100)


def test_two_jobs_at_once_record_each_range_once(tmp_path: Path) -> None:
    log = ArchivedGroup()
    path = new_table(tmp_path / "table", log)
    second = proving(log, path, at_once=1)

    def overtaken(ranges: Any) -> Any:
        found = digests_of(path)(ranges)
        second.prove()
        return found

    assert proving(log, path, overtaken, at_once=2).prove().findings == []
    assert [(one.start, one.end) for one in log.recorded] == [(0, 100), (100, 200), (200, 300)]


def test_statement_removes_the_rows_of_the_other_log_only(tmp_path: Path) -> None:
    log = ArchivedGroup()
    path = new_table(tmp_path / "table", log)
    append(path, [entry(142, term=2), entry(143, term=2), entry(100), entry(402)])
    for _ in range(9):
        done = proving(log, path).prove()
        if not done.findings:
            break
        for one in done.findings:
            where = one.next_step.partition(" WHERE ")[2].replace("`", '"')
            assert where, one
            delete(path, where)
    assert (log.archived_end, DeltaTable(path).to_pyarrow_table().num_rows) == (300, 298)


# --- tables that cannot be an archive ------------------------------------------------------------------------------


def described(path: Path, fields: dict[str, str], features: list[str]) -> str:
    """Write a table without rows, by its log alone."""
    (path / "_delta_log").mkdir(parents=True)
    columns = [{"name": name, "type": kind, "nullable": True, "metadata": {}} for name, kind in fields.items()]
    schema = json.dumps({"type": "struct", "fields": columns})
    protocol = {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": features, "writerFeatures": features}
    table = {"id": "1", "format": {"provider": "parquet", "options": {}}, "schemaString": schema}
    table |= {"partitionColumns": [], "configuration": {}, "createdTime": 0}
    lines = [json.dumps({"protocol": protocol}), json.dumps({"metaData": table})]
    (path / "_delta_log" / f"{0:020}.json").write_text("\n".join(lines))
    return str(path)


FIELDS = {"group": "string", "index": "long", "term": "long", "position": "long", "timestamp": "timestamp"}
FIELDS |= {"body": "binary"}


@pytest.mark.parametrize(
    ("fields", "features", "named"),
    [
        ({name: kind for name, kind in FIELDS.items() if name != "position"}, [], "position"),
        (FIELDS | {"term": "integer"}, [], "term"),
        (FIELDS | {"timestamp": "timestamp_ntz"}, ["timestampNtz"], "timestamp"),
        ({("indexes" if name == "index" else name): kind for name, kind in FIELDS.items()}, [], "index"),
        (FIELDS, ["typeWidening"], "TypeWidening"),
        (FIELDS, ["catalogManaged"], "catalog"),
        (FIELDS, ["ofTomorrow"], "ofTomorrow"),
    ],
)
def test_table_that_is_no_archive_or_cannot_be_read_is_refused_by_name(
    tmp_path: Path, fields: dict[str, str], features: list[str], named: str
) -> None:
    table = ArchiveTable(described(tmp_path / "table", fields, features))
    with pytest.raises(ArchiveTableError, match=named):
        table.check()


def test_table_of_decoded_messages_is_refused(tmp_path: Path) -> None:
    from spark_connector.messages import MESSAGE_SCHEMA

    extra = {name: "string" for name in MESSAGE_SCHEMA.names if name not in FIELDS}
    with pytest.raises(ArchiveTableError, match="decode"):
        ArchiveTable(described(tmp_path / "table", FIELDS | extra, [])).check()


def test_columns_of_the_user_are_no_difference(tmp_path: Path) -> None:
    log = ArchivedGroup()
    rows = rows_of(log.entries(0, 300))
    write_deltalake(tmp_path / "table", rows.append_column("note", pa.nulls(rows.num_rows, pa.string())))
    assert proving(log, str(tmp_path / "table")).prove().ranges == 3


def test_missing_table_and_secret_of_its_storage_are_no_part_of_the_error(tmp_path: Path) -> None:
    with pytest.raises(ArchiveTableError) as caught:
        ArchiveTable(f"{tmp_path}/s3cr3t/absent", {"aws_secret_access_key": "s3cr3t", "aws_region": "eu"}).check()
    assert "s3cr3t" not in caught.value.what
    assert "<aws_secret_access_key>" in caught.value.what


def test_times_that_only_int96_can_hold_are_read(tmp_path: Path) -> None:
    path = Path(described(tmp_path / "table", FIELDS, []))
    times = [-1, 0, 32_503_680_000_000_001, 253_402_300_799_999_000]
    rows = rows_of([entry(index, timestamp=times[index]) for index in range(4)])
    pq.write_table(rows, path / "a.parquet", use_deprecated_int96_timestamps=True)
    size = (path / "a.parquet").stat().st_size
    add = {"path": "a.parquet", "partitionValues": {}, "size": size, "modificationTime": 0, "dataChange": True}
    (path / "_delta_log" / f"{1:020}.json").write_text(json.dumps({"add": add}))
    table = ArchiveTable(str(path))
    assert table.rows(GROUP, 0, 9).column("timestamp").cast(pa.int64()).to_pylist() == times
    assert table.count(GROUP, 1, 3) == 2  # without statistics


def test_rows_are_counted_from_statistics_and_read_only_where_these_are_not_exact(tmp_path: Path) -> None:
    log = ArchivedGroup()
    path = new_table(tmp_path / "table", log)
    table = ArchiveTable(path)
    assert table.count(GROUP, 50, 300) == 247
    without_files = shutil.copytree(path, tmp_path / "without files", ignore=shutil.ignore_patterns("*.parquet"))
    assert ArchiveTable(str(without_files)).count(GROUP, 0, 300) == 296
    with pytest.raises(ArchiveTableError):
        ArchiveTable(str(without_files)).count(GROUP, 50, 300)
    DeltaTable(path).optimize.compact()
    table.reopen()
    assert [table.count(GROUP, 0, 300), table.count(GROUP, 50, 120), table.count("other", 0, 300)] == [296, 68, 2]
    partitioned = str(tmp_path / "partitioned")
    write_deltalake(partitioned, DeltaTable(path).to_pyarrow_table(), partition_by=["group"])
    other = ArchiveTable(partitioned)
    assert [other.count(GROUP, 0, 300), other.count("other", 0, 300), other.count("none", 0, 300)] == [296, 2, 0]


def test_differences_of_one_range_are_named_by_kind_and_column() -> None:
    log = ArchivedGroup()
    rows = [*log.entries(1, 5), entry(5, term=9), entry(5, term=9), entry(7), entry(7), entry(7, term=2), entry(100)]
    rows += [entry(102, body=b"x", position=1), entry(9), entry(10)]
    found = rows_of(sorted(rows, key=lambda one: one["index"])).drop_columns("group")
    differences = find_differences(log.rows(0, 103), found)
    assert [(one.kind, one.start, one.end, one.rows, one.columns) for one in differences] == [
        (Kind.CHANGED, 5, 6, 2, ("term",)),
        (Kind.MISSING, 6, 7, 1, ()),
        (Kind.DOUBLED, 7, 8, 1, ()),
        (Kind.FOREIGN, 7, 8, 1, ("term",)),
        (Kind.MISSING, 8, 9, 1, ()),
        (Kind.MISSING, 11, 100, 89, ()),
        (Kind.FOREIGN, 100, 101, 1, ()),
        (Kind.CHANGED, 102, 103, 1, ("position", "body")),
    ]
