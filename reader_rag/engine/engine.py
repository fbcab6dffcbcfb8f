"""The engine: a model, what is kept from request to request, and the entry of every request."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Unpack, overload

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from reader_rag.config import EngineConfig, LoadConfig, SamplingParams, checked_tenant
from reader_rag.config.setting import settings_of, unknown_argument
from reader_rag.draft.context_index import ContextIndex
from reader_rag.draft.source import SourceFactory
from reader_rag.draft.tree_builder import TreeBuilder
from reader_rag.engine.context import Costs, DecodeContext
from reader_rag.engine.datastore_lookup import DatastoreLookup, open_datastore
from reader_rag.engine.draft_models.loading import TargetParts, load_draft_model
from reader_rag.engine.draft_models.source import DraftModel
from reader_rag.engine.draft_state import DraftStates
from reader_rag.engine.observer import Load, Observers
from reader_rag.engine.outputs import Generation, Passage, Prompt
from reader_rag.engine.request import Request, RequestBuilder, RequestOptions
from reader_rag.engine.scheduler import Scheduler
from reader_rag.engine.stream import GenerationStream, finish_all
from reader_rag.engine.text.encoder import PromptEncoder
from reader_rag.errors import BatchError, BusyError, ConfigError, PromptError
from reader_rag.kv_cache.prefix_cache import PrefixCache
from reader_rag.model.fixed_step.select import add_fixed_step
from reader_rag.model.interface import TargetModel
from reader_rag.model.profile.task import load_profile
from reader_rag.model.select_target import Drafting, select_reuse, select_target
from reader_rag.model.weights_cache import cache_folder
from reader_rag.util.fork import check_not_forked, note_threads
from reader_rag.util.own_thread import on_own_thread

_UNKNOWN_WINDOW = 1 << 20
_PREFIX_BYTES_ON_CPU = 256 << 20
"""Default size of the prefix cache: 12,000 tokens of the default model in 16 bits, 2,000 of an 8B model with grouped
heads (128 KiB a token). Memory that all programs of a machine share."""
_PREFIX_BYTES_ELSEWHERE = 1 << 30
"""The default on a GPU, which holds larger models and little else."""
_AHEAD = 4
"""Requests that `generate` submits at once, as a multiple of those that are decoded at once: as many wait that no row
of the batch is empty while the first is still decoded."""


def _token_ids(encoder: PromptEncoder, text: str) -> Sequence[int]:
    return encoder.encode(text).token_ids


class Engine:
    """A model that decodes with drafts, and without.

    Plain decoding (`SamplingParams(speculate=False)`) is the same engine without drafts, and the reference that every
    drafted answer equals. All requests, of any thread, are decoded by one thread of the engine, together.

    Args:
        model: A causal language model of `transformers`, in eval mode, with its adapters, if it has some. Small checks
            find out what can be verified on it (`drafting`); see `select_target` for what they may change.
        tokenizer: Its tokenizer.
        config: How it decodes.
        name: What messages and metadata call the model.
        draft_sources: Make sources of drafts that every request has besides the built-in ones, one for each request.
        assistant: A loaded draft model, a causal language model with this tokenizer, in place of the setting
            `draft_model`.
        settings: Fields of `EngineConfig`, in place of those of `config`; None takes the default.

    Attributes:
        model: As given.
        tokenizer: As given.
        config: What holds.
        name: As given, or the model's own name.
        target: Computes forward passes of the model.
        draft_model: The model that drafts; None: there is none.
        prefix_bytes: Size of the prefix cache in bytes.
        requests: Checks the arguments of `submit` and prepares requests.
        scheduler: Decodes the requests; its `limits` may be replaced.
        context: What decoding uses; it belongs to the thread that decodes (`between_steps`).

    Raises:
        ConfigError: A setting is unknown or out of its range.
        DatastoreError: The datastore cannot be used.
        ForkError: This process was forked after a model was loaded.
        UnsupportedModelError: The model cannot be decoded rightly, or not strictly on this device.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: EngineConfig | None = None,
        *,
        name: str = "",
        draft_sources: Sequence[SourceFactory] = (),
        assistant: PreTrainedModel | None = None,
        **settings: Any,
    ) -> None:
        note_threads()
        given = {setting: value for setting, value in settings.items() if value is not None}
        self.config = EngineConfig.of(given, config)
        self.model = model
        self.tokenizer = tokenizer
        self.name = name or str(getattr(model.config, "_name_or_path", "")) or type(model).__name__
        self._encoder = PromptEncoder(tokenizer, self.name)
        self.target, drafting = on_own_thread(self._select_target)
        context_window = self.target.context_window or _UNKNOWN_WINDOW
        given_sources = (draft_sources, self.target.layer_count)
        self.requests = RequestBuilder(
            model, tokenizer, self.name, self.target.device, context_window, self.config.draft, *given_sources
        )
        self.prefix_bytes = self._prefix_bytes()
        self.draft_model = self._load_draft_model(assistant)
        drafted = 0 if self.draft_model is None else self.draft_model.prefix_bytes
        reuse = on_own_thread(lambda: select_reuse(self.target, self.config.exactness)) if self.prefix_bytes else None
        observers = Observers()
        report, computes = partial(observers.tell, "profiled"), self.config.profile == "auto"
        profile, profile_task = load_profile(
            self.target, tokenizer, name=self.name, drafting=drafting, computes=computes, report=report
        )
        self.context = DecodeContext(
            target=self.target,
            drafting=drafting,
            tokenizer=tokenizer,
            tokenize=self._encoder.encode,
            eos_ids=self.requests.eos_ids,
            context_window=context_window,
            vocabulary=self.requests.vocabulary,
            draft_states=DraftStates(profile),
            prefix_cache=PrefixCache(self.prefix_bytes - drafted, reuse.block) if reuse is not None else None,
            reuse=reuse,
            lookup=self._lookup(),
            costs=Costs(self.target, cache_folder() / "costs"),
            observers=observers,
        )
        self.scheduler = Scheduler(self.context, self.config.batch, self.prefix_bytes, profile_task)

    @classmethod
    def load(
        cls,
        model: str,
        config: EngineConfig | None = None,
        *,
        draft_sources: Sequence[SourceFactory] = (),
        **settings: Any,
    ) -> Engine:
        """Load a model by alias, local folder or hub id.

        Args:
            model: E.g. "smollm2-135m".
            config: How the engine decodes.
            draft_sources: Make sources of drafts that every request has besides the built-in ones.
            settings: Fields of `LoadConfig` and `EngineConfig`; None takes the default.

        Raises:
            ConfigError: A setting is unknown or out of its range.
            DatastoreError: The datastore cannot be used.
            ForkError: This process was forked after a model was loaded.
            ModelNotFoundError: There is no such model; the message names the ways to get one.
            UnsupportedModelError: The model cannot be decoded rightly, or not strictly on this device.
        """
        from reader_rag.model.loading import load_model

        check_not_forked()
        load_names, engine_names = settings_of(LoadConfig), settings_of(EngineConfig)
        for name in settings:
            if name not in load_names and name not in engine_names:
                raise ConfigError(unknown_argument(name, [*load_names, *engine_names]))
        given = {name: value for name, value in settings.items() if value is not None}
        load = LoadConfig.of({name: value for name, value in given.items() if name in load_names})
        config = EngineConfig.of({name: value for name, value in given.items() if name in engine_names}, config)
        loaded, tokenizer = load_model(model, **vars(load))
        return cls(loaded, tokenizer, config, name=model, draft_sources=draft_sources)

    @property
    def drafting(self) -> Drafting:
        """What the model can verify: "tree"; "chain" where it takes no tree mask; "none" where its state cannot be
        rolled back, so that it is decoded plainly. All give the model's own output; a `ReaderWarning` reports the
        last two."""
        return self.context.drafting

    @property
    def context_window(self) -> int:
        """Most tokens of prompt and answer."""
        return self.context.context_window

    @property
    def observers(self) -> Observers:
        """Receive what the engine does; append one of your own."""
        return self.context.observers

    @property
    def lookup(self) -> DatastoreLookup | None:
        """The datastore that drafts are searched in; None where there is none."""
        return self.context.lookup

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return self.context.eos_ids

    @property
    def busy(self) -> Load:
        """Running and waiting requests, and the memory that is reserved for them."""
        return self.scheduler.load

    # -- prompts --

    def encode(self, text: str) -> Prompt:
        """Raw text to a prompt, with the special tokens that the tokenizer itself adds."""
        return self._encoder.encode(text, special=True)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> Prompt:
        """Messages to a prompt through the tokenizer's chat template, up to where the assistant speaks.

        Args:
            messages: Mappings with "role" and "content".
            tools: Tools for a chat template that describes them, in OpenAI's form.

        Raises:
            ConfigError: The tokenizer has no chat template, or the template refuses these messages.
        """
        return self._encoder.encode_chat(messages, tools)

    # -- requests --

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        passages: Sequence[Passage] = (),
        **options: Unpack[RequestOptions],
    ) -> GenerationStream:
        """Queue a request; returns at once.

        Args:
            prompt: What to continue.
            params: Length, stop strings, sampling.
            passages: Retrieved texts that the answer may repeat. Where the prompt contains one, its tokens there are
                marked as its own; the others are searched besides the prompt.
            options: Tenant, processors and more: `RequestOptions`.

        Returns:
            An iterator over the answer's chunks, for a thread or an event loop.

        Raises:
            BusyError: The queue is full (`BatchConfig.max_waiting`).
            ConfigError: A processor, a criterion, a grammar or a setting cannot be used; or prompt and answer need more
                memory than `BatchConfig.max_cache_bytes`.
            EngineClosedError: The engine was closed.
            ForkError: This process was forked after the model was loaded.
            MissingDependencyError: There is a grammar, and llguidance is not installed.
            NestedCallError: A logits processor or stopping criterion that the engine runs calls this.
            PromptError: The prompt is empty, holds unknown tokens, or leaves no room in the model's context.
        """
        return self.scheduler.submit(self.requests.build(prompt, params, passages, options))

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        passages: Sequence[Passage] = (),
        **options: Unpack[RequestOptions],
    ) -> GenerationStream:
        """The old name of `submit`, which goes in 0.3; arguments and errors are those of `submit`."""
        warnings.warn("Engine.stream is now Engine.submit; the old name goes in 0.3", DeprecationWarning, stacklevel=2)
        return self.submit(prompt, params, passages, **options)

    @overload
    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        passages: Sequence[Passage] = (),
        **options: Unpack[RequestOptions],
    ) -> Generation: ...

    @overload
    def generate(
        self,
        prompt: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        passages: Sequence[Sequence[Passage]] = (),
        *,
        progress: bool = False,
        **options: Unpack[RequestOptions],
    ) -> list[Generation]: ...

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        params: Any = None,
        passages: Sequence[Any] = (),
        *,
        progress: bool = False,
        **options: Unpack[RequestOptions],
    ) -> Generation | list[Generation]:
        """Decode to the end: one prompt, or many together.

        Args:
            prompt: What to continue; a sequence of prompts is decoded in batches (`BatchConfig`), each prompt to the
                answer that it gets alone.
            params: Length, stop strings, sampling; for many prompts one for all or one for each.
            passages: Retrieved texts that the answer may repeat; for many prompts, those of each.
            progress: Whether to show a progress bar over many prompts.
            options: Tenant, processors and more: `RequestOptions`; a sampler for one prompt only.

        Returns:
            The answer, or the answers in the order of the prompts.

        Raises:
            PromptError: A prompt cannot be answered; nothing is decoded then.
            ConfigError: A setting cannot be used, or there are not as many settings or passages as prompts.
            BatchError: Answers failed; it holds the others.
        """
        if isinstance(prompt, Prompt):
            with self.submit(prompt, params, passages, **options) as stream:
                return stream.finish()
        _check_lists(prompt, params, passages)
        count = len(prompt)
        if options.get("sampler") is not None:
            raise ConfigError("a sampler chooses the tokens of one answer; decode these prompts one by one")
        each = [params] * count if params is None or isinstance(params, SamplingParams) else list(params)
        given = list(passages) or [()] * count
        for name, values in (("settings", each), ("passages", given)):
            if len(values) != count:
                raise ConfigError(f"{len(values)} {name} for {count} prompts; give one for each, or leave them out")
        requests = [
            self.requests.build(one, config, texts, options)
            for one, config, texts in zip(prompt, each, given, strict=True)
        ]
        at_once = _AHEAD * self.scheduler.max_rows
        results = finish_all(self._submit_patiently, requests, at_once=at_once, progress=progress)
        failed = [result for result in results if isinstance(result, Exception)]
        if failed:
            message = f"{len(failed)} of {count} answers failed, the first with: {failed[0]}"
            raise BatchError(message, results) from failed[0]
        return [result for result in results if isinstance(result, Generation)]

    # -- what is kept --

    def between_steps(self, call: Callable[[], Any]) -> Any:
        """Call a function on the thread that decodes, between two steps, and wait for its result.

        Args:
            call: What to call; it may use `context`.

        Raises:
            BusyError: The step that runs does not end within `BatchConfig.max_wait_s`.
        """
        return self.scheduler.between_steps(call)

    def forget(self, tenant: str = "", *, learned: bool = True) -> None:
        """Forget a tenant's texts: its prefixes, what drafting learned from them, and its answers in the datastore, if
        this engine keeps any.

        Running requests go on, and their answers are kept when they end.

        Args:
            tenant: Whose texts.
            learned: False forgets the prefixes alone, so that the next prompt is prefilled whole.

        Raises:
            BusyError: The step that runs does not end within `BatchConfig.max_wait_s`.
            ConfigError: The tenant's name is invalid.
            DatastoreError: Answers could not be removed.
        """
        checked_tenant(tenant)

        def drop() -> None:
            if learned:
                self.context.draft_states.forget(tenant)
            for kept in (self.context.prefix_cache, self.draft_model):
                if kept is not None:
                    kept.forget(tenant)

        self.between_steps(drop)
        if learned and self.lookup is not None:
            self.lookup.forget(tenant)

    def close(self) -> None:
        """End all requests with a `BusyError`, and write kept answers to the datastore.

        Later requests, `forget` and `between_steps` raise an `EngineClosedError`; closing again does nothing.
        """
        self.scheduler.close()
        if self.lookup is not None:
            self.lookup.flush()

    # -- parts --

    def _select_target(self) -> tuple[TargetModel, Drafting]:
        # Loads the compiled loops of drafting here rather than in the first answer.
        TreeBuilder(max_nodes=1).build(ContextIndex([0, 1, 0]))
        config = self.config
        width = config.strict_width
        target, drafting = select_target(
            self.model, name=self.name, exactness=config.exactness, forward=config.forward, strict_width=width
        )
        add_fixed_step(target, config.cuda_graphs, name=self.name, max_bytes=config.batch.max_cache_bytes)
        return target, drafting

    def _load_draft_model(self, assistant: PreTrainedModel | None) -> DraftModel | None:
        given, quantization = self.config.draft_model, self.config.draft_quantization
        if given is not None and assistant is not None:
            raise ConfigError("assistant is a draft model, and draft_model names another one: give one of them")
        chosen = assistant if given is None else given
        if chosen is None:
            return None
        encode = partial(_token_ids, self._encoder)
        parts = TargetParts(self.target, self.tokenizer, self.name, self.requests.vocabulary, encode)
        most = self.prefix_bytes
        model = on_own_thread(lambda: load_draft_model(chosen, parts, quantization=quantization, prefix_bytes=most))
        self.requests.draft_model = model
        return model

    def _prefix_bytes(self) -> int:
        if self.config.prefix_bytes is not None:
            return self.config.prefix_bytes
        return _PREFIX_BYTES_ON_CPU if self.target.device.type == "cpu" else _PREFIX_BYTES_ELSEWHERE

    def _lookup(self) -> DatastoreLookup | None:
        folder, recall = self.config.datastore, self.config.recall
        if folder is None:
            if recall.keeps_answers:
                raise ConfigError("keeps_answers needs a datastore: set datastore to its folder")
            return None
        if not hasattr(self.tokenizer, "get_vocab"):
            raise ConfigError(
                "a datastore needs a tokenizer with get_vocab(), which identifies it; leave datastore out"
            )
        opened = open_datastore(folder, self.tokenizer, self.requests.vocabulary, read_only=not recall.keeps_answers)
        return DatastoreLookup(opened, recall)

    def _submit_patiently(self, request: Request) -> GenerationStream | None:
        try:
            return self.scheduler.submit(request, patient=True)
        except BusyError:
            return None


def _check_lists(prompts: Any, params: Any, passages: Any) -> None:
    """Check the types of the arguments of `Engine.generate` for many prompts."""
    if not isinstance(prompts, (list, tuple)):
        raise PromptError(f"a prompt must be a Prompt, or a list of them, not {type(prompts).__name__}")
    for name, value, others in (("params", params, (SamplingParams, type(None))), ("passages", passages, ())):
        if not isinstance(value, (list, tuple, *others)):
            raise ConfigError(f"{name} must be a list, with one entry for each prompt, not {type(value).__name__}")
