"""The public names of this version, one fact per line: a later version may add lines and lose none.

Python names with their parameters, commands, jobs and their options, environment variables, error codes, exit codes,
the options and columns of the Spark source. Defaults are not part of it: they may change.
"""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Iterator
from enum import Enum
from typing import Any

import click

import spark_connector.errors  # noqa: F401  (registers its error classes)
from dledger_core import DLedgerError, exit_codes
from dledger_core.cli import main
from spark_connector.columns import ddl_of, schema_for
from spark_connector.options import DLedgerOptions

MODULES = ("dledger_core", "dledger_core.rocketmq", "dledger_core.cli", "spark_connector")
JOBS = ("archive", "audit_replicas", "demo", "ingest", "rebuild_consume_queue")
OURS = ("dledger_core", "spark_connector")


def public_names() -> list[str]:
    """Return all lines, sorted."""
    return sorted({*_python(), *_commands(), *_errors(), *_exit_codes(), *_spark()})


def required_parameters(lines: list[str]) -> dict[str, set[str]]:
    """Return the parameters that a caller must pass, by the callable's name."""
    found: dict[str, set[str]] = {}
    for line in lines:
        kind, _, rest = line.partition(" ")
        if kind == "parameter":
            name, parameter, *facts = rest.split()
            found.setdefault(name, set()).update({parameter} if "required" in facts else ())
    return found


# --- Python -----------------------------------------------------------------------------------------------------------


def _python() -> Iterator[str]:
    for name in MODULES:
        module = importlib.import_module(name)
        for public in module.__all__:
            yield from _object(f"{name}.{public}", getattr(module, public))


def _object(name: str, found: Any) -> Iterator[str]:
    yield f"name {name}"
    if inspect.isclass(found) and found.__module__.startswith(OURS):
        yield from _class(name, found)
    elif inspect.isroutine(found):
        yield from _parameters(name, found)
    elif isinstance(found, int | str) and "VERSION" not in name and not name.endswith("_MAX"):
        yield f"value {name} {found!r}"


def _class(name: str, found: type) -> Iterator[str]:
    if not issubclass(found, BaseException | Enum):
        yield from _parameters(name, found)
    if issubclass(found, Enum):
        yield from (f"name {name}.{member.name} {member.value!r}" for member in found)
    bases = (found,) if issubclass(found, DLedgerError) else reversed(found.__mro__)
    for base in bases:
        if base.__module__.startswith(OURS):
            for key in (*vars(base), *vars(base).get("__annotations__", ())):
                if not key.startswith("_"):
                    yield from _member(f"{name}.{key}", inspect.getattr_static(found, key, None))


def _member(name: str, found: Any) -> Iterator[str]:
    if isinstance(found, classmethod | staticmethod):
        found = found.__func__
    if isinstance(found, types.FunctionType):
        yield f"name {name}()"
        yield from _parameters(name, found)
    else:
        yield f"name {name}"


def _parameters(name: str, found: Any) -> Iterator[str]:
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):
        return
    at = 0
    for parameter in parameters:
        if parameter.name in ("self", "cls"):
            continue
        need = "required" if parameter.default is parameter.empty and parameter.kind < 4 else "optional"
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            yield f"parameter {name} *{parameter.name}"
        elif parameter.kind == parameter.KEYWORD_ONLY:
            yield f"parameter {name} {parameter.name} {need}"
        else:
            yield f"parameter {name} {parameter.name} {need} position {at}"
            at += 1


# --- commands ---------------------------------------------------------------------------------------------------------


def _commands() -> Iterator[str]:
    yield from _command("dledger", main, click.Context(main, **main.context_settings))
    for job in JOBS:
        command = importlib.import_module(f"jobs.{job}").command
        yield from _command(f"{job}.py", command, click.Context(command, **command.context_settings))


def _command(name: str, command: click.Command, context: click.Context) -> Iterator[str]:
    yield f"command {name}"
    for parameter in command.get_params(context):
        yield from _option(name, parameter)
    if isinstance(command, click.Group):
        for each in command.list_commands(context):
            part = command.get_command(context, each)
            assert part is not None
            yield from _command(f"{name} {each}", part, click.Context(part, parent=context, **part.context_settings))


def _option(name: str, parameter: click.Parameter) -> Iterator[str]:
    if getattr(parameter, "hidden", False):
        return
    names = (*parameter.opts, *parameter.secondary_opts)
    shown = names if isinstance(parameter, click.Option) else (str(parameter.name).upper(),)
    takes = "flag" if getattr(parameter, "is_flag", False) else "value"
    need = " required" if parameter.required else ""
    for option in shown:
        yield f"option {name} {option} {takes}{need}"
        if isinstance(parameter.type, click.Choice):
            yield from (f"choice {name} {option} {choice}" for choice in parameter.type.choices)
    variables = parameter.envvar or ()
    yield from (f"environment {each}" for each in ([variables] if isinstance(variables, str) else variables))


# --- codes and Spark --------------------------------------------------------------------------------------------------


def _errors() -> Iterator[str]:
    for error in _subclasses(DLedgerError):
        if error.__module__.startswith(OURS):
            facts = [f"exit {error.exit_code}"]
            facts += ["retriable"] * error.retriable + ["outcome-unknown"] * error.outcome_unknown
            yield f"error {error.name} {error.code} {' '.join(facts)} {error.__name__}"


def _subclasses(found: type[DLedgerError]) -> Iterator[type[DLedgerError]]:
    yield found
    for each in found.__subclasses__():
        yield from _subclasses(each)


def _exit_codes() -> Iterator[str]:
    yield from (f"exit {value} {name}" for name, value in vars(exit_codes).items() if name.startswith("EXIT_"))


def _spark() -> Iterator[str]:
    for name, option in DLedgerOptions.model_fields.items():
        yield f"spark-option {option.validation_alias or name}"
    for decode in ("none", "message"):
        for field in schema_for(decode):
            yield f"spark-column {decode} {ddl_of([field])}"
