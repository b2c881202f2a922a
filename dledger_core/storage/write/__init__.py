"""The write path: batches get their place, are written, synced, truncated and trimmed."""
