"""Many prompts decoded to their ends, together."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Unpack

from tqdm.auto import tqdm

from reader_rag.config import SamplingParams
from reader_rag.engine.outputs import Generation, Passage, Prompt
from reader_rag.engine.reader_stream import GenerationStream
from reader_rag.engine.sequence import Request
from reader_rag.engine.stream import ScheduledStream
from reader_rag.errors import BatchError, BusyError, ConfigError

if TYPE_CHECKING:
    from reader_rag.engine.engine import Engine, RequestOptions

_AHEAD = 4
"""Requests that are submitted at once, times those that are decoded at once."""
_PATIENCE_S = 0.1


def generate_all(
    engine: Engine,
    prompts: Sequence[Prompt],
    generation: SamplingParams | Sequence[SamplingParams] | None,
    passages: Sequence[Sequence[Passage]],
    *,
    progress: bool,
    **options: Unpack[RequestOptions],
) -> list[Generation]:
    """See `Engine.generate`."""
    count = len(prompts)
    if options.get("sampler") is not None:
        raise ConfigError("a sampler chooses the tokens of one answer; decode these prompts one by one")
    each = [generation] * count if generation is None or isinstance(generation, SamplingParams) else list(generation)
    given = list(passages) or [()] * count
    for name, values in (("settings", each), ("passages", given)):
        if len(values) != count:
            raise ConfigError(f"{len(values)} {name} for {count} prompts; give one for each, or leave them out")
    asked = [
        engine.asked(prompt, config, texts, **options)
        for prompt, config, texts in zip(prompts, each, given, strict=True)
    ]
    results: list[Generation | Exception] = []
    going: deque[ScheduledStream | GenerationStream] = deque()
    with tqdm(total=count, unit="answer", disable=not progress) as bar:

        def finish_first() -> None:
            results.append(_result(going.popleft()))
            bar.update()

        try:
            for one in asked:
                # Enough of them wait that no place stays empty while the first is still decoded.
                while len(going) >= _AHEAD * engine.scheduler.max_rows:
                    finish_first()
                while (stream := _submitted(engine, one)) is None:
                    if going:
                        finish_first()
                    else:
                        time.sleep(_PATIENCE_S)  # all places are others'
                going.append(stream)
            while going:
                finish_first()
        finally:
            for stream in going:
                stream.close()
    failed = [result for result in results if isinstance(result, Exception)]
    if failed:
        message = f"{len(failed)} of {count} answers failed, the first with: {failed[0]}"
        raise BatchError(message, results) from failed[0]
    return [result for result in results if isinstance(result, Generation)]


def _submitted(engine: Engine, asked: Request) -> ScheduledStream | GenerationStream | None:
    """The answer in the making, or None while too many others wait."""
    try:
        return engine.open(asked, patient=True)
    except BusyError:
        return None


def _result(stream: ScheduledStream | GenerationStream) -> Generation | Exception:
    try:
        for _ in stream:
            pass
    except Exception as error:
        return error
    return stream.result
