"""The query of one driver: from the log ``in`` into the log ``out``, on two executors, with speculation.

``python -m tests.chaos.connector.query PEERS CHECKPOINT``; with ``--to-the-end`` it ends with the newest entry.
"""

from __future__ import annotations

import sys

from jobs._session import spark_session
from spark_connector import register

SETTINGS = {
    "spark.master": "local-cluster[2,1,768]",
    "spark.executor.memory": "768m",
    "spark.ui.enabled": "false",
    "spark.speculation": "true",
    "spark.speculation.interval": "200ms",
    "spark.speculation.multiplier": "1.1",
    "spark.speculation.quantile": "0.5",
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.shuffleTracking.enabled": "true",
    "spark.dynamicAllocation.minExecutors": "0",
    "spark.dynamicAllocation.executorIdleTimeout": "10s",
}


def main() -> None:
    peers, checkpoint, *flags = sys.argv[1:]
    with spark_session("chaos", settings=SETTINGS) as spark:
        register(spark)
        options = {"peers": peers, "startingOffsets": "earliest", "minPartitions": "4", "maxOffsetsPerTrigger": "20000"}
        rows = spark.readStream.format("dledger").options(groups="in", **options).load().select("body")
        writer = rows.writeStream.format("dledger").options(peers=peers, group="out", checkpointLocation=checkpoint)
        trigger = {"availableNow": True} if flags else {"processingTime": "1 second"}
        writer.trigger(**trigger).start().awaitTermination()


if __name__ == "__main__":
    main()
