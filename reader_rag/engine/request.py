"""Requests: their options, and how they are checked and prepared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from reader_rag.config import DraftConfig, SamplingParams, checked_tenant, unknown_argument
from reader_rag.config.setting import shown
from reader_rag.draft.source import DraftSource, SourceFactory, hidden_layers_of, make_sources
from reader_rag.engine.draft_models.source import DraftModel, DraftRequest, ModelSource, Stream
from reader_rag.engine.outputs import Passage, Prompt
from reader_rag.errors import ConfigError, ContextLengthError, PromptError
from reader_rag.sampling.constrained import Constraint, GrammarCompiler
from reader_rag.sampling.logits_processors import copy_processors, make_processors
from reader_rag.sampling.noise import Draw
from reader_rag.sampling.sampler import CheckedSampler, ProcessedSampler, Processor, Sampler, make_sampler
from reader_rag.util.encodable import is_encodable
from reader_rag.util.fork import check_not_forked

StoppingCriterion = Callable[[torch.Tensor, None], Any]
"""A `StoppingCriteria` of `transformers`, or a function like it: token ids [1, length] and None to whether to stop."""


class RequestOptions(TypedDict, total=False):
    """Options of a request besides its prompt, `SamplingParams` and passages.

    Attributes:
        tenant: The request's tenant; nothing learned or kept from one tenant's text is used for another tenant.
        draft: How drafts are made; the engine's `DraftConfig` by default.
        logits_processor: Processors of `transformers`, or functions of (token ids [1, length], scores
            [1, vocabulary]): applied after those of the sampling parameters and before temperature and the like, once
            for every token, in order, with all tokens before it. A request works on copies of them, which begin in
            the state that these are in. They run on the engine's thread and cannot call the engine.
        stopping_criteria: Criteria of `transformers`, or functions of (token ids [1, length], None), called after
            every token, on copies as well.
        sampler: Chooses the tokens in place of sampling parameters and processors.
        recall: False leaves the datastore alone: it is not searched, and the answer is not kept there.
        draft_sources: Makers of draft sources (`reader_rag.draft.source`) that propose beside the built-in ones and the
            engine's own.
        prediction: A predicted answer, which drafts are copied from. It is never cited, and nothing keeps it. It is the
            newest text under the bound `DraftConfig.max_passage_tokens`.
    """

    tenant: str
    draft: DraftConfig | None
    logits_processor: Sequence[Processor]
    stopping_criteria: Sequence[StoppingCriterion]
    sampler: Sampler | None
    recall: bool
    draft_sources: Sequence[SourceFactory]
    prediction: str


@dataclass(frozen=True)
class Request:
    """A checked and prepared request.

    Attributes:
        prompt: The prompt's tokens, text and character offsets.
        params: Length, stop strings, sampling.
        draft: How drafts are made.
        sampler: Chooses the tokens.
        passages: Texts that the answer may repeat.
        tenant: The request's tenant.
        criteria: Decide after every token whether to stop.
        constraint: The state of the answer's grammar; None without one.
        recalls: Whether the engine's datastore is searched and may keep the answer.
        has_callbacks: Whether sampler, criteria or draft sources are code of the caller's.
        draft_sources: Sources of drafts besides the built-in ones, for this request alone.
        prediction: A predicted answer; empty: none.
    """

    prompt: Prompt
    params: SamplingParams
    draft: DraftConfig
    sampler: Sampler
    passages: tuple[Passage, ...] = ()
    tenant: str = ""
    criteria: Sequence[StoppingCriterion] = ()
    constraint: Constraint | None = None
    recalls: bool = True
    has_callbacks: bool = False
    draft_sources: tuple[DraftSource, ...] = ()
    prediction: str = ""

    @property
    def draw(self) -> Draw | None:
        """How its tokens are drawn, where a pass can draw them."""
        return self.sampler.draw if isinstance(self.sampler, ProcessedSampler) else None

    def hidden_layers(self, layers: int) -> tuple[int, ...]:
        """The layers whose outputs its draft sources need, ascending.

        Args:
            layers: Layers of the target.
        """
        wanted = (hidden_layers_of(source, layers) for source in self.draft_sources)
        return tuple(sorted({layer for each in wanted for layer in each}))


def draft_bytes(requests: Sequence[Request]) -> int:
    """Most bytes that draft models hold for requests that are decoded together.

    Args:
        requests: The requests.
    """
    streams: dict[DraftModel, list[Stream]] = {}
    for source in (source for request in requests for source in request.draft_sources):
        if isinstance(source, ModelSource):
            streams.setdefault(source.group, []).append(source.stream)
    return sum(model.bytes_of(opened) for model, opened in streams.items())


class RequestBuilder:
    """Checks the arguments of a request and prepares it.

    Args:
        model: The engine's model.
        tokenizer: Its tokenizer.
        name: Name of the model in messages.
        device: Device of the logits.
        context_window: Most tokens of prompt and answer.
        draft: How drafts are made if a request has no `draft` option.
        draft_sources: Make the sources of drafts that every request has besides the built-in ones.
        layers: Layers whose outputs draft sources may ask for; 0: none.

    Attributes:
        draft_model: Drafts for every request that drafts at all; None: there is none.
        eos_ids: Tokens that end an answer.
        vocabulary: Token ids that the model has an embedding of.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        device: torch.device,
        context_window: int,
        draft: DraftConfig,
        draft_sources: Sequence[SourceFactory] = (),
        layers: int = 0,
    ) -> None:
        width = _logits_width(model)
        self.eos_ids = _eos_ids(model, tokenizer)
        # A token id out of range ends the whole process on some devices, and all its answers.
        self.vocabulary = int(getattr(model.get_input_embeddings(), "num_embeddings", 0)) or width
        self._grammars = GrammarCompiler(tokenizer, width, self.eos_ids)
        self._width = width
        self._tokenizer = tokenizer
        self._name = name
        self._device = device
        self._context_window = context_window
        self._draft = draft
        self._draft_sources = tuple(draft_sources)
        self._layers = layers
        self.draft_model: DraftModel | None = None

    def build(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        passages: Sequence[Passage] = (),
        options: RequestOptions | None = None,
    ) -> Request:
        """Make a request of the arguments of `Engine.submit`.

        Args:
            prompt: The prompt.
            params: Length, stop strings, sampling; None: the defaults.
            passages: Texts that the answer may repeat.
            options: Further options; None: none.

        Raises:
            ConfigError: A processor, a criterion, a grammar or a setting cannot be used.
            ForkError: This process was forked after the model was loaded.
            MissingDependencyError: There is a grammar, and llguidance is not installed.
            PromptError: The prompt is empty, holds unknown tokens, or leaves no room in the model's context.
        """
        check_not_forked()
        options = options or {}
        check_options(options, passages)
        prompt = self._checked(prompt)
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ConfigError(f"params must be SamplingParams, not {type(params).__name__}")
        self._check_bias(params)
        given = options.get("logits_processor", ())
        processors, criteria = copy_processors(given, options.get("stopping_criteria", ()))
        sources = make_sources([*self._draft_sources, *options.get("draft_sources", ())], self._layers)
        own_sampler = options.get("sampler")
        if own_sampler is None:
            constraint = self._constraint(prompt, params)
            sampler = self.sampler(prompt, params, processors, constraint)
        else:
            constraint, sampler = None, CheckedSampler(own_sampler, self.vocabulary)
        draft = options.get("draft") or self._draft
        model = self._draft_source(prompt, params, draft, sampler, options.get("tenant", ""))
        return Request(
            prompt=prompt,
            params=params,
            draft=draft,
            sampler=sampler,
            passages=tuple(passages),
            tenant=options.get("tenant", ""),
            criteria=criteria,
            constraint=constraint,
            recalls=options.get("recall", True),
            has_callbacks=own_sampler is not None or bool(processors or criteria or sources),
            draft_sources=(*sources, *model),
            prediction=options.get("prediction", ""),
        )

    def sampler(
        self,
        prompt: Prompt,
        params: SamplingParams,
        logits_processor: Sequence[Processor] = (),
        constraint: Constraint | None = None,
    ) -> Sampler:
        """Make the sampler of one request.

        Args:
            prompt: The prompt.
            params: The sampling parameters.
            logits_processor: The caller's processors; they are not copied.
            constraint: The grammar's state in this answer; None makes a new one where there is a grammar.

        Raises:
            ConfigError: A processor or a setting cannot be used.
        """
        constraint = constraint or self._constraint(prompt, params)
        processors = make_processors(
            params,
            self._tokenizer,
            prompt_tokens=len(prompt.token_ids),
            eos_ids=sorted(self.eos_ids),
            device=self._device,
            given=logits_processor,
            last=[] if constraint is None else [constraint],
        )
        return make_sampler(params, processors)

    def _draft_source(
        self, prompt: Prompt, params: SamplingParams, draft: DraftConfig, sampler: Sampler, tenant: str
    ) -> list[ModelSource]:
        """The source over the draft model, if there is one and the request drafts."""
        if self.draft_model is None or not params.speculate or not draft.max_nodes:
            return []
        drawn, sampler = None, getattr(sampler, "chooses_as", None) or sampler
        if isinstance(sampler, ProcessedSampler):
            # Without the caller's processors: those may count their calls, and drafts are no tokens of the answer.
            processors = make_processors(
                params,
                self._tokenizer,
                prompt_tokens=len(prompt.token_ids),
                eos_ids=sorted(self.eos_ids),
                device=self._device,
            )
            drawn = ProcessedSampler(processors, sampler.seed)
        wanted = DraftRequest(
            positions=min(len(prompt.token_ids) + params.max_tokens, self._context_window),
            tenant=tenant,
            vocabulary=self.vocabulary,
            width=self._width,
            tokens=draft.model_tokens,
            branches=draft.model_branches,
            sampler=drawn,
        )
        model = self.draft_model
        return [ModelSource(model.open(wanted))]

    def _checked(self, prompt: Prompt) -> Prompt:
        """The prompt, with a tuple of integers as token ids."""
        if not isinstance(prompt, Prompt):
            raise PromptError(
                f"a prompt must be a Prompt, not {type(prompt).__name__}: use engine.encode(text) or Prompt(token_ids)"
            )
        prompt = replace(prompt, token_ids=_integers(prompt.token_ids))
        length = len(prompt.token_ids)
        if not length:
            raise PromptError("the prompt is empty; pass at least one token")
        if not isinstance(prompt.text, str) or (prompt.offsets is not None and len(prompt.offsets) != length):
            raise PromptError("a prompt's text must be a string, and its offsets as many as its token ids, or None")
        if not 0 <= min(prompt.token_ids) <= max(prompt.token_ids) < self.vocabulary:
            wrong = next(token for token in prompt.token_ids if not 0 <= token < self.vocabulary)
            raise PromptError(
                f"the prompt has the token id {wrong}, and {self._name} has 0..{self.vocabulary - 1}; use its tokenizer"
            )
        if length >= self._context_window:
            raise ContextLengthError(
                f"the prompt has {length} tokens, and {self._name} reads at most {self._context_window - 1}; "
                "shorten it, or retrieve fewer passages (similarity_top_k)"
            )
        return prompt

    def _check_bias(self, params: SamplingParams) -> None:
        beyond = [token for token in params.logit_bias or () if token >= self._width]
        if beyond:
            raise ConfigError(
                f"logit_bias has the token id {beyond[0]}, and {self._name} has 0..{self._width - 1}; use its tokenizer"
            )

    def _constraint(self, prompt: Prompt, params: SamplingParams) -> Constraint | None:
        if params.grammar is None:
            return None
        return Constraint(self._grammars.compile(params.grammar), len(prompt.token_ids))


