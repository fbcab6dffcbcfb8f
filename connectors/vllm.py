"""ReaderProposer: drafts for vLLM's V1 engine, searched in the requests' own texts and in a datastore.

    vllm serve MODEL --speculative-config '{"method": "custom_class", "num_speculative_tokens": 16,
        "model": "reader_rag.connectors.vllm.ReaderProposer"}'

Settings go to `--additional-config '{"reader_rag": {...}}'`, see `ProposerSettings`. Needs numpy and numba only; vLLM
itself verifies the drafts. See docs/connectors/vllm.md.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reader_rag.datastore import Datastore
from reader_rag.draft.chains import ChainDrafter, DatastoreSearch, as_lists
from reader_rag.draft.profile import Profile, fingerprint, profiles
from reader_rag.draft.step_table import StepTable
from reader_rag.errors import ConfigError, DatastoreError

_log = logging.getLogger(__name__)

_KEY = "reader_rag"
_LONGEST = 256
_MOST_THREADS = 4
"""By default: what a step drafts is done before more of them are awake."""


@dataclass(frozen=True)
class ProposerSettings:
    """What `additional_config["reader_rag"]` may hold.

    Attributes:
        datastore: Folder of a datastore that is searched too, as it is when the engine starts; read only.
        namespaces: What is searched in it besides the namespaces that are marked as shared.
        costs: File of step costs, measured on this machine with this model; None: assumed.
        profile: File of `reader-rag models profile`, what follows each token by itself; None: a shipped one, if there
            is one of this vocabulary.
        max_index_tokens: Most tokens of a request that are searched: of a longer one the last. 32 bytes each.
        keep_answers: Whether a request is also drafted from answers to other requests that have ended. How fast an
            answer comes then tells whether its words were said before, to whoever.
        max_answer_tokens: Most tokens of such answers.
        threads: Most threads that draft; None: up to 4, by the cores of the machine.
    """

    datastore: str | None = None
    namespaces: tuple[str, ...] = ()
    costs: str | None = None
    profile: str | None = None
    max_index_tokens: int = 65_536
    keep_answers: bool = False
    max_answer_tokens: int = 1_000_000
    threads: int | None = None

    def __post_init__(self) -> None:
        for name in ("datastore", "costs", "profile"):
            value = getattr(self, name)
            _require(value is None or (isinstance(value, str) and value), f"{name} must be a path, not {value!r}")
        names = self.namespaces
        listed = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
        _require(listed, f"namespaces must be a list of names, not {names!r}")
        object.__setattr__(self, "namespaces", tuple(names))
        _require(self.datastore is not None or not names, "namespaces are of a datastore: name its folder")
        _require(isinstance(self.keep_answers, bool), f"keep_answers must be true or false, not {self.keep_answers!r}")
        self._integer("max_index_tokens", 64, 1 << 24)
        self._integer("max_answer_tokens", 64, 1 << 28)
        if self.threads is not None:
            self._integer("threads", 1, 256)

    def _integer(self, name: str, least: int, most: int) -> None:
        value = getattr(self, name)
        right = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
        _require(right, f"{name} must be {least}..{most}, not {value!r}")

    @classmethod
    def of(cls, additional_config: object) -> ProposerSettings:
        """The settings in vLLM's `additional_config`.

        Raises:
            ConfigError: A key is unknown, or a value is out of its range.
        """
        held = additional_config.get(_KEY, {}) if isinstance(additional_config, Mapping) else {}
        _require(isinstance(held, Mapping), f"must be an object of settings, not {held!r}")
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(map(str, set(held) - set(known)))
        _require(not unknown, f"there is no setting {', '.join(unknown)}; there are {', '.join(known)}")
        return cls(**held)


class ReaderProposer:
    """A drafter for vLLM, made by it for `"method": "custom_class"`.

    Args:
        vllm_config: vLLM's own `VllmConfig`.

    Raises:
        ConfigError: A setting is wrong, or the engine cannot be drafted for so.
        DatastoreError: The datastore cannot be used: not there, of another tokenizer, damaged.
    """

    def __init__(self, vllm_config: Any) -> None:
        settings = ProposerSettings.of(vllm_config.additional_config)
        self._longest = _checked_longest(vllm_config)
        self._max_length: int = vllm_config.model_config.max_model_len
        self._drafter = _drafter(settings, vllm_config, self._longest)
        self._warm_up()

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Draft for the next step.

        Args:
            sampled_token_ids: For each row what this step emitted; nothing where the prompt is still being read.
            num_tokens_no_spec: int32 [>= rows], tokens of each row's text, those just emitted included.
            token_ids_cpu: int32 [>= rows, max_model_len], the texts.
            slot_mappings: Not used.

        Returns:
            For each row the tokens to verify, none where nothing pays.
        """
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        came = np.fromiter(map(len, sampled_token_ids), np.int64, len(drafts))
        lengths = num_tokens_no_spec[: len(drafts)].astype(np.int64)
        # The last token that fits is the target's own, behind the drafted ones.
        limits = self._max_length - 1 - lengths
        rows = np.flatnonzero((came > 0) & (limits > 0) & (lengths > 0))
        if not len(rows):
            return drafts
        chains, verified = self._drafter.draft(token_ids_cpu, rows, lengths[rows], came[rows], limits[rows])
        for row, draft in zip(rows.tolist(), as_lists(chains, verified), strict=True):
            drafts[row] = draft
        return drafts

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is loaded: drafts are searched."""

    def _warm_up(self) -> None:
        """Compile the loops now rather than in the first request's step; leaves no trace."""
        text = np.zeros((1, 64), np.int32)
        one = np.ones(1, np.int64)
        for length in (48, 49):
            self._drafter.draft(text, one - 1, one * length, one, one)
        self._drafter.forget()


