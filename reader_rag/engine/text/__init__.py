"""From tokens to text: detokenization, and which characters were copied from where."""
