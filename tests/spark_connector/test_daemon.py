"""Python workers of a local session begin with the connector loaded."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pyspark
import pytest

from spark_connector.daemon import without_zips

INSTALLED = Path(pyspark.__file__).parent
ZIPS = [str(INSTALLED / "python" / "lib" / name) for name in ("pyspark.zip", "py4j-0.10-src.zip")]


@pytest.mark.spark
def test_workers_come_with_the_connector(spark: Any) -> None:
    def seen(_: int) -> tuple[str, bool, bool]:
        spec = sys.modules["__main__"].__spec__
        in_zip = ".zip" in str(sys.modules["pyspark"].__file__)
        return spec.name if spec else "", "spark_connector.source" in sys.modules, in_zip

    found = spark.sparkContext.parallelize(range(4), 2).map(seen).distinct().collect()
    assert found == [("spark_connector.daemon", True, False)]


def test_the_zips_of_the_installed_pyspark_are_left_out_and_no_others() -> None:
    site = str(INSTALLED.parent)
    assert without_zips(["", *ZIPS, "/sent/job.zip", site]) == ["", "/sent/job.zip", site]
    elsewhere = ["/opt/spark/python/lib/pyspark.zip", site]
    assert without_zips(elsewhere) == elsewhere  # another installation's, maybe of another version
    assert without_zips([*ZIPS, "/nowhere"]) == [*ZIPS, "/nowhere"]
