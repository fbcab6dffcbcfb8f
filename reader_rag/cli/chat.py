"""A conversation about documents, line by line."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from reader_rag.cli.answers import citations_of
from reader_rag.cli.display.show import show_citations, show_sources, show_stats, streamed
from reader_rag.cli.display.terminal import clean, print_error
from reader_rag.errors import ReaderError

if TYPE_CHECKING:
    from llama_index.core.schema import NodeWithScore

    from reader_rag.cli.recorder import CallRecorder
    from reader_rag.rag.chat_engine import GroundedChatEngine

COMMANDS = {
    "/sources": "the passages behind the last answer, and what it copied from them",
    "/stats": "counts and speed of the last answer",
    "/reset": "forget the conversation",
    "/help": "these commands",
    "/quit": "end (as does Ctrl-D)",
}


class ChatSession:
    """Reads messages from standard input, answers them, and obeys the commands.

    Args:
        engine: Answers the messages and keeps the history.
        recorder: Registered with the engine's LLM.
        console: Where answers go.
        remote: The answers are made elsewhere: Ctrl-C need not wait for a step of the model.
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
        """Go on until the input ends or `/quit`."""
        if self._interactive:
            self._console.print(Text("Ask about the documents. /help lists the commands.", style="dim"))
        while (line := self._read()) is not None:
            if line == "/quit":
                return
            if line.startswith("/"):
                self._obey(line)
            elif line:
                self._answer(line)

    def _read(self) -> str | None:
        """The next line; None at the end of the input."""
        while True:
            try:
                return input("> " if self._interactive else "").strip()
            except EOFError:
                if self._interactive:
                    self._console.print()
                return None
            except KeyboardInterrupt:
                self._console.print(Text("\n/quit or Ctrl-D ends the chat", style="dim"))

    def _obey(self, command: str) -> None:
        if command == "/sources":
            self._show_sources()
        elif command == "/stats":
            self._show_stats()
        elif command == "/reset":
            self._engine.reset()
            self._nodes = self._recorder.last = None
            self._console.print("The conversation is forgotten.")
        elif command == "/help":
            for name, meaning in COMMANDS.items():
                self._console.print(f"{name:9} {meaning}")
        else:
            print_error(f"there is no command {command}; use {', '.join(COMMANDS)}")

    def _answer(self, message: str) -> None:
        self._nodes = self._recorder.last = None
        try:
            with nullcontext(threading.Event()) if self._remote else _interrupt_noted() as interrupted:
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
        names = dict.fromkeys(str(node.node.metadata.get("file_name", "(no file)")) for node in nodes)
        self._console.print(Text(clean(f"from {', '.join(names)} (/sources, /stats)"), style="dim"), soft_wrap=True)

    def _show_sources(self) -> None:
        if self._nodes is None:
            self._console.print("There is no answer yet.")
        elif not self._nodes:
            self._console.print("Nothing was found in the documents for the last message.")
        else:
            call = self._recorder.last
            citations = (call and citations_of(call, self._nodes)) or ()
            show_sources(self._console, self._nodes, citations)
            show_citations(self._console, citations)

    def _show_stats(self) -> None:
        if self._recorder.last is None:
            self._console.print("There is no finished answer to count.")
        else:
            show_stats(self._console, self._recorder.last)


@contextmanager
def _interrupt_noted() -> Iterator[threading.Event]:
    """Within, the first Ctrl-C is noted, so that a step of the model is not torn; the second interrupts as usual."""
    noted = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # signals go to the main thread only
        yield noted
        return

    def note(signum: int, frame: object) -> None:
        if noted.is_set():
            raise KeyboardInterrupt
        noted.set()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)
