"""Reads logs: what the driver plans, what executors read."""