def _require(condition: object, message: str) -> None:
    if not condition:
        raise ConfigError(f'additional_config["{_KEY}"]: {message}')


def _checked_longest(vllm_config: Any) -> int:
    """`num_speculative_tokens`, if the engine can verify so many."""
    longest: int = vllm_config.speculative_config.num_speculative_tokens
    length: int = vllm_config.model_config.max_model_len
    batched: int = vllm_config.scheduler_config.max_num_batched_tokens
    most = min(_LONGEST, length - 2, batched - 1)
    if not 1 <= longest <= most:
        raise ConfigError(
            f"num_speculative_tokens must be 1..{most}, not {longest}: the engine has max_model_len {length} and "
            f"max_num_batched_tokens {batched}"
        )
    if getattr(vllm_config.model_config, "enable_prompt_embeds", False):
        raise ConfigError("prompts given as embeddings have no tokens to search: start vLLM without prompt embeddings")
    return longest


def _drafter(settings: ProposerSettings, vllm_config: Any, longest: int) -> ChainDrafter:
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    device = str(vllm_config.device_config.device_type)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = vllm_config.parallel_config.tensor_parallel_size
    costs = StepTable.read(settings.costs) if settings.costs is not None else StepTable.assumed(device)
    if settings.costs is None:
        _log.warning("no step costs were measured: how much is drafted is decided by assumed ones (%s)", device)
    if device == "cpu":
        _log.warning("vLLM 0.32 for the CPU samples nonsense beside any drafts (its issue 55005): use temperature 0")
    vocabulary = _vocabulary(model)
    search = _open(settings, vocabulary, model.get_vocab_size()) if settings.datastore is not None else None
    return ChainDrafter(
        scheduler.max_num_seqs,
        longest,
        costs,
        max_positions=scheduler.max_num_batched_tokens,
        max_tokens=settings.max_index_tokens,
        max_ended_tokens=settings.max_answer_tokens if settings.keep_answers else 0,
        search=search,
        prior=_prior(settings, vocabulary),
        threads=settings.threads or max(min(_MOST_THREADS, cores // ranks), 1),
    )


def _vocabulary(model_config: Any) -> str | None:
    """The fingerprint of the model's vocabulary; None where vLLM runs without a tokenizer."""
    if getattr(model_config, "skip_tokenizer_init", False):
        return None
    from vllm.tokenizers import cached_tokenizer_from_config

    return fingerprint(cached_tokenizer_from_config(model_config).get_vocab())


def _open(settings: ProposerSettings, vocabulary: str | None, size: int) -> DatastoreSearch:
    folder = str(settings.datastore)
    if vocabulary is None:
        raise ConfigError("a datastore is of a tokenizer: start vLLM without skip_tokenizer_init")
    store = Datastore.open(Path(folder), vocabulary=size, tokenizer=vocabulary, read_only=True)
    missing = sorted(set(settings.namespaces) - set(store.namespaces()))
    if missing:
        raise DatastoreError(
            f"the datastore {folder} has no namespace {', '.join(map(repr, missing))}; it has "
            f"{', '.join(map(repr, store.namespaces())) or 'none'}"
        )
    searcher = store.searcher(settings.namespaces)
    if not len(searcher.snapshot()):
        _log.warning("the datastore %s has no shared namespace, and none is named: nothing is searched there", folder)
    return DatastoreSearch(searcher)


def _prior(settings: ProposerSettings, vocabulary: str | None) -> NDArray[np.int32] | None:
    """What follows each token by itself, if that is known of this vocabulary."""
    if settings.profile is None:
        return next((held.tokens for held in profiles() if held.vocabulary == vocabulary), None)
    held = Profile.load(Path(settings.profile))
    if vocabulary is not None and held.vocabulary != vocabulary:
        raise ConfigError(f"the profile {settings.profile} is of another vocabulary: make one of this model")
    return held.tokens
