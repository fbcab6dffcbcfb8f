"""Keys and values: trees, batches, prefixes, and the masks over them."""
