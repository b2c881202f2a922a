"""Options of ``format("dledger")``: names, defaults and checks, as one model.

Spark passes a flat map of strings with lower-case names. An unknown option is an error that names the nearest known
one: a misspelled limit must not be ignored silently. A validator parses the text of a value and passes a value of the
right type on; a wrong text is a ValueError that describes the valid values.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from dledger_core import ClientConfig, ConfigError, TlsOptions
from dledger_core.config import check_group_name, parse_duration, parse_groups, parse_peers
from spark_connector.errors import CheckpointError, OptionError
from spark_connector.offsets import StreamOffset, read_offsets

__all__ = ["EARLIEST", "LATEST", "DLedgerOptions", "StartSpec", "TimeSpec"]

EARLIEST: Final = -2
LATEST: Final = -1
_INT64_END: Final = 1 << 63
_MILLIS: Final = re.compile(r"\d{1,15}", re.ASCII)

_NO_TABLE: Final = "Spark passes no options of a table in the catalog to this source: use a temporary view"
_VIEW: Final = "CREATE TEMPORARY VIEW entries USING dledger OPTIONS (peers '127.0.0.1:40911', groups 'default')"
_VIEW_TO_WRITE: Final = _VIEW.replace("entries", "appended (body STRING)").replace("groups", "group")

StartSpec = Literal["earliest", "latest"] | Mapping[str, int]
"""Start or end: the same for all groups, or per group an index, EARLIEST or LATEST."""

TimeSpec = int | Mapping[str, int]
"""Milliseconds since the epoch: one for all groups, or per group."""


def _of_text(parse: Callable[[str], Any]) -> BeforeValidator:
    """Return a validator that parses a text and passes every other value on."""
    return BeforeValidator(lambda value: parse(value.strip()) if isinstance(value, str) else value)


def _not_empty(text: str) -> str:
    if not text:
        raise ValueError("it is empty")
    return text


def _peers(text: str) -> str:
    parse_peers(text, needs_ids=False)
    return text


def _pattern(text: str) -> str:
    try:
        re.compile(_not_empty(text))
    except re.error as error:
        raise ValueError(f"it must be a regular expression, and {error}") from None
    return text


def _replica(text: str) -> str:
    if text.lower() in ("any", "leader", "follower"):
        return text.lower()
    if text.startswith("node:") and text != "node:":
        return text
    raise ValueError("it must be any, leader, follower or node:ID")


def _archive(text: str) -> str | None:
    word = _not_empty(text).lower()
    return None if word == "false" else word if word == "true" else text


def _listed(text: str, separator: str, item: str) -> tuple[str, ...]:
    if text.startswith("["):
        try:
            parts = json.loads(text)
        except ValueError:
            parts = None
        if not isinstance(parts, list) or not all(isinstance(part, str) and part for part in parts):
            raise ValueError(f"it must be {item}s, or a JSON list of them")
    else:
        parts = [part.strip() for part in re.split(separator, text) if part.strip()]
    if not parts:
        raise ValueError(f"it names no {item}")
    return tuple(dict.fromkeys(parts))


def _tags(text: str) -> tuple[str, ...]:
    found = _listed(text, r"\|\||,", "tag")
    return () if found == ("*",) else found  # no filter, as in RocketMQ


def _offsets(text: str) -> StartSpec:
    if text.startswith("@"):
        text = _file(text[1:])
    if text.lower() in ("earliest", "latest"):
        return "earliest" if text.lower() == "earliest" else "latest"
    try:
        parsed = json.loads(text)
        stored = StreamOffset.from_text(parsed)
    except ValueError:
        raise ValueError(
            'it must be earliest, latest or JSON like {"default": 1200}, or @FILE with that content'
        ) from None
    except CheckpointError as error:
        raise ValueError(error.what) from None
    parsed = parsed if stored is None else stored.next_indexes
    if not isinstance(parsed, dict) or not parsed:
        raise ValueError('it must be JSON like {"default": 1200}')
    return {check_group_name(group): _index(group, index) for group, index in sorted(parsed.items())}


def _recorded(text: str) -> StreamOffset | None:
    """Return the offset in a valid ``startingOffsets`` if it is one of a Spark checkpoint, which knows its logs."""
    text = text.strip()
    text = _file(text[1:]) if text.startswith("@") else text
    return StreamOffset.from_text(text)


def _file(path: str) -> str:
    """Return the content of a file; of a micro-batch file in a Spark checkpoint the offset of this source."""
    try:
        content = Path(path).read_text(encoding="utf-8").strip()
        offsets = [ends for ends in read_offsets(Path(path)) if ends is not None] if content.startswith("v1\n") else []
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"cannot read the file: {error}") from None
    except CheckpointError as error:
        raise ValueError(error.what) from None
    if len(offsets) > 1:
        raise ValueError("the file contains offsets of several sources: give one of them as JSON")
    return json.dumps(offsets[0].to_json()) if offsets else content


def _index(group: str, value: object) -> int:
    names = {"earliest": EARLIEST, "latest": LATEST}
    if isinstance(value, str) and value.lower() in names:
        return names[value.lower()]
    if not isinstance(value, int) or isinstance(value, bool) or not EARLIEST <= value < _INT64_END:
        raise ValueError(f"group {group!r} must have an index, -2 (earliest) or -1 (latest)")
    return value


def _times(text: str) -> TimeSpec:
    if not text.startswith("{"):
        return _time(text)
    try:
        parsed = json.loads(text)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict) or not parsed or any(isinstance(moment, bool) for moment in parsed.values()):
        raise ValueError('per group it must be JSON like {"default": "2026-03-01T12:00:00Z"}')
    return {check_group_name(group): _time(str(moment)) for group, moment in sorted(parsed.items())}


def _time(text: str) -> int:
    """Return milliseconds since the epoch, from that number or an ISO-8601 time.

    A time without a zone is in UTC: the session's time zone is unknown here, and a table must not depend on it.
    """
    if _MILLIS.fullmatch(text):
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError("it must be milliseconds since the epoch, or a time like 2026-03-01T12:00:00Z") from None
    moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    millis = round((moment - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds() * 1000)
    if millis < 0:
        raise ValueError("it is before 1970")
    return millis


Text = Annotated[str, _of_text(_not_empty)]
Filters = Sequence[tuple[str, tuple[str, ...]]]
"""Columns of messages, each with the values that pass."""
Peers = Annotated[str, _of_text(_peers)]
Group = Annotated[str, _of_text(check_group_name)]
Groups = Annotated[tuple[str, ...], _of_text(parse_groups)]
Pattern = Annotated[str, _of_text(_pattern)]
Replica = Annotated[str, _of_text(_replica)]
Topics = Annotated[tuple[str, ...], _of_text(lambda text: _listed(text, ",", "topic"))]
Tags = Annotated[tuple[str, ...], _of_text(_tags)]
Archive = Annotated[str | None, _of_text(_archive)]
"""``true``, the location of a table, or None."""
OffsetsOption = Annotated[StartSpec, _of_text(_offsets)]
TimeOption = Annotated[TimeSpec, _of_text(_times)]
Duration = Annotated[int, _of_text(lambda text: max(1, round(parse_duration(text) * 1000)))]
"""Milliseconds above 0."""
Delay = Annotated[int, _of_text(lambda text: round(parse_duration(text, allow_zero=True) * 1000))]
"""Milliseconds, or 0."""
Count = Annotated[int, Field(gt=0, lt=_INT64_END)]
Version = Annotated[int, Field(ge=0, lt=_INT64_END)]
AppId = Annotated[str, _of_text(_not_empty), Field(max_length=100)]
Lowered = _of_text(str.lower)
"""For words that may be written in capitals."""


_OF_SPARK: Final = frozenset({"path", "checkpointlocation", "queryname"})
_INTERNAL: Final = frozenset(
    {"archive_storage", "columns", "default_group", "parallelism", "pushed_values", "recorded_start"}
)
"""Fields without an option."""
_IDEMPOTENT: Final = ("txn_app_id", "txn_version")
_WRITTEN_ONLY: Final = frozenset({"group", "append_max_bytes", "first_batch_id", "on_replay_mismatch", *_IDEMPOTENT})
_ACCESS: Final = frozenset({"tls_ca", "tls_cert", "tls_key", "token_file"})
_WRITTEN: Final = _WRITTEN_ONLY | _ACCESS | {"client_config", "peers", "fetch_timeout_ms", "fetch_retry_ms", "protocol"}
"""Options of a write; a read takes all fields but ``_WRITTEN_ONLY``."""
_OF_TABLES: Final = _ACCESS | {
    *("table", "peers", "path", "groups", "groups_pattern", "fetch_timeout_ms", "fetch_retry_ms", "protocol"),
    "client_config",
}
"""Options of metadata tables."""
_OF_MESSAGES: Final = ("topics", "tags", "on_decode_error")
_OF_JAVA: Final = ("safety_lag_ms", "commit_probe")
_NOT_OF_JAVA: Final = (
    *("archive", "path", "groups_pattern", "discovery_ms", "table", "pin_ms", "on_pin_failure"),
    *("starting_timestamp", "starting_strategy", "ending_timestamp"),
    *sorted(_ACCESS),
)
"""Java groups have no append times, no list of groups, no descriptions, and no TLS here."""
_KAFKAS_NAMES: Final = {
    "kafka.bootstrap.servers": "peers",
    "assign": "groups",
    "subscribe": "groups",
    "subscribepattern": "groupsPattern",
    "startingoffsetsbytimestamp": "startingTimestamp",
    "endingoffsetsbytimestamp": "endingTimestamp",
    "topic": "group",
}
"""Names of Kafka's connector and their equivalents here."""
_ARCHIVE_PREFIX: Final = "archive."
_OFFSETS: Final = ['earliest, latest, {"default": 1200} or @offsets.json']
_TIME: Final = ["2026-03-01T12:00:00Z"]


