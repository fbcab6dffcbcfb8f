"""A model's profile, computed while its engine has nothing to do.

The prior of all successor tables is one array. The task fills it row by row on the thread that decodes, while no
request runs, so an answer that is decoded next drafts from what is known so far. A profile is only a prior of drafts:
how far it has come changes no token of any answer.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from filelock import BaseFileLock, FileLock, Timeout
from transformers import PreTrainedTokenizerBase

from reader_rag.draft.profile import Profile, fingerprint, profile_path, profiles
from reader_rag.errors import ConfigError
from reader_rag.model.fingerprint import model_fingerprint
from reader_rag.model.interface import TargetModel
from reader_rag.model.profile.successors import ProfileBuilder
from reader_rag.model.registry import alias_of
from reader_rag.model.select_target import Drafting
from reader_rag.model.weights_cache import cache_folder

_log = logging.getLogger(__name__)

_LEAST, _MOST = 3, 127
"""Fewest and most tokens of a pass. With the token before them they are whole blocks of four rows."""
_AIM = 0.8
"""Share of `ProfileLimits.batch_s` that a pass is made to take."""
_TOO_SLOW, _SLOW_PASSES = 4.0, 10
"""A model whose shortest pass takes this many times `batch_s` of time and of processor time, so many times in a row, is
left without more of a profile."""
_BUSY_S = 10.0
"""Seconds for which nothing is computed after such a pass: other programs may be using the processors."""
_RETRY_S = 60.0
"""Seconds after which a task that found another process at work looks again."""


@dataclass(frozen=True)
class ProfileLimits:
    """When a profile is computed, and for how long.

    Attributes:
        after_s: Seconds without a request after which computing begins, or goes on.
        batch_s: Most seconds of a forward pass, for which a request that arrives may have to wait.
        cpu_s: Most seconds of processor time for one model, those of other processes and earlier starts included.
        save_every_s: Seconds of computing after which the file is written.
    """

    after_s: float = 2.0
    batch_s: float = 0.05
    cpu_s: float = 600.0
    save_every_s: float = 15.0


LIMITS = ProfileLimits()
"""The limits of every engine."""


class ProfileTask:
    """Computes the rest of a model's profile in short passes, and keeps it in a file.

    `run` belongs to the thread that decodes. One process at a time computes a model's profile, by a lock that ends with
    the process. A folder that cannot be written, or a full disk, means that the profile is kept in memory only.

    Args:
        builder: What has to be computed; rows that the file has are written into it.
        name: What the profile and messages call the model.
        model: `model_fingerprint` of the model.
        folder: The folder of profiles.
        report: Called after each pass with the share of the vocabulary that is done.
        limits: When it computes, and for how long; None: `LIMITS`.
        clock: Seconds that pass.
        cpu_clock: Seconds of processor time of this process.

    Attributes:
        limits: Those that hold.
    """

    def __init__(
        self,
        builder: ProfileBuilder,
        name: str,
        model: str,
        folder: Path,
        *,
        report: Callable[[float], None] = lambda share: None,
        limits: ProfileLimits | None = None,
        clock: Callable[[], float] = time.perf_counter,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        self.limits = limits or LIMITS
        self._builder = builder
        self._name, self._model = name, model
        self._path = profile_path(folder, model)
        self._report = report
        self._clock, self._cpu_clock = clock, cpu_clock
        self._count, self._slow = _LEAST, 0
        self._cpu_s = self._unsaved_s = 0.0
        self._lock: BaseFileLock | None = None
        self._may_run = False
        self._not_before = -math.inf
        self._stopped = self._keeps = False
        self._saving: threading.Thread | None = None
        self._warned = False
        self._process = os.getpid()
        self._resume()
        self._stopped = self._is_done

    @property
    def share(self) -> float:
        """Share of the vocabulary whose next tokens are known, 0 to 1."""
        return self._builder.done / max(len(self._builder.tokens), 1)

    @property
    def stopped(self) -> bool:
        """Whether nothing is to be computed any more."""
        return self._stopped

    def pause_s(self, idling: bool) -> float | None:
        """Seconds without a request after which `run` is to be called; None: never.

        Args:
            idling: Whether there was no request since it was called last.
        """
        if self._stopped:
            return None
        return max(0.0 if idling else self.limits.after_s, self._not_before - self._clock())

    def run(self) -> None:
        """Compute one pass; on the thread that decodes, while no request runs."""
        try:
            if self._may_run or self._begin():
                self._advance()
        except Exception as error:  # drafts are worse without a profile, answers are the same
            _log.warning("no profile of %s is computed: %s", self._name, error)
            self.close()

    def close(self) -> None:
        """Stop for good, and write what was computed; not while `run` runs on another thread."""
        self._stopped = True
        self._builder.release()
        if self._process != os.getpid():  # a fork: lock and file are its parent's
            return
        if self._saving is not None:
            self._saving.join()
        if self._unsaved_s > 0.0 and self._keeps:
            self._save(self._state())
        self._unsaved_s = 0.0
        self._release()

    # -- computing --

    def _begin(self) -> bool:
        """Lock the file and read what others computed; whether this task is to compute."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self._path.with_suffix(".lock"), thread_local=False)
            lock.acquire(timeout=0)
        except Timeout:
            self._resume()
            self._not_before = self._clock() + _RETRY_S
            self._end_if_done()
            return False
        except (OSError, NotImplementedError) as error:
            self._warn(error)
        else:
            self._lock, self._keeps = lock, True
        self._resume()
        self._may_run = True
        return not self._end_if_done()

    def _advance(self) -> None:
        count, before, cpu_before = self._count, self._clock(), self._cpu_clock()
        self._builder.advance(count)
        seconds, cpu_s = self._clock() - before, self._cpu_clock() - cpu_before
        self._cpu_s += cpu_s
        self._unsaved_s += seconds
        self._count = _next_count(count, seconds, self.limits.batch_s)
        slow = _TOO_SLOW * self.limits.batch_s
        self._slow = self._slow + 1 if count == _LEAST and min(seconds, cpu_s) > slow else 0
        if seconds > slow:
            self._not_before = self._clock() + _BUSY_S
        self._report(self.share)
        if not self._end_if_done() and self._unsaved_s >= self.limits.save_every_s:
            self._save_beside()

    @property
    def _is_done(self) -> bool:
        """Whether all is computed, the processor time is spent, or the model is too slow."""
        return self._builder.complete or self._cpu_s >= self.limits.cpu_s or self._slow >= _SLOW_PASSES

    def _end_if_done(self) -> bool:
        if self._is_done:
            self._stopped = True
            self._builder.release()
            if self._unsaved_s > 0.0:
                self._save_beside(last=True)
            else:
                self._release()
        return self._stopped

    # -- the file --

    def _resume(self) -> None:
        """Take over the rows of the file, if it has more of them. A file of something else is none."""
        builder = self._builder
        try:
            found = Profile.load(self._path)
        except ConfigError:  # not there, damaged, or of another version
            return
        key = (self._model, builder.vocabulary, builder.tokens.shape)
        if (found.model, found.vocabulary, found.tokens.shape) != key:
            return
        self._cpu_s = max(self._cpu_s, found.cpu_s)
        done = len(found.tokens) if found.done is None else found.done
        if done > builder.done:
            builder.tokens[builder.done : done] = found.tokens[builder.done : done]
            builder.done = done

    def _state(self) -> Profile:
        """What is to be written: rows of this model alone, not those that the array had before."""
        tokens = self._builder.tokens.copy()
        tokens[self._builder.done :] = -1
        return Profile(self._name, self._builder.vocabulary, tokens, self._model, self._builder.done, self._cpu_s)

    def _save_beside(self, *, last: bool = False) -> None:
        """Write the file on a thread of its own, so that no request waits for the disk."""
        self._unsaved_s = 0.0
        before, state = self._saving, self._state()

        def write() -> None:
            if before is not None:
                before.join()
            if self._keeps:
                self._save(state)
            if last:
                self._release()

        self._saving = threading.Thread(target=write, name="reader-rag-profile")
        self._saving.start()

    def _save(self, state: Profile) -> None:
        try:
            state.save(self._path)
        except OSError as error:
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            reason = getattr(error, "strerror", None) or error
            _log.warning(
                "the profile of %s is kept in memory: %s cannot be written (%s)", self._name, self._path, reason
            )

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def _next_count(count: int, seconds: float, limit: float) -> int:
    """How many tokens the next pass has, when one of `count` took `seconds`."""
    fitting = int((count + 1) * _AIM * limit / seconds) if seconds > 0.0 else _MOST
    rows = min(fitting, 2 * (count + 1)) // 4 * 4
    return min(max(rows - 1, _LEAST), _MOST)


