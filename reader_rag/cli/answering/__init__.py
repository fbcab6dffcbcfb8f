"""Answers of the programs: citations and statistics."""
