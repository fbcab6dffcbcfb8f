"""Whether asking a draft source pays: the tokens that it adds against the tokens that its time is worth.

A step's worth is measured in tokens: what a source's time costs is that time multiplied by the tokens that are emitted
in a second. Everything is estimated from the steps that ran; nothing depends on the kind of source or text.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

_WORTH = 4.0
"""Tokens that a proposal may add, before anything is known: the standard deviation that estimates begin with. A source
that adds nothing has cost about as many tokens of time when it is asked no more."""
_SHARED = 8.0
"""Weight, in proposals, of the mean over all classes in that of one: what proposals of a class add varies about so many
times as much as what classes add on average."""
_MEMORY = 1024.0
"""Proposals over which a class's estimate is formed; older ones fade."""
_RECENT = 8.0
"""Proposals over which it is checked whether a class is as it was."""
_SURPRISE = 3.0
"""Standard errors by which the last proposals must differ from those before for these to be forgotten."""
_PROBED = 1.0 / 256.0
"""Share of all time in which a source is asked where it does not pay, so that its estimate can recover."""
_CALLS = 15
"""Calls whose median time counts."""
_FADES = 0.99
"""Factor by which the tokens and seconds of earlier steps fade with each step."""
_PACE_SHARED = 2.0
"""Weight, in steps, of all steps in the pace of one class."""


class _Steps:
    """Tokens and seconds of steps, older ones fading."""

    def __init__(self) -> None:
        self.tokens = self.seconds = self.count = 0.0

    def observe(self, tokens: float, seconds: float) -> None:
        self.tokens = _FADES * self.tokens + tokens
        self.seconds = _FADES * self.seconds + seconds
        self.count = _FADES * self.count + 1.0


class Pace:
    """Tokens that are emitted in a second after a step of some class; see `class_of`.

    A token that a source adds saves the time in which the steps that follow would have emitted it. Texts are copied in
    stretches: after a step in which search expects much, tokens come fast and are worth little, and where it expects
    nothing they come slowly.
    """

    def __init__(self) -> None:
        self._all = _Steps()
        self._classes: dict[int, _Steps] = {}

    def observe(self, before: float | None, tokens: float, seconds: float) -> None:
        """Count a step.

        Args:
            before: Tokens that the draft of search in the step before it was expected to gain; None: it was the first.
            tokens: Emitted tokens.
            seconds: Its time, proposing included.
        """
        self._all.observe(tokens, seconds)
        if before is not None:
            self._classes.setdefault(class_of(before), _Steps()).observe(tokens, seconds)

    def rate(self, expected: float) -> float | None:
        """Tokens a second in the steps that follow; None before the first step.

        Args:
            expected: Tokens that the draft of search is expected to gain in this step.
        """
        if not self._all.count:
            return None
        steps, share = self._classes.get(class_of(expected), _Steps()), _PACE_SHARED / self._all.count
        return (steps.tokens + share * self._all.tokens) / (steps.seconds + share * self._all.seconds)


def class_of(expected: float) -> int:
    """The class of a step: half octaves of the tokens that it emits without a source.

    Args:
        expected: Tokens that its draft is expected to gain.
    """
    return int(2.0 * math.log2(1.0 + max(expected, 0.0)))


class CallTime:
    """Seconds that asking a source takes: what it declares, or else the median of the last calls.

    A source that was left out for some steps catches up with them when it is asked again. Such a call counts only
    while there is no other.
    """

    def __init__(self) -> None:
        self._steady: deque[float] = deque(maxlen=_CALLS)
        self._after_pause: deque[float] = deque(maxlen=_CALLS)

    def observe(self, seconds: float, *, steady: bool) -> None:
        """Count a call.

        Args:
            seconds: Its time.
            steady: Whether the source was asked in the step before too.
        """
        (self._steady if steady else self._after_pause).append(seconds)

    @property
    def seconds(self) -> float | None:
        """Of a call; None before the first one."""
        calls = self._steady or self._after_pause
        return median(calls) if calls else None


class _Gains:
    """Tokens that proposals of one class added: how many proposals, their mean, and their mean square."""

    def __init__(self) -> None:
        self.count = self.total = self.squares = self.recent = 0.0

    def observe(self, gain: float) -> None:
        fades = 1.0 - 1.0 / _MEMORY
        self.count = fades * self.count + 1.0
        self.total = fades * self.total + gain
        self.squares = fades * self.squares + gain * gain
        self.recent += (gain - self.recent) / min(self.count, _RECENT)

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def variance(self, prior: float = _WORTH**2, weight: float = 1.0) -> float:
        """Of a gain: that of the counted ones, and a prior one that weighs as much as so many gains."""
        around = max(self.squares - self.count * self.mean**2, 0.0)
        return (weight * prior + around) / (weight + self.count)

    def forget_if_changed(self) -> None:
        """Keep the last gains alone where they are not like those before."""
        difference = abs(self.recent - self.mean)
        if self.count > 2 * _RECENT and difference > _SURPRISE * math.sqrt(self.variance() / _RECENT):
            spread = self.variance()
            self.count, self.total = _RECENT, _RECENT * self.recent
            self.squares = _RECENT * (self.recent**2 + spread)


class Payoff:
    """Decides whether a source is asked in a step. Deterministic: the same steps lead to the same decisions.

    Proposals are classed by how many tokens the draft without them is expected to gain: inside a copy they add little,
    and where search finds nothing they add most. What a proposal added is known exactly once it was verified: the
    emitted tokens show how far the draft without it would have come. A source is asked where the mean of its class,
    and one standard error more, exceeds what its time is worth; so one that adds nothing is left out after it has cost
    some tokens' time, and one that adds something is asked on until that is certain not to pay. A small share of all
    time is spent on asking where it does not.
    """

    def __init__(self) -> None:
        self._all = _Gains()
        self._classes: dict[int, _Gains] = {}
        self._allowance = 0.0

    def asks(self, expected: float, price: float, seconds: float) -> bool:
        """Whether to ask.

        Args:
            expected: Tokens of the draft without the source that are expected to be accepted.
            price: Tokens that are emitted in the time that the source takes.
            seconds: That time.
        """
        if self.estimate(expected) + self._doubt(expected) > price:
            return True
        if self._allowance < seconds:
            return False
        self._allowance = 0.0
        return True

    def estimate(self, expected: float) -> float:
        """Tokens that a proposal adds beside such a draft, on average.

        Args:
            expected: As in `asks`.
        """
        gains = self._of(expected)
        shared = min(_SHARED, self._all.count)
        weight = gains.count + shared
        return (gains.total + shared * self._all.mean) / weight if weight else 0.0

    def observe(self, expected: float, gain: float) -> None:
        """Count a proposal that was verified.

        Args:
            expected: As it was given to `asks`.
            gain: Tokens that the step emitted more than it would have without, less what it took longer.
        """
        gains = self._of(expected)
        for counted in (self._all, gains):
            counted.observe(gain)
        gains.forget_if_changed()

    def spent(self, seconds: float) -> None:
        """Count the time of a step.

        Args:
            seconds: All of it.
        """
        self._allowance += _PROBED * seconds

    def _doubt(self, expected: float) -> float:
        """The standard error of the estimate; infinite before the first proposal."""
        gains = self._of(expected)
        weight = gains.count + min(_SHARED, self._all.count)
        if not weight:
            return math.inf
        return math.sqrt(gains.variance(self._all.variance(), _SHARED) / weight)

    def _of(self, expected: float) -> _Gains:
        return self._classes.setdefault(class_of(expected), _Gains())