class DLedgerOptions(BaseModel):
    """Checked options; made by ``for_reading`` and ``for_writing``, then passed around and pickled.

    Attributes:
        peers: the servers, ``n0-host:port;n1-host:port``; empty when a store is read.
        path: a node's store directory, read without servers; empty when servers are read.
        groups: the logs to read.
        groups_pattern: read every log whose name this regular expression matches completely, also new ones.
        discovery_ms: interval at which a stream looks for new groups.
        table: read metadata of the logs: groups, nodes, terms, segments, producers or transactions.
        group: the log to write to; None = the column ``group``, else ``default``.
        starting_offsets: start of a new query; None = earliest for a batch, latest for a stream.
        starting_timestamp: start a new query at the first entry appended at this time or later; overrides
            ``starting_offsets``.
        starting_strategy: without such an entry: error, or latest.
        ending_offsets: end of a batch read; a stream reads no entry after it.
        ending_timestamp: end before the first entry appended at this time or later; overrides ``ending_offsets``.
        max_offsets_per_trigger: limit of the indexes in a micro-batch, all groups together.
        max_bytes_per_trigger: limit of the bytes of the logs in a micro-batch, all groups together.
        min_offsets_per_trigger: delay a micro-batch until this many indexes are available.
        max_trigger_delay: limit of that delay, in milliseconds.
        min_partitions: plan at least this many partitions if there are as many entries.
        max_records_per_partition: limit of the entries in a partition.
        fail_on_data_loss: fail the query on a loss, or log and count it.
        pin_ms: duration of pins against retention; None = 10 minutes for a stream, 0 for a batch.
        on_pin_failure: entries that cannot be pinned fail the batch, or it waits until they can be.
        archive: read trimmed entries from the log's archive, a Delta table: true for the table that the log names, or
            its location. Further options ``archive.NAME`` are those of its storage.
        read_from: the replica to read: any, leader, follower or node:ID.
        decode: none, or message for RocketMQ's columns.
        topics: with ``decode``: only messages of these topics; empty = all.
        tags: with ``decode``: only messages with one of these tags; empty = all.
        on_decode_error: a body that is not a message becomes a row with the column ``error`` set, or fails the query.
        isolation: read_committed skips orphaned attempts and open transactions.
        filter_pushdown: filters of a batch query: Spark alone applies them (none), or they limit the planned range
            (one_query: the loaded DataFrame serves one query).
        fetch_max_bytes: bytes of one read and of one Arrow batch; None = 4 MiB from servers, 8 MiB from files.
        fetch_timeout_ms: timeout of one request.
        fetch_retry_ms: total timeout of a read or append with its retries on all replicas.
        poll_ms: time that an idle stream waits at the server for new entries.
        append_max_bytes: bytes of bodies in one append of the sink.
        first_batch_id: the micro-batch above 0 at which a query that no group knows may start.
        on_replay_mismatch: a replayed micro-batch that is committed with other rows fails the query, or is skipped.
        txn_app_id: names the application whose batch writes are numbered by ``txn_version``.
        txn_version: number of this write; the log has each at most once, and none below the newest one.
        protocol: dledger, or dledger-java for a Java group.
        safety_lag_ms: of a Java group: read up to the end that was observed this long ago.
        commit_probe: of a Java group: append probe entries and read below them instead.
        tls_ca: file with the authority of the nodes' certificates; turns TLS on. The same path on all machines.
        tls_cert: file with this client's certificate, whose identity is the principal.
        tls_key: file with its key; None = in the same file.
        token_file: file with this client's token, instead of a certificate. It is read again when it changes.
        client_config: TOML file with options that are not given: see ``ClientConfig``. Only the driver reads it.
        archive_storage: names and values of the options ``archive.NAME``; not an option.
        default_group: without ``group``, where the column ``group`` does not exist; not an option.
        columns: the columns of a user-given schema; None = all; not an option.
        parallelism: number of tasks that the cluster runs at once; None = not known; not an option.
        pushed_values: columns of messages and their values in filters of the query; not an option.
        recorded_start: ``starting_offsets`` with the identity of the logs, if it is from a Spark checkpoint.
    """

    model_config = ConfigDict(
        frozen=True, alias_generator=to_camel, validate_by_name=True, hide_input_in_errors=True, extra="forbid"
    )

    peers: Peers = Field("", examples=["n0-127.0.0.1:40911;n1-127.0.0.1:40912;n2-127.0.0.1:40913"])
    path: Text = Field("", examples=["dledger-data/default/dledger-n0"])
    groups: Groups = Field(("default",), examples=["orders,payments"])
    groups_pattern: Pattern | None = Field(None, examples=["orders.*"])
    discovery_ms: Duration = Field(10_000, validation_alias="discoveryInterval", examples=["10s"])
    table: Annotated[Literal["groups", "nodes", "terms", "segments", "producers", "transactions"], Lowered] | None = (
        Field(None, examples=["groups"])
    )
    group: Group | None = Field(None, examples=["orders"])
    starting_offsets: OffsetsOption | None = Field(None, examples=_OFFSETS)
    starting_timestamp: TimeOption | None = Field(None, examples=_TIME)
    starting_strategy: Annotated[Literal["error", "latest"], Lowered] = Field(
        "error", validation_alias="startingOffsetsByTimestampStrategy", examples=["latest"]
    )
    ending_offsets: OffsetsOption | None = Field(None, examples=_OFFSETS)
    ending_timestamp: TimeOption | None = Field(None, examples=_TIME)
    max_offsets_per_trigger: Count | None = Field(None, examples=["1000000"])
    max_bytes_per_trigger: Count | None = Field(None, examples=["268435456"])
    min_offsets_per_trigger: Count | None = Field(None, examples=["10000"])
    max_trigger_delay: Duration = Field(15 * 60_000, examples=["15m"])
    min_partitions: Count | None = Field(None, le=100_000, examples=["8"])
    max_records_per_partition: Count | None = Field(None, examples=["1000000"])
    fail_on_data_loss: bool = Field(True, examples=["true"])
    pin_ms: Delay | None = Field(None, validation_alias="pinFor", examples=["10m"])
    on_pin_failure: Annotated[Literal["fail", "wait"], Lowered] = Field("fail", examples=["wait"])
    archive: Archive = Field(None, examples=["true"])
    read_from: Replica = Field("any", examples=["follower"])
    decode: Annotated[Literal["none", "message"], Lowered] = Field("none", examples=["message"])
    topics: Topics = Field((), examples=["orders,payments"])
    tags: Tags = Field((), examples=["created || paid"])
    on_decode_error: Annotated[Literal["column", "fail"], Lowered] = Field("column", examples=["fail"])
    isolation: Annotated[Literal["read_committed", "read_uncommitted"], Lowered] = Field(
        "read_committed", examples=["read_committed"]
    )
    filter_pushdown: Annotated[Literal["none", "one_query"], Lowered] = Field("none", examples=["one_query"])
    fetch_max_bytes: Count | None = Field(None, le=16 << 20, examples=["4194304"])
    fetch_timeout_ms: Count = Field(10_000, examples=["10000"])
    fetch_retry_ms: Count = Field(60_000, examples=["60000"])
    poll_ms: Count = Field(500, examples=["500"])
    append_max_bytes: Count = Field(2 << 20, le=7 << 20, examples=["2097152"])
    first_batch_id: Count | None = Field(None, examples=["42"])
    on_replay_mismatch: Annotated[Literal["fail", "skip"], Lowered] = Field("fail", examples=["skip"])
    txn_app_id: AppId | None = Field(None, examples=["orders-enriched"])
    txn_version: Version | None = Field(None, examples=["42"])
    protocol: Annotated[Literal["dledger", "dledger-java"], Lowered] = Field("dledger", examples=["dledger"])
    safety_lag_ms: Delay = Field(10_000, validation_alias="safetyLag", examples=["10s"])
    commit_probe: bool = Field(False, examples=["true"])
    tls_ca: Text | None = Field(None, validation_alias="tls.ca", examples=["/etc/dledger/nodes-ca.pem"])
    tls_cert: Text | None = Field(None, validation_alias="tls.cert", examples=["/etc/dledger/ingest.pem"])
    tls_key: Text | None = Field(None, validation_alias="tls.key", examples=["/etc/dledger/ingest.key"])
    token_file: Text | None = Field(None, validation_alias="token.file", examples=["/etc/dledger/ingest.token"])
    client_config: Text | None = Field(None, validation_alias="client.config", examples=["/etc/dledger/client.toml"])
    archive_storage: tuple[tuple[str, str], ...] = Field((), repr=False)  # may have credentials
    default_group: Group = "default"
    columns: tuple[str, ...] | None = None
    parallelism: int | None = None
    pushed_values: tuple[tuple[str, tuple[str, ...]], ...] = ()
    recorded_start: StreamOffset | None = None

    @property
    def message_filters(self) -> Filters:
        """Columns of messages that the query filters, with their values."""
        given = (("topic", self.topics), ("tags", self.tags), *self.pushed_values)
        return [(column, values) for column, values in given if values]

    @property
    def tls(self) -> TlsOptions | None:
        """The TLS files, None for plaintext."""
        return None if self.tls_ca is None else TlsOptions(ca=self.tls_ca, cert=self.tls_cert, key=self.tls_key)

    @property
    def token(self) -> Path | None:
        """The file with the token, None without one."""
        return None if self.token_file is None else Path(self.token_file)

    def read_bytes(self, *, files: bool = False) -> int:
        """Return the bytes of one read, from servers or from files, where large reads cost less."""
        return self.fetch_max_bytes or (8 << 20 if files else 4 << 20)

    @property
    def groups_given(self) -> bool:
        """Whether the option groups was given."""
        return "groups" in self.model_fields_set

    def selects(self, group: str) -> bool:
        """Whether a group of this name belongs to the query."""
        if self.groups_pattern is not None:
            return re.fullmatch(self.groups_pattern, group) is not None
        if self.path:  # of a mixed log, PRECEDING in reading/logs.py
            return not self.groups_given or group.removesuffix(".commitlog") in self.groups
        return group in self.groups

    @classmethod
    def for_reading(cls, options: Mapping[str, str]) -> DLedgerOptions:
        """Check the options of a read.

        Raises:
            OptionError: unknown option, wrong value, or options that exclude each other.
        """
        parsed = cls._parsed(options, frozenset(cls.model_fields) - _WRITTEN_ONLY - _INTERNAL, "reading")
        _check_source(parsed)
        _check_archive(parsed)
        _check_messages(parsed)
        _check_access(parsed)
        _check_java(parsed)
        for name in ("starting_offsets", "starting_timestamp", "ending_offsets", "ending_timestamp"):
            _check_groups(name, getattr(parsed, name), parsed)
        least, most = parsed.min_offsets_per_trigger, parsed.max_offsets_per_trigger
        if least is not None and most is not None and least > most:
            raise OptionError(f"minOffsetsPerTrigger {least} is above maxOffsetsPerTrigger {most}", "", "lower it")
        _reject(parsed, parsed.model_fields_set - _OF_TABLES if parsed.table else (), f"with table={parsed.table}")
        start = next((value for name, value in options.items() if name.lower() == "startingoffsets"), "")
        return parsed.model_copy(update={"recorded_start": _recorded(start)})

    @classmethod
    def for_writing(cls, options: Mapping[str, str], *, stream: bool = False) -> DLedgerOptions:
        """Check the options of a write, perhaps of a stream.

        Raises:
            OptionError: unknown option, wrong value, a ``path``, no ``peers``, half of a version, or a Java group.
        """
        path = next((value for name, value in options.items() if name.lower() == "path"), "")
        if path:
            raise OptionError(
                f"path {path!r}: a log is not written by path",
                "",
                f"name its group: .option('group', {path!r}), and leave the path out of save, start and option",
            )
        parsed = cls._parsed(options, _WRITTEN, "writing")
        _check_access(parsed)
        _check_version(parsed, stream=stream)
        if not parsed.peers:
            remedy = f"list the servers: n0-127.0.0.1:40911;n1-127.0.0.1:40912; {_NO_TABLE}: {_VIEW_TO_WRITE}"
            raise OptionError("missing option peers", "", remedy)
        if parsed.protocol == "dledger-java":
            raise OptionError(
                "protocol=dledger-java cannot be written: Java groups have no transactions",
                "",
                "append with Client(peers, group, protocol='dledger-java').append, for example in foreachPartition",
            )
        return parsed

    @classmethod
    def _parsed(cls, options: Mapping[str, str], allowed: frozenset[str], doing: str) -> DLedgerOptions:
        names = {_name_of(field).lower(): field for field in cls.model_fields if field not in _INTERNAL}
        if "provider" in options:  # a property of a table in the catalog
            raise OptionError(_NO_TABLE, "", _VIEW)
        given, storage = dict[str, str](), dict[str, str]()
        for name, value in options.items():
            field = names.get(name.lower())
            if field in allowed:
                given[_name_of(field)] = value
            elif name.lower().startswith(_ARCHIVE_PREFIX) and "archive" in allowed:
                storage[name.lower().removeprefix(_ARCHIVE_PREFIX)] = value
            elif name.lower() not in _OF_SPARK:
                raise _unknown(name, allowed, doing, known=field is not None)
        if given.get("client.config") and not given.get("path"):
            given = _of_file(given, allowed) | given
        try:
            parsed = cls.model_validate(given)
        except ValidationError as error:
            raise _wrong_value(error, given) from None
        if storage and parsed.archive is None:
            raise OptionError(f"{_ARCHIVE_PREFIX}{min(storage)} has no effect without archive", "", "set archive=true")
        return parsed.model_copy(update={"archive_storage": tuple(sorted(storage.items()))}) if storage else parsed


