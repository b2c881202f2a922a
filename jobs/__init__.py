"""Spark jobs over a log: ingest, rebuild of consume queues, audit of replicas. Run them with python or spark-submit."""
