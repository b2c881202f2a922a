"""Writes rows as transactions: what executors append, what the driver commits."""