def _integers(token_ids: Any) -> tuple[int, ...]:
    """Token ids as a tuple of integers.

    Raises:
        PromptError: They are no sequence of integers.
    """
    try:
        array = token_ids.cpu().numpy() if isinstance(token_ids, torch.Tensor) else np.asarray(token_ids)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        array = np.empty((), object)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise PromptError("the token ids of a prompt must be a list of integers, of one prompt")
    return tuple(array.tolist())


def check_options(options: RequestOptions, passages: Sequence[Passage]) -> None:
    """Check the types of a request's options and passages.

    Args:
        options: The options.
        passages: The passages.

    Raises:
        ConfigError: There is no such option, or it is of another type.
    """
    known = RequestOptions.__annotations__
    for name in options:
        if name not in known:
            raise ConfigError(unknown_argument(name, known))
    checked_tenant(options.get("tenant", ""))
    for name, kind in (("draft", DraftConfig), ("recall", bool)):
        value: Any = options.get(name)
        if value is not None and not isinstance(value, kind):
            raise ConfigError(f"{name} must be {kind.__name__}, not {shown(value)}")
    prediction = options.get("prediction", "")
    if not isinstance(prediction, str) or not is_encodable(prediction):
        raise ConfigError(f"prediction must be a string without lone surrogates, not {shown(prediction)}")
    sampler = options.get("sampler")
    if sampler is not None and not callable(sampler):
        raise ConfigError(f"sampler must be callable with the result of a pass (Verified); {shown(sampler)} is not")
    for name, listed in (("passages", passages), ("draft_sources", options.get("draft_sources", ()))):
        if not isinstance(listed, (list, tuple)):
            raise ConfigError(f"{name} must be a list, not {type(listed).__name__}")
    for passage in passages:
        if not (isinstance(passage, Passage) and isinstance(passage.id, str) and isinstance(passage.text, str)):
            raise ConfigError(f"a passage must be a Passage with an id and a text as strings, not {shown(passage)}")


def _logits_width(model: PreTrainedModel) -> int:
    """Width of the model's logits; it may be more than the tokenizer's vocabulary."""
    width = getattr(model.get_output_embeddings(), "out_features", None)
    return int(width or model.config.get_text_config(decoder=True).vocab_size)


def _eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every token that ends an answer: those of the generation configuration and the tokenizer's own."""
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids: list[Any] = list(configured) if isinstance(configured, (list, tuple)) else [configured]
    ids.append(getattr(tokenizer, "eos_token_id", None))
    return frozenset(int(i) for i in ids if i is not None)
