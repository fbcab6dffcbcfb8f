"""`reader-rag chat`: a conversation about documents."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from reader_rag.bench.option_groups import with_option_groups
from reader_rag.cli.display.show import show_citations, show_sources, show_stats, streamed
from reader_rag.cli.display.terminal import clean, output, print_error
from reader_rag.cli.loading import ModelOptions, require_store
from reader_rag.cli.options import QuestionOptions, StoreOptions
from reader_rag.errors import ReaderError
from reader_rag.util.source_title import source_title

if TYPE_CHECKING:
    from llama_index.core.schema import NodeWithScore

    from reader_rag.cli.answering.recorder import CallRecorder
    from reader_rag.rag.chat_engine import GroundedChatEngine

COMMANDS = {
    "/sources": "show the passages of the last answer, and what it copied from them",
    "/stats": "show counts and speed of the last answer",
    "/reset": "start a new conversation",
    "/help": "list these commands",
    "/quit": "end the chat (as does Ctrl-D)",
}


@with_option_groups
def chat(
    documents: StoreOptions = StoreOptions(),
    answering: QuestionOptions = QuestionOptions(),
    models: ModelOptions = ModelOptions(),
) -> None:
    """Chat about the documents of a store.

    Ctrl-C stops an answer. Commands: /sources, /stats, /reset, /help, /quit.
    """
    place = documents.place
    require_store(place)
    models.require_datastore()
    from reader_rag.cli.answering.answers import recorded
    from reader_rag.rag.engines import make_chat_engine, open_store

    embedding = models.load_embedding()
    with open_store(place, embedding, answering.tenant) as store:
        llm, recorder = recorded(models.load_llm(answering.max_tokens))
        chat_engine = make_chat_engine(
            store, llm, embedding, top_k=answering.top_k, cutoff=answering.cutoff, alpha=answering.alpha
        )
        ChatSession(chat_engine, recorder, output(), remote=models.engine is not None).run()


class ChatSession:
    """Reads messages and commands from standard input, and prints answers.

    Args:
        engine: The chat engine; it keeps the history.
        recorder: Records the calls of the engine's LLM.
        console: Answers are printed to it.
        remote: Whether a server answers; then Ctrl-C interrupts at once, not at the end of a decode step.
    """

    def __init__(
        self, engine: GroundedChatEngine, recorder: CallRecorder, console: Console, *, remote: bool = False
    ) -> None:
        self._engine = engine
        self._recorder = recorder
        self._console = console
        self._remote = remote
        self._nodes: Sequence[NodeWithScore] | None = None
        self._interactive = sys.stdin.isatty()
        if self._interactive:
            with suppress(ImportError):
                import readline  # noqa: F401  gives input() line editing and its own history

    def run(self) -> None:
        """Answer until the input ends or `/quit`."""
        if self._interactive:
            self._console.print(Text("Ask about the documents. /help lists the commands.", style="dim"))
        while (line := self._read()) is not None:
            if line == "/quit":
                return
            if line.startswith("/"):
                self._run_command(line)
            elif line:
                self._answer(line)

    def _read(self) -> str | None:
        """The next line without white space around it; None at the end of the input."""
        while True:
            try:
                return input("> " if self._interactive else "").strip()
            except EOFError:
                if self._interactive:
                    self._console.print()
                return None
            except KeyboardInterrupt:
                self._console.print(Text("\n/quit or Ctrl-D ends the chat", style="dim"))

    def _run_command(self, command: str) -> None:
        if command == "/sources":
            self._show_sources()
        elif command == "/stats":
            self._show_stats()
        elif command == "/reset":
            self._engine.reset()
            self._nodes = self._recorder.last = None
            self._console.print("A new conversation begins.")
        elif command == "/help":
            for name, meaning in COMMANDS.items():
                self._console.print(f"{name:9} {meaning}")
        else:
            print_error(f"there is no command {command}; use {', '.join(COMMANDS)}")

    def _answer(self, message: str) -> None:
        self._nodes = self._recorder.last = None
        try:
            with nullcontext(threading.Event()) if self._remote else _deferred_interrupt() as interrupted:
                response = self._engine.stream_chat(message)
                self._nodes = response.source_nodes
                show = streamed(self._console)
                with closing(response.response_gen) as pieces:
                    for piece in pieces:
                        if interrupted.is_set():
                            break
                        show(piece)
            self._console.print(" [stopped]" if interrupted.is_set() else "", markup=False)
        except KeyboardInterrupt:
            self._console.print("\n[stopped]", markup=False)
        except ReaderError as error:
            print_error(str(error))
            return
        if self._nodes and self._interactive:
            self._show_names(self._nodes)

    def _show_names(self, nodes: Sequence[NodeWithScore]) -> None:
        names = dict.fromkeys(
            str(metadata.get("file_name") or source_title(metadata) or "(no file)")
            for metadata in (node.node.metadata for node in nodes)
        )
        self._console.print(Text(clean(f"from {', '.join(names)} (/sources, /stats)"), style="dim"), soft_wrap=True)

    def _show_sources(self) -> None:
        if self._nodes is None:
            self._console.print("There is no answer yet.")
        elif not self._nodes:
            self._console.print("No passage was found for the last message.")
        else:
            from reader_rag.cli.answering.answers import citations_of

            call = self._recorder.last
            citations = (call and citations_of(call, self._nodes)) or ()
            show_sources(self._console, self._nodes, citations)
            show_citations(self._console, citations)

    def _show_stats(self) -> None:
        if self._recorder.last is None:
            self._console.print("There is no finished answer yet.")
        else:
            show_stats(self._console, self._recorder.last)


@contextmanager
def _deferred_interrupt() -> Iterator[threading.Event]:
    """Yield an event that the first Ctrl-C sets, so that a decode step ends; a second one interrupts at once."""
    interrupted = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # signals go to the main thread only
        yield interrupted
        return

    def handle(signum: int, frame: object) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt
        interrupted.set()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)
