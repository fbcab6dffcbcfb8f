"""A decode step of fixed shapes, whose buffers never move, so that a GPU can record it once and replay it."""
