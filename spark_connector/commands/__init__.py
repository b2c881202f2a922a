"""Commands that the connector adds to ``dledger``, about the checkpoints of Spark queries: lag, checkpoint."""
