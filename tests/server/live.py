"""A service behind a real socket, and requests written byte by byte."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from waiting import LIMIT_S, join, wait_until

from reader_rag.server.running import listen, make_server
from reader_rag.server.service import Service


@contextmanager
def live(service: Service) -> Iterator[tuple[uvicorn.Server, int]]:
    """Serve on a free port in a thread; yields the server and the port."""
    taken = listen(service.config)
    server = make_server(service)
    thread = threading.Thread(target=server.run, args=([taken],))
    thread.start()
    try:
        wait_until(lambda: server.started, "the start of the service")
        yield server, taken.getsockname()[1]
    finally:
        server.should_exit = True
        join(thread)


def exchange(port: int, *parts: bytes) -> bytes:
    """Send parts, and read until the service closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) as connection:
        for part in parts:
            connection.sendall(part)
        received = b""
        while data := connection.recv(1 << 16):
            received += data
        return received
