"""Build and search times of a datastore."""
