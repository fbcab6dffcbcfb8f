"""An engine that answers from a script, for tests of what stands around the engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from reader_rag.config import DraftConfig, EngineConfig, SamplingParams
from reader_rag.engine.outputs import Chunk, CopiedSpan, Generation, Passage, Prompt, Stats
from reader_rag.errors import PromptError

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
NO_SYSTEM_TEMPLATE = TEMPLATE.replace(
    "{% for m in messages %}",
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}{% for m in messages %}",
)


def make_tokenizer(chat_template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token per byte, `<s>` put first."""
    vocabulary = {symbol: i for i, symbol in enumerate(["<s>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")
    fast.chat_template = chat_template
    return fast


@dataclass
class Call:
    prompt: Prompt
    generation: SamplingParams
    passages: tuple[Passage, ...]
    tenant: str
    draft: DraftConfig | None
    recall: bool = True
    logits_processor: tuple[Any, ...] = ()
    stopping_criteria: tuple[Any, ...] = ()
    prediction: str = ""


@dataclass
class ScriptedEngine:
    """Answers a prompt with the prompt's words backwards, one word a step, or with `script`."""

    tokenizer: Any = field(default_factory=make_tokenizer)
    script: list[str] | None = None
    fails_at: int | None = None
    name: str = "scripted"
    context_window: int = 4096
    config: EngineConfig = field(default_factory=EngineConfig)
    prefix_bytes: int = 0
    model: Any = field(default_factory=lambda: SimpleNamespace(dtype="torch.float32", device="cpu"))

    def __post_init__(self) -> None:
        self.calls: list[Call] = []
        self.streams: list[ScriptedStream] = []
        self.chats: list[list[dict[str, str]]] = []
        self.lock = threading.Lock()
        self.step_begun = threading.Event()
        self.may_step = threading.Event()
        self.may_step.set()
        self.worker = ThreadPoolExecutor(1)

    def encode(self, text: str) -> Prompt:
        return Prompt(self.tokenizer(text)["input_ids"], text)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> Prompt:
        self.chats.append([dict(message) for message in messages])
        text = self.tokenizer.apply_chat_template(
            messages, tools=[dict(tool) for tool in tools] or None, tokenize=False, add_generation_prompt=True
        )
        return Prompt(self.tokenizer(text, add_special_tokens=False)["input_ids"], text)

    def submit(
        self,
        prompt: Prompt,
        generation: SamplingParams,
        passages: Sequence[Passage] = (),
        *,
        tenant: str = "",
        draft: DraftConfig | None = None,
        recall: bool = True,
        logits_processor: Sequence[Any] = (),
        stopping_criteria: Sequence[Any] = (),
        prediction: str = "",
    ) -> ScriptedStream:
        if len(prompt.token_ids) > self.context_window:
            raise PromptError("the prompt is longer than the context window")
        given = (tuple(logits_processor), tuple(stopping_criteria))
        self.calls.append(Call(prompt, generation, tuple(passages), tenant, draft, recall, *given, prediction))
        self.streams.append(ScriptedStream(self, prompt, generation))
        return self.streams[-1]


class ScriptedStream(Iterator[Chunk], AsyncIterator[Chunk]):
    def __init__(self, engine: ScriptedEngine, prompt: Prompt, generation: SamplingParams) -> None:
        pieces = engine.script or backwards(prompt.text)
        self.finish_reason = "length" if len(pieces) > generation.max_tokens else "stop"
        self.pieces = pieces[: generation.max_tokens]
        self.engine, self.prompt = engine, prompt
        self.steps = 0
        self.closed = threading.Event()

    def __next__(self) -> Chunk:
        with self.engine.lock:
            if self.closed.is_set() or self.steps == len(self.pieces):
                raise StopIteration
            self.engine.step_begun.set()
            if not self.engine.may_step.wait(timeout=20):
                raise TimeoutError("the test never let this step go on: the event loop was blocked")
            if self.steps == self.engine.fails_at:
                raise RuntimeError("the accelerator caught fire")
            self.steps += 1
            done = self.steps == len(self.pieces)
            return Chunk(self.pieces[self.steps - 1], (self.steps,), self.finish_reason if done else None)

    async def __anext__(self) -> Chunk:
        chunk = await asyncio.get_running_loop().run_in_executor(self.engine.worker, next, self, None)
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    def finish(self) -> Generation:
        for _ in self:
            pass
        return self.result

    def close(self) -> None:
        self.closed.set()

    @property
    def result(self) -> Generation:
        stats = Stats(
            prompt_tokens=len(self.prompt.token_ids), completion_tokens=self.steps, steps=4, drafted=9, accepted=5
        )
        copied = (CopiedSpan("node-1", 10, 14, 0, 4),)
        text = "".join(self.pieces[: self.steps])
        return Generation(text, tuple(range(self.steps)), self.finish_reason, stats, copied)


def backwards(text: str) -> list[str]:
    return [f"{word} " for word in reversed(text.split())]
