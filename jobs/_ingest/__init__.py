"""Parts of ``ingest``: the options of the source, the columns of its tables, dead letters, OPTIMIZE."""
