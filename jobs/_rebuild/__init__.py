"""The parts of ``jobs/rebuild_consume_queue.py``, in the order of the data.

``plan`` checks the options and opens the logs. ``stream`` is the route from log to table: ``units`` turns entries into
units (``dispatch``: those of further queues), ``classic`` the messages of a classic CommitLog, ``slots`` places units
in their queues, ``table`` is the Delta table. ``files`` writes RocketMQ's own files, ``compare`` compares existing
files with the log, ``broker`` reads the broker's configuration and explains queue offsets assigned twice.
"""
