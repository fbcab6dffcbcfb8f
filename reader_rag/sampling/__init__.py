"""From logits to tokens: processors, samplers, grammars, and which drafted tokens are accepted."""
