"""A scripted server for the tests of the OpenAI connector. Imports no LlamaIndex: the tests with vLLM have none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from scripted_server import Script, serving


@pytest.fixture
def script() -> Script:
    """The behaviour of the server `url`."""
    return Script()


@pytest.fixture
def url(script: Script) -> Iterator[str]:
    """The address of a running server."""
    with serving(script) as address:
        yield address
