"""Provenance: which tokens of an answer were copied from which characters of which passage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from reader_rag.draft.context_index import ContextIndex
from reader_rag.engine.outputs import CopiedSpan, Passage, Prompt

Offsets = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class _Copy:
    """The origin of a token: a position in a corpus of the draft index, and the passage's characters there, if any."""

    source: int
    position: int
    passage_id: str | None = None
    start: int = 0
    end: int = 0


class Provenance:
    """Records the origin of every token of an answer.

    A token has an origin if it is an accepted draft node, or if it continues the text that the token before it was
    copied from. A token copied from the answer itself inherits the origin of the token that it was copied from.

    Args:
        index: The request's draft index.
        prompt: The prompt that the index was made from.
    """

    def __init__(self, index: ContextIndex, prompt: Prompt) -> None:
        self._index = index
        self._prompt = prompt
        self._texts: dict[str, str] = {}
        self._starts: dict[str, list[int]] = {}
        self._offsets: dict[str, Offsets] = {}
        self._copies: list[_Copy | None] = []

    def mark(self, passage: Passage) -> bool:
        """Find a passage in the prompt and mark its tokens there.

        Args:
            passage: The passage.

        Returns:
            Whether the prompt contains its text.
        """
        text = passage.text.strip()
        if not text or self._prompt.offsets is None:
            return False
        inset = passage.text.index(text)
        at = self._prompt.text.find(text)
        found = False
        while at >= 0:
            inside = [
                k
                for k, (start, end) in enumerate(self._prompt.offsets)
                if start < at + len(text) and end > at and end > start
            ]
            if inside:
                self._index.mark_passage(passage.id, inside[0], inside[-1] + 1)
                self._texts[passage.id] = passage.text
                self._starts.setdefault(passage.id, []).append(at - inset)
                found = True
            at = self._prompt.text.find(text, at + len(text))
        return found

    def add(self, passage: Passage, token_ids: Sequence[int], offsets: Offsets | None) -> None:
        """Add a passage that the prompt does not contain to the draft index.

        Args:
            passage: The passage.
            token_ids: Token ids of its text.
            offsets: For each token its (start, end) characters; None if the tokenizer does not report them.
        """
        self._index.add_passage(passage.id, token_ids)
        if offsets is not None:
            self._texts[passage.id] = passage.text
            self._offsets[passage.id] = offsets

    def drafted(self, source: int, position: int) -> None:
        """Append a token that was an accepted draft node.

        Args:
            source: Code of the corpus that the node was copied from (`DraftTree.sources`).
            position: Position in that corpus (`DraftTree.positions`).
        """
        generated = position - len(self._prompt.token_ids)
        if source == 0 and generated >= 0:
            earlier = self._copies[generated]
            self._copies.append(earlier and _Copy(0, position, earlier.passage_id, earlier.start, earlier.end))
        else:
            self._copies.append(self._copy(source, position))

    def undrafted(self, token: int) -> None:
        """Append a token that was not drafted; it may continue the text that the token before it was copied from.

        Args:
            token: Its id.
        """
        last = self._copies[-1] if self._copies else None
        if last is not None:
            corpus = self._index.sequence if last.source == 0 else self._index.passages
            position = last.position + 1
            if position < len(corpus) and int(corpus[position]) == token:
                self.drafted(last.source, position)
                return
        self._copies.append(None)

    def _copy(self, source: int, position: int) -> _Copy | None:
        place = self._index.locate(source, position)
        if place.passage_id is None or place.passage_id not in self._texts:
            return _Copy(source, position)
        if place.apart:
            offsets = self._offsets.get(place.passage_id)
            if offsets is None:
                return _Copy(source, position)
            start, end = offsets[place.position]
        else:
            assert self._prompt.offsets is not None
            start, end = self._prompt.offsets[place.position]
            origin = max((s for s in self._starts[place.passage_id] if s <= end), default=0)
            start, end = start - origin, end - origin
        length = len(self._texts[place.passage_id])
        return _Copy(source, position, place.passage_id, max(start, 0), min(end, length))

    def spans(self, text: str, ends: Sequence[int]) -> tuple[CopiedSpan, ...]:
        """The spans of the answer that were copied from passages.

        Args:
            text: The answer.
            ends: For each of its tokens, the length of the text after it (`Detokenizer.ends`).

        Returns:
            Spans in order, not overlapping; each has the same characters in the answer and in the passage.
        """
        spans: list[CopiedSpan] = []
        run: tuple[str, int, int, int, int] | None = None
        for copy, begin, end in zip(self._copies, [0, *ends], ends, strict=False):
            if end <= begin:
                continue  # part of a character that a later token completes, or cut off by a stop string
            if copy is None or copy.passage_id is None:
                self._close(run, text, spans)
                run = None
            elif run is not None and run[0] == copy.passage_id and self._continues(run[0], run[2], copy.start):
                run = (run[0], run[1], copy.end, run[3], end)
            else:
                self._close(run, text, spans)
                run = (copy.passage_id, copy.start, copy.end, begin, end)
        self._close(run, text, spans)
        return tuple(spans)

    def _continues(self, passage_id: str, end: int, start: int) -> bool:
        """Whether only white space is between two tokens: some tokenizers leave it out of the tokens' characters."""
        return start >= end and not self._texts[passage_id][end:start].strip()

    def _close(self, run: tuple[str, int, int, int, int] | None, text: str, spans: list[CopiedSpan]) -> None:
        """Append a run of copied tokens to `spans` as far as answer and passage agree, without white space at its ends.

        The ends can differ, because a stop string can cut a token in two. The start is extended to the left over equal
        characters, because the match that the draft was made from begins before the first drafted token.
        """
        if run is None:
            return
        passage_id, start, end, begin, stop = run
        floor = spans[-1].text_end if spans else 0
        while start > 0 and begin > floor and self._texts[passage_id][start - 1] == text[begin - 1]:
            start, begin = start - 1, begin - 1
        source, answer = self._texts[passage_id][start:end], text[begin:stop]
        start += len(source) - len(source.lstrip())
        begin += len(answer) - len(answer.lstrip())
        pairs = zip(source.lstrip(), answer.lstrip(), strict=False)
        length = len("".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)).rstrip())
        if length:
            spans.append(CopiedSpan(passage_id, start, start + length, begin, begin + length))