def _name_of(field: str) -> str:
    """Return the option's name of a field."""
    return str(DLedgerOptions.model_fields[field].validation_alias)


def _of_file(given: Mapping[str, str], allowed: frozenset[str]) -> dict[str, str]:
    """Return the options in the file of ``client.config``, which names files with secrets and has none itself."""
    try:
        settings = ClientConfig.read(given["client.config"].strip())
    except ConfigError as error:
        raise OptionError(f"client.config: {error.what}", error.where, error.remedy) from None
    found = {_name_of(field): str(value) for field, value in settings.given.items() if field != "group"}
    if settings.group is not None and "group" in allowed:
        found["defaultGroup"] = settings.group
    elif settings.group is not None and "groupsPattern" not in given:
        found["groups"] = settings.group
    return found


def _wrong_value(error: ValidationError, given: Mapping[str, str]) -> OptionError:
    first = error.errors()[0]
    name, cause = str(first["loc"][0]), first.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return OptionError(f"{name}: {cause.what}", "", cause.remedy)
    reason = str(cause or first["msg"]).replace("Input should", "it should", 1)
    [field] = (field for field in DLedgerOptions.model_fields if _name_of(field) == name)
    example = (DLedgerOptions.model_fields[field].examples or [""])[0]
    return OptionError(f"wrong value {given[name]!r} of {name}: {reason}", "", f"for example {example}")


