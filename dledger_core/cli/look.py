"""``dledger look``: kind and content of a directory or a group at a glance, and the command to run next."""

from __future__ import annotations

import contextlib
import re
import shlex
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from dledger_core.cli.entry_table import EntryTable, table_width
from dledger_core.cli.help import command, examples
from dledger_core.cli.options import (
    Access,
    access_options,
    format_option,
    group_of_target_option,
    opaque_option,
    target_argument,
    target_of,
)
from dledger_core.cli.output import Format, Progress, emit, say, show_result, show_rows
from dledger_core.cli.previews import preview, shortened
from dledger_core.client import Metadata
from dledger_core.client_config import LOCAL_PEERS, ClientConfig
from dledger_core.connect import Client
from dledger_core.errors import CorruptRecordError, StorageError, StoreMismatchError
from dledger_core.exit_codes import EXIT_FINDING, EXIT_OK
from dledger_core.rocketmq import (
    BrokerParts,
    Location,
    LogDirectory,
    Skipped,
    broker_parts,
    flushed_until,
    locate,
    log_around,
    open_log_directory,
    queues_in_rocksdb,
)
from dledger_core.rocketmq.broker_parts import confirm_offset
from dledger_core.rocketmq.inspection import (
    LAST_SCHEMA,
    LogInspection,
    end_problems,
    inspect_directory,
    inspect_log,
    key_index,
    queue_files,
)
from dledger_core.rocketmq.store.controller_log import is_event, read_sync_states
from dledger_core.rocketmq.store.epochs import broker_identity, read_epochs
from dledger_core.storage import StoreReader

_DEFAULTS: Final = {"peers": LOCAL_PEERS, "group": "default"}
_TOPICS_SHOWN: Final = 10
_TERMS_SHOWN: Final = 5
_NARROW: Final = 12
_WIDE: Final = 32
_TOPIC_NUMBERS: Final = 40
"""Width of the columns between topic and keys."""
_CHECKPOINT_BYTES_MAX: Final = 4096


@dataclass
class View:
    """Content of the page.

    Attributes:
        facts: name and value.
        inspection: of the entries, if there are any.
        terms: first index and term of each range, oldest first.
        epochs: of a broker in controller mode, number and first position of each, oldest first.
        sync_states: of a controller's log, the sync state set and master of each broker set.
        nodes: of a group.
        damage: a sentence for each problem.
        next: commands to run.
        skipped: directories that look like a log and were left out.
        notes: remarks without effect on the exit code.
    """

    facts: dict[str, Any]
    inspection: LogInspection | None = None
    terms: list[dict[str, int]] = field(default_factory=list)
    epochs: list[dict[str, int]] = field(default_factory=list)
    sync_states: list[dict[str, Any]] = field(default_factory=list)
    nodes: list[dict[str, Any]] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)
    next: list[str] = field(default_factory=list)
    skipped: tuple[Skipped, ...] = ()
    notes: list[str] = field(default_factory=list)


@command(
    epilog=examples(
        "dledger look /var/lib/broker/store",
        "dledger look dledger-data/default/dledger-n0 --format json",
        "dledger look 'n0-127.0.0.1:40911;n1-127.0.0.1:40912' --group orders",
    )
)
@target_argument
@group_of_target_option
@access_options
@opaque_option
@format_option
def look(target: str | None, group: str, access: Access, opaque: bool, output: Format) -> int:
    """Show what a directory or a group is and contains.

    DIR is a store of this project or of Java DLedger, a classic CommitLog, a broker's directory, consume queues, or a
    directory with several stores; nothing is written there. Of a large log only a sample is read. Exit 1 if damage is
    seen; 'dledger verify' reads everything.
    """
    found = target_of(target)
    view = _directory(found, opaque=opaque) if isinstance(found, Path) else _group(found, group, access)
    if output == "json":
        show_result(_json(view), output)
    else:
        _show(view)
    return EXIT_FINDING if view.damage else EXIT_OK


# --- directories --------------------------------------------------------------------------------------------------


