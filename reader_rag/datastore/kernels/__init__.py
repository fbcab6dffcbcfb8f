"""The numba loops of the datastore: search over segments (`search`) and construction of their suffix arrays."""
