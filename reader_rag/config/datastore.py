"""Settings of an engine's datastore: limits of the search, and which answers are kept."""

from __future__ import annotations

from dataclasses import dataclass

from reader_rag.config.setting import Settings, setting


@dataclass(frozen=True)
class DatastoreConfig(Settings):
    """Settings of an engine's datastore: limits of the search, and which answers are kept."""

    keeps_answers: bool = setting(
        False,
        "Whether finished answers are kept, each tenant's for that tenant alone. The process is then the datastore's "
        "only writer.",
    )
    max_answer_tokens: int = setting(
        4_000_000, "Most tokens of each tenant's answers; the least recently used are evicted.", ge=1
    )
    max_answer_age_s: float | None = setting(
        None, "Seconds after which an answer is removed; None: it is not removed by age.", gt=0.0
    )
    max_places: int = setting(
        8, "Most occurrences in answers, and as many in other texts, that one draft is made of.", ge=1, le=1024
    )
    reach: int = setting(40, "Most tokens that are copied from one occurrence.", ge=1, le=256)
    least_match: int = setting(
        4, "Tokens that must agree before an occurrence in a text that the model has not written.", ge=1, le=64
    )
    least_match_of_answers: int = setting(
        3, "Tokens that must agree before an occurrence in an earlier answer.", ge=1, le=64
    )
