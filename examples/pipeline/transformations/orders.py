"""Copies the paid orders of one log into another one, each once."""

import os

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession

PEERS = os.environ.get("DLEDGER_PEERS", "127.0.0.1:40911,127.0.0.1:40912,127.0.0.1:40913")

dp.create_sink("paid", "dledger", {"peers": PEERS, "group": "paid"})


@dp.temporary_view
def orders() -> DataFrame:
    """The entries of the group ``default``, from the first one on."""
    log = SparkSession.active().readStream.format("dledger")
    return log.options(peers=PEERS, groups="default", startingOffsets="earliest").load()


@dp.append_flow(target="paid")
def paid_orders() -> DataFrame:
    """The orders that are paid."""
    found = SparkSession.active().readStream.table("orders")
    return found.where("cast(body as string) like '%paid%'").select("body")
