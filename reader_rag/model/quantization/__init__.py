"""Models whose linear layers have 8-bit integer weights and multiply 8-bit integer activations (W8A8)."""
