"""Drafts of several requests at once: sources that share a model are asked in one call."""

from __future__ import annotations

import time
from collections.abc import Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from reader_rag.draft.checked_source import CheckedSource
from reader_rag.draft.source import Ask, Budget, Proposal, RequestState
from reader_rag.draft.tree import DraftTree

_Key = TypeVar("_Key", bound=Hashable)


class Asking(NamedTuple):
    """A source that is asked in this step.

    Attributes:
        source: The source.
        state: The request.
        budget: Most nodes, and most tokens on a path.
    """

    source: CheckedSource
    state: RequestState
    budget: Budget


class Answered(NamedTuple):
    """What a source proposed.

    Attributes:
        tree: Its proposal.
        seconds: What it took; of a call for several requests, an equal share.
    """

    tree: DraftTree
    seconds: float


Drafting = Generator[Asking, Answered, DraftTree]
"""A draft in the making: yields each source that it asks, gets its proposal, and returns the draft."""


@dataclass
class Drafted:
    """A draft that was made.

    Attributes:
        tree: The draft; None: making it failed.
        error: Why; None: it did not.
        seconds: What it took.
        asking_s: Of that, what the sources took that it asked.
    """

    tree: DraftTree | None = None
    error: BaseException | None = None
    seconds: float = 0.0
    asking_s: float = 0.0


def draft_together(drafting: Mapping[_Key, Drafting]) -> dict[_Key, Drafted]:
    """Make the drafts of several requests. Sources of one group that are asked at the same time are asked in one call.

    Args:
        drafting: By request, its draft in the making.

    Returns:
        By request.
    """
    made = {key: Drafted() for key in drafting}
    answers: dict[_Key, Answered | BaseException | None] = dict.fromkeys(drafting)
    while answers:
        asking: dict[_Key, Asking] = {}
        for key, answer in answers.items():
            began = time.perf_counter()
            try:
                if isinstance(answer, BaseException):
                    drafting[key].throw(answer)
                asking[key] = drafting[key].send(answer)  # type: ignore[arg-type]  # None starts it
            except StopIteration as ended:
                made[key].tree = ended.value
            except BaseException as error:
                made[key].error = error
            made[key].seconds += time.perf_counter() - began
        answers = dict(zip(asking, _answered(list(asking.values())), strict=True))
        for key, answer in answers.items():
            if isinstance(answer, Answered):
                made[key].seconds += answer.seconds
                made[key].asking_s += answer.seconds
    return made


def draft_alone(drafting: Drafting) -> DraftTree:
    """Make one draft.

    Args:
        drafting: In the making.
    """
    made = draft_together({0: drafting})[0]
    if made.tree is None:
        assert made.error is not None
        raise made.error
    return made.tree


def _answered(asking: Sequence[Asking]) -> list[Answered | BaseException]:
    groups: dict[object, list[int]] = {}
    for place, one in enumerate(asking):
        group = one.source.group
        groups.setdefault(place if group is None else (id(group),), []).append(place)
    answers: dict[int, Answered | BaseException] = {}
    for places in groups.values():
        answers |= zip(places, _asked([asking[place] for place in places]), strict=True)
    return [answers[place] for place in range(len(asking))]


def _asked(asking: Sequence[Asking]) -> list[Answered | BaseException]:
    """Ask sources of one group, in one call where there are several."""
    group = asking[0].source.group
    if group is not None and len(asking) > 1:
        began = time.perf_counter()
        try:
            proposals = group.propose_together([Ask(one.source.source, one.state, one.budget) for one in asking])
        except Exception:  # each is asked alone, so that the one that fails is found
            return [_asked_alone(one) for one in asking]
        seconds = (time.perf_counter() - began) / len(asking)
        return [_checked(one, proposal, seconds) for one, proposal in zip(asking, proposals, strict=True)]
    return [_asked_alone(one) for one in asking]


def _checked(one: Asking, proposal: Proposal | DraftTree, seconds: float) -> Answered:
    return Answered(one.source.checked(lambda: proposal, one.budget), seconds)


def _asked_alone(one: Asking) -> Answered | BaseException:
    try:
        return Answered(*one.source.timed_proposal(one.state, one.budget))
    except BaseException as error:  # ends this request, not the others
        return error
