"""`ReaderProposer`: drafts for vLLM's V1 engine, from the requests' own tokens and from a datastore.

    vllm serve MODEL --speculative-config '{"method": "custom_class", "num_speculative_tokens": 16,
        "model": "reader_rag.connectors.vllm.ReaderProposer"}'

Settings are passed as `--additional-config '{"reader_rag": {...}}'`, see `ProposerSettings`. It needs numpy and numba
only; vLLM verifies the drafts. See docs/connectors/vllm.md.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reader_rag.config.setting import Settings, setting
from reader_rag.datastore import Datastore
from reader_rag.draft.chains import ChainDrafter, DatastoreSearch, as_lists
from reader_rag.draft.profile import Profile, fingerprint, profiles
from reader_rag.draft.step_table import StepTable
from reader_rag.errors import ConfigError, DatastoreError

_log = logging.getLogger(__name__)

_KEY = "reader_rag"
_MOST_DRAFTED = 256
_DEFAULT_THREADS = 4
"""With more threads the drafts of a step are done before all threads have woken up."""


@dataclass(frozen=True)
class ProposerSettings(Settings):
    """The settings in `additional_config["reader_rag"]`."""

    datastore: str | None = setting(
        None, "Folder of a datastore to search, opened read-only in the state at the engine's start."
    )
    namespaces: tuple[str, ...] = setting(
        (), "Namespaces of the datastore that are searched besides those marked as shared.", may_be_empty=True
    )
    costs: str | None = setting(
        None, "File of step costs, measured on this machine with this model; None assumes costs for the device."
    )
    profile: str | None = setting(
        None,
        "File of `reader-rag models profile`, with the likely next tokens of each token; None takes a shipped one of "
        "the same vocabulary, if there is one.",
    )
    max_index_tokens: int = setting(
        65_536,
        "Most tokens of a request that are indexed, 32 bytes each; of a longer request the last ones.",
        ge=64,
        le=1 << 24,
    )
    keep_answers: bool = setting(
        False,
        "Whether requests are also drafted from ended answers to other requests. The speed of an answer then reveals "
        "to any user whether its text was generated before.",
    )
    max_answer_tokens: int = setting(1_000_000, "Most tokens of these answers.", ge=64, le=1 << 28)
    threads: int | None = setting(
        None, "Most threads that draft; None takes up to 4, by the number of cores.", ge=1, le=256
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.namespaces and self.datastore is None:
            raise ConfigError("namespaces has no effect without a datastore: set datastore to its folder")

    @classmethod
    def from_vllm(cls, additional_config: object) -> ProposerSettings:
        """Read the settings from vLLM's configuration.

        Args:
            additional_config: vLLM's `additional_config`; without the key "reader_rag" the defaults hold.

        Raises:
            ConfigError: A name is unknown, or a value is out of its range.
        """
        values = additional_config.get(_KEY, {}) if isinstance(additional_config, Mapping) else {}
        try:
            if not isinstance(values, Mapping):
                raise ConfigError(f"must be an object of settings, not {values!r}")
            return cls.of({str(name): value for name, value in values.items()})
        except ConfigError as error:
            raise ConfigError(f'additional_config["{_KEY}"]: {error}') from error


class ReaderProposer:
    """A proposer that vLLM makes for `"method": "custom_class"`.

    Args:
        vllm_config: vLLM's `VllmConfig`.

    Raises:
        ConfigError: A setting is invalid, or the engine's configuration does not allow drafts.
        DatastoreError: The datastore cannot be used: missing, of another tokenizer, damaged.
    """

    def __init__(self, vllm_config: Any) -> None:
        settings = ProposerSettings.from_vllm(vllm_config.additional_config)
        longest = _checked_longest(vllm_config)
        self._max_length: int = vllm_config.model_config.max_model_len
        self._drafter = _drafter(settings, vllm_config, longest)
        self._warm_up()

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Propose the drafts of the next step.

        Args:
            sampled_token_ids: The tokens that each row emitted in this step; none during its prefill.
            num_tokens_no_spec: int32 [>= rows], number of tokens of each row, with those just emitted.
            token_ids_cpu: int32 [>= rows, max_model_len], the token ids of each row.
            slot_mappings: Not used.

        Returns:
            The tokens to verify for each row; none where verification would cost more time than it saves.
        """
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        emitted = np.fromiter(map(len, sampled_token_ids), np.int64, len(drafts))
        lengths = num_tokens_no_spec[: len(drafts)].astype(np.int64)
        # The last position is left for the target's own token after the drafted ones.
        limits = self._max_length - 1 - lengths
        rows = np.flatnonzero((emitted > 0) & (limits > 0) & (lengths > 0))
        if not len(rows):
            return drafts
        chains, verified = self._drafter.draft(token_ids_cpu, rows, lengths[rows], emitted[rows], limits[rows])
        for row, draft in zip(rows.tolist(), as_lists(chains, verified), strict=True):
            drafts[row] = draft
        return drafts

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: there is no draft model."""

    def _warm_up(self) -> None:
        """Compile the kernels before the first request; its state is removed."""
        text = np.zeros((1, 64), np.int32)
        one = np.ones(1, np.int64)
        for length in (48, 49):
            self._drafter.draft(text, one - 1, one * length, one, one)
        self._drafter.forget()


def _checked_longest(vllm_config: Any) -> int:
    """`num_speculative_tokens`, if the engine can verify that many."""
    longest: int = vllm_config.speculative_config.num_speculative_tokens
    length: int = vllm_config.model_config.max_model_len
    batched: int = vllm_config.scheduler_config.max_num_batched_tokens
    most = min(_MOST_DRAFTED, length - 2, batched - 1)
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
        _log.warning("no measured step costs: the number of drafted tokens follows assumed costs (%s)", device)
    if device == "cpu":
        _log.warning("vLLM 0.32 for the CPU samples wrong tokens with any drafts (its issue 55005): use temperature 0")
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
        threads=settings.threads or max(min(_DEFAULT_THREADS, cores // ranks), 1),
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
        raise ConfigError("a datastore belongs to a tokenizer: start vLLM without skip_tokenizer_init")
    store = Datastore.open(Path(folder), vocabulary=size, tokenizer=vocabulary, read_only=True)
    missing = sorted(set(settings.namespaces) - set(store.namespaces()))
    if missing:
        raise DatastoreError(
            f"the datastore {folder} has no namespace {', '.join(map(repr, missing))}; it has "
            f"{', '.join(map(repr, store.namespaces())) or 'none'}"
        )
    searcher = store.searcher(settings.namespaces)
    if not len(searcher.snapshot()):
        _log.warning("the datastore %s has no shared namespace, and none is named: it is not searched", folder)
    return DatastoreSearch(searcher)


def _prior(settings: ProposerSettings, vocabulary: str | None) -> NDArray[np.int32] | None:
    """The likely next tokens of each token of the vocabulary; None if there is no profile of it."""
    if settings.profile is None:
        return next((profile.tokens for profile in profiles() if profile.vocabulary == vocabulary), None)
    profile = Profile.load(Path(settings.profile))
    if vocabulary is not None and profile.vocabulary != vocabulary:
        raise ConfigError(f"the profile {settings.profile} has another vocabulary: make one for this model")
    return profile.tokens
