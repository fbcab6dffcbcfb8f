"""Chat templates that do not end, or make too much of the messages, are ended."""

from __future__ import annotations

import copy
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from transformers import PreTrainedTokenizerFast

from reader_rag.engine.text import template as template_module
from reader_rag.engine.text.template import render_chat
from reader_rag.errors import ConfigError
from reader_rag.util.bounded_call import BoundExceeded, bounded_call

MESSAGES = [{"role": "user", "content": "the garden"}]

ENDLESS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "one range": "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
    "output": "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "set": "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = a %}{% endfor %}{% endfor %}",
    "filter": "{% for a in range(99999) %}{{ range(99999) | map('string') | join | length }}{% endfor %}",
    "macro": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "recursive loop": "{% for a in [[1, 1]] * 20 recursive %}{{ loop([[1, 1]] * 20) }}{% endfor %}",
    "memory": "{% set n = namespace(s='x' * 1000) %}{% for a in range(99999) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
}


@pytest.fixture
def tokenizer(tiny_tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    return copy.deepcopy(tiny_tokenizer)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_module, "_SECONDS", 0.3)
    monkeypatch.setattr(template_module, "_MEMORY_BYTES", 256 << 20)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("name", ENDLESS)
def test_templates_without_an_end_are_ended(tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    tokenizer.chat_template = ENDLESS[name]
    with pytest.raises(ConfigError, match="the chat template of m (takes|refuses)"):
        render_chat(tokenizer, "m", MESSAGES)
    with ThreadPoolExecutor(1) as pool, pytest.raises(ConfigError, match="the chat template of m (takes|refuses)"):
        pool.submit(render_chat, tokenizer, "m", MESSAGES).result()
    tokenizer.chat_template = "{{ messages[0].content }}"
    assert render_chat(tokenizer, "m", MESSAGES) == "the garden"


@pytest.mark.parametrize("power", ["{{ 9**9**9 }}", "{{ 9 ** n }}", "{% set a = (9)**9 %}", "{{ f(1, 9**9) }}"])
def test_powers_are_refused_before_they_are_computed(tokenizer: PreTrainedTokenizerFast, power: str) -> None:
    tokenizer.chat_template = power
    with pytest.raises(ConfigError, match="computes powers"):
        render_chat(tokenizer, "m", MESSAGES)


def test_keyword_arguments_are_no_powers(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = "{{ dict(**messages[0]).content }} ** {{ dict(a=1, **{'b': 2}) | length }}"
    assert render_chat(tokenizer, "m", MESSAGES) == "the garden ** 2"


def test_a_template_that_makes_too_much_text_is_refused(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_module, "_MOST_CHARACTERS", 1000)
    tokenizer.chat_template = "{{ 'x' * 1001 }}"
    with pytest.raises(ConfigError, match="makes 1001 characters of the messages"):
        render_chat(tokenizer, "m", MESSAGES)


def test_a_call_that_ends_in_time_is_not_interrupted_later() -> None:
    for _ in range(20):
        seconds = 0.05
        try:
            bounded_call(lambda seconds=seconds: time.sleep(seconds), seconds=seconds, memory_bytes=1 << 30)
        except BoundExceeded:
            continue
    for _ in range(1000):
        time.sleep(0)  # an exception that is still to come would be raised here
    assert bounded_call(lambda: 5, seconds=60, memory_bytes=1 << 30) == 5
    with pytest.raises(KeyError):
        bounded_call(lambda: {}[5], seconds=60, memory_bytes=1 << 30)
    assert not any(thread.name == "reader-rag-watch" and thread.is_alive() for thread in _settled_threads())


def _settled_threads() -> list[threading.Thread]:
    for thread in threading.enumerate():
        if thread.name == "reader-rag-watch":
            thread.join(timeout=60)
    return threading.enumerate()
