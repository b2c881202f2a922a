"""Chaos for the connector: a table and a log that queries fill while their drivers, executors and nodes fail."""
