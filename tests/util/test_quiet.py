"""What other libraries print while they load is held back, and nothing else is."""

from __future__ import annotations

import io
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from reader_rag.errors import ModelError
from reader_rag.model.loading import load_model
from reader_rag.util.quiet import quiet_loading

LIBRARY = logging.getLogger("some_library.backends.cpu")


def _print_everywhere() -> None:
    print("on standard output")
    print("on standard error", file=sys.stderr)
    LIBRARY.error("logged %d", 1)


@contextmanager
def no_logging_set_up() -> Iterator[None]:
    """As in a process whose host has not set up logging; pytest has."""
    handlers, logging.root.handlers = logging.root.handlers, []
    try:
        yield
    finally:
        logging.root.handlers = handlers


def test_nothing_is_printed_while_loading_and_all_of_it_afterwards(capsys: pytest.CaptureFixture[str]) -> None:
    with no_logging_set_up():
        with quiet_loading():
            _print_everywhere()
        assert capsys.readouterr() == ("", "")
        _print_everywhere()
    assert capsys.readouterr() == ("on standard output\n", "on standard error\nlogged 1\n")


def test_a_librarys_own_handler_prints_nothing_while_loading() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    LIBRARY.addHandler(handler)
    try:
        with quiet_loading():
            LIBRARY.warning("held back")
        LIBRARY.warning("printed")
    finally:
        LIBRARY.removeHandler(handler)
    assert stream.getvalue() == "printed\n"


def test_a_stream_that_a_library_stored_while_loading_prints_afterwards(capsys: pytest.CaptureFixture[str]) -> None:
    with quiet_loading():
        stored = sys.stderr
        stored.write("held back")
    stored.write("printed")
    assert capsys.readouterr().err == "printed"


def test_what_the_hosts_logging_asks_for_arrives(caplog: pytest.LogCaptureFixture) -> None:
    with quiet_loading():
        LIBRARY.warning("logged")
    assert caplog.messages == ["logged"]


def test_other_threads_print_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    with quiet_loading():
        other = threading.Thread(target=print, args=("from another thread",))
        other.start()
        other.join(timeout=30)
        print("from this thread")
    assert capsys.readouterr().out == "from another thread\n"


def test_two_threads_that_end_in_the_order_they_began_leave_the_streams_as_they_were() -> None:
    before = (sys.stdout, sys.stderr)
    entered, may_leave = threading.Event(), threading.Event()

    def load() -> None:
        with quiet_loading():
            entered.set()
            may_leave.wait(timeout=30)

    with quiet_loading(), quiet_loading():
        other = threading.Thread(target=load)
        other.start()
        assert entered.wait(timeout=30)
    may_leave.set()
    other.join(timeout=30)
    assert (sys.stdout, sys.stderr) == before


def test_an_error_brings_what_was_printed_as_a_note() -> None:
    def load() -> None:
        with quiet_loading():
            print("no kernel for 4 bits")
            raise ValueError("cannot load")

    with pytest.raises(ValueError, match=r"^cannot load") as caught:
        load()
    assert caught.value.__notes__ == ["Printed meanwhile:\nno kernel for 4 bits"]


def test_nothing_is_held_back_when_the_package_is_debugged(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, logger="reader_rag"), quiet_loading():
        print("shown")
    assert capsys.readouterr().out == "shown\n"


def test_weights_of_4_bits_that_cannot_be_used_are_an_error(
    tmp_path: Path,
    tiny_model: LlamaForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import transformers.quantizers.quantizer_bnb_4bit as quantizer

    tiny_model.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    quantised = '{"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": true},'
    config.write_text(config.read_text().replace("{", quantised, 1))

    def refuse(*_: object, **__: object) -> None:
        raise ImportError("this machine has no kernels for 4 bits")

    monkeypatch.setattr(quantizer.Bnb4BitHfQuantizer, "validate_environment", refuse)
    with pytest.raises(ModelError, match="this machine has no kernels for 4 bits"):
        load_model(tmp_path)
