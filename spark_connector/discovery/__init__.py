"""What PySpark finds by itself: the wheel maps this package to the top-level module ``pyspark_dledger``.

PySpark imports every ``pyspark_*`` module to look for a ``DefaultSource``, and one that fails hides all others, so
a missing dependency must not raise here.
"""

try:
    from spark_connector.source import DLedgerDataSource as DefaultSource
except ImportError:
    import logging

    logging.getLogger(__name__).warning("the dledger data source cannot be loaded", exc_info=True)
else:
    __all__ = ["DefaultSource"]
