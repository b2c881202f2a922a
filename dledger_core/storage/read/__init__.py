"""The read path: entries by index and time, the rule of ``read_committed``, and ``open_store``."""
