"""Holds an answer to a grammar: which tokens may come next, and which drafts are worth verifying.

llguidance follows the grammar byte by byte, so an allowed text may be spelled in any tokens; only where the grammar
leaves one text, the mask allows its usual spelling alone. The answer is constrained by `GrammarState.mask`, at every
token, drafted or not; `GrammarState.shape` only keeps the forward pass from checking what the mask would refuse.
"""

from __future__ import annotations

import json
import re
import threading
import warnings
from collections.abc import Collection, Iterable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from reader_rag.config.grammar import Grammar
from reader_rag.draft.kernels import workspace as kernels
from reader_rag.draft.tree import SUCCESSOR, DraftTree
from reader_rag.errors import ConfigError, GrammarError, MissingDependencyError, ReaderWarning

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# As `json.dumps` writes, and so most of the JSON that models were trained on. Were any white space allowed, little
# would be forced, and small models like to go on with spaces for ever.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

_BOUNDS = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), np.inf, -np.inf)
_BOUNDS = _BOUNDS.astype(np.float32)
"""float32 [256, 8]: upper bounds of the scores of eight tokens, by the bits of their mask.

`llguidance.numpy.apply_token_bitmask_inplace` gives the same scores in 157 us instead of 21 us (49,152 tokens, one
thread), and `llguidance.torch` compiles its kernel with a C++ compiler at the first call.
"""


def _llguidance() -> ModuleType:
    try:
        import llguidance
        import llguidance.hf
    except ImportError as cause:
        raise MissingDependencyError("grammars need llguidance: pip install 'reader-rag[grammar]'") from cause
    return llguidance


def _reason(error: str) -> str:
    """What llguidance says is wrong, in one line: without its echo of the grammar and of the matcher's state."""
    lines = error.split("<state>")[0].splitlines()
    return " ".join(line.strip() for line in lines if line.strip(" ^") and not re.match(r"\s*\d+ \|", line))


