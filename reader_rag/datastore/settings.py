"""DatastoreSettings: when segments are written, merged and rewritten."""

from __future__ import annotations

from dataclasses import dataclass

from reader_rag.errors import ConfigError


@dataclass(frozen=True)
class DatastoreSettings:
    """How a writer keeps house.

    Attributes:
        live_tokens: A log with so many tokens becomes a segment. They are sorted when a datastore is opened.
        fan: So many segments of about one size are merged into one, each size `fan` times the one before.
        max_segment_tokens: Most tokens of a segment that is made of others. Sorting takes 16 bytes of memory a token
            of 16-bit vocabularies, 22 of larger ones.
        rewrite_share: A segment is rewritten when so much of it was removed,
        rewrite_after_s: or when the first removal was so long ago.
        background: Merge and rewrite in a thread; else only in `Datastore.compact`.

    Raises:
        ConfigError: A value is out of its range.
    """

    live_tokens: int = 1 << 18
    fan: int = 4
    max_segment_tokens: int = 1 << 27
    rewrite_share: float = 0.125
    rewrite_after_s: float = 900.0
    background: bool = True

    def __post_init__(self) -> None:
        if self.live_tokens < 1 or self.fan < 2:
            raise ConfigError("live_tokens must be at least 1 and fan at least 2")
        if not self.live_tokens <= self.max_segment_tokens < 1 << 31:
            raise ConfigError("max_segment_tokens must lie from live_tokens to 2**31 - 1")
        if not 0 <= self.rewrite_share <= 1 or self.rewrite_after_s < 0:
            raise ConfigError("rewrite_share must lie from 0 to 1 and rewrite_after_s must not be negative")
