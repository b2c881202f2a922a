"""The data source of a session: the parallelism that its plans go by."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pyspark import cloudpickle
from pyspark.sql.types import BinaryType, LongType, StructField, StructType

from spark_connector.planning import SPLIT_ENTRIES_MIN, core_count
from spark_connector.source import DLedgerDataSource, data_source_of
from tests.spark_connector.store_writer import StoreWriter

MANY = core_count() + 1


def session(master: str, parallelism: int) -> Any:
    """A session of a cluster."""
    return SimpleNamespace(sparkContext=SimpleNamespace(master=master, defaultParallelism=parallelism))


def connected(setting: str | None) -> Any:
    """A session of Spark Connect, which has no context."""
    return SimpleNamespace(conf=SimpleNamespace(get=lambda _name, _default: setting))


@pytest.mark.parametrize(
    ("spark", "expected"),
    [
        (session("local[1]", 1), 1),
        (session("local", 1), 1),
        (session("spark://host:7077", MANY), MANY),
        (session("yarn", 1), core_count()),
        (session("local-cluster[2,1,1024]", MANY), MANY),
        (connected(None), None),
        (connected(str(MANY)), MANY),
    ],
)
def test_data_source_knows_parallelism_of_cluster(spark: Any, expected: int | None) -> None:
    made = data_source_of(spark)
    assert made.parallelism == expected
    assert cloudpickle.loads(cloudpickle.dumps(made)).parallelism == expected
    assert (made.name(), DLedgerDataSource.parallelism) == ("dledger", None)


def test_plan_has_parallelism_of_cluster_unless_partitions_are_named(store: StoreWriter) -> None:
    for _ in range(MANY):
        store.append([b""] * SPLIT_ENTRIES_MIN)
    made = data_source_of(session("spark://host:7077", MANY))
    schema = StructType([StructField("index", LongType()), StructField("body", BinaryType())])
    for given, expected in (({}, MANY), ({"minPartitions": str(2 * MANY)}, 2 * MANY)):
        reader = made({"path": str(store.path), **given}).reader(schema)
        assert len(reader.partitions()) == expected