def _directory(path: Path, *, opaque: bool) -> View:
    if path.is_file():
        return _file(path)
    location = locate(path)
    if location.several:
        return _several(location, opaque=opaque)
    parts = broker_parts(location.broker) if location.logs and not location.is_commitlog else None
    queues = queue_files(location.broker if location.logs and not location.is_commitlog else path)
    if location.store is None and (location.commitlog is None or (location.is_commitlog and queues is not None)):
        facts: dict[str, Any]
        if queues is not None:
            facts = {"what": "consume queues of a broker", "directory": str(path)}
            counts = {"topics": queues.topics, "queues": queues.queues, "units": queues.units}
            compare = (
                f"python jobs/rebuild_consume_queue.py --store STORE --compare {shlex.quote(str(path))} --table DIR"
            )
            lost = broker_parts(path).without_log() if (path / "consumequeue").is_dir() and _is_broker(path) else []
            return View(facts | counts, next=[compare], damage=[str(each) for each in lost])
        index = key_index(path)
        if index is not None:
            facts = {"what": "key index of a broker", "directory": str(path), "files": index.files, "keys": index.keys}
            return View(facts | _times(index.since, index.until), next=_look_at(path.parent))
        if not location.logs and not location.skipped:
            _check_known(path)
    with open_log_directory(path, opaque=opaque) as opened:
        view = _log(opened)
        if parts is not None and (opened.log is None or opened.log.writer != "dledger-python"):
            _compare(view, parts)
    if queues is not None:
        view.facts |= {"consume queues": f"{queues.queues} of {queues.topics} topics, {queues.units:,} units"}
    flushed = _broker_checkpoint(location.broker / "checkpoint")
    if flushed is not None:
        view.facts |= {"CommitLog flushed up to": flushed}
    _add_epochs(view, location.broker)
    view.skipped = location.skipped
    return view


def _compare(view: View, parts: BrokerParts) -> None:
    """Add the differences between the log and the broker's other parts."""
    assert view.inspection is not None
    problems = parts.compare(view.inspection)
    view.damage += [str(each) for each in problems if each.is_damage]
    view.notes += [str(each) for each in problems if not each.is_damage]


def _add_epochs(view: View, broker: Path) -> None:
    """Add the files of controller mode, if the broker has them."""
    identity, found = broker_identity(broker), read_epochs(broker)
    if identity is not None:
        view.facts |= {"broker": f"id {identity.number} of {identity.broker} in {identity.cluster}"}
    if found is None:
        return
    confirmed = confirm_offset(broker / "checkpoint")
    view.facts |= {} if confirmed is None else {"confirm offset": confirmed}
    view.epochs = [{"epoch": each.number, "start": each.start} for each in found.epochs]
    view.damage += [f"{each} ({broker})" for each in found.problems]


def _is_broker(path: Path) -> bool:
    """Whether a directory is a broker's, and not a copy of its consume queues."""
    return (path / "commitlog").is_dir() or flushed_until(path / "checkpoint") is not None


def _look_at(directory: Path) -> list[str]:
    return [f"dledger look {shlex.quote(str(directory))}"]


def _check_known(path: Path) -> None:
    """Raise an error about a directory without a log that names the log around it."""
    if not any(path.iterdir()):
        raise StoreMismatchError("the directory is empty", str(path), "name another one")
    if queues_in_rocksdb(path):
        what = "the directory is a RocksDB database of consume queues, which this command does not read"
        raise StoreMismatchError(what, str(path), _look_at(path.parent)[0])
    around = log_around(path)
    if around is not None:
        what = "the directory contains no log, but a directory above it does"
        raise StoreMismatchError(what, str(path), _look_at(around)[0])


def _file(path: Path) -> View:
    """Show a checkpoint.

    Raises:
        StoreMismatchError: another file.
    """
    named = path.name.startswith("checkpoint")
    flushed, committed = (_broker_checkpoint(path), _java_commit_index(path)) if named else (None, None)
    facts: dict[str, Any]
    if flushed is not None:
        facts = {"what": "checkpoint of a broker", "file": str(path), "CommitLog flushed up to": flushed}
        return View(facts, next=_look_at(path.parent))
    if committed is not None:
        facts = {"what": "checkpoint of a Java DLedger store", "file": str(path), "commit_index": committed}
        return View(facts, next=_look_at(path.parent))
    raise StoreMismatchError("the file is not a log", str(path), f"name its directory: {_look_at(path.parent)[0]}")


def _several(location: Location, *, opaque: bool) -> View:
    """Show a row for each log, with its number of problems, and the problems of all."""
    rows: list[dict[str, Any]] = []
    damage = []
    logs = location.several
    with Progress("looking", len(logs), unit="stores") as progress:
        for number, each in enumerate(logs):
            progress.update(number, detail=str(each.path))
            try:
                found = _directory(each.path, opaque=opaque)
            except StorageError as error:
                rows.append(
                    {"store": str(each.path), "what": None, "first_index": None, "last_index": None, "damage": 1}
                )
                damage.append(f"{each.path}: {error}")
                continue
            bounds = {name: found.facts.get(name) for name in ("first_index", "last_index")}
            row = {"store": str(each.path), "what": found.facts["what"]}
            rows.append(row | bounds | {"damage": len(found.damage)})
            damage += [f"{each.path}: {text}" for text in found.damage]
    facts = {"what": "directory of several stores", "directory": str(location.path), "stores": len(logs)}
    first = [row["store"] for row in rows if row["damage"]]
    named = [*first, *(row["store"] for row in rows if row["store"] not in first)][:_TOPICS_SHOWN]
    commands = [f"dledger look {shlex.quote(name)}" for name in named]
    commands += [f"dledger verify {shlex.quote(str(location.path))}"] if damage else []
    return View(facts, nodes=rows, damage=damage, next=commands, skipped=location.skipped)


