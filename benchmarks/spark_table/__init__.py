"""The table of speeds of the Spark connector, measured in one go: ``python -m benchmarks.spark_table --help``."""
