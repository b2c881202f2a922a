"""Maintenance of stores while a node runs: retention, scrub, repair, disk space, and backups."""
