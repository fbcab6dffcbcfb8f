"""An HTTP server with OpenAI's protocol as vLLM implements it, with scripted answers and failures.

It imports no LlamaIndex: the tests with vLLM, which collect this folder, have none.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = Callable[["Handler"], None]
CHAT, COMPLETIONS, MODELS = "/v1/chat/completions", "/v1/completions", "/v1/models"


@dataclass
class Asked:
    """A received request."""

    path: str
    headers: dict[str, str]
    body: Any


@dataclass
class Script:
    """The behaviour of the server.

    Attributes:
        models: The list in `/v1/models`.
        pieces: The pieces of the answer.
        finish_reason: The answer's finish reason; None: the stream has no end.
        usage: The answer's token counts; None: not reported.
        counts_tokens: Whether there is a `/tokenize`, with one token a word.
        has_template: Whether `/tokenize` has a chat template.
        pause_s: Seconds before each piece.
        replies: Handlers that replace the normal answer, by path.
        asked: The requests so far.
        left: Set when a client closed the connection before the end of its answer.
    """

    models: Any = field(default_factory=lambda: [{"id": "bird", "max_model_len": 2000}])
    pieces: tuple[str, ...] = ("The heron ", "stands still.")
    finish_reason: str | None = "stop"
    usage: dict[str, Any] | None = field(default_factory=lambda: {"prompt_tokens": 40, "completion_tokens": 5})
    counts_tokens: bool = True
    has_template: bool = True
    pause_s: float = 0.0
    replies: dict[str, Reply] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    left: threading.Event = field(default_factory=threading.Event)

    def bodies(self, path: str) -> list[Any]:
        """The bodies of the requests to a path."""
        return [asked.body for asked in self.asked if asked.path == path]


class Handler(BaseHTTPRequestHandler):
    """Answers one client."""

    protocol_version = "HTTP/1.1"
    server: Any
    asked: Asked

    @property
    def script(self) -> Script:
        script: Script = self.server.script
        return script

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: tests read standard error."""

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.asked = Asked(self.path, {k.lower(): v for k, v in self.headers.items()}, json.loads(body or "null"))
        self.script.asked.append(self.asked)
        usual = {
            "/v1/models": self.list_models,
            "/tokenize": self.tokenize,
            "/v1/chat/completions": self.say,
            "/v1/completions": self.say,
        }
        try:
            if self.path in self.script.replies:
                self.script.replies[self.path](self)
            else:
                usual.get(self.path, lambda: self.fail(404, "Not Found"))()
        except OSError:
            self.script.left.set()
            self.close_connection = True

    def send_json(self, status: int, value: Any, **headers: str) -> None:
        text = json.dumps(value).encode()
        self.send_response(status)
        for name, header in headers.items():
            self.send_header(name.replace("_", "-"), header)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def fail(self, status: int, message: str, code: Any = None) -> None:
        """An error as vLLM tells it; a client that asks again need not wait."""
        error = {"message": message, "type": "Error", "code": code or status}
        self.send_json(status, {"error": error}, retry_after_ms="1")

    def list_models(self) -> None:
        self.send_json(200, {"object": "list", "data": self.script.models})

    def tokenize(self) -> None:
        asked = self.asked.body
        if not self.script.counts_tokens:
            self.fail(404, "Not Found")
        elif "messages" in asked and not self.script.has_template:
            self.fail(400, "there is no chat template")
        else:
            said = [asked["prompt"]] if "prompt" in asked else [f"<x> {m['content']} </x>" for m in asked["messages"]]
            tokens = list(range(sum(len(text.split()) for text in said)))
            self.send_json(200, {"count": len(tokens), "max_model_len": 2000, "tokens": tokens})

    def say(self) -> None:
        if not self.asked.body.get("stream"):
            choice = self._choice("".join(self.script.pieces), self.script.finish_reason, "message")
            self.send_json(200, self._event(choice))
            return
        self.start_stream()
        for piece in self.script.pieces:
            self.send_piece(piece)
        if self.script.finish_reason is not None:
            self.send_event(self._event(self._choice("", self.script.finish_reason, "delta"), usage=None))
            if self.script.usage is not None and self.asked.body.get("stream_options", {}).get("include_usage"):
                self.send_event(self._event())
            self.send_chunk("data: [DONE]\n\n")
        self.send_chunk("")

    def start_stream(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()

    def send_piece(self, text: str) -> None:
        time.sleep(self.script.pause_s)
        self.send_event(self._event(self._choice(text, None, "delta"), usage=None))

    def send_event(self, value: Any) -> None:
        self.send_chunk(f"data: {json.dumps(value)}\n\n")

    def send_chunk(self, text: str) -> None:
        self.wfile.write(f"{len(text.encode()):x}\r\n{text}\r\n".encode())
        self.wfile.flush()

    def _choice(self, text: str, finish_reason: str | None, kind: str) -> dict[str, Any]:
        said = {kind: {"role": "assistant", "content": text}} if "messages" in self.asked.body else {"text": text}
        return {"index": 0, "finish_reason": finish_reason, "logprobs": None, **said}

    def _event(self, *choices: Any, **more: Any) -> dict[str, Any]:
        model = self.asked.body["model"]
        reported_values = {"id": "c-1", "object": "x", "created": 1, "model": model, "usage": self.script.usage}
        return reported_values | {"choices": list(choices)} | more


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, script: Script) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script = script

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no error; anything else is shown."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def serving(script: Script) -> Iterator[str]:
    """The API's address, while the server runs."""
    server = _Server(script)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=60)


def failing(status: int, message: str, code: Any = None) -> Reply:
    """A reply with an error status."""
    return lambda handler: handler.fail(status, message, code)


def interrupted(handler: Handler) -> None:
    """Sends a piece of a stream and closes the connection."""
    handler.start_stream()
    handler.send_piece("The heron ")
    handler.close_connection = True


def silent(handler: Handler) -> None:
    """Sends nothing until the client leaves."""
    handler.server.script.left.wait(5)
    handler.close_connection = True


def body(data: bytes, **headers: str) -> Reply:
    """A reply with any body.

    Args:
        data: The body.
        headers: More headers, with underscores in place of hyphens.
    """

    def reply(handler: Handler) -> None:
        handler.send_response(200)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("content-length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    return reply
