"""Conversations, kept for each key."""