def _log(opened: LogDirectory) -> View:
    log, classic = opened.log, opened.classic
    name = shlex.quote(str(opened.path))
    facts: dict[str, Any] = {"what": opened.kind, "directory": str(opened.path)}
    if classic:
        facts |= {"CommitLog files": len(classic), "positions": f"{classic[0].position} to {classic[-1].end}"}
    inspection = inspect_directory(opened)
    for deleted in inspection.deleted:
        say(deleted)
    if log is not None:
        facts |= {} if log.path == opened.path else {"store": str(log.path)}
        facts |= _facts_of(log)
        inspection.damage += [f"indexes {a} to {b - 1} are damaged" for a, b in log.damaged if not inspection.complete]
    view = View(facts, inspection, _terms(log), damage=[*inspection.damage, *end_problems(opened)])
    if log is not None and any(is_event(row["body"] or b"") for row in inspection.last):
        with contextlib.suppress(CorruptRecordError):  # the inspection reports it
            view.sync_states = _sync_states(log)
    verify = f"dledger verify {name}"
    view.next = [f"dledger dump {name} --from -10", *([verify] if view.damage or not inspection.complete else [])]
    if log is not None and log.writer != "dledger-python":
        view.next.append(f"dledger convert {name} dledger-data --group NAME --self-id n0 --peers PEERS --dry-run")
    if inspection.messages:
        parts = {"--commitlog": Path(classic[0].path).parent if classic else None, "--store": log.path if log else None}
        source = " ".join(f"{option} {shlex.quote(str(path))}" for option, path in parts.items() if path is not None)
        view.next.append(f"python jobs/rebuild_consume_queue.py {source} --table DIR")
    return view


def _sync_states(log: StoreReader) -> list[dict[str, Any]]:
    return [
        {"broker_set": name, "sync_state_set": sorted(each.in_sync), "master": each.master, "elections": each.elections}
        for name, each in sorted(read_sync_states(log).items())
    ]


def _facts_of(log: StoreReader) -> dict[str, Any]:
    files = _sizes(log.path / "data")
    size = sum(files)
    facts: dict[str, Any] = {"group": log.group, "node": log.node_id, "log_uuid": log.log_uuid}
    facts |= {"first_index": int(log.first_index), "last_index": int(log.last_index), "commit_index": log.commit_index}
    facts |= {"files": len(files), "bytes on disk": size}
    if log.identity_lost:
        facts["identity"] = "meta/log.json is missing: read like a store that Java wrote"
    return {name: value for name, value in facts.items() if value is not None}


def _sizes(directory: Path) -> list[int]:
    """Return the bytes on disk of each file; a node or broker may delete some meanwhile."""
    found = []
    for path in directory.iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += [path.stat().st_blocks * 512] if path.is_file() else []
    return found


def _terms(log: StoreReader | None) -> list[dict[str, int]]:
    if log is None or log.last_index < log.first_index:
        return []
    return [{"term": int(each.term), "first_index": int(each.first_index)} for each in log.term_ranges()]


def _java_commit_index(path: Path) -> int | None:
    """Return the commit index that Java's generation A records; None for other files."""
    if path.stat().st_size > _CHECKPOINT_BYTES_MAX:
        return None
    found = re.search(rb"^committedIndex=(-?[0-9]{1,18})$", path.read_bytes(), re.MULTILINE)
    return int(found[1]) if found else None


def _times(since: datetime | None, until: datetime | None) -> dict[str, str]:
    found = {"since": since, "until": until}
    return {name: time.isoformat(timespec="seconds") for name, time in found.items() if time is not None}


def _broker_checkpoint(path: Path) -> str | None:
    """Return the time up to which a broker has flushed its CommitLog; None for other files."""
    flushed = flushed_until(path)
    return None if flushed is None else flushed.isoformat(timespec="seconds")


# --- groups -------------------------------------------------------------------------------------------------------


