"""Audit of replicas: what ``jobs/audit_replicas.py`` is made of.

``model`` holds the words (replica, finding, verdict), ``plan`` which ranges are compared, ``vote`` who is right at an
index, ``report`` findings and coverage: all four are pure. ``sources`` reads a replica, ``drill`` compares a range
entry by entry, ``passes`` runs both on Spark, ``tables`` writes what was found, ``snapshot`` asks the replicas.
"""
