"""Options that several commands share, and the client that the connection options ask for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, Final, TypeVar

import click
from pydantic import ByteSize, TypeAdapter

from dledger_core.archive import read_storage
from dledger_core.cli.help import option
from dledger_core.cli.output import say
from dledger_core.client import AsyncLogClient, SyncLogClient
from dledger_core.client.archived import ArchivedClient
from dledger_core.client_config import CLIENT_CONFIG, LOCAL_PEERS, ClientConfig, variable_of
from dledger_core.config import check_group_name, parse_duration, parse_groups, parse_peers
from dledger_core.connect import PROTOCOLS, Client, JavaOptions, MessageFormat, connect
from dledger_core.errors import ConfigError, DLedgerError
from dledger_core.net.credentials import Credentials
from dledger_core.net.tls import TlsOptions

_F = TypeVar("_F", bound=Callable[..., Any])
_TIMEOUT_MAX_S: Final = 86_400
_SAFETY_LAG_S: Final = 10.0
_SILENT_S: Final = 2.0
_NO_ANSWER_S: Final = 1.0
_COMPLETION_MS: Final = 1_000

EXISTING_DIRECTORY: Final = click.Path(exists=True, file_okay=False, path_type=Path)


class DurationType(click.ParamType[float]):
    """A duration in seconds: a plain number, or a number with a unit as ``parse_duration`` reads it.

    Args:
        minimum: smallest number of seconds.
        maximum: largest number of seconds.
    """

    name = "duration"

    def __init__(self, minimum: float = 0, maximum: float = float("inf")) -> None:
        self._minimum, self._maximum = minimum, maximum

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """See ``click.ParamType``."""
        text = str(value).strip()
        try:
            seconds = parse_duration(f"{text} s" if text[-1:].isdigit() else text, allow_zero=True)
        except ConfigError as error:
            self.fail(f"{error.what}; {error.remedy}", param, ctx)
        if not self._minimum <= seconds <= self._maximum:
            self.fail(f"{text!r} is not in the range from {self._minimum:g} s to {self._maximum:g} s", param, ctx)
        return seconds


class SizeType(click.ParamType[int]):
    """A number of bytes: ``1048576`` or ``1MiB``."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """See ``click.ParamType``."""
        try:
            return int(TypeAdapter(ByteSize).validate_python(value))
        except ValueError:
            self.fail(f"{value!r} is not a size; write 1048576 or 1MiB", param, ctx)


@dataclass(frozen=True, kw_only=True)
class Access:
    """Values of the security options: how a command introduces itself to nodes."""

    tls: TlsOptions | None = None
    token: Path | None = None

    @classmethod
    def of(
        cls,
        *,
        tls_ca: Path | str | None,
        tls_cert: Path | str | None,
        tls_key: Path | str | None,
        token_file: Path | str | None,
    ) -> Access:
        """Return the values of these options; raise ConfigError if one is given without --tls-ca."""
        given = ClientConfig(tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key, token_file=token_file)
        return cls(tls=given.tls, token=given.token)

    def credentials(self) -> Credentials:
        """Return the credentials; raise ConfigError if a file cannot be used."""
        return Credentials(self.tls, self.token)

    @property
    def of_client(self) -> dict[str, Any]:
        """The arguments ``tls`` and ``token`` of a client."""
        return {"tls": self.tls, "token": self.token}

    @property
    def of_source(self) -> dict[str, str]:
        """The options of ``format("dledger")``; they have the names of files, and no secret."""
        tls = self.tls
        files = {
            "tls.ca": tls and tls.ca,
            "tls.cert": tls and tls.cert,
            "tls.key": tls and tls.key,
            "token.file": self.token,
        }
        return {name: str(path) for name, path in files.items() if path is not None}


@dataclass(frozen=True, kw_only=True)
class Connection:
    """Values of the connection options.

    Attributes:
        peers: the nodes; None = none are named, and ``client`` asks the local node, with a note on stderr.
    """

    peers: str | None
    group: str
    timeout_s: float
    protocol: str = "dledger"
    safety_lag_s: float = _SAFETY_LAG_S
    commit_probe: bool = False
    access: Access = Access()

    @property
    def is_java(self) -> bool:
        """Whether the nodes are Java's."""
        return self.protocol == "dledger-java"

    def client(self, *, in_order: bool = False) -> Client:
        """Return a client.

        Args:
            in_order: append one entry at a time, which keeps their order in a Java group.
        """
        timeout_ms, peers = int(self.timeout_s * 1000), asked_peers(self.peers)
        if not self.is_java:
            return Client(peers, self.group, timeout_ms=timeout_ms, **self.access.of_client)
        java = JavaOptions(
            safety_lag_ms=int(self.safety_lag_s * 1000),
            commit_probe=self.commit_probe,
            **({"appends_in_flight": 1} if in_order else {}),
        )
        return Client(
            peers,
            self.group,
            timeout_ms=timeout_ms,
            protocol="dledger-java",
            java=java,
            **self.access.of_client,
        )

    def reader(self, archive: Archive | None) -> SyncLogClient:
        """Return a client for reads, which takes trimmed entries from the archive.

        Args:
            archive: None = read only what the nodes have.
        """
        if archive is None:
            return self.client()
        peers, timeout_ms = asked_peers(self.peers), int(self.timeout_s * 1000)
        log = connect(peers, self.group, timeout_ms=timeout_ms, **self.access.of_client)
        return SyncLogClient(AsyncLogClient(ArchivedClient(log, archive.location, archive.storage, MessageFormat())))

    @contextmanager
    def announce_silence(self) -> Iterator[None]:
        """Write the addresses to stderr if the work inside takes a second; Java's reads take longer."""
        if self.is_java:
            yield
            return
        peers = parse_peers(self.peers or LOCAL_PEERS, needs_ids=False)
        addresses = ", ".join(peer.address for peer in peers)
        text = f"no answer yet; trying {addresses} for up to {self.timeout_s:g} s"
        timer = threading.Timer(_NO_ANSWER_S, say, (text,))
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def announce_wait(self) -> None:
        """Write to stderr that a read of a Java group waits, if it waits for several seconds."""
        if self.is_java and not self.commit_probe and self.safety_lag_s > _SILENT_S:
            say(
                f"waiting {self.safety_lag_s:g} s, because a Java group does not report its commit index "
                "(use a smaller --safety-lag, 0 if no client writes, or --commit-probe)"
            )


