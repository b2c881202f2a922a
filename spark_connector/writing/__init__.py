"""Writing: executors append rows as parts of a transaction, the driver commits it."""
