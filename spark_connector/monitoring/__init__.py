"""Monitoring: the lag of queries, its outputs, and the commands about Spark checkpoints."""
