"""A client of a live Java DLedger group: the surface of ``AsyncClient``, as far as Java can serve it."""
