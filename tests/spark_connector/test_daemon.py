"""Python workers of a local session begin with the connector loaded."""

from __future__ import annotations

import sys
from typing import Any

import pytest


@pytest.mark.spark
def test_workers_come_with_the_connector(spark: Any) -> None:
    def seen(_: int) -> tuple[str, bool]:
        spec = sys.modules["__main__"].__spec__
        return spec.name if spec else "", "spark_connector.source" in sys.modules

    found = spark.sparkContext.parallelize(range(4), 2).map(seen).distinct().collect()
    assert found == [("spark_connector.daemon", True)]
