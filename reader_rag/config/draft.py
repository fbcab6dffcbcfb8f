"""How drafts are made."""

from __future__ import annotations

from dataclasses import dataclass

from reader_rag.config.setting import Settings, setting


@dataclass(frozen=True)
class DraftConfig(Settings):
    """How drafts are made."""

    max_nodes: int = setting(
        64,
        "Most drafted tokens in one tree. How many of them are verified is decided by what a step over them costs on "
        "this machine. 0 turns drafting off (plain decoding).",
        ge=0,
        le=1024,
    )
    max_depth: int = setting(40, "Longest path of a draft tree, in tokens.", ge=1, le=256)
    min_probability: float = setting(
        0.0001, "A node enters the tree if the estimated probability of its path is at least this.", ge=0.0, lt=1.0
    )
    max_occurrences: int = setting(
        256,
        "Most occurrences of the current suffix that are followed at once; the longest matches are kept, then the most "
        "recent ones.",
        ge=1,
        le=4096,
    )
    max_passage_tokens: int = setting(
        65_536, "Most tokens of text that is searched besides prompt and output; the oldest passage is evicted.", ge=0
    )
    max_successors: int = setting(
        32_768,
        "Entries of the table of the model's own next tokens, 136 bytes each; 0 drafts without it.",
        ge=0,
        le=1 << 24,
    )
    model_tokens: int = setting(
        4, "Most tokens that a draft model drafts one behind the other in a step; each takes a pass of it.", ge=1, le=64
    )
    model_branches: int = setting(
        4,
        "Tokens that a draft model drafts at each position: the best one is followed, the others are ends.",
        ge=1,
        le=32,
    )
    calibrates: bool = setting(
        True, "Whether estimated probabilities are corrected by the acceptance rates that were observed."
    )
    gated: bool = setting(
        True,
        "Whether a draft source from outside is asked only where the tokens that it is expected to add pay for its "
        "time; False asks in every step.",
    )
