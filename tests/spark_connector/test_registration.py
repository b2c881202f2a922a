from __future__ import annotations

from typing import Any

import pyspark
import pytest

from spark_connector import register
from spark_connector.discovery import DefaultSource
from spark_connector.errors import SparkVersionError


def test_discovery_finds_source() -> None:
    assert DefaultSource.name() == "dledger"


def test_other_spark_version_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pyspark, "__version__", "4.1.0")
    with pytest.raises(SparkVersionError, match=r"PySpark 4.1.0"):
        register(None)  # type: ignore[arg-type]


@pytest.mark.spark
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"peers": "n0-127.0.0.1:1", "maxOffsetPerTrigger": "5"}, "[DLEDGER_OPTION]"),
    ],
)
def test_wrong_options_fail_before_query_starts(spark: Any, options: dict[str, str], said: str) -> None:
    register(spark)
    with pytest.raises(pyspark.errors.AnalysisException) as caught:
        spark.read.format("dledger").options(**options).load().count()
    assert said in str(caught.value)
