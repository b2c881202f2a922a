"""Checks of a store: scan, verify, crash recovery, and repair of damaged records."""
