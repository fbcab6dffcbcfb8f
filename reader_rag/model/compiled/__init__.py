"""Models in compiled loops: their weights by address, and a pass over rows of tokens."""
