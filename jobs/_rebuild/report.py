"""The verdict of a rebuild in words, and the page of a comparison with a broker's consume queues."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .._report.drill_down import Fields, RangeDiff
from .._report.page import Place, ReportedFinding, render_page
from .._report.templates import half_open
from .plan import RebuildPlan
from .stored_queues import Slot, StoredQueues, stored_queues

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["Slot", "expected_units", "page", "problems_of", "verdict_of"]

_DETAILED_MAX: Final = 20
"""Differences whose units and messages the page shows."""
_EXPECTED: Final = ("position", "size", "tags_code", "index", "msg_id", "keys", "store_timestamp")
_MEANINGS: Final = {
    "CONSISTENT": "The broker's queues have the unit of every message in the log, and no others.",
    "INCONSISTENT": "The log's queues, or those of the broker, have faults.",
}


_NOT_CONSUMED: Final = ("CQ_MISSING", "CQ_WRONG_POSITION", "CQ_WRONG_SIZE")
"""Differences that keep a message from consumers, each in one slot."""


def not_consumed(summary: Mapping[str, Any]) -> int:
    """Return the number of messages that consumers do not get from the broker."""
    differences = summary.get("compare", {}).get("differences", {})
    unserved = summary.get("duplicates", {}).get("not_served_by_broker", 0)
    return int(unserved + sum(differences.get(kind, 0) for kind in _NOT_CONSUMED))


def problems_of(plan: RebuildPlan, summary: Mapping[str, Any]) -> list[str]:
    """Return the problems that a rebuild found, in words, the worst first."""
    skipped, lost = summary["skipped"], not_consumed(summary)
    keys, units = (summary.get(name, {}).get("differences", {}) for name in ("compare_indexes", "compare"))
    impossible = skipped["impossible_queue_offsets"]
    problems = {
        f"{_of(lost, 'message')} that consumers do not get": lost,
        "queues have holes": not summary["dense"],
        f"{_of(summary['duplicate_slots'], 'slot')} assigned twice": summary["duplicate_slots"] > 0,
        f"{skipped['not_messages']:,} entries are not messages": plan.foreign and skipped["not_messages"] > 0,
        f"{impossible:,} queue offsets are impossible": impossible > 0,
        f"{len(summary['damaged_files']):,} files of the CommitLog are damaged": summary["damaged_files"],
        f"{summary['damaged_messages']:,} messages are damaged": summary["damaged_messages"],
        "the log lost its end": plan.lost,
        "some queues do not fit into files": summary.get("files", {}).get("refused_queues"),
        f"{sum(units.values()):,} slots differ from the broker's": units,
        f"{sum(keys.values()):,} keys of the index files differ": keys,
    }
    return [text for text, found in problems.items() if found]


def _of(count: int, name: str) -> str:
    return f"{count:,} {name}{'' if count == 1 else 's'}"


def counted(summary: Mapping[str, Any]) -> str:
    """Return the numbers of messages and queues in words."""
    return f"{_of(summary['rows'], 'message')} in {_of(summary['queues'], 'queue')}"


def verdict_of(problems: Sequence[str]) -> str:
    """Return the verdict."""
    return "INCONSISTENT" if problems else "CONSISTENT"


def expected_units(rows: DataFrame, findings: Sequence[Mapping[str, Any]]) -> dict[Slot, Fields]:
    """Return the unit and the message that the log has for the first slot of each of the first findings.

    Args:
        rows: of the table, with one message for each slot.
        findings: of the comparison.
    """
    from pyspark.sql import functions as f

    slots = [(one["topic"], one["queue_id"], one["start"]) for one in findings[:_DETAILED_MAX]]
    if not slots:
        return {}
    wanted = f.lit(False)
    for topic, queue_id, slot in slots:
        wanted |= (f.col("topic") == topic) & (f.col("queue_id") == queue_id) & (f.col("queue_offset") == slot)
    found = rows.where(wanted).select("topic", "queue_id", "queue_offset", *_EXPECTED).collect()
    return {(row["topic"], row["queue_id"], row["queue_offset"]): row.asDict() for row in found}


def page(
    plan: RebuildPlan,
    summary: Mapping[str, Any],
    expected: Mapping[Slot, Fields],
    problems: Sequence[str],
    began: datetime,
) -> str:
    """Return the page of a comparison.

    Args:
        plan: of the rebuild.
        summary: the JSON summary.
        expected: from ``expected_units``.
        problems: from ``problems_of``.
        began: start of the run.
    """
    compared, verdict = summary["compare"], verdict_of(problems)
    stored = stored_queues(compared["directory"])
    versions = ", ".join(f"{name} {version(name)}" for name in ("dledger", "pyspark", "delta-spark"))
    lines = [f"{counted(summary)}, compared with {_of(compared[f'{stored.noun}s'], stored.noun)}."]
    return render_page(
        "comparison.html",
        [_reported(plan, stored, one, expected) for one in compared["findings"]],
        title="Consume queues, compared with the log",
        verdict=verdict,
        meaning=f"{problems[0]}." if not_consumed(summary) else _MEANINGS[verdict],
        lines=[*(f"{text[:1].upper()}{text[1:]}." for text in problems[bool(not_consumed(summary)) :]), *lines],
        subject="queue",
        more_in="in the JSON summary",
        run=[
            ("started", f"{began:%Y-%m-%d %H:%M:%S} UTC"),
            ("log", source_of(plan)),
            ("table", summary["table"]),
            ("slots with several messages", f"the {plan.on_duplicate} one is expected"),
            ("versions", versions),
        ],
        summary=summary,
    )


def source_of(plan: RebuildPlan) -> str:
    """Return the log's directory, or its servers."""
    classic = [str(Path(plan.classic[0].path).parent)] if plan.classic else []
    named = [plan.source[name] for name in ("path", "peers") if name in plan.source]
    return ", ".join([*classic, *named])


