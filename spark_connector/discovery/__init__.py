"""The module that PySpark discovers: the wheel maps this package to the top-level module ``pyspark_dledger``.

PySpark imports every ``pyspark_*`` module to look for a ``DefaultSource``. One that raises hides all others, so a
missing dependency is only logged here.
"""

import logging

try:
    from spark_connector.source import DLedgerDataSource as DefaultSource
except ImportError:
    logging.getLogger(__name__).warning("loading the dledger data source failed", exc_info=True)
else:
    __all__ = ["DefaultSource"]
