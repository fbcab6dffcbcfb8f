"""The gain from earlier answers of the same model in a datastore."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from reader_rag.bench.inputs import Trace
from reader_rag.bench.replay.peers import best_copy_steps
from reader_rag.bench.replay.replayer import Best, ReplayConfig, replay
from reader_rag.datastore import Datastore
from reader_rag.draft.profile import Profile
from reader_rag.engine.datastore_lookup import answer_document, answers_of


def halves(traces: Sequence[Trace]) -> tuple[list[Trace], list[Trace]]:
    """The first half of the answers of each category, and the second half."""
    parts: tuple[list[Trace], list[Trace]] = ([], [])
    for category in dict.fromkeys(trace.category for trace in traces):
        of_it = [trace for trace in traces if trace.category == category]
        middle = len(of_it) // 2
        parts[0].extend(of_it[:middle])
        parts[1].extend(of_it[middle:])
    return parts


@contextmanager
def answers_in_datastore(known: Sequence[Trace], asked: Sequence[Trace]) -> Iterator[Datastore]:
    """A temporary datastore of answers, stored as an engine stores them.

    Args:
        known: The answers.
        asked: Other answers with tokens of the same vocabulary.
    """
    vocabulary = 1 + max(max(*trace.prompt, *trace.output) for trace in (*known, *asked))
    with (
        tempfile.TemporaryDirectory() as folder,
        Datastore.open(Path(folder) / "answers", vocabulary=vocabulary, tokenizer="of the traces") as store,
    ):
        for trace in known:
            store.add(*answer_document(trace.prompt, trace.output), namespace=answers_of(""))
        yield store


def measure_recall(
    known: Sequence[Trace], asked: Sequence[Trace], config: ReplayConfig, best: Best, profile: Profile | None
) -> dict[str, Any]:
    """Replay answers with and without a datastore that holds others.

    Args:
        known: The answers in the datastore.
        asked: The answers that are replayed.
        config: Settings of the replay.
        best: The target's best next tokens, by trace id.
        profile: The model's profile, or None.

    Returns:
        Documents and tokens of the datastore; by category both replays and the ratio of their tokens per step, and the
        same of an oracle, which knows the rest of the answer and makes the longest copy after a matching token: an
        upper bound of the gain.
    """
    with answers_in_datastore(known, asked) as store:
        stats = store.stats().get(answers_of(""))
        runs = [replay(asked, config, best, profile, datastore=used) for used in (store, None)]
    return {
        "documents": stats.documents if stats else 0,
        "tokens": stats.tokens if stats else 0,
        "categories": {
            category: {
                "with": tally.summary(),
                "without": runs[1][category].summary(),
                "ratio": round(tally.mat / runs[1][category].mat, 4) if runs[1][category].steps else None,
                "oracle": _oracle([trace for trace in asked if trace.category == category], known),
            }
            for category, tally in runs[0].items()
        },
    }


def _oracle(asked: Sequence[Trace], known: Sequence[Trace]) -> dict[str, float | None]:
    """Tokens per step of the oracle: with copies from known answers too, and from prompt and answer alone."""
    answers = [trace.output for trace in known]
    tokens = sum(len(trace.output) for trace in asked)
    mats = [
        tokens / max(sum(best_copy_steps(trace, after_match=True, known=texts) for trace in asked), 1)
        for texts in (answers, [])
    ]
    ratio = round(mats[0] / mats[1], 4) if tokens else None
    return {"with": round(mats[0], 4), "without": round(mats[1], 4), "ratio": ratio}
