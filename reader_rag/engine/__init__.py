"""Decoding with drafts: requests, their scheduling, and what comes out."""