def load_profile(
    target: TargetModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    name: str,
    drafting: Drafting,
    computes: bool,
    report: Callable[[float], None],
) -> tuple[Profile | None, ProfileTask | None]:
    """The profile that an engine begins with, and the task that completes it.

    The model's own profile, in the cache folder, gives the rows that it has; other rows are those of a profile that
    fits the vocabulary: one in the cache folder that names no model, or the shipped one. The model that such a profile
    was made of needs no other.

    Args:
        target: The model.
        tokenizer: Its tokenizer.
        name: What messages call the model.
        drafting: What the target verifies; a profile is computed where it verifies trees.
        computes: Whether missing rows are to be computed.
        report: Called after each pass with the share of the vocabulary that is done.

    Returns:
        The profile, or None where nothing is known; the task, whose rows appear in the profile, or None.
    """
    if not hasattr(tokenizer, "get_vocab"):  # a benchmark's random weights have no text
        return None, None
    folder, vocabulary = cache_folder() / "profiles", fingerprint(tokenizer.get_vocab())
    known = next((one for one in _shared_profiles(folder) if one.vocabulary == vocabulary), None)
    if drafting != "tree" or target.fixed is not None or (known is not None and _was_made_of(known, target, name)):
        return known, None
    builder = ProfileBuilder(target, tokenizer)
    if known is not None:
        rows = min(len(known.tokens), len(builder.tokens))
        builder.tokens[:rows] = np.where(known.tokens[:rows] < len(builder.tokens), known.tokens[:rows], -1)
    task = ProfileTask(builder, name, model_fingerprint(target.model), folder, report=report)
    computes = computes and not task.stopped
    if not computes and not builder.done:
        return known, None
    return Profile(name, vocabulary, builder.tokens), task if computes else None


def _shared_profiles(folder: Path) -> Iterator[Profile]:
    """Profiles that name no model: those in a folder that can be read, then the shipped ones."""
    for path in sorted(folder.glob("*.npz")):
        try:
            profile = Profile.load(path)
        except ConfigError as error:
            _log.info("%s", error)
            continue
        if not profile.model:
            yield profile
    yield from profiles()


def _was_made_of(profile: Profile, target: TargetModel, name: str) -> bool:
    """Whether a profile was made of this very model, which is known by an alias or its folder."""
    return profile.name in (name, alias_of(str(getattr(target.model.config, "_name_or_path", ""))))
