"""The parts of ``jobs/rebuild_consume_queue.py``, in the order of the data.

``plan`` checks the options and opens what they name, ``stream`` is the route from log to table: ``units`` turns entries
into units (``dispatch``: those of further queues), ``classic`` those of a classic CommitLog, ``slots`` places them in
their queues, ``table`` is the Delta table. ``duplicates`` explains slots given out twice, ``files`` writes RocketMQ's
own files, ``compare`` compares existing files with the log; ``broker`` reads what lies beside a broker's log.
"""
