"""The parts of ``jobs/rebuild_consume_queue.py``, in the order of the data.

``plan`` checks the options and opens the logs, ``source`` reads them, ``units`` turns entries into units, ``slots``
places units in their queues, ``table`` is the Delta table and the stream that writes it. ``files`` writes RocketMQ's
own files, ``compare`` compares existing files with the log, ``broker`` reads the broker's configuration and explains
queue offsets assigned twice.
"""