def _group(peers: str, group: str, access: Access) -> View:
    with Client(peers, group, **access.of_client) as client:
        metadata, bounds = client.metadata(), client.bounds()
        inspection = inspect_log(client.tail, bounds.first_index, bounds.end)
    facts: dict[str, Any] = {"what": "running group", "group": group, "log_uuid": metadata.log_uuid}
    facts |= {"leader": metadata.leader_id, "term": metadata.term}
    facts |= {"first_index": bounds.first_index, "last_index": bounds.end - 1}
    away = [str(node.node_id) for node in metadata.nodes if not node.reachable]
    damage = [f"node {name} does not answer" for name in away]
    given = {"peers": peers, "group": group}
    known = _DEFAULTS | ClientConfig.in_effect().given
    options = "".join(f" --{name} {shlex.quote(text)}" for name, text in given.items() if known[name] != text)
    commands = [f"dledger tail{options}", f"dledger status --watch{options}"]
    return View(facts, inspection, nodes=_nodes(metadata), damage=damage, next=commands)


def _nodes(metadata: Metadata) -> list[dict[str, Any]]:
    names = ("node_id", "address", "role", "first_index", "last_index", "commit_index")
    return [{name: getattr(node, name) for name in names} for node in metadata.nodes]


# --- output -------------------------------------------------------------------------------------------------------


def _topics(inspection: LogInspection) -> list[dict[str, Any]]:
    rows = []
    for topic, count in inspection.topics.most_common():
        share = round(100 * count / inspection.sampled, 1)
        named = {"topic": topic, "queues": len(inspection.queues[topic]), "messages": count, "percent": share}
        rows.append(named | {"keys": inspection.keys[topic]})
    return rows


def _last(inspection: LogInspection) -> list[dict[str, Any]]:
    return [row | {"body": None if row["body"] is None else preview(row["body"])} for row in inspection.last]


def _json(view: View) -> dict[str, Any]:
    shown: dict[str, Any] = {name.replace(" ", "_").lower(): value for name, value in view.facts.items()}
    inspection = view.inspection
    if inspection is not None:
        shown |= {"entries": inspection.entries, "sampled": inspection.sampled, "messages": inspection.messages}
        shown |= {"since": inspection.since, "until": inspection.until}
        shown |= {"topics": _topics(inspection), "last": _last(inspection), "hidden": inspection.hidden}
    skipped = [{"path": str(each.path), "reason": each.part.value} for each in view.skipped]
    shown |= {"terms": view.terms, "epochs": view.epochs}
    shown |= {"sync_states": view.sync_states, "nodes": view.nodes, "damage": view.damage, "next": view.next}
    return shown | {"skipped": skipped, "notes": view.notes}


def _newest(ranges: list[dict[str, int]], number: str, start: str) -> str:
    shown = ", ".join(f"{each[number]} from {each[start]}" for each in ranges[-_TERMS_SHOWN:])
    return shown if len(ranges) <= _TERMS_SHOWN else f"... {shown}"


def _show(view: View) -> None:
    facts, inspection = dict(view.facts), view.inspection
    if inspection is not None:
        facts["entries"] = inspection.entries
        if not inspection.complete:
            share = 100 * inspection.sampled / inspection.entries
            facts["sample"] = f"{inspection.sampled:,} of {inspection.entries:,} entries, {share:.3g} %"
        facts |= _times(inspection.since, inspection.until)
        none = "none: bodies are plain" if inspection.sampled else "none"
        facts["messages"] = none if not inspection.messages else f"{inspection.messages:,} in the sample"
        if inspection.complete and inspection.messages:
            facts["messages"] = inspection.messages
        if inspection.hidden:
            facts["hidden"] = ", ".join(f"{count:,} {reason}" for reason, count in inspection.hidden.items())
    facts |= {"terms": _newest(view.terms, "term", "first_index")} if view.terms else {}
    facts |= {"epochs": _newest(view.epochs, "epoch", "start")} if view.epochs else {}
    show_result(facts, "table")
    show_rows(view.sync_states, "table", "sync state sets")
    nodes = [
        {name: None if value == -1 and row.get("role") == "unreachable" else value for name, value in row.items()}
        for row in view.nodes
    ]
    show_rows(nodes, "table", "nodes" if inspection is not None else "stores")
    if inspection is not None:
        topics = _topics(inspection)
        width = max(_NARROW, min(_WIDE, (table_width() - _TOPIC_NUMBERS) // 2))
        rows = [
            row | {"topic": shortened(row["topic"], width), "keys": shortened(", ".join(row["keys"]), width) or None}
            for row in topics[:_TOPICS_SHOWN]
        ]
        more = f"topics, {len(topics) - len(rows)} more" if len(topics) > len(rows) else "topics"
        show_rows(rows, "table", more)
        if inspection.last:
            emit("last entries")
            EntryTable(table_width()).write(pa.RecordBatch.from_pylist(inspection.last, LAST_SCHEMA))
            emit("")
    notes = [("damage", view.damage), ("note", view.notes), ("left out", view.skipped), ("next", view.next)]
    emit("\n".join(f"{name}: {each}" for name, found in notes for each in found))
