"""Text to prompts, tokens to text, and the passages that an answer was copied from."""
