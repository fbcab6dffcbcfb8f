"""Records the calls of an LLM through LlamaIndex's callbacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.callbacks import CBEventType, EventPayload
from llama_index.core.callbacks.base_handler import BaseCallbackHandler

from reader_rag.engine.outputs import CopiedSpan


@dataclass(frozen=True)
class LLMCall:
    """One finished call of an LLM.

    Attributes:
        messages: The messages of the chat; empty for a completion.
        prompt: The text that was completed; empty for a chat.
        answer: The text that was generated.
        metrics: Counts and times of the call by the names of `Stats`; of a server's answer those that it reports.
        copied: Spans of the answer that were copied from the passages in its prompt; None if copies were not recorded.
        finish_reason: "stop" or "length", or the server's word.
    """

    messages: Sequence[ChatMessage]
    prompt: str
    answer: str
    metrics: dict[str, Any]
    copied: tuple[CopiedSpan, ...] | None
    finish_reason: str


class CallRecorder(BaseCallbackHandler):
    """Keeps the last finished call of the LLM that it is registered with. A call that was stopped is not kept."""

    def __init__(self) -> None:
        super().__init__(event_starts_to_ignore=[], event_ends_to_ignore=[])
        self.last: LLMCall | None = None

    def on_event_start(
        self,
        event_type: CBEventType,
        payload: dict[str, Any] | None = None,
        event_id: str = "",
        parent_id: str = "",
        **kwargs: Any,
    ) -> str:
        """Drop the call before."""
        if event_type == CBEventType.LLM:
            self.last = None
        return event_id

    def on_event_end(
        self, event_type: CBEventType, payload: dict[str, Any] | None = None, event_id: str = "", **kwargs: Any
    ) -> None:
        """Keep the call that ended."""
        payload = payload or {}
        response = payload.get(EventPayload.RESPONSE) or payload.get(EventPayload.COMPLETION)
        if event_type != CBEventType.LLM or response is None:
            return
        metrics = dict(response.additional_kwargs)
        copied = metrics.pop("copied", None)
        message = getattr(response, "message", None)
        self.last = LLMCall(
            messages=tuple(payload.get(EventPayload.MESSAGES) or ()),
            prompt=str(payload.get(EventPayload.PROMPT) or ""),
            answer=response.text if message is None else str(message.content or ""),
            copied=None if copied is None else tuple(CopiedSpan(**span) for span in copied),
            metrics=metrics,
            finish_reason=str((response.raw or {}).get("finish_reason", "stop")),
        )

    def start_trace(self, trace_id: str | None = None) -> None:
        """Nothing to do."""

    def end_trace(self, trace_id: str | None = None, trace_map: dict[str, list[str]] | None = None) -> None:
        """Nothing to do."""
