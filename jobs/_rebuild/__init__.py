"""Rebuild of consume queues: what ``jobs/rebuild_consume_queue.py`` is made of.

``units`` turns entries into units and places them in their queues, ``classic`` reads a classic CommitLog, ``table`` is
the Delta table, ``files`` writes RocketMQ's own files, ``compare`` holds existing files against the log,
``incremental`` keeps a table up to date.
"""
