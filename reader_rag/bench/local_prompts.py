"""Prompts made from texts that every machine with Python has, for tuning and measuring.

Three categories, as in Spec-Bench: questions with retrieved passages ("rag"), texts to summarise ("summarization"), and
requests without a text ("chat"). The first two are made from two corpora each: Python's language reference and
the descriptions of the installed packages.
"""

from __future__ import annotations

import importlib.metadata
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from reader_rag.bench.inputs import BenchPrompt, read_prompts
from reader_rag.errors import ConfigError

_PASSAGE = 900
"""Characters of a passage."""
_TEXT = 2600
"""Characters of a text to summarise."""

CHATS = (
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "Explain to a child why the sky is blue.",
    "Give me a recipe for vegetable soup, with amounts and steps.",
    "What are the advantages and disadvantages of working from home?",
    "Write a polite email that asks a colleague to move a meeting to Thursday.",
    "Write a Python function that returns the n-th Fibonacci number, and explain it.",
    "Compare cats and dogs as pets.",
    "List ten ideas for a rainy weekend with children.",
    "How does a refrigerator keep things cold?",
    "Describe the water cycle step by step.",
    "Write a poem about autumn in four stanzas.",
    "What should I pack for a week of hiking in the mountains?",
    "Explain the difference between a virus and a bacterium.",
    "Make a weekly training plan for someone who wants to run five kilometres.",
    "Write a product description for a wooden desk lamp.",
    "Why did the Roman Empire fall? Give several reasons.",
    "Write a SQL query that lists the ten customers with the most orders, and explain it.",
    "How do I remove a coffee stain from a cotton shirt?",
    "Write a dialogue between a customer and a bookseller.",
    "What is inflation, and what does it do to savings?",
    "Explain how a bicycle stays upright.",
    "Draft a short speech for a friend's birthday.",
    "What are the main parts of a plant, and what does each do?",
    "Give me tips for learning a new language.",
    "Write an HTML page with a heading, a list and a link, and explain each part.",
    "Tell me about the planets of the solar system.",
    "How is paper made?",
    "Write a letter of complaint about a late delivery.",
    "What is the difference between a list and a tuple in Python?",
    "Plan a day in a city by the sea for a family of four.",
)


def prompts_or_local(
    path: Path | None, categories: Sequence[str], limit: int | None, each: int, seed: int = 0
) -> list[BenchPrompt]:
    """The prompts of a file, or `local_prompts` if there is none.

    Args:
        path: The file, or None.
        categories: Keep these; none: all.
        limit: Most prompts of each category; None: all of the file.
        each: Local prompts of each category if `limit` is None.
        seed: Decides which texts local prompts are made from.

    Raises:
        ConfigError: The file cannot be read, a line is not of its form, or there is no such category.
    """
    if path is not None:
        return read_prompts(path, categories, limit)
    prompts = local_prompts(each if limit is None else limit, seed)
    prompts = [prompt for prompt in prompts if not categories or prompt.category in categories]
    if not prompts:
        raise ConfigError(
            f"--categories {','.join(categories)}: without --prompts there are rag, summarization and chat"
        )
    return prompts


def local_prompts(each: int, seed: int = 0) -> list[BenchPrompt]:
    """Prompts of all three categories.

    Args:
        each: Most prompts of each category; half of those with a text come from each corpus.
        seed: Decides which texts are taken.
    """
    draw = random.Random(seed)
    corpora = {"topics": _topics(), "packages": _packages()}
    prompts = []
    for name, texts in corpora.items():
        titles = sorted(texts)
        draw.shuffle(titles)
        share = (each + 1) // 2 if name == "topics" else each // 2
        for number, title in enumerate(titles[:share]):
            others = [other for other in draw.sample(titles, 3) if other != title][:2]
            passages = [_passage(texts[other], draw) for other in (title, *others)]
            draw.shuffle(passages)
            prompts.append(BenchPrompt(f"rag-{name}-{number}", "rag", _question(title, passages)))
        long = [title for title in titles if len(texts[title]) > _TEXT]
        for number, title in enumerate(long[len(long) - min(share, len(long)) :]):
            text = f"Summarize the following text.\n\n{texts[title][:_TEXT]}"
            prompts.append(BenchPrompt(f"summarization-{name}-{number}", "summarization", text))
    chats = draw.sample(CHATS, min(each, len(CHATS)))
    prompts += [BenchPrompt(f"chat-{number}", "chat", text) for number, text in enumerate(chats)]
    return sorted(prompts, key=lambda prompt: prompt.category)


_EDITS = (
    ("Answer the question from the passages.", "Please answer this question, using the passages below."),
    ("What do the passages say about", "What can one learn from the passages about"),
    ("Summarize the following text.", "Please give me a summary of this text."),
    ("Explain ", "Could you explain "),
    ("Write a ", "Please write a "),
    ("What are ", "Tell me: what are "),
    ("How do", "Please tell me how do"),
    ("Give me ", "I would like "),
)
"""Other words for the same request; those that occur in a prompt are replaced."""


def reworded(prompts: Sequence[BenchPrompt]) -> list[BenchPrompt]:
    """Other phrasings of the requests; the texts quoted in them are unchanged."""
    return [BenchPrompt(f"{prompt.id}-edited", prompt.category, _reworded(prompt.text)) for prompt in prompts]


def _reworded(text: str) -> str:
    for plain, other in _EDITS:
        text = text.replace(plain, other, 1)
    return text if any(other in text for _, other in _EDITS) else f"Please help me with this. {text}"


def _question(title: str, passages: list[str]) -> str:
    context = "\n\n".join(f"[{number}] {passage}" for number, passage in enumerate(passages, 1))
    return f"Answer the question from the passages.\n\n{context}\n\nQuestion: What do the passages say about {title}?"


def _passage(text: str, draw: random.Random) -> str:
    start = draw.randrange(max(len(text) - _PASSAGE, 1))
    return text[start : start + _PASSAGE].strip()


def _topics() -> dict[str, str]:
    from pydoc_data.topics import topics

    return {name: text.strip() for name, text in topics.items() if len(text) > 300}


def _packages() -> dict[str, str]:
    return {name: text for name, text in _descriptions() if len(text) > 300}


def _descriptions() -> Iterator[tuple[str, str]]:
    for distribution in importlib.metadata.distributions():
        metadata: Any = distribution.metadata
        text = str(metadata.json.get("description") or "")
        text = re.sub(r"<[^>]+>|!?\[[^\]]*\]\([^)]*\)|^\s*(\.\. |:).*$", "", text, flags=re.MULTILINE)
        yield str(metadata["Name"]), re.sub(r"\n{3,}", "\n\n", text).strip()