ACCESS_HELP: Final = {
    "tls-ca": "Use TLS, and trust this authority of the nodes' certificates.",
    "tls-cert": "Certificate of this client; its identity is the principal.",
    "tls-key": "Key of --tls-cert [default: in the same file].",
    "token-file": "File with this client's token, instead of a certificate.",
}
"""Options that name files of this client, with their help."""


def asked_peers(peers: str | None) -> str:
    """Return the peers; where none are named the local node's address, with a note on stderr."""
    if peers is None:
        say(f"asking {LOCAL_PEERS} (dledger dev); name other nodes with --peers or {variable_of('peers')}")
    return peers or LOCAL_PEERS


def _check_group(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    return check_group_name(value)


def _completing(names: Callable[[Client], Iterable[str]]) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """Return a completion of a value by names that the nodes report; without nodes it offers nothing."""

    def complete(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
        given = {name: value for name, value in context.params.items() if value is not None}
        files = {name: given.get(name) for name in ("tls_ca", "tls_cert", "tls_key", "token_file")}
        group = given.get("group")
        with contextlib.suppress(DLedgerError):
            access, peers = Access.of(**files), given.get("peers") or given.get("target") or LOCAL_PEERS
            group = group if isinstance(group, str) else "default"
            with Client(peers, group, timeout_ms=_COMPLETION_MS, **access.of_client) as client:
                return sorted(name for name in names(client) if name.startswith(incomplete))
        return []

    return complete


complete_group: Final = _completing(lambda client: client.groups())
complete_node: Final = _completing(lambda client: (node.node_id for node in client.metadata().nodes))


def split_groups(_context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    """Return the checked groups of a multiple option that also accepts commas; an option's callback."""
    return parse_groups(",".join(values)) if values else ()


def peers_option(
    *, required: bool, envvar: str | None = "DLEDGER_PEERS", needs_ids: bool = False, asks_local: bool = False
) -> Callable[[_F], _F]:
    """Add ``--peers``.

    Args:
        required: whether it is an error to name no nodes; otherwise the value may be None.
        envvar: variable with the value.
        needs_ids: require the ids of all nodes, because the command writes them or asks each node.
        asks_local: the command passes the value through ``asked_peers``.
    """

    def check(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
        if value is not None:
            parse_peers(value, needs_ids=needs_ids)
        return value

    text = "All nodes of the group: 'n0-host:port;n1-host:port'."
    if not needs_ids:
        text = "Nodes of the group, with or without ids: 'host:port,n1-host:port'; one is enough."
    if asks_local:
        text += " [default: 127.0.0.1, ports 40911 to 40913]"
    return option(
        "--peers",
        envvar=envvar,
        required=required,
        callback=check,
        metavar="PEERS",
        section="Connection",
        missing="list the group's nodes or set DLEDGER_PEERS",
        help=text,
    )


def target_argument(command: _F) -> _F:
    """Add the argument DIR|PEERS, passed on as ``target``; see ``target_of``."""
    named: Callable[[_F], _F] = click.argument("target", metavar="[DIR|PEERS]", envvar="DLEDGER_PEERS", required=False)
    return named(command)


def group_of_target_option(command: _F) -> _F:
    """Add ``--group`` to a command with ``target_argument``."""
    added: Callable[[_F], _F] = option(
        "--group",
        envvar="DLEDGER_GROUP",
        default="default",
        show_default=True,
        callback=_check_group,
        shell_complete=complete_group,
        metavar="NAME",
        help="Group of PEERS.",
    )
    return added(command)


def target_of(target: str | None) -> Path | str:
    """Return a directory or file that exists, or the peers; without a target as ``asked_peers``.

    Raises:
        ConfigError: it is neither.
    """
    if target is None:
        return asked_peers(None)
    if Path(target).exists():
        return Path(target)
    if ":" not in target:
        raise ConfigError(f"{target!r} is neither a directory nor a list of nodes", "", "name a directory or PEERS")
    parse_peers(target, needs_ids=False)
    return target


def timeout_option(command: _F) -> _F:
    """Add ``--timeout``."""
    timeout: Callable[[_F], _F] = option(
        "--timeout",
        type=DurationType(0.001, _TIMEOUT_MAX_S),
        default="10",
        show_default=True,
        metavar="SECONDS",
        section="Connection",
        help="Timeout of a request.",
    )
    return timeout(command)


def _read_client_config(context: click.Context, _parameter: click.Parameter, path: str | None) -> None:
    """Make the file's values the defaults of the options whose variables they replace."""
    if path:
        values = {variable_of(name): value for name, value in ClientConfig.read(path).given.items()}
        context.default_map = {
            str(parameter.name): values[parameter.envvar]
            for parameter in context.command.params
            if isinstance(parameter.envvar, str) and parameter.envvar in values
        }


def client_config_option(**given: Any) -> Callable[[_F], _F]:
    """Add ``--client-config``, which sets other options of the command; see ``click.option`` for ``given``."""
    return option(
        f"--{CLIENT_CONFIG}",
        envvar=variable_of(CLIENT_CONFIG),
        is_eager=True,  # before the options that it sets
        expose_value=False,
        callback=_read_client_config,
        metavar="FILE",
        section="Connection",
        help="TOML file with options that have a variable, by their names. Option and variable override it.",
        **given,
    )


def access_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of ``Access``, passed on as ``access``, and ``--client-config``."""

    @wraps(command)
    def with_access(
        *, tls_ca: Path | None, tls_cert: Path | None, tls_key: Path | None, token_file: Path | None, **others: Any
    ) -> Any:
        access = Access.of(tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key, token_file=token_file)
        return command(access=access, **others)

    added = with_access
    for name, text in reversed(ACCESS_HELP.items()):
        added = option(
            f"--{name}",
            type=click.Path(path_type=Path),
            envvar=variable_of(name),
            metavar="FILE",
            section="Security",
            help=text,
        )(added)
    return client_config_option()(added)


@dataclass(frozen=True)
class Archive:
    """Values of ``archive_options``: the table, ``true`` for the one that the log names, and options of its storage."""

    location: str
    storage: dict[str, str] = field(default_factory=dict, repr=False)  # may have credentials


def archive_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--archive`` and ``--archive-storage``, passed on as ``archive``; below those of ``connection_options``."""

    @wraps(command)
    def with_archive(*, archive: str | None, archive_storage: Path | None, **others: Any) -> Any:
        connection = others.get("connection")  # a command that reads a directory has none
        if archive is not None and isinstance(connection, Connection) and connection.is_java:
            raise ConfigError("--archive: a Java group has no archive", "", "leave --archive out")
        if archive is None and archive_storage is not None:
            raise ConfigError("--archive-storage has no effect without --archive", "", "add --archive true")
        storage = {} if archive_storage is None else read_storage(archive_storage, "--archive-storage")
        found = None if archive is None else Archive(archive, storage)
        return command(archive=found, **others)

    added = with_archive
    for add in (
        option(
            "--archive-storage",
            type=click.Path(path_type=Path),
            metavar="FILE",
            section="Connection",
            help="JSON file with deltalake's options for the archive's location, such as credentials.",
        ),
        option(
            "--archive",
            metavar="true|LOCATION",
            section="Connection",
            help="Read trimmed entries from the archive: true for the table that the log names, or the location of a "
            "copy.",
        ),
    ):
        added = add(added)
    return added


def connection_options(command: Callable[..., Any], *, needs_peers: bool = False) -> Callable[..., Any]:
    """Add the options of ``Connection``, passed on as ``connection``.

    Args:
        command: the function.
        needs_peers: require the nodes to be named, because the command changes which nodes hold the log.
    """

    @wraps(command)
    def connected(
        *,
        peers: str | None,
        group: str,
        timeout: float,
        protocol: str,
        safety_lag: float,
        commit_probe: bool,
        access: Access,
        **others: Any,
    ) -> Any:
        if peers is None and protocol == "dledger-java":
            raise ConfigError("missing --peers", "", "list the nodes of the Java group with their ids: n0-host:port")
        connection = Connection(
            peers=peers,
            group=group,
            timeout_s=timeout,
            protocol=protocol,
            safety_lag_s=safety_lag,
            commit_probe=commit_probe,
            access=access,
        )
        return command(connection=connection, **others)

    for add in reversed(
        [
            peers_option(required=needs_peers, asks_local=not needs_peers),
            option(
                "--group",
                envvar="DLEDGER_GROUP",
                default="default",
                show_default=True,
                callback=_check_group,
                shell_complete=complete_group,
                metavar="NAME",
                section="Connection",
                help="The group, which is one replicated log.",
            ),
            timeout_option,
            access_options,
            option(
                "--protocol",
                type=click.Choice(PROTOCOLS),
                default=PROTOCOLS[0],
                show_default=True,
                section="Connection",
                help="Wire protocol of the nodes; dledger-java for Java DLedger.",
            ),
            option(
                "--safety-lag",
                type=DurationType(0, 86_400),
                default=f"{_SAFETY_LAG_S:g}",
                show_default=True,
                metavar="SECONDS",
                section="Connection",
                help="dledger-java: read up to the end that was seen this long ago; Java reports no commit index.",
            ),
            option(
                "--commit-probe",
                is_flag=True,
                section="Connection",
                help="dledger-java: append a probe entry and read below it instead of waiting. Never use it on a "
                "RocketMQ broker's group.",
            ),
        ]
    ):
        connected = add(connected)
    return connected


RESULT_FORMAT: Final = "dledger.format"
"""Key of the chosen format in the context of click, for errors."""


def _note_format(context: click.Context, _: click.Parameter, value: str) -> str:
    context.meta[RESULT_FORMAT] = value
    return value


def format_option(command: _F) -> _F:
    """Add ``--format``, passed on as ``output``."""
    formatted: Callable[[_F], _F] = option(
        "--format",
        "output",
        type=click.Choice(["table", "json"]),
        default="table",
        show_default=True,
        section="Output",
        callback=_note_format,
        help="Format of the result on stdout.",
    )
    return formatted(command)


def opaque_option(command: _F) -> _F:
    """Add ``--opaque``."""
    flagged: Callable[[_F], _F] = option(
        "--opaque", is_flag=True, help="Take bodies as bytes: do not check the RocketMQ messages in them."
    )
    return flagged(command)
