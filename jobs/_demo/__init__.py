"""The stages of ``jobs/demo.py``: the events, a producer through a failover, the stream into Delta, the comparison."""
