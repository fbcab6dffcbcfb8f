"""Verifies drafts: one forward pass over a tree, the target's own token at every node, the longest agreeing path."""
