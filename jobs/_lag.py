"""Where a job that streams writes how far it is behind: options, and checks before a JVM starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from dledger_core.errors import ConfigError
from jobs._directories import check_apart, check_file, check_table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["LagOutputs", "lag_options"]


@dataclass(frozen=True, kw_only=True)
class LagOutputs:
    """What the options say; None where one was not given.

    Attributes:
        json: a file for JSON lines.
        prometheus: a port, ``host:port``, or a file that ends in ``.prom``.
        table: directory of a Delta table.
    """

    json: str | None = None
    prometheus: str | None = None
    table: str | None = None

    def check(self, written: dict[str, str]) -> None:
        """Refuses what cannot be used.

        Args:
            written: directories that the job writes to, by option.

        Raises:
            ConfigError: says which option and why.
        """
        from spark_connector.errors import OptionError
        from spark_connector.monitoring.prometheus import parse_place

        if self.json is not None:
            check_file(self.json, "--lag-json")
        if self.prometheus is not None:
            try:
                file = parse_place(self.prometheus)
            except OptionError as error:
                raise ConfigError(error.what, "--lag-prometheus", error.remedy) from None
            if isinstance(file, str):
                check_file(file, "--lag-prometheus")
        if self.table is not None:
            check_table(self.table, "--lag-table")
            check_apart(written | {"--lag-table": self.table})

    @contextmanager
    def watch(self, spark: SparkSession) -> Iterator[None]:
        """Writes the lag of the session's queries inside the block, if any output was asked for."""
        from spark_connector import monitor

        chosen = {name: value for name, value in asdict(self).items() if value is not None}
        if not chosen:
            yield
            return
        with monitor(spark, log=False, **chosen):
            yield


def lag_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds ``--lag-json``, ``--lag-prometheus`` and ``--lag-table``, passed on as one ``lag``."""

    @wraps(command)
    def gathered(
        *args: Any, lag_json: str | None, lag_prometheus: str | None, lag_table: str | None, **options: Any
    ) -> Any:
        return command(*args, lag=LagOutputs(json=lag_json, prometheus=lag_prometheus, table=lag_table), **options)

    gathered = click.option("--lag-table", metavar="DELTA", help="Append how far the logs are read to this table.")(
        gathered
    )
    gathered = click.option(
        "--lag-prometheus", metavar="PLACE", help="Serve it as metrics on a port or host:port, or write a .prom file."
    )(gathered)
    return click.option("--lag-json", metavar="FILE", help="Append it to this file, a JSON object a line.")(gathered)
