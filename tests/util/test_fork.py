"""A process that is forked after OpenMP's threads have started gets an error, and is neither killed nor hangs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from reader_rag.config import SamplingParams
from reader_rag.datastore import Datastore
from reader_rag.engine.engine import Engine
from reader_rag.util import fork

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork() on this system")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = fork._started_in
    yield
    fork._started_in = before


def in_child(call: Callable[[], object]) -> str:
    """What a forked child gets: "ok", or the error's class and message."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        message = "ok"
        try:
            call()
        except BaseException as error:
            message = f"{type(error).__name__}: {error}"
        os.write(write, message.encode())
        sys.stdout.flush()
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        message = pipe.read()
    assert os.waitpid(child, 0)[1] == 0, "the child was killed"
    return message


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_child_of_a_process_with_an_engine_gets_an_error(
    tiny_model: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    engine = Engine(tiny_model, tiny_tokenizer)
    prompt, params = engine.encode("the garden"), SamplingParams(max_tokens=4)
    expected = engine.generate(prompt, params).token_ids
    message = "ForkError: this process was forked after a model was loaded"
    assert in_child(lambda: engine.generate(prompt, params)).startswith(message)
    assert in_child(lambda: Engine(tiny_model, tiny_tokenizer)).startswith(message)
    assert in_child(lambda: Engine.load("smollm2-135m")).startswith(message)
    assert engine.generate(prompt, params).token_ids == expected
    engine.close()


def test_a_child_of_a_process_that_sorted_a_datastore_gets_an_error(tmp_path: Path) -> None:
    def add(folder: Path) -> None:
        with Datastore.open(folder, vocabulary=1000, tokenizer="t") as store:
            store.add("a", list(range(1, 100)))
            store.commit()
            store.compact(wait=True)

    add(tmp_path / "parent")
    assert in_child(lambda: add(tmp_path / "child")).startswith("ForkError: this process was forked")


def test_a_child_of_a_process_without_such_threads_may_start_them() -> None:
    fork._started_in = None
    assert in_child(fork.note_threads) == "ok"
    fork.note_threads()
    fork.note_threads()
    assert in_child(fork.check_not_forked).startswith("ForkError: this process was forked")
