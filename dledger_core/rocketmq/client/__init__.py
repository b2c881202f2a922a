"""The log client of a live Java DLedger group."""

from dledger_core.rocketmq.client.client import JavaClient

__all__ = ["JavaClient"]