def _reported(
    plan: RebuildPlan, stored: StoredQueues, finding: Mapping[str, Any], expected: Mapping[Slot, Fields]
) -> ReportedFinding:
    slot = (finding["topic"], finding["queue_id"], finding["start"])
    unit, fields = stored.unit(slot), expected.get(slot)
    names = {"consumers"} & finding.keys()
    count, file = finding["count"], stored.place(slot)
    return ReportedFinding(
        kind=finding["kind"],
        severity="warning" if finding["kind"] == "CQ_DUPLICATE_OFFSET" else "error",
        subject=f"{slot[0]}, queue {slot[1]}",
        extent=f"slots {half_open(finding['start'], finding['end'])}",
        affected=_of(count, "slot"),
        meaning=finding["cause"],
        next_step=finding["next"],
        place=Place(str(file[0]), file[1], _cure(plan, stored.directory, finding, file[0])),
        show=_command(plan, finding),
        message=_message(fields) if fields else "",
        facts=tuple((name, finding[name]) for name in sorted(names)),
        diff=RangeDiff("", "", {"log": _unit_fields(fields), stored.label: _unit_fields(unit)}, {}, None, None),
    )


def _message(fields: Fields) -> str:
    names = ("msg_id", "keys", "store_timestamp", "index")
    return ", ".join(f"{name} {fields[name]}" for name in names if fields[name] is not None)


def _unit_fields(fields: Fields | None) -> Fields:
    if fields is None:
        return {"unit": "none"}
    return {"unit": "present"} | {name: fields[name] for name in ("position", "size", "tags_code")}


def _cure(plan: RebuildPlan, directory: str, finding: Mapping[str, Any], file: Path) -> str:
    """Return the command that repairs the queue, or reads the messages to send again."""
    if finding["kind"] == "CQ_DUPLICATE_OFFSET":
        return _command(plan, finding)
    if finding["kind"] == "CQ_EXTRA":
        return f"dledger verify {shlex.quote(str(Path(directory).parent))}"
    given = {"--peers": plan.source.get("peers"), "--store": plan.source.get("path")}
    if "peers" in plan.source:
        given["--groups"] = plan.source["groups"]
    given["--commitlog"] = str(Path(plan.classic[0].path).parent) if plan.classic else None
    given |= {"--table": plan.table, "--files": f"{plan.table}-files"}
    if file.is_file():
        given["--consume-queue-file-size"] = str(file.stat().st_size)
    options = " ".join(f"{name} {shlex.quote(value)}" for name, value in given.items() if value is not None)
    return f"python jobs/rebuild_consume_queue.py {options}"


def _command(plan: RebuildPlan, finding: Mapping[str, Any]) -> str:
    """Return the command that shows the message of a slot, else that of the unit."""
    known = [finding[name] for name in ("expected_position", "found_position") if finding[name] is not None]
    place = f"@{known[0]}" if known else "first"
    if "peers" in plan.source:
        [group] = plan.ranges
        return f"dledger get {place} --peers {shlex.quote(plan.source['peers'])} --group {shlex.quote(group)}"
    classic = plan.classic and (not plan.source or (known and known[0] < plan.classic[-1].end))
    log = Path(plan.classic[0].path).parent if classic else Path(plan.source["path"])
    return f"dledger dump {shlex.quote(str(log))} --from {place} --count 1"
