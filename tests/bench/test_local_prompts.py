"""Prompts made from the texts of this machine: the same for a seed, of three kinds, from two corpora."""

from __future__ import annotations

from collections import Counter
from pydoc_data.topics import topics

import pytest

from reader_rag.bench import local_prompts as module
from reader_rag.bench.inputs import BenchPrompt
from reader_rag.bench.local_prompts import CHATS, local_prompts


@pytest.fixture(autouse=True)
def _read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Descriptions of made-up packages, instead of reading those of all installed ones each time."""
    held = [(f"package-{k}", f"Package {k} does thing {k}. " * (20 + 15 * k)) for k in range(20)]
    monkeypatch.setattr(module, "_descriptions", lambda: iter(held))


def of(prompts: list[BenchPrompt], category: str) -> list[BenchPrompt]:
    return [prompt for prompt in prompts if prompt.category == category]


def test_the_same_seed_gives_the_same_prompts() -> None:
    assert local_prompts(6, seed=3) == local_prompts(6, seed=3)
    assert local_prompts(6) == local_prompts(6, seed=0)


def test_another_seed_gives_other_texts_in_every_category() -> None:
    first, second = local_prompts(6, seed=0), local_prompts(6, seed=1)
    for category in ("chat", "rag", "summarization"):
        assert {p.text for p in of(first, category)} != {p.text for p in of(second, category)}


def test_the_same_seed_gives_the_same_prompts_in_whatever_order_packages_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = local_prompts(6)
    found = list(module._descriptions())
    monkeypatch.setattr(module, "_descriptions", lambda: reversed(found))
    assert local_prompts(6) == first


@pytest.mark.parametrize("each", [2, 4, 10])
def test_there_are_as_many_prompts_of_each_category_as_asked_for_half_of_them_from_each_corpus(each: int) -> None:
    prompts = local_prompts(each)
    assert Counter(prompt.category for prompt in prompts) == {"chat": each, "rag": each, "summarization": each}
    for category in ("rag", "summarization"):
        corpora = Counter(prompt.id.split("-")[1] for prompt in of(prompts, category))
        assert corpora == {"topics": each // 2, "packages": each // 2}


@pytest.mark.parametrize("each", [1, 3, 7])
def test_there_are_never_more_prompts_of_a_category_than_asked_for(each: int) -> None:
    assert max(Counter(prompt.category for prompt in local_prompts(each)).values()) <= each


def test_there_are_no_more_chats_than_are_written_down() -> None:
    assert len(of(local_prompts(100), "chat")) == len(CHATS) == len(set(CHATS))


def test_ids_are_unique_and_categories_come_one_after_the_other() -> None:
    prompts = local_prompts(10)
    assert len({prompt.id for prompt in prompts}) == len(prompts)
    assert [prompt.category for prompt in prompts] == sorted(prompt.category for prompt in prompts)
    assert all(prompt.id.startswith(f"{prompt.category}-") for prompt in prompts)


def test_a_question_has_three_passages_one_of_them_of_the_title_it_asks_about() -> None:
    for prompt in of(local_prompts(10), "rag"):
        assert prompt.text.startswith("Answer the question from the passages.\n\n[1] ")
        assert [f"\n\n[{k}] " in prompt.text for k in (1, 2, 3, 4)] == [True, True, True, False]
        title = prompt.text.rpartition("\n\nQuestion: What do the passages say about ")[2].removesuffix("?")
        if prompt.id.startswith("rag-packages-"):
            assert f"does thing {title.removeprefix('package-')}." in prompt.text
        else:
            # Some part of the title's text is a passage: at most 900 characters of it, from anywhere.
            passages = prompt.text.partition("[1] ")[2].rpartition("\n\nQuestion: ")[0]
            assert any(line in topics[title] for line in passages.splitlines() if len(line) > 30)


def test_a_text_to_summarise_is_the_beginning_of_a_long_one() -> None:
    whole = {text.strip()[:2600] for text in topics.values()} | {text[:2600] for _, text in module._descriptions()}
    for prompt in of(local_prompts(10), "summarization"):
        instruction, text = prompt.text.split("\n\n", 1)
        assert instruction == "Summarize the following text."
        assert len(text) == 2600
        assert text in whole


def test_chats_come_without_a_text() -> None:
    assert {prompt.text for prompt in of(local_prompts(10), "chat")} <= set(CHATS)


def test_no_title_is_asked_about_and_summarised_while_there_are_titles_enough() -> None:
    # Questions take titles from one end of a shuffled list, summaries from the other.
    prompts = local_prompts(4)
    asked = {prompt.text.rpartition("say about ")[2].removesuffix("?") for prompt in of(prompts, "rag")}
    summarised = {prompt.text.partition("\n\n")[2] for prompt in of(prompts, "summarization")}
    texts = dict(module._descriptions()) | {name: text.strip() for name, text in topics.items()}
    assert not {texts[title][:2600] for title in asked} & summarised


def test_the_installed_packages_have_descriptions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    text = next(text for name, text in module._descriptions() if name == "numpy")
    assert "array" in text
    assert "\n\n\n" not in text
