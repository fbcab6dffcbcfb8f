"""LlamaIndex's programs, output parsers and selectors under a grammar: answers that always parse."""
