"""A job that writes a Delta table and counts its rows: ``python -m tests.jobs.first_start TABLE [NAME=VALUE...]``."""

from __future__ import annotations

import click

from jobs._cli import Outcome, run_job
from jobs._session import spark_session

ROWS = 5


@click.command()
@click.argument("table")
@click.argument("settings", nargs=-1)
def command(table: str, settings: tuple[str, ...]) -> Outcome:
    """Write a table with a session that has these settings."""
    with spark_session("first-start", settings=dict(each.split("=", 1) for each in settings)) as spark:
        spark.range(ROWS).write.format("delta").save(table)
        return Outcome({"rows": spark.read.format("delta").load(table).count()})


if __name__ == "__main__":
    run_job(command)
