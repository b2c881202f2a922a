"""Audit of replicas: the steps of ``jobs/audit_replicas.py``.

``snapshot`` asks the replicas, ``plan`` says which ranges are compared, ``passes`` reads digests of them on Spark,
``compare`` finds the ranges that differ, ``entries`` compares those entry by entry, ``judge`` says who is right,
``report`` and ``page`` show it. All but ``snapshot``, ``sources`` and ``passes`` are pure functions of tables, whose
schemas are in ``model``.
"""
