"""Audit of replicas: the steps of ``jobs/audit_replicas.py``.

``pipeline`` runs them on Spark: ``plan`` chooses the ranges to compare, ``digests`` reads their digests and finds the
ranges that differ, ``compare`` compares those entry by entry, ``judge`` decides which replica is right, ``report``
makes the summary and the page. ``replicas`` takes the snapshot and reads replicas; ``model`` has the types and the
schemas of the tables between the steps. All but ``replicas`` and ``pipeline`` are pure functions of tables.
"""
