"""Loading a model and computing one forward pass of it."""