def enforceable_schema(schema: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """A schema that a grammar can follow: what llguidance does not know is not enforced, with one warning.

    Args:
        schema: A JSON schema.
        owner: Whose schema it is, for the warning.

    Returns:
        The schema, with the style of this package's JSON.

    Raises:
        ConfigError: The schema is not one.
        MissingDependencyError: llguidance is not installed.
    """
    matchers = _llguidance().LLMatcher
    lenient = {**schema, "x-guidance": {**_JSON_STYLE, "lenient": True, "coerce_one_of": True}}
    failed, notes = matchers.validate_grammar_with_warnings(matchers.grammar_from_json_schema(json.dumps(lenient)))
    if failed and "regex" in notes[0]:
        lenient = _without_patterns(lenient)
        failed, more = matchers.validate_grammar_with_warnings(matchers.grammar_from_json_schema(json.dumps(lenient)))
        notes = more if failed else [*more, "pattern"]
    if failed:
        raise ConfigError(f"the schema of {owner} cannot be followed: {_reason(notes[0])}")
    if notes:
        warnings.warn(
            f"the schema of {owner} is checked after the answer where the grammar does not know it: "
            + "; ".join(_reason(note) for note in notes),
            ReaderWarning,
            stacklevel=2,
        )
    return lenient


def _without_patterns(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_patterns(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    text = schema.get("type") == "string"
    return {key: _without_patterns(part) for key, part in schema.items() if not (text and key == "pattern")}


class GrammarCompiler:
    """Makes grammars ready for one model. Making it costs nothing: what is needed is loaded with the first grammar.

    Thread-safe.

    Args:
        tokenizer: The model's, a fast one.
        vocabulary_size: Width of the model's logits; it may be above or below the tokenizer's number of tokens.
        eos_ids: Every token that ends an answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary_size: int, eos_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary_size = vocabulary_size
        self._eos_ids = frozenset(eos_ids)
        self._lock = threading.Lock()
        self._prepared: LLTokenizer | None = None

    def compile(self, grammar: Grammar) -> GrammarState:
        """Make a grammar ready for one answer.

        Args:
            grammar: What the answer is to look like.

        Returns:
            The state at the start of the answer.

        Raises:
            ConfigError: The grammar cannot be followed, or not with this tokenizer; the message says why.
            MissingDependencyError: llguidance is not installed.
        """
        matchers = _llguidance().LLMatcher
        tokens = self._tokens()
        try:
            if grammar.kind == "json_schema":
                rules = matchers.grammar_from_json_schema(grammar.text, defaults=_JSON_STYLE)
            else:
                rules = getattr(matchers, f"grammar_from_{grammar.kind}")(grammar.text)
        except ValueError as cause:  # nested too deep for its parser
            raise ConfigError(f"this {grammar.kind} grammar cannot be read: {_reason(str(cause))}") from cause
        matcher: LLMatcher = matchers(tokens, rules, log_level=0)
        if matcher.is_error():
            raise ConfigError(f"this {grammar.kind} grammar cannot be followed: {_reason(matcher.get_error())}")
        own = self._tokenizer.eos_token_id
        end = own if own in self._eos_ids else min(self._eos_ids)
        return GrammarState(matcher, tokens.vocab_size, self._vocabulary_size, self._eos_ids, end)

    def _tokens(self) -> LLTokenizer:
        with self._lock:
            if self._prepared is None:
                self._prepared = self._prepare()
            return self._prepared

    def _prepare(self) -> LLTokenizer:
        name = type(self._tokenizer).__name__
        if not getattr(self._tokenizer, "is_fast", False):
            raise ConfigError(f"grammars need a fast tokenizer, and {name} is a slow one; use a model that has one")
        if not self._eos_ids:
            raise ConfigError(
                "grammars need a model with an end-of-sequence token, and this one has none; leave grammar out"
            )
        # The matcher's vocabulary cannot be smaller than the tokenizer's; masks are cut to the logits instead.
        size = max(self._vocabulary_size, len(self._tokenizer))
        try:
            prepared: LLTokenizer = _llguidance().hf.from_tokenizer(
                self._tokenizer, n_vocab=size, eos_token=sorted(self._eos_ids)
            )
        except ValueError as cause:
            raise ConfigError(f"grammars cannot be followed with {name}: {_reason(str(cause))}") from cause
        return prepared


class GrammarState:
    """Where in its grammar one answer is; made by `GrammarCompiler.compile`. It belongs to one stream.

    Args:
        matcher: llguidance's, at the start of the answer.
        matched_size: Size of its vocabulary.
        vocabulary_size: Width of the model's logits.
        eos_ids: Every token that ends an answer.
        end: The one of them that is drafted where nothing else may follow.
    """

    def __init__(
        self, matcher: LLMatcher, matched_size: int, vocabulary_size: int, eos_ids: frozenset[int], end: int
    ) -> None:
        self._matcher = matcher
        self._vocabulary_size = vocabulary_size
        self._eos_ids = eos_ids
        self._end = end
        self._ended = False
        # One bit a token, and those that are one of the model's.
        self._bits = np.zeros((matched_size + 31) // 32, np.uint32)
        self._within = np.packbits(np.arange(self._bits.size * 32) < vocabulary_size, bitorder="little").view(np.uint32)
        self._address = self._bits.ctypes.data
        self._bounds = torch.from_numpy(_BOUNDS)

    def follow(self, tokens: Iterable[int]) -> None:
        """Go on behind tokens that were emitted.

        Args:
            tokens: Token ids, in their order; behind the end of the answer only end-of-sequence tokens.

        Raises:
            GrammarError: The grammar does not allow one of them here, or is too costly to follow. The state is then
                of no further use.
        """
        tokens = list(tokens)
        length = next((at for at, token in enumerate(tokens) if token in self._eos_ids), len(tokens))
        followed = 0 if self._ended else self._matcher.try_consume_tokens(tokens[:length])
        self._check()
        if followed == length < len(tokens) and (self._ended or self._may_end()):
            if not self._matcher.is_stopped():
                self._matcher.try_consume_tokens([tokens[length]])
                self._check()
            self._ended = True
            # A draft may end twice; `mask` allows it, so it is followed.
            followed = next((at for at in range(length, len(tokens)) if tokens[at] not in self._eos_ids), len(tokens))
        if followed < len(tokens):
            raise GrammarError(
                f"the grammar does not allow token {tokens[followed]} here; choose tokens from masked scores only"
            )

    def mask(self, scores: torch.Tensor) -> torch.Tensor:
        """Take away what the grammar forbids.

        Args:
            scores: float32 [vocabulary], logits for the next token, on any device.

        Returns:
            float32 [vocabulary], a copy on the same device, -inf where the grammar does not allow the token. Tokens
            that end the answer are allowed where it is complete, and nothing else once it has ended.

        Raises:
            GrammarError: The grammar is too costly to follow, or allows no token of this vocabulary.
        """
        size = self._vocabulary_size
        if scores.shape != (size,):
            raise ValueError(f"scores must be [{size}], not {list(scores.shape)}")
        self._matcher.unsafe_compute_mask_ptr(self._address, self._bits.nbytes)
        self._check()
        self._bits &= self._within
        # A matcher that sees no way on stops, and a stopped one allows the end, complete or not.
        if not self._bits.any() or (self._matcher.is_stopped() and not self._ended and not self._may_end()):
            raise GrammarError("no token of the model continues the answer as its grammar wants; change the grammar")
        if self._bounds.device != scores.device:
            self._bounds = self._bounds.to(scores.device)
        # The smaller one, not the sum: an infinite score of a forbidden token stays forbidden.
        octets = torch.from_numpy(self._bits.view(np.uint8)).to(scores.device).int()
        return torch.minimum(scores, self._bounds.index_select(0, octets).view(-1)[:size])

    def shape(self, tree: DraftTree, max_nodes: int, max_depth: int | None = None) -> DraftTree:
        """Fit a draft to the grammar: without what it forbids, and with what it forces.

        A forced token, the only one that the mask will allow, is as probable as its parent, and drafted nodes below it
        gain accordingly. The state stays as it is.

        Args:
            tree: The draft behind the tokens followed so far.
            max_nodes: Most nodes of the result.
            max_depth: Longest path of the result; None sets no limit of its own.

        Returns:
            The most probable of the nodes that remain and those that are forced. Forced nodes that were not drafted
            have the source SUCCESSOR and position -1. Should the grammar be too costly to follow along a draft, the
            nodes found until then: a guess that cannot be checked is none, and the answer itself may go elsewhere.
        """
        deepest = max_nodes if max_depth is None else min(max_nodes, max_depth)
        if deepest < 1 or self._ended:
            return DraftTree.empty()
        shaping = _Shaping(self._matcher.deep_copy(), tree, self._eos_ids, self._end, self._vocabulary_size, deepest)
        return shaping.run(max_nodes)

    def _may_end(self) -> bool:
        return bool(self._matcher.is_accepting())

    def _check(self) -> None:
        # A matcher that failed answers every question as if the answer had ended.
        if self._matcher.is_error():
            raise GrammarError(
                f"the grammar is too costly to follow: {_reason(self._matcher.get_error())}; use a simpler one"
            )


class Constraint:
    """The grammar of one answer as a logits processor: it follows the answer by the tokens before each choice.

    Args:
        state: At the start of the answer.
        prompt_tokens: Tokens before the answer.
    """

    def __init__(self, state: GrammarState, prompt_tokens: int) -> None:
        self._state = state
        self._followed = prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Mask scores [1, vocabulary] behind `input_ids` [1, length]; errors as in `GrammarState`."""
        self._follow(input_ids[0, self._followed :].tolist())
        masked = self._state.mask(scores[0])
        # `argmax` would take the first token of the vocabulary, whatever it is.
        if bool(torch.isneginf(masked).all()):
            raise GrammarError(
                "penalties, bans or processors forbid every token that the grammar allows here; leave one of them out"
            )
        return masked[None]

    def shape(self, tree: DraftTree, sequence: NDArray[np.int32], max_nodes: int, max_depth: int) -> DraftTree:
        """Fit a draft to the grammar; see `GrammarState.shape`.

        Args:
            tree: The draft behind `sequence`.
            sequence: int32 [length], prompt and answer so far.
            max_nodes: Most nodes of the result.
            max_depth: Longest path of the result.
        """
        self._follow(sequence[self._followed :].tolist())
        return self._state.shape(tree, max_nodes, max_depth)

    def _follow(self, tokens: list[int]) -> None:
        self._state.follow(tokens)
        self._followed += len(tokens)


class _Shaping:
    """One pass over a draft, depth first; see `GrammarState.shape`.

    Args:
        matcher: At the tree's root; changed.
        tree: The draft.
        eos_ids: Every token that ends an answer.
        end: The one of them that is drafted where nothing else may follow.
        vocabulary_size: Width of the model's logits.
        deepest: Longest path of the result.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        tree: DraftTree,
        eos_ids: frozenset[int],
        end: int,
        vocabulary_size: int,
        deepest: int,
    ) -> None:
        self._matcher = matcher
        self._tree = tree
        self._eos_ids = eos_ids
        self._end = end
        self._vocabulary_size = vocabulary_size
        self._deepest = deepest
        self._tokens: list[int] = tree.tokens.tolist()
        self._paths: list[float] = tree.probabilities.tolist()
        # The children of each drafted node; of the root at -1, and at -2 of nodes that are not drafted.
        self._children: list[list[int]] = [[] for _ in range(len(tree) + 2)]
        for node, parent in enumerate(tree.parents.tolist()):
            self._children[parent].append(node)
        # Candidates: token, parent among those found, depth, probability, its ratio to the drafted one, the drafted
        # node (-2: none), and what is forced behind it.
        self._open: list[tuple[int, int, int, float, float, int, list[int]]] = []

    def run(self, max_nodes: int) -> DraftTree:
        matcher = self._matcher
        found: list[tuple[int, int, int, int]] = []  # token, parent, depth, drafted node
        probabilities: list[float] = []
        consumed = 0
        self._expand(-1, 0, 1.0, 1.0, -1, [])
        while self._open:
            token, parent, depth, probability, ratio, drafted, forced = self._open.pop()
            if consumed >= depth:
                matcher.rollback(consumed - depth + 1)
                consumed = depth - 1
            ends = token in self._eos_ids
            if token >= self._vocabulary_size:
                continue
            if not (matcher.is_accepting() if ends else matcher.try_consume_tokens([token])):
                if matcher.is_error():
                    break
                continue
            found.append((token, parent, depth, drafted))
            probabilities.append(probability)
            if not ends:
                consumed = depth
                if depth < self._deepest:
                    self._expand(len(found) - 1, depth, probability, ratio, drafted, forced)
        return self._assemble(found, probabilities, max_nodes)

    def _expand(
        self, parent: int, depth: int, probability: float, ratio: float, drafted: int, forced: list[int]
    ) -> None:
        """Open the children of a node at which the matcher is; `parent` is its place among those found."""
        if not forced:
            forced = self._matcher.compute_ff_tokens()[: self._deepest - depth]
            if not forced and self._matcher.is_stopped():
                forced = [self._end]
        if forced:
            drafts = (child for child in self._children[drafted] if self._tokens[child] == forced[0])
            same = next(drafts, -2)
            # As probable as its parent, and what is below it accordingly.
            ratio = probability / self._paths[same] if same >= 0 else 1.0
            self._open.append((forced[0], parent, depth + 1, probability, ratio, same, forced[1:]))
            return
        for child in reversed(self._children[drafted]):
            path = min(self._paths[child] * ratio, probability)
            self._open.append((self._tokens[child], parent, depth + 1, path, ratio, child, []))

    def _assemble(
        self, found: list[tuple[int, int, int, int]], probabilities: list[float], max_nodes: int
    ) -> DraftTree:
        if not found:
            return DraftTree.empty()
        probability = np.array(probabilities)
        # Stable: parents were found before their children, and stay before equally probable ones.
        order = np.argsort(-probability, kind="stable")[:max_nodes]
        place = np.full(len(found) + 1, -1, np.int32)  # the last: of the root, -1
        place[order] = np.arange(len(order))
        tokens, parents, depths, drafted = np.array(found, np.int32)[order].T
        undrafted = np.zeros((kernels.TREE_FIELDS, 2), np.int32)
        undrafted[kernels.SOURCE], undrafted[kernels.POSITION] = SUCCESSOR, -1
        fields = np.concatenate([self._tree.fields, undrafted], axis=1)[:, drafted]
        fields[kernels.TOKEN], fields[kernels.PARENT], fields[kernels.DEPTH] = tokens, place[parents], depths
        return DraftTree(fields, probability[order])
