"""Document stores: the contract, FAISS over one SQLite file, and the base of stores in vector databases."""
