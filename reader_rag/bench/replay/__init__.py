"""Drafting measured on recorded answers."""