def _unknown(name: str, allowed: frozenset[str], doing: str, *, known: bool) -> OptionError:
    by_lower = {_name_of(field).lower(): _name_of(field) for field in allowed}
    kafkas = _KAFKAS_NAMES.get(name.lower(), "")
    nearest = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    if kafkas.lower() in by_lower:
        hint = f"its name in this connector is {kafkas!r}"
    elif nearest:
        hint = f"did you mean {by_lower[nearest[0]]!r}?"
    else:
        hint = f"known options: {', '.join(sorted(by_lower.values()))}"
    return OptionError(f"option {name!r} is not for {doing}" if known else f"unknown option {name!r}", "", hint)


def _reject(options: DLedgerOptions, fields: Iterable[str], context: str, remedy: str = "leave it out") -> None:
    """Raise an error if one of the fields was given."""
    for field in fields:
        if field in options.model_fields_set:
            raise OptionError(f"{_name_of(field)} has no effect {context}", "", remedy)


def _check_source(options: DLedgerOptions) -> None:
    """Check the options that name servers or a store, and their logs."""
    if bool(options.peers) == bool(options.path):
        remedy = "peers names servers (n0-127.0.0.1:40911;n1-…), path (or load(path)) a node's store directory"
        if not options.peers:
            remedy += f"; {_NO_TABLE}: {_VIEW}"
        raise OptionError("give exactly one of the options peers and path", "", remedy)
    if options.groups_pattern is not None and options.groups_given:
        raise OptionError("give only one of the options groups and groupsPattern", "", "leave one out")
    if options.path and (len(options.groups) > 1 or options.groups_pattern is not None):
        name = "groups" if options.groups_given else "groupsPattern"
        raise OptionError(f"{name}: a store contains one group", "", "name one group, or leave the option out")
    if options.peers and options.read_from.startswith("node:"):
        peers = parse_peers(options.peers, needs_ids=False)
        nodes = [str(peer.node_id) for peer in peers]
        is_complete = all(peer.has_id for peer in peers)  # otherwise the nodes report the ids
        if is_complete and options.read_from.removeprefix("node:") not in nodes:
            remedy = f"use one of {', '.join(f'node:{node}' for node in nodes)}"
            raise OptionError(f"readFrom {options.read_from!r}: the node is not in peers", "", remedy)


