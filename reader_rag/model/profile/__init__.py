"""The profile of a model: its likely next tokens after each token, and the task that computes them."""
