"""The model, what is known of it, and the ways to have something decoded with it.

`Engine.submit` has requests decoded together, on a thread of the engine's own. `Engine.stream` works in the thread that
asks for its next chunk, a step at a time, between the others' steps.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack, overload

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from reader_rag.config import BatchConfig, DatastoreConfig, DraftConfig, Exactness, Forward, SamplingParams
from reader_rag.draft.context_index import ContextIndex
from reader_rag.draft.profile import Profile, fingerprint, profiles
from reader_rag.draft.tree_builder import TreeBuilder
from reader_rag.engine.datastore_lookup import DatastoreLookup, open_datastore
from reader_rag.engine.draft_state import DraftStates
from reader_rag.engine.fair_lock import FairLock
from reader_rag.engine.observer import Load, Observers
from reader_rag.engine.offline import generate_all
from reader_rag.engine.outputs import Generation, Passage, Prompt
from reader_rag.engine.reader_stream import GenerationStream
from reader_rag.engine.scheduler import Scheduler
from reader_rag.engine.sequence import Request, StoppingCriterion
from reader_rag.engine.stream import ScheduledStream
from reader_rag.errors import ConfigError, PromptError
from reader_rag.kv_cache.prefix_cache import PrefixCache
from reader_rag.model.select_target import Drafting, select_reuse, select_target
from reader_rag.model.step_costs import StepCosts, load_costs
from reader_rag.model.weights_cache import cache_folder
from reader_rag.sampling.constrained import Constraint, GrammarCompiler
from reader_rag.sampling.logits_processors import copy_processors, make_processors
from reader_rag.sampling.sampler import Processor, Sampler, make_sampler

_UNKNOWN_WINDOW = 1 << 20
_CROWDED = 1.5
"""Growth of a pass by a node for each text from which on prompts teach nothing: what good drafts give in tokens."""
_PREFIX_BYTES_ON_CPU = 256 << 20
"""What the beginnings of texts may take unless told: 12,000 tokens of the default model, 2,000 of an 8B model with
grouped heads (128 KiB a token), in 16 bits. Memory that all programs of a machine share."""
_PREFIX_BYTES_ELSEWHERE = 1 << 30
"""The same on a GPU, which holds larger models and little else."""


class RequestOptions(TypedDict, total=False):
    """What may be asked of an answer besides its `SamplingParams`.

    Attributes:
        tenant: On whose behalf; nothing learned or kept of one tenant's text is used for another.
        draft: Overrides the engine's.
        logits_processor: Processors of `transformers`, or functions of (token ids [1, length], scores
            [1, vocabulary]): applied after those of `generation` and before temperature and the like, once for
            every token, in order, with all tokens before it. An answer works on copies of its own, which begin in
            the state that these are in.
        stopping_criteria: Criteria of `transformers`, or functions of (token ids [1, length], None): asked after
            every token, likewise.
        sampler: Chooses the tokens instead of all that.
        recall: False leaves the engine's datastore alone: it is not searched, and the answer is not kept there.
    """

    tenant: str
    draft: DraftConfig | None
    logits_processor: Sequence[Processor]
    stopping_criteria: Sequence[StoppingCriterion]
    sampler: Sampler | None
    recall: bool


class Engine:
    """A target model that decodes with drafts, and without.

    Plain decoding (`SamplingParams(speculate=False)`) is the same engine with no drafts, and the reference that
    every drafted answer equals.

    Args:
        model: A causal language model of `transformers`, in eval mode, with its adapters, if it has some. Small checks
            find out what can be verified on it (`drafting`); see `select_target` for what they may change.
        tokenizer: Its tokenizer.
        draft: How drafts are made.
        exactness: "fast": every pass has the shape it needs; equal to plain decoding up to rounding, which in float32
            is never seen and in 16-bit types now and then. "strict": bit for bit equal to plain decoding of the same
            engine in every type, by fixed shapes and drafts without branches, or at no cost where `CpuForward`
            computes the model.
        forward: "auto" computes models of a known shape on the CPU with `CpuForward`, about twice as fast as their own
            `forward`, which "torch" always calls.
        strict_width: Positions of every pass in strict mode where shapes are fixed, 2 to 256: drafts are one shorter.
            None takes what pays on the kind of device.
        batch: How many requests of `submit` are decoded together.
        prefix_bytes: Most bytes of keys and values that are kept, where the model lies, so that a text which begins
            like one before is read only from where they differ (docs/prefixes.md). None: 256 MiB on the CPU, 1 GiB
            elsewhere. 0 reads every prompt whole.
        datastore: Folder of texts and earlier answers that drafts are searched in (docs/datastore.md); None: there is
            none.
        recall: What is looked up there, and whether answers are kept there.
        name: What messages and metadata call the model.

    Attributes:
        drafting: "tree"; "chain" where the model takes no tree mask; "none" where it keeps a state that cannot be
            rewound and is decoded plainly. All give the model's own output; a `ReaderWarning` tells of the last two.
        prefix_bytes: As given, or what None stands for.
        prefixes: What is kept of the beginnings of texts; None where nothing is.
        reuse: What may be kept of them, or None.
        recall: What the datastore gives to drafts; None where there is none.

    Raises:
        ConfigError: A setting is out of its range.
        DatastoreError: The datastore cannot be used.
        UnsupportedModelError: The model cannot be decoded rightly, or not strictly on this device.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        draft: DraftConfig | None = None,
        exactness: Exactness = "fast",
        forward: Forward = "auto",
        strict_width: int | None = None,
        batch: BatchConfig | None = None,
        prefix_bytes: int | None = None,
        datastore: str | Path | None = None,
        recall: DatastoreConfig | None = None,
        name: str = "",
    ) -> None:
        if forward not in ("auto", "torch"):
            raise ConfigError(f"forward must be 'auto' or 'torch', not {forward!r}")
        if exactness not in ("fast", "strict"):
            raise ConfigError(f"exactness must be 'fast' or 'strict', not {exactness!r}")
        if strict_width is not None and not 2 <= strict_width <= 256:
            raise ConfigError(f"strict_width must be 2..256, not {strict_width}")
        if prefix_bytes is not None and prefix_bytes < 0:
            raise ConfigError(f"prefix_bytes must be at least 0 (0: every prompt is read whole), not {prefix_bytes}")
        self.model = model
        self.tokenizer = tokenizer
        self.draft = draft or DraftConfig()
        self.exactness = exactness
        self.forward = forward
        self.name = name or str(getattr(model.config, "_name_or_path", "")) or type(model).__name__
        # Loads the compiled loops here rather than in the first answer.
        TreeBuilder(max_nodes=1).build(ContextIndex([0, 1, 0]))
        self.target, found = select_target(
            model, name=self.name, exactness=exactness, forward=forward, strict_width=strict_width
        )
        self.drafting: Drafting = found
        self.context_window = self.target.context_window or _UNKNOWN_WINDOW
        self.eos_ids = _eos_ids(model, tokenizer)
        # Reentrant: a processor or a criterion may ask the engine something itself.
        self.lock = FairLock()
        self.observers = Observers()
        """Are told what the engine does."""
        self.scheduler = Scheduler(self, batch or BatchConfig())
        self._told_moves = (0, 0)
        self.costs: StepCosts | None = None
        """What steps cost on this device, measured when the first draft is made; None before, and in strict mode."""
        self.learned = DraftStates(_profile(model, tokenizer))
        if prefix_bytes is None:
            prefix_bytes = _PREFIX_BYTES_ON_CPU if self.target.device.type == "cpu" else _PREFIX_BYTES_ELSEWHERE
        self.prefix_bytes = prefix_bytes
        self.reuse = select_reuse(self.target, exactness) if prefix_bytes else None
        self.prefixes = PrefixCache(prefix_bytes, self.reuse.block) if self.reuse is not None else None
        self._tokenizer_lock = threading.Lock()
        self._grammars = GrammarCompiler(tokenizer, _width_of_logits(model), self.eos_ids)
        # A token that there is not ends the whole process on some devices, and all its answers.
        self._vocabulary = int(getattr(model.get_input_embeddings(), "num_embeddings", 0)) or _width_of_logits(model)
        self.recall = self._recall(datastore, recall or DatastoreConfig())

    @classmethod
    def load(
        cls,
        model: str,
        *,
        dtype: str = "auto",
        device: str = "auto",
        draft: DraftConfig | None = None,
        exactness: Exactness = "fast",
        forward: Forward = "auto",
        strict_width: int | None = None,
        batch: BatchConfig | None = None,
        prefix_bytes: int | None = None,
        datastore: str | Path | None = None,
        recall: DatastoreConfig | None = None,
        trust_remote_code: bool = False,
    ) -> Engine:
        """Load a model by alias, local folder or hub id.

        Args:
            model: E.g. "smollm2-135m".
            dtype: "auto", "float32", "bfloat16" or "float16".
            device: "auto", "cpu", "cuda", ...
            draft: See `Engine`.
            exactness: See `Engine`.
            forward: See `Engine`.
            strict_width: See `Engine`.
            batch: See `Engine`.
            prefix_bytes: See `Engine`.
            datastore: See `Engine`.
            recall: See `Engine`.
            trust_remote_code: Whether code that comes with the model may run.

        Raises:
            ConfigError: A setting is out of its range.
            DatastoreError: The datastore cannot be used.
            ModelNotFoundError: There is no such model; the message names the ways to get one.
            UnsupportedModelError: See `Engine`.
        """
        from reader_rag.model.loading import load_model

        loaded, tokenizer = load_model(model, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
        return cls(
            loaded,
            tokenizer,
            draft=draft,
            exactness=exactness,
            forward=forward,
            strict_width=strict_width,
            batch=batch,
            prefix_bytes=prefix_bytes,
            datastore=datastore,
            recall=recall,
            name=model,
        )

    def encode(self, text: str) -> Prompt:
        """Raw text to a prompt, with the special tokens that the tokenizer itself adds."""
        return self.tokenize(text, special=True)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> Prompt:
        """Messages to a prompt through the tokenizer's chat template, up to where the assistant speaks.

        Args:
            messages: Mappings with "role" and "content".

        Raises:
            ConfigError: The tokenizer has no chat template, or the template refuses these messages.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            raise ConfigError(f"{self.name} has no chat template; give a formatted prompt to complete() instead")
        try:
            text = self.tokenizer.apply_chat_template(
                [dict(m) for m in messages], tokenize=False, add_generation_prompt=True
            )
        except Exception as cause:
            raise ConfigError(f"the chat template of {self.name} refuses these messages: {cause}") from cause
        return self.tokenize(str(text), special=False)

    def tokenize(self, text: str, *, special: bool) -> Prompt:
        """Text to tokens and their characters.

        Args:
            text: Any text.
            special: Whether the tokenizer adds its special tokens.
        """
        offsets = bool(getattr(self.tokenizer, "is_fast", False))
        with self._tokenizer_lock:
            encoded: Any = self.tokenizer(
                text, add_special_tokens=special, return_offsets_mapping=offsets, verbose=False, truncation=False
            )
        return Prompt(tuple(encoded["input_ids"]), text, tuple(encoded["offset_mapping"]) if offsets else None)

    def stream(
        self,
        prompt: Prompt,
        generation: SamplingParams | None = None,
        passages: Sequence[Passage] = (),
        **options: Unpack[RequestOptions],
    ) -> GenerationStream:
        """Decode step by step.

        Args:
            prompt: What to continue.
            generation: Length, stop strings, sampling.
            passages: Retrieved texts that the answer may repeat. Where the prompt contains one, its tokens there are
                marked as its own; the others are searched besides the prompt.
            options: What else may be asked for.

        Returns:
            An iterator over chunks; its first `next` does the prefill.

        Raises:
            PromptError: The prompt is empty or leaves no room in the model's context.
            ConfigError: A processor, a criterion, a grammar or a setting cannot be used.
            MissingDependencyError: There is a grammar, and llguidance is not installed.
        """
        return GenerationStream(self, self.asked(prompt, generation, passages, **options))

    def submit(
        self,
        prompt: Prompt,
        generation: SamplingParams | None = None,
        passages: Sequence[Passage] = (),
        **options: Unpack[RequestOptions],
    ) -> ScheduledStream | GenerationStream:
        """Decode together with the other requests of all threads, on a thread of the engine's own; never waits.

        Arguments as in `stream`, and the same answer.

        Returns:
            An iterator over chunks, for a thread or an event loop. From within a step, as a processor that asks the
            engine something, what `stream` returns.

        Raises:
            BusyError: As many requests wait already as may (`BatchConfig.max_waiting`).
            ConfigError: See `stream`; or prompt and answer need more memory than `BatchConfig.max_cache_bytes`.
            PromptError: See `stream`.
            MissingDependencyError: See `stream`.
        """
        return self.open(self.asked(prompt, generation, passages, **options))

    def open(self, asked: Request, *, patient: bool = False) -> ScheduledStream | GenerationStream:
        """`submit` what `asked` has settled; `patient`: see `Scheduler.submit`."""
        inside = self.scheduler.is_here or self.lock.is_mine  # it cannot wait for a step that waits for it
        return GenerationStream(self, asked) if inside else self.scheduler.submit(asked, patient=patient)

    @property
    def batch(self) -> BatchConfig:
        """How many requests of `submit` are decoded together."""
        return self.scheduler.limits

    @property
    def busy(self) -> Load:
        """What `submit` has it do now."""
        return self.scheduler.load

    def close(self) -> None:
        """End all requests of `submit` with a `BusyError`; a later one is decoded again. Answers that are kept in the
        datastore are on the disk then."""
        self.scheduler.close()
        if self.recall is not None:
            self.recall.flush()

    def asked(
        self,
        prompt: Prompt,
        generation: SamplingParams | None = None,
        passages: Sequence[Passage] = (),
        **options: Unpack[RequestOptions],
    ) -> Request:
        """Check and settle what `stream` is asked; arguments and errors are its."""
        unknown = options.keys() - RequestOptions.__annotations__.keys()
        if unknown:
            known = ", ".join(RequestOptions.__annotations__)
            raise TypeError(f"unexpected argument {', '.join(sorted(unknown))}; there are {known}")
        length = len(prompt.token_ids)
        if not length:
            raise PromptError("the prompt is empty; ask something")
        if not 0 <= min(prompt.token_ids) <= max(prompt.token_ids) < self._vocabulary:
            wrong = next(token for token in prompt.token_ids if not 0 <= token < self._vocabulary)
            raise PromptError(f"the prompt has a token {wrong}, and {self.name} knows 0..{self._vocabulary - 1}")
        if length >= self.context_window:
            raise PromptError(
                f"the prompt has {length} tokens, and {self.name} reads at most {self.context_window - 1}; "
                "shorten it, or retrieve fewer passages (--top-k)"
            )
        generation = generation or SamplingParams()
        processors, criteria = copy_processors(
            options.get("logits_processor", ()), options.get("stopping_criteria", ())
        )
        sampler, constraint = options.get("sampler"), None
        if sampler is None:
            constraint = self._constraint(prompt, generation)
            sampler = self.sampler(prompt, generation, processors, constraint)
        draft, tenant = options.get("draft") or self.draft, options.get("tenant", "")
        recalls = options.get("recall", True)
        return Request(prompt, generation, draft, sampler, tuple(passages), tenant, criteria, constraint, recalls)

    def forget(self, tenant: str = "", *, learned: bool = True) -> None:
        """Forget a tenant's texts: what is kept of their beginnings, what drafting learned from them, and its answers
        in the datastore, if this engine keeps any.

        Answers that are in the making go on, and are kept when they end.

        Args:
            tenant: See `stream`.
            learned: False forgets the beginnings alone, so that the next prompt is read whole.

        Raises:
            DatastoreError: Answers could not be removed.
        """
        with self.lock:
            if learned:
                self.learned.forget(tenant)
            if self.prefixes is not None:
                self.prefixes.forget(tenant)
        if learned and self.recall is not None:
            self.recall.forget(tenant)

    def tell_moves(self) -> None:
        """Tell what was moved of keys and values since this was told last."""
        (rearrangements, moved), (before, moved_before) = self.target.moved, self._told_moves
        if moved > moved_before:
            self._told_moves = rearrangements, moved
            self.observers.tell("moved", rearrangements - before, moved - moved_before)

    def know_costs(self, max_nodes: int) -> None:
        """Measure what steps cost, or remember it from an earlier process, unless it is known.

        Args:
            max_nodes: Most nodes of a tree.
        """
        if self.target.fixed is None and (self.costs is None or self.costs.max_nodes < max_nodes):
            self.costs = load_costs(self.target, max_nodes, cache_folder() / "costs")

    def _recall(self, datastore: str | Path | None, config: DatastoreConfig) -> DatastoreLookup | None:
        if datastore is None:
            if config.keeps_answers:
                raise ConfigError("answers are kept in a datastore: name its folder (datastore=...)")
            return None
        if not hasattr(self.tokenizer, "get_vocab"):
            raise ConfigError("a datastore needs a tokenizer, by which it is known to be of this model")
        opened = open_datastore(datastore, self.tokenizer, self._vocabulary, read_only=not config.keeps_answers)
        return DatastoreLookup(opened, config)

    @property
    def crowded(self) -> bool:
        """Whether so many requests share passes that drafts hardly pay, and what prepares them does not.

        By what a pass takes: on the CPU from a few texts on its time grows with every row, on a GPU much later.
        """
        if self.costs is None:
            return False
        load = self.busy
        texts = min(load.running + load.waiting, self.scheduler.max_rows)
        return texts > 1 and self.costs.growth(texts) > _CROWDED

    def _constraint(self, prompt: Prompt, generation: SamplingParams) -> Constraint | None:
        if generation.grammar is None:
            return None
        return Constraint(self._grammars.compile(generation.grammar), len(prompt.token_ids))

    def sampler(
        self,
        prompt: Prompt,
        generation: SamplingParams,
        logits_processor: Sequence[Processor] = (),
        constraint: Constraint | None = None,
    ) -> Sampler:
        """What chooses the tokens of one answer.

        Args:
            prompt: See `stream`, here and below.
            generation: Its grammar is held by `constraint`.
            logits_processor: The caller's own; they are not copied.
            constraint: The grammar's state in this answer; None makes a new one where there is a grammar.

        Raises:
            ConfigError: A processor or a setting cannot be used.
        """
        constraint = constraint or self._constraint(prompt, generation)
        processors = make_processors(
            generation,
            self.tokenizer,
            prompt_tokens=len(prompt.token_ids),
            eos_ids=sorted(self.eos_ids),
            device=self.target.device,
            given=logits_processor,
            last=[] if constraint is None else [constraint],
        )
        return make_sampler(generation, processors)

    @overload
    def generate(
        self,
        prompt: Prompt,
        generation: SamplingParams | None = None,
        passages: Sequence[Passage] = (),
        **options: Unpack[RequestOptions],
    ) -> Generation: ...

    @overload
    def generate(
        self,
        prompt: Sequence[Prompt],
        generation: SamplingParams | Sequence[SamplingParams] | None = None,
        passages: Sequence[Sequence[Passage]] = (),
        *,
        progress: bool = False,
        **options: Unpack[RequestOptions],
    ) -> list[Generation]: ...

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        generation: Any = None,
        passages: Sequence[Any] = (),
        *,
        progress: bool = False,
        **options: Unpack[RequestOptions],
    ) -> Generation | list[Generation]:
        """Decode to the end: one prompt, or many together.

        Args:
            prompt: What to continue; a sequence of prompts is decoded in batches (`BatchConfig`), each prompt to the
                answer that it gets alone.
            generation: See `stream`; for many prompts one for all or one for each.
            passages: See `stream`; for many prompts, those of each.
            progress: Whether to show a progress bar over many prompts.
            options: See `RequestOptions`; a sampler for one prompt only.

        Returns:
            The answer, or the answers in the order of the prompts.

        Raises:
            PromptError: See `stream`; before anything is decoded, whichever prompt it is.
            ConfigError: See `stream`; or there are not as many settings or passages as prompts.
            BatchError: Answers failed; it holds the others.
        """
        if not isinstance(prompt, Prompt):
            return generate_all(self, prompt, generation, passages, progress=progress, **options)
        with self.stream(prompt, generation, passages, **options) as stream:
            for _ in stream:
                pass
            return stream.result


def _profile(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Profile | None:
    """The profile of the tokenizer's vocabulary, if there is one."""
    held = profiles(cache_folder() / "profiles")
    if not held or not hasattr(tokenizer, "get_vocab"):  # a benchmark's random weights have no text
        return None
    vocabulary = fingerprint(tokenizer.get_vocab())
    return next((profile for profile in held if profile.vocabulary == vocabulary), None)


def _width_of_logits(model: PreTrainedModel) -> int:
    """Tokens that the model tells apart; it may be more than the tokenizer knows."""
    width = getattr(model.get_output_embeddings(), "out_features", None)
    return int(width or model.config.get_text_config(decoder=True).vocab_size)


def _eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every token that ends an answer: those of the generation configuration and the tokenizer's own."""
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids: list[Any] = list(configured) if isinstance(configured, (list, tuple)) else [configured]
    ids.append(getattr(tokenizer, "eos_token_id", None))
    return frozenset(int(i) for i in ids if i is not None)