def _check_archive(options: DLedgerOptions) -> None:
    if options.path:
        _reject(options, ["archive"], "with path, which is read without servers")
    if options.archive is not None and options.isolation != "read_committed":
        raise OptionError("isolation: an archive has what read_committed shows", "", "leave isolation or archive out")


def _check_messages(options: DLedgerOptions) -> None:
    if options.decode != "message":
        _reject(options, _OF_MESSAGES, "without decode=message", "set decode=message, or leave it out")


def _check_access(options: DLedgerOptions) -> None:
    if options.path:
        _reject(options, sorted(_ACCESS | {"client_config"}), "with path, which is read without servers")
    if options.tls_ca is None:
        _reject(options, sorted(_ACCESS), "without tls.ca", "name the authority of the nodes' certificates with tls.ca")
    if options.tls_cert is None:
        _reject(options, ("tls_key",), "without tls.cert", "name the certificate, or leave it out")


def _check_version(options: DLedgerOptions, *, stream: bool) -> None:
    if stream:
        _reject(options, _IDEMPOTENT, "with a stream, whose micro-batches have numbers of their own")
    given = [_name_of(field) for field in _IDEMPOTENT if getattr(options, field) is not None]
    if len(given) == 1:
        [missing] = {_name_of(field) for field in _IDEMPOTENT} - set(given)
        raise OptionError(f"{given[0]} is given without {missing}", "", "give both, or leave both out")


def _check_java(options: DLedgerOptions) -> None:
    is_java = options.protocol == "dledger-java"
    remedy = "leave it out" if is_java else "set protocol=dledger-java, or leave it out"
    _reject(options, _NOT_OF_JAVA if is_java else _OF_JAVA, f"with protocol={options.protocol}", remedy)
    if is_java and options.peers:
        parse_peers(options.peers)  # with the ids
    if is_java and options.read_from not in ("any", "leader"):
        raise OptionError("readFrom: a Java group is read from its leader", "", "leave it out")


def _check_groups(field: str, spec: StartSpec | TimeSpec | None, options: DLedgerOptions) -> None:
    unknown = [group for group in spec if not options.selects(group)] if isinstance(spec, Mapping) else []
    if unknown and options.groups_pattern is not None:
        reason = f"does not match groupsPattern {options.groups_pattern!r}"
    else:
        reason = f"is not among the groups {', '.join(options.groups)}"
    if unknown:
        raise OptionError(f"{_name_of(field)}: group {unknown[0]!r} {reason}", "", "correct either option")
